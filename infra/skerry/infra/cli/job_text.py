"""Formats the jobs of a deployed run: one line per job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text

from skerry.infra.provision.handler import Condition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.provision.target_and_store_interfaces import JobView

_CONDITIONS: Final = {
    Condition.READY: "yellow",
    Condition.DONE: "green",
    Condition.LOST: "red",
    Condition.BROKEN: "red",
}


def searched_line(places: Sequence[str]) -> str:
    """The places that were searched without a state: nothing is claimed about other regions and kinds."""
    return f"without a state, only {', '.join(places)} was searched, by tag and name"


def job_lines(jobs: Sequence[JobView]) -> Iterator[Text]:
    """A line for each job: its state, and why it waits."""
    for job in jobs:
        attempt = f" attempt {job.attempt}" if job.attempt > 1 else ""
        code = f" exit code {job.exit_code}"
        # Most reasons name the exit code and its meaning.
        code = "" if job.exit_code is None or f"{code}:" in f" {job.why}" else code
        text = f"  {job.slot}: {job.state.lower()}{attempt}{code}"
        yield Text(f"{text}: {job.why}" if job.why else text, style=_CONDITIONS[job.condition])
