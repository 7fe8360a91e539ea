"""Looks at a deployed run: its jobs as their clouds tell of them, its rounds as its store does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.deploy import jobs as working
from skerry.infra.deploy.reviving import Reviving
from skerry.infra.deploy.showing import job_lines
from skerry.infra.errors import in_short
from skerry.infra.founding import find_run
from skerry.infra.handler import Condition
from skerry.infra.observe.look import Observer
from skerry.infra.render import log_line
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.text import Text

    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.deploy.reviving import Stop
    from skerry.infra.handler import Made
    from skerry.infra.render import Screen
    from skerry.infra.target import JobView
    from skerry.infra.view import RunView

# A job changes its state in minutes, a log arrives in seconds; each question is a call that somebody pays for.
_JOBS_S: Final = 10.0
_LOGS_S: Final = 2.0


class Watch:
    """One watch over a run. `look` once, or `until_over`."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._observer: Observer | None = None
        self._told: dict[str, str] = {}

    def look(self) -> tuple[list[JobView], RunView | None]:
        """The jobs, and the run if it was started."""
        pairs, view = self._look()
        return [job for _, job in pairs], view

    def _look(self) -> tuple[list[tuple[Made, JobView]], RunView | None]:
        pairs = working.jobs(self._deployment)
        if self._observer is None and self._deployment.has_bucket():
            run = find_run(self._deployment.store)
            if run is not None:
                self._observer = Observer(self._deployment.store, run, self._deployment.clock)
        return pairs, None if self._observer is None else self._observer.look()

    def until_over(self, console: Console, screen: Screen, stop: Stop) -> bool:
        """Show what changes, and start again what is lost, until every round is closed: True.

        False if before that no job waits or runs any more, or somebody asks to stop.
        """
        reviving = Reviving(self._deployment, stop)
        while not stop.asked.is_set():
            try:
                if (ended := self._step(console, screen, reviving)) is not None:
                    return ended
            except SkerryError as error:
                console.print(f"cannot look: {in_short(error)}; looking again", highlight=False)
            self._deployment.clock.pause(_JOBS_S, stop.asked)
        return False

    def _step(self, console: Console, screen: Screen, reviving: Reviving) -> bool | None:
        """One look: whether the run is over, and every round closed."""
        pairs, view = self._look()
        if view is not None:
            screen.view(view)
        jobs = [job for _, job in pairs]
        for line in self._news(jobs):
            console.print(line, soft_wrap=True)
        if view is not None and view.finished:
            return True
        heard = () if view is None else view.replicas
        for text in reviving.look(pairs, {one.slot for one in heard if one.incarnation is not None}):
            console.print(text, highlight=False, soft_wrap=True)
        # One that was just started again was not running when it was looked at.
        going = any(job.condition is Condition.READY for job in jobs)
        return None if going or reviving.busy else False

    def _news(self, jobs: Sequence[JobView]) -> Iterator[Text]:
        for job, line in zip(jobs, job_lines(jobs), strict=True):
            if self._told.get(job.slot) != line.plain:
                self._told[job.slot] = line.plain
                yield line


def logs(deployment: Deployment, slot: str | None, *, follow: bool, stop: threading.Event) -> Iterator[Text]:
    """What the replicas wrote, one stream, each line behind its slot; with `follow` until no job waits or runs."""
    cursors: dict[str, str] = {}
    while True:
        pairs = [(made, view) for made, view in working.jobs(deployment) if slot in (None, view.slot)]
        # Asked before reading: what is written until then is read below.
        going = follow and any(view.condition is Condition.READY for _, view in pairs)
        found = [line for made, _ in pairs for line in working.lines(deployment, made, cursors.get(made.address))]
        by_slot = {view.slot: made.address for made, view in pairs}
        for line in found:
            cursors[by_slot[line.slot]] = line.cursor
        for line in sorted(found, key=lambda line: line.at_s):
            yield log_line(line.slot, line.text)
        if not going or stop.is_set():
            return
        deployment.clock.pause(_LOGS_S, stop)
