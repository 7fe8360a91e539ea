"""Watches a deployed run: shows its jobs and rounds as they change, and follows its logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.cli.common import print_lines
from skerry.infra.cli.job_text import job_lines
from skerry.infra.cli.supervisor_output_text import is_shown, log_line
from skerry.infra.deploy.list_and_stop_jobs import list_jobs, read_jobs
from skerry.infra.deploy.read_clouds import find_run_store, read_move
from skerry.infra.deploy.restart_lost import LostJobRestarter
from skerry.infra.local.up_destroy_events import RoundsMissed
from skerry.infra.observe.history import read_history
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.read_participation import ParticipationFollower
from skerry.infra.provision.handler import Condition
from skerry.infra.run.run_record import load_settings
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import Retryable, SkerryError
from skerry.runtime.failure_text import without_commands

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.text import Text

    from skerry.infra.cli.live_run_table import Screen
    from skerry.infra.deploy.list_and_stop_jobs import JobLogs
    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.deploy.read_clouds import Resolved
    from skerry.infra.deploy.restart_lost import StopRequest
    from skerry.infra.observe.run_view import RunView
    from skerry.infra.provision.target_and_store_interfaces import JobView
    from skerry.infra.run.run_record import Move

# A job changes its state within minutes, a log line arrives within seconds; each look costs requests.
_JOBS_S: Final = 10.0
_LOGS_S: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """The jobs and the run. searched: see JobList. unasked: a line for each place that could not be asked, whose jobs
    are not in `jobs`.
    """

    jobs: tuple[JobView, ...]
    run: RunView | None
    searched: tuple[str, ...]
    unasked: tuple[str, ...]


class Watch:
    """One watch of a run. resolved: of the plan that `up` applied, for restarts; see LostJobRestarter."""

    def __init__(self, deployment: Deployment, resolved: Resolved | None = None) -> None:
        self._deployment = deployment
        self._resolved = resolved
        self._observer: Observer | None = None
        self._follower: ParticipationFollower | None = None
        self.move: Move | None = None
        """The place at which the run went on by itself, at the last look."""
        self._printed: dict[str, str] = {}

    def look(self) -> Look:
        """The jobs, and the run if it was started, as far as clouds and store answer."""
        listed, unasked = read_jobs(self._deployment), list[str]()
        try:
            view = self._view()
        except SkerryError as error:
            view, unasked = None, [f"could not read the run at {self._deployment.run}: {in_short(error)}"]
        return Look(
            jobs=tuple(job for _, job in listed.jobs),
            run=view,
            searched=listed.searched,
            unasked=(*listed.unasked_lines, *unasked),
        )

    def until_over(self, console: Console, screen: Screen, stop: StopRequest) -> bool:
        """Show changes and restart lost jobs until every round is closed: True.

        False if no job waits or runs any more before that, or a stop is requested.
        """
        restarter = LostJobRestarter(self._deployment, stop, resolved=self._resolved)
        while not stop.requested.is_set():
            try:
                if (finished := self._step(console, screen, restarter)) is not None:
                    return finished
            except SkerryError as error:
                print_lines([f"cannot read the jobs or the run: {in_short(error)}; trying again"], console)
            self._deployment.clock.pause(_JOBS_S, stop.requested)
        return False

    def _view(self) -> RunView | None:
        try:
            move = read_move(self._deployment)
        except Retryable:
            if self._observer is None:
                raise
            move = self.move  # watched where it was
        if move != self.move:  # the run left its store meanwhile
            self.move, self._observer = move, None
        store = find_run_store(self._deployment) if self._observer is None else None
        if store is not None and (settings := load_settings(store)) is not None:
            history = read_history(store)
            self._observer = Observer(store, settings, self._deployment.clock, history, sparing=True)
            self._follower = ParticipationFollower(self._observer, is_new=not history.rounds)
        return None if self._observer is None else self._observer.view()

    def _step(self, console: Console, screen: Screen, restarter: LostJobRestarter) -> bool | None:
        """One look: True if every round is closed, False if no job is left, None to continue."""
        pairs, view = list_jobs(self._deployment), self._view()
        if view is not None:
            screen.view(view)
            for text in () if self._follower is None else self._follower.look():
                screen.report(RoundsMissed(text=text))
        jobs = [job for _, job in pairs]
        print_lines(self._changed(jobs), console)
        if view is not None and view.finished:
            return True
        replicas = () if view is None else view.replicas
        beating = {replica.slot for replica in replicas if replica.incarnation is not None}
        print_lines(restarter.look(pairs, beating), console)
        running = any(job.condition is Condition.READY for job in jobs)
        return None if running or restarter.busy else False

    def _changed(self, jobs: Sequence[JobView]) -> Iterator[Text]:
        for job, line in zip(jobs, job_lines(jobs), strict=True):
            if self._printed.get(job.slot) != line.plain:
                self._printed[job.slot] = line.plain
                yield line


def logs(of: JobLogs, slot: str | None, *, follow: bool, verbose: bool, stop: threading.Event) -> Iterator[Text]:
    """The lines of all replicas, or of one slot, each prefixed with its slot; follow: until no job waits or runs.

    verbose: with the protocol's events.
    """
    cursors: dict[str, str] = {}
    while True:
        pairs = [(job, view) for job, view in of.list_jobs() if slot in (None, view.slot)]
        # Determined before reading: lines written until then are read below.
        running = follow and any(view.condition is Condition.READY for _, view in pairs)
        lines = [line for job, _ in pairs for line in of.read_log(job, cursors.get(job.address))]
        addresses = {view.slot: job.address for job, view in pairs}
        for line in lines:
            cursors[addresses[line.slot]] = line.cursor
        for line in sorted(lines, key=lambda line: line.at_s):
            if is_shown(line.text, verbose=verbose):
                yield log_line(line.slot, without_commands(line.text))
        if not running or stop.is_set():
            return
        of.clock.pause(_LOGS_S, stop)
