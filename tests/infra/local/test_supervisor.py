"""The supervisor over the real local target, with tiny scripts as replicas."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import pytest

from skerry.infra.policy import Fate, RestartPolicy
from skerry.infra.reports import Ended, Killing, Lines, LostSight, Report, Restarting, Started, Stopping, Untracked
from skerry.infra.spec import LocalTarget, Seat
from skerry.infra.supervise import Settings, Supervisor, stopped_by_signals
from skerry.infra.targets.local import LocalExecutor, LocalJob
from skerry.infra.view import ReplicaView, RunView
from skerry.infra.workspace import Workspace
from skerry.runtime.clock import Backoff, SystemClock
from skerry.runtime.errors import Retryable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VIEW = RunView(
    run="r", uri="memory://", rounds=1, closed=0, work=0.0, due=None, participants=None, replicas=(), agreement=None
)
WAIT = (
    "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(10))\nprint('ready', flush=True)\ntime.sleep(600)"
)
DEAF = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)"


class Trial:
    """A supervisor of `count` replicas that run `script`; `react` sees every report first."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *,
        count: int = 1,
        limit: int = 1,
        min_replicas: int = 1,
        budget_s: float = 20.0,
        look: Callable[[], RunView] = lambda: VIEW,
        on_view: Callable[[RunView], None] = lambda _: None,
    ) -> None:
        self.reports: list[Report] = []
        self.views: list[RunView] = []
        self._on_view = on_view
        self.react: Callable[[Report], None] = lambda _: None
        seats = [Seat(slot=f"a-{n}", index=n, target=LocalTarget(kind="local")) for n in range(count)]
        job = LocalJob(run_uri="file:///r", seats=seats, folder=folder, environment=dict(os.environ))
        settings = Settings(
            command=("python", "-S", "-c", script),
            replicas=count,
            min_replicas=min_replicas,
            restarts=RestartPolicy(limit=limit, window_s=None),
            backoff=Backoff(first=0.01, cap=0.01),
            stop_budget_s=budget_s,
            look_s=0.01,
        )
        self.workspace = Workspace(folder / "work")
        self.supervisor = Supervisor(
            settings,
            lambda on_end: LocalExecutor(job, self.workspace, on_end),
            look,
            SystemClock(),
            on_report=self._told,
            on_view=self._viewed,
        )

    def _told(self, report: Report) -> None:
        self.reports.append(report)
        self.react(report)

    def _viewed(self, view: RunView) -> None:
        self.views.append(view)
        self._on_view(view)

    def run(self) -> list[tuple[str, Fate, int]]:
        results = self.supervisor.run()
        assert self.workspace.processes() == []
        return [(result.slot, result.fate, result.restarts) for result in results]

    def of(self, kind: type[Report]) -> list[Report]:
        return [report for report in self.reports if isinstance(report, kind)]

    @property
    def lines(self) -> list[str]:
        return [line for report in self.reports if isinstance(report, Lines) for line in report.lines]


class Gate:
    """Holds replicas until the supervisor has looked at the run once. wait: what their scripts begin with."""

    def __init__(self, path: Path, starts: int) -> None:
        """starts: so many may pass, each once."""
        os.mkfifo(path)
        self._end = os.open(path, os.O_RDWR)
        self._starts = starts
        self.wait = f"import os; os.read(os.open({str(path)!r}, os.O_RDONLY), 1)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)

    def open(self, _: RunView) -> None:
        os.write(self._end, b"." * self._starts)
        self._starts = 0


def when_ready(count: int, act: Callable[[], None]) -> Callable[[Report], None]:
    """Do `act` once, when so many replicas have said that they are ready."""
    ready: list[str] = []

    def react(report: Report) -> None:
        if isinstance(report, Lines) and "ready" in report.lines:
            ready.append(report.slot)
            if len(ready) == count:
                act()

    return react


def test_replicas_that_end_with_0_are_done_and_their_last_words_are_told(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "import os; print('I am', os.environ['SKERRY_SLOT'], end='')", count=2)
    assert trial.run() == [("a-0", Fate.DONE, 0), ("a-1", Fate.DONE, 0)]
    assert sorted(trial.lines) == ["I am a-0", "I am a-1"]
    assert len(trial.of(Started)) == 2


def test_a_killed_replica_is_started_again_and_the_others_are_left_alone(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    script = f"import os\nif os.environ['SKERRY_SLOT'] == 'a-1' and not os.path.exists({str(marker)!r}):\n"
    script += f" open({str(marker)!r}, 'w').close(); os.kill(os.getpid(), 9)"
    trial = Trial(tmp_path, script, count=2)
    assert trial.run() == [("a-0", Fate.DONE, 0), ("a-1", Fate.DONE, 1)]
    [restart] = trial.of(Restarting)
    assert isinstance(restart, Restarting)
    assert (restart.slot, str(restart.ending)) == ("a-1", "signal SIGKILL")


def test_a_crash_loop_ends_when_its_restarts_are_used(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "print('boom'); raise SystemExit(10)", limit=2)
    assert trial.run() == [("a-0", Fate.FAILED, 2)]
    assert trial.lines == ["boom"] * 3
    assert trial.of(Ended) == [Ended(slot="a-0", fate=Fate.FAILED, reason="exit code 10; 2 of 2 restarts used")]


def test_a_script_that_cannot_start_is_given_up_after_two_starts_with_its_last_line(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "print('x'); import no_such_module", limit=5)
    [result] = trial.supervisor.run(VIEW)
    assert (result.fate, result.restarts) == (Fate.FAILED, 1)
    assert result.last_line == "ModuleNotFoundError: No module named 'no_such_module'"
    assert result.reason == "exit code 1 before its first heartbeat, 2 starts in a row"


def test_a_script_that_has_beaten_is_started_again_as_often_as_the_spec_says(tmp_path: Path) -> None:
    beaten = replace(VIEW, replicas=(ReplicaView(slot="a-0", incarnation=4),))
    with Gate(tmp_path / "1", starts=4) as gate:
        trial = Trial(tmp_path, f"{gate.wait}; raise SystemExit(1)", limit=3, look=lambda: beaten, on_view=gate.open)
        assert trial.run() == [("a-0", Fate.FAILED, 3)]
    # The heartbeat of an earlier start says nothing about this one.
    with Gate(tmp_path / "2", starts=4) as gate:
        trial = Trial(tmp_path, f"{gate.wait}; raise SystemExit(1)", limit=3, look=lambda: beaten, on_view=gate.open)
        assert [result.restarts for result in trial.supervisor.run(beaten)] == [1]


def test_a_folder_that_vanishes_is_told_once_and_neither_ending_nor_stop_is_lost(tmp_path: Path) -> None:
    trial = Trial(tmp_path, WAIT, count=2)

    def vanish() -> None:
        shutil.rmtree(tmp_path / "work")
        trial.supervisor.stop()

    trial.react = when_ready(2, vanish)
    assert [fate for _, fate, _ in trial.run()] == [Fate.STOPPED] * 2
    assert len(trial.of(Untracked)) == 1


def test_only_a_second_signal_of_a_person_kills(tmp_path: Path) -> None:
    trial = Trial(tmp_path, WAIT)

    def hang_up() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)

    trial.react = when_ready(1, hang_up)
    with stopped_by_signals(trial.supervisor):
        assert trial.run() == [("a-0", Fate.STOPPED, 0)]
    assert len(trial.of(Stopping)) == 1
    assert trial.of(Killing) == []


@pytest.mark.parametrize(("code", "fate"), [(20, Fate.FAILED), (30, Fate.STOPPED)])
def test_permanent_failures_and_requested_stops_are_not_started_again(tmp_path: Path, code: int, fate: Fate) -> None:
    assert Trial(tmp_path, f"raise SystemExit({code})", limit=5).run() == [("a-0", fate, 0)]


def test_stop_lets_every_replica_end_cleanly(tmp_path: Path) -> None:
    trial = Trial(tmp_path, WAIT, count=2)
    trial.react = when_ready(2, trial.supervisor.stop)
    assert trial.run() == [("a-0", Fate.STOPPED, 0), ("a-1", Fate.STOPPED, 0)]
    assert trial.of(Killing) == []


def test_who_is_stopped_by_a_signal_from_elsewhere_is_started_again(tmp_path: Path) -> None:
    """As its machine would be taken back."""
    pid = tmp_path / "pid"
    trial = Trial(tmp_path, f"import os\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\n{WAIT}")
    starts: list[str] = []

    def react(report: Report) -> None:
        if isinstance(report, Lines) and "ready" in report.lines:
            starts.append(report.slot)
            if len(starts) == 1:
                os.kill(int(pid.read_text()), signal.SIGTERM)
            else:
                trial.supervisor.stop()

    trial.react = react
    assert trial.run() == [("a-0", Fate.STOPPED, 1)]
    [restart] = trial.of(Restarting)
    assert isinstance(restart, Restarting)
    assert str(restart.ending) == "exit code 10"


def test_a_second_stop_kills_at_once(tmp_path: Path) -> None:
    trial = Trial(tmp_path, DEAF)
    trial.react = when_ready(1, lambda: (trial.supervisor.stop(), trial.supervisor.stop(), None)[-1])
    assert trial.run() == [("a-0", Fate.STOPPED, 0)]
    assert trial.of(Killing) == [Killing(reason="asked again")]


def test_a_replica_that_does_not_stop_is_killed_when_the_budget_is_over(tmp_path: Path) -> None:
    trial = Trial(tmp_path, DEAF, budget_s=0.05)
    trial.react = when_ready(1, trial.supervisor.stop)
    assert trial.run() == [("a-0", Fate.STOPPED, 0)]
    assert trial.of(Killing) == [Killing(reason="still running after 0.05 s")]


def test_a_stop_while_a_restart_is_pending_cancels_it(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "raise SystemExit(1)", limit=5)

    def react(report: Report) -> None:
        if isinstance(report, Restarting):
            trial.supervisor._stop("now")

    trial.react = react
    assert trial.run() == [("a-0", Fate.STOPPED, 0)]
    assert len(trial.of(Started)) == 1


def test_kill_is_a_crash_and_restarts_the_replica(tmp_path: Path) -> None:
    trial = Trial(tmp_path, WAIT)
    trial.supervisor.kill("no-such-slot")
    killed = threading.Event()

    def react(report: Report) -> None:
        if isinstance(report, Lines) and "ready" in report.lines:
            if killed.is_set():
                trial.supervisor.stop()
            else:
                killed.set()
                trial.supervisor.kill("a-0")

    trial.react = react
    assert trial.run() == [("a-0", Fate.STOPPED, 1)]


def test_the_others_are_stopped_when_too_few_are_left_for_a_round(tmp_path: Path) -> None:
    fails = "import os\nif os.environ['SKERRY_SLOT'] == 'a-1': raise SystemExit(20)\n"
    trial = Trial(tmp_path, fails + WAIT, count=2, min_replicas=2)
    trial.run()
    assert [report.reason for report in trial.reports if isinstance(report, Stopping)] == [
        "only 1 left of the 2 that a round needs"
    ]


def test_views_reach_the_caller_and_an_unreachable_store_does_not_end_the_run(tmp_path: Path) -> None:
    looks = iter([VIEW])

    def look() -> RunView:
        for view in looks:
            return view
        raise Retryable("the store is away")

    trial = Trial(tmp_path, WAIT, look=look)

    def react(report: Report) -> None:
        if isinstance(report, LostSight) and trial.lines == ["ready"]:
            trial.supervisor.stop()

    trial.react = react
    assert trial.run() == [("a-0", Fate.STOPPED, 0)]
    assert trial.views == [VIEW]
    assert LostSight(error="the store is away") in trial.reports


def test_a_defect_in_the_look_or_in_a_callback_ends_the_run_and_every_process(tmp_path: Path) -> None:
    def look() -> RunView:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Trial(tmp_path, WAIT, look=look).run()

    trial = Trial(tmp_path, WAIT)

    def react(report: Report) -> None:
        if isinstance(report, Lines):
            raise KeyError

    trial.react = react
    with pytest.raises(KeyError):
        trial.run()
    assert trial.workspace.processes() == []
