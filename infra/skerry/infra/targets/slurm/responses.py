"""Parses the answers of squeue and sacct, and the endings that jobs leave, into rows. Pure.

The text of `squeue --Format` has fixed widths, which every release understands; its JSON differs between releases.
Sources: squeue(1), "JOB STATE CODES"; sacct(1).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.handler_helpers import tagged_record
from skerry.infra.provision.graph import generation_name
from skerry.infra.provision.handler import Condition, Observed
from skerry.infra.provision.target_and_store_interfaces import is_named_by, named_job
from skerry.infra.targets.slurm.resource_types import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.provision.handler import StateRecord

_COLUMNS: Final = {
    "JobID": 20,
    "Name": 120,
    "State": 20,
    "Reason": 60,
    "exit_code": 12,
    "RestartCnt": 12,
    "StartTime": 24,
    "EndTime": 24,
    "Comment": 1500,
}
FORMAT: Final = ",".join(f"{name}:{width}" for name, width in _COLUMNS.items())
"""The value of `squeue --Format`. Times are in seconds since the epoch, by SLURM_TIME_FORMAT."""
ACCOUNTING: Final = "JobID,JobName,State,ExitCode,Start,End"
"""The value of `sacct --format`."""
_NAMES: Final = "skerry-"
DONE: Final = "COMPLETED"
CANCELLED: Final = "CANCELLED"
ENDED: Final = frozenset(
    {
        DONE,
        CANCELLED,
        "BOOT_FAIL",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""The states of a job that has ended; in all others it waits, runs, or is being stopped."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The comment of a job of ours. spec: the digest of its settings."""

    run: str
    address: str
    generation: int
    spec: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """A job as Slurm, or its own ending, describes it. exit_code: above 128 a signal; None if it did not end by itself.

    name: without a generation. starts_before: how often it was requeued. mark: None if its comment is not ours.
    """

    id: str
    name: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    starts_before: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    mark: Mark | None = None

    @property
    def live(self) -> bool:
        """True if it has not ended."""
        return self.state not in ENDED

    @property
    def condition(self) -> Condition:
        """The condition. A cancelled job is lost."""
        if self.state == DONE:
            return Condition.DONE
        return Condition.READY if self.live else Condition.LOST

    @property
    def outputs(self) -> dict[str, str]:
        """See Job."""
        return {"id": self.id, "job": f"{self.full_name}/{self.id}"}

    @property
    def full_name(self) -> str:
        """The name with its generation."""
        return self.name if self.mark is None else generation_name(self.name, self.mark.generation)


def queue_rows(text: str) -> list[Row]:
    """Parse the answer of squeue; jobs of other names are left out."""
    rows: list[Row] = []
    for line in text.splitlines():
        fields = dict(_fields(line))
        if not fields["Name"].startswith(_NAMES):
            continue
        ended = fields["State"] in ENDED
        rows.append(
            Row(
                id=fields["JobID"],
                name=fields["Name"],
                state=fields["State"],
                reason="" if fields["Reason"] == "None" else fields["Reason"],
                exit_code=_exit_code(fields["exit_code"]) if fields["State"] in {DONE, "FAILED"} else None,
                starts_before=_number(fields["RestartCnt"]),
                started_s=_seconds(fields["StartTime"]) if fields["State"] != "PENDING" else None,
                ended_s=_seconds(fields["EndTime"]) if ended else None,
                mark=mark_of(fields["Comment"]),
            )
        )
    return rows


def accounting_rows(text: str) -> list[Row]:
    """Parse the answer of sacct."""
    rows: list[Row] = []
    for line in text.splitlines():
        job, name, state, code, start, end = line.split("|")
        state = state.partition(" ")[0]  # CANCELLED by 1000
        rows.append(
            Row(
                id=job,
                name=name,
                state=state,
                exit_code=_exit_code(code) if state in {DONE, "FAILED"} else None,
                started_s=_seconds(start),
                ended_s=_seconds(end) if state in ENDED else None,
            )
        )
    return rows


def ending_row(text: str, name: str, job: str) -> Row | None:
    """Parse the ending of a job; None if there is none, or it belongs to another job of the name."""
    try:
        ending = json.loads(text)
        if ending["job"] != job:
            return None
        code, stopped, start = int(ending["code"]), bool(ending["stopped"]), int(ending["start"])
    except (ValueError, KeyError, TypeError):
        return None
    state = CANCELLED if stopped else DONE if code == 0 else "FAILED"
    return Row(id=job, name=name, state=state, exit_code=None if stopped else code, starts_before=start)


def mark_of(comment: str) -> Mark | None:
    """Parse the comment of a job; None if it is not ours."""
    try:
        fields = json.loads(comment)
        return Mark(
            run=str(fields["run"]),
            address=str(fields["address"]),
            generation=int(fields["generation"]),
            spec=str(fields["spec"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def observed(row: Row, region: str) -> Observed:
    """Return the job as a plan compares it."""
    return Observed(
        outputs=row.outputs,
        settings={"region": region},
        owner=None if row.mark is None else row.mark.run,
        condition=row.condition,
        detail=row.state.lower() if row.exit_code is None else f"exit code {row.exit_code}",
    )


def with_owner(seen: Observed, run: str) -> Observed:
    """Return the same job as one of this run."""
    return replace(seen, owner=run)


def owned_record(row: Row, run: str, region: str) -> StateRecord | None:
    """Return the record of a job of this run; None for another run's. Without its comment, its name counts."""
    if row.mark is None and is_named_by(run, row.name):
        key, generation = named_job(run, row.name)
        address = f"{Job.KIND}.{key}"
    elif row.mark is not None and row.mark.run == run:
        address, generation = row.mark.address, row.mark.generation
    else:
        return None
    return tagged_record(
        Job,
        address=address,
        name=row.full_name,
        generation=str(generation),
        region=region,
        outputs=row.outputs,
    )


def _fields(line: str) -> Iterator[tuple[str, str]]:
    start = 0
    for name, width in _COLUMNS.items():
        yield name, line[start : start + width].strip()
        start += width


def _exit_code(text: str) -> int | None:
    """Return an exit code from code:signal, or from the status that wait(2) returns."""
    code, colon, signal = text.partition(":")
    if not code.isdecimal():
        return None
    if colon:
        return 128 + int(signal) if int(signal or 0) else int(code)
    ended = os.waitstatus_to_exitcode(int(code))
    return 128 - ended if ended < 0 else ended


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _seconds(text: str) -> float | None:
    return float(text) if text.isdecimal() else None
