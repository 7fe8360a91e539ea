"""Helpers that describe jobs for `skerry status` and read the logs of their attempts, for every target. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.provision.handler import Condition
from skerry.infra.provision.target_and_store_interfaces import JobView, LogLine
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from skerry.infra.clouds.aws.logs import Event
    from skerry.infra.provision.handler import StateRecord

EXIT_CODES: Final[Mapping[int, str]] = {
    int(ExitCode.DONE): "done",
    int(ExitCode.PERMANENT): "the options, the code or the rights are wrong; see its logs",
    int(ExitCode.STOPPED): "its script stopped it, or the time of the run is over; see its logs",
    137: "killed, often because memory was short",
    143: "stopped by a signal",
}
"""The meaning of a replica's exit codes where targets agree; they add RETRY, after which each does something else."""

AGAIN: Final = "`skerry apply` starts another"
"""The advice for a job that is lost."""
DOCTOR: Final = "see `skerry doctor`"
"""The advice for a job that a quota or a right stopped."""
UNKNOWN: Final = "UNKNOWN"
"""The state of a job of which the cloud has no record."""


def slot_of(record: StateRecord) -> str:
    """Return the slot of a job's replica."""
    return record.address.removeprefix(f"{record.kind}.")


def unknown_job(record: StateRecord, job: str, why: str) -> JobView:
    """Return the view of a job of which the cloud has no record."""
    return JobView(slot=slot_of(record), job=job, state=UNKNOWN, condition=Condition.LOST, why=why)


def joined(*parts: str) -> str:
    """Join the parts that are not empty."""
    return "; ".join(filter(None, parts))


def exit_text(code: int | None, meanings: Mapping[int, str]) -> str:
    """Describe an exit code; the empty text for None."""
    return "" if code is None else f"exit code {code}: {meanings.get(code, 'not a code of the runtime; see its logs')}"


def stream_lines(
    slot: str,
    streams: Iterable[str],
    cursor: str | None,
    read: Callable[[str, str | None], Iterable[Event]],
) -> Iterator[LogLine]:
    """Return the lines of a job's attempts, one log stream after the other.

    read: returns the events of a stream after a cursor in it. A line's cursor has the number of its stream and the
    event's own cursor. Raises Invalid if `cursor` is none of those.
    """
    first, inner = 0, None
    if cursor is not None:
        number, slash, inner = cursor.partition("/")
        if not slash or not number.isdecimal():
            raise Invalid(f"not a place in a job's log: {cursor!r}")
        first = int(number)
    for number, stream in enumerate(streams):
        if number >= first:
            for event in read(stream, inner if number == first else None):
                yield LogLine(slot=slot, at_s=event.at_s, text=event.text, cursor=f"{number}/{event.cursor}")
