"""The supervisor over the real local target, with tiny scripts as replicas."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TypeVar

import pytest
from tests.infra.kit import failing

from skerry.infra.local.options import LocalTarget
from skerry.infra.local.process_starts import ProcessOptions, ProcessStarts
from skerry.infra.local.supervisor import Settings, Supervisor, stop_on_signals
from skerry.infra.local.up_destroy_events import (
    Event,
    KillingReplicas,
    LogLines,
    ReplicaRestarting,
    ReplicaResult,
    ReplicaStarted,
    StoppingReplicas,
    StoreUnreadable,
    UntrackedProcess,
)
from skerry.infra.local.workspace import Workspace
from skerry.infra.observe.run_view import ReplicaView, RunView
from skerry.infra.run.executor import Ending
from skerry.infra.run.restart_policy import ReplicaFate, RestartPolicy
from skerry.infra.spec.model import ReplicaSlot
from skerry.runtime.clock import Backoff, SystemClock
from skerry.runtime.errors import Retryable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VIEW = RunView(
    run="r", uri="memory://", rounds=1, closed=0, work=0.0, due=None, participants=None, replicas=(), agreement=None
)
# Blocked first: a handler that runs just before `signal.pause` would leave the process waiting for a second signal.
WAITS = (
    "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\nprint('ready', flush=True)\n"
    "signal.sigwait({15})\nsys.exit(10)"
)
IGNORES_SIGTERM = "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\nsignal.pause()"


E = TypeVar("E")


def slots(count: int) -> list[ReplicaSlot]:
    return [ReplicaSlot(slot=f"a-{n}", index=n, target=LocalTarget(kind="local")) for n in range(count)]


class Trial:
    """A supervisor of `count` replicas that run `script`; `react` is called with each event."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *,
        count: int = 1,
        limit: int = 1,
        read_view: Callable[[], RunView] = lambda: VIEW,
        on_view: Callable[[RunView], object] = lambda _: None,
        **changes: object,
    ) -> None:
        """limit: of restarts. changes: other settings of the supervisor."""
        self.events: list[Event] = []
        self.react: Callable[[Event], None] = lambda _: None
        options = ProcessOptions(
            run_uri="file:///r", replicas=slots(count), folder=folder, environment=dict(os.environ)
        )
        settings = Settings(
            command=("python", "-S", "-c", script),
            replicas=count,
            min_replicas=1,
            restarts=RestartPolicy(limit=limit, window_s=None),
            backoff=Backoff(first=0.01, cap=0.01),
            stop_budget_s=20.0,
            poll_s=0.01,
        )
        self.workspace = Workspace(folder / "work")
        self.supervisor = Supervisor(
            replace(settings, **changes),  # type: ignore[arg-type]
            lambda on_end: ProcessStarts(options, self.workspace, on_end),
            read_view,
            SystemClock(),
            on_event=self._record,
            on_view=on_view,
        )

    def _record(self, event: Event) -> None:
        self.events.append(event)
        self.react(event)

    def run(self) -> list[tuple[str, ReplicaFate, int]]:
        results = self.supervisor.run()
        assert self.workspace.processes() == []
        return [(result.slot, result.fate, result.restarts) for result in results]

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def lines(self) -> list[str]:
        return [line for event in self.events if isinstance(event, LogLines) for line in event.lines]


class Gate:
    """Blocks replicas until the supervisor has read a view. wait: the first statement of their scripts."""

    def __init__(self, path: Path, starts: int) -> None:
        """starts: the number of starts that may pass."""
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


def when_ready(*acts: Callable[[], object] | None) -> Callable[[Event], None]:
    """At each "ready" that a replica prints, call the next of `acts`."""
    remaining = iter(acts)

    def react(event: Event) -> None:
        if isinstance(event, LogLines) and "ready" in event.lines and (act := next(remaining)):
            act()

    return react


def test_replicas_that_exit_with_0_are_done(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "import os; print('I am', os.environ['SKERRY_SLOT'], end='')", count=2)
    assert trial.run() == [("a-0", ReplicaFate.DONE, 0), ("a-1", ReplicaFate.DONE, 0)]
    assert sorted(trial.lines) == ["I am a-0", "I am a-1"]
    assert len(trial.of(ReplicaStarted)) == 2


def test_killed_replica_is_restarted_alone(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    script = f"import os\nif os.environ['SKERRY_SLOT'] == 'a-1' and not os.path.exists({str(marker)!r}):\n"
    script += f" open({str(marker)!r}, 'w').close(); os.kill(os.getpid(), 9)"
    trial = Trial(tmp_path, script, count=2)
    assert trial.run() == [("a-0", ReplicaFate.DONE, 0), ("a-1", ReplicaFate.DONE, 1)]
    [restart] = trial.of(ReplicaRestarting)
    assert (restart.slot, str(restart.ending)) == ("a-1", "signal SIGKILL")


def test_crash_loop_ends_at_the_restart_limit(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "print('boom'); raise SystemExit(10)", limit=2)
    assert trial.run() == [("a-0", ReplicaFate.FAILED, 2)]
    assert trial.lines == ["boom"] * 3
    reason = "exit code 10; 2 of 2 restarts used"
    assert trial.of(ReplicaResult) == [
        ReplicaResult(
            slot="a-0",
            fate=ReplicaFate.FAILED,
            reason=reason,
            restarts=2,
            last_line="boom",
            ending=Ending(exit_code=10),
        )
    ]
    assert [restart.last_line for restart in trial.of(ReplicaRestarting)] == ["boom", "boom"]


def test_last_line_of_a_replica_is_of_its_script(tmp_path: Path) -> None:
    event = "2026-11-25 10:00:00,123 a-0 INFO ended slot=a-0 status=retry"
    trial = Trial(tmp_path, f"print('ValueError: x'); print('{event}'); print(' '); raise SystemExit(10)", limit=0)
    trial.run()
    assert [result.last_line for result in trial.of(ReplicaResult)] == ["ValueError: x"]


def test_broken_script_fails_after_two_starts(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "print('x'); import no_such_module", limit=5)
    [result] = trial.supervisor.run(VIEW)
    assert (result.fate, result.restarts) == (ReplicaFate.FAILED, 1)
    assert result.last_line == "ModuleNotFoundError: No module named 'no_such_module'"
    assert result.reason == "exit code 1 before its first heartbeat, 2 starts in a row"


@pytest.mark.parametrize(("earlier", "restarts"), [(False, 3), (True, 1)])
def test_crash_after_a_heartbeat_uses_all_restarts(tmp_path: Path, *, earlier: bool, restarts: int) -> None:
    """earlier: the heartbeat is of an earlier incarnation, and does not count."""
    with_heartbeat = replace(VIEW, replicas=(ReplicaView(slot="a-0", incarnation=4),))
    with Gate(tmp_path / "gate", starts=4) as gate:
        script = f"{gate.wait}; raise SystemExit(1)"
        trial = Trial(tmp_path, script, limit=3, read_view=lambda: with_heartbeat, on_view=gate.open)
        [result] = trial.supervisor.run(with_heartbeat if earlier else VIEW)
    assert (result.fate, result.restarts) == (ReplicaFate.FAILED, restarts)


def test_deleted_folder_is_reported_once_and_loses_no_ending(tmp_path: Path) -> None:
    trial = Trial(tmp_path, WAITS, count=2)

    def vanish() -> None:
        shutil.rmtree(tmp_path / "work")
        trial.supervisor.stop()

    trial.react = when_ready(None, vanish)
    assert [fate for _, fate, _ in trial.run()] == [ReplicaFate.STOPPED] * 2
    assert len(trial.of(UntrackedProcess)) == 1


def test_second_interrupt_kills_but_second_hangup_does_not(tmp_path: Path) -> None:
    trial = Trial(tmp_path, WAITS)

    def hang_up() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)

    trial.react = when_ready(hang_up)
    with stop_on_signals(trial.supervisor):
        assert trial.run() == [("a-0", ReplicaFate.STOPPED, 0)]
    assert len(trial.of(StoppingReplicas)) == 1
    assert trial.of(KillingReplicas) == []


@pytest.mark.parametrize(("code", "fate"), [(20, ReplicaFate.FAILED), (30, ReplicaFate.STOPPED)])
def test_permanent_failures_and_stops_are_not_restarted(tmp_path: Path, code: int, fate: ReplicaFate) -> None:
    assert Trial(tmp_path, f"raise SystemExit({code})", limit=5).run() == [("a-0", fate, 0)]


def test_stop_ends_every_replica_cleanly(tmp_path: Path) -> None:
    trial = Trial(tmp_path, WAITS, count=2)
    trial.react = when_ready(None, trial.supervisor.stop)
    assert trial.run() == [("a-0", ReplicaFate.STOPPED, 0), ("a-1", ReplicaFate.STOPPED, 0)]
    assert trial.of(KillingReplicas) == []


def test_removed_replica_that_does_not_stop_is_killed_alone(tmp_path: Path) -> None:
    trial = Trial(tmp_path, IGNORES_SIGTERM, count=2, stop_budget_s=0.05)
    remove = when_ready(None, lambda: trial.supervisor.expect(slots(1)))

    def react(event: Event) -> None:
        remove(event)
        if isinstance(event, ReplicaResult):
            trial.supervisor.stop()

    trial.react = react
    trial.run()
    results = [(result.slot, result.fate) for result in trial.of(ReplicaResult)]
    assert results == [("a-1", ReplicaFate.STOPPED), ("a-0", ReplicaFate.STOPPED)]
    text = "removed from the run, and still running after 0.05 s"
    assert trial.of(KillingReplicas)[0] == KillingReplicas(reason=text, slot="a-1")


def test_replica_that_is_added_again_while_it_stops_is_started_again(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    end = os.open(fifo, os.O_RDWR)
    script = WAITS.replace("sys.exit", f"print('stops', flush=True)\nopen({str(fifo)!r}, 'rb', 0).read(1)\nsys.exit")
    trial = Trial(tmp_path, script, count=2)
    acts = when_ready(None, lambda: trial.supervisor.expect(slots(1)), trial.supervisor.stop)

    def react(event: Event) -> None:
        acts(event)
        if isinstance(event, LogLines) and "stops" in event.lines and not trial.of(ReplicaResult):
            trial.supervisor.expect(slots(2))
            os.write(end, b"...")  # for each of the three starts

    trial.react = react
    assert sorted(trial.run()) == [("a-0", ReplicaFate.STOPPED, 0), ("a-1", ReplicaFate.STOPPED, 0)]
    assert [started.handle.slot for started in trial.of(ReplicaStarted)] == ["a-0", "a-1", "a-1"]
    os.close(end)


def test_replica_stopped_by_a_foreign_signal_is_restarted(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    trial = Trial(tmp_path, f"import os\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\n{WAITS}")
    trial.react = when_ready(lambda: os.kill(int(pid.read_text()), signal.SIGTERM), trial.supervisor.stop)
    assert trial.run() == [("a-0", ReplicaFate.STOPPED, 1)]
    assert [str(restart.ending) for restart in trial.of(ReplicaRestarting)] == ["exit code 10"]


@pytest.mark.parametrize(
    ("stops", "budget_s", "reason"), [(2, 20.0, "asked again"), (1, 0.05, "still running after 0.05 s")]
)
def test_deaf_replica_is_killed_at_the_second_stop_or_after_the_budget(
    tmp_path: Path, stops: int, budget_s: float, reason: str
) -> None:
    trial = Trial(tmp_path, IGNORES_SIGTERM, stop_budget_s=budget_s)
    trial.react = when_ready(lambda: [trial.supervisor.stop() for _ in range(stops)])
    assert trial.run() == [("a-0", ReplicaFate.STOPPED, 0)]
    assert trial.of(KillingReplicas) == [KillingReplicas(reason=reason)]


def test_stop_cancels_a_pending_restart(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "raise SystemExit(1)", limit=5, backoff=Backoff(first=60.0, cap=60.0))

    def react(event: Event) -> None:
        if isinstance(event, ReplicaRestarting):
            trial.supervisor.stop()

    trial.react = react
    assert trial.run() == [("a-0", ReplicaFate.STOPPED, 0)]
    assert len(trial.of(ReplicaStarted)) == 1


def test_killed_replica_counts_as_crashed(tmp_path: Path) -> None:
    trial = Trial(tmp_path, WAITS)
    trial.supervisor.kill("no-such-slot")
    trial.react = when_ready(lambda: trial.supervisor.kill("a-0"), trial.supervisor.stop)
    assert trial.run() == [("a-0", ReplicaFate.STOPPED, 1)]
    (restart,) = trial.of(ReplicaRestarting)
    assert restart.ending.why == "on purpose, by the process that started it"


def test_run_stops_when_too_few_replicas_are_left(tmp_path: Path) -> None:
    fails = "import os\nif os.environ['SKERRY_SLOT'] == 'a-1': raise SystemExit(20)\n"
    trial = Trial(tmp_path, fails + WAITS, count=2, min_replicas=2)
    trial.run()
    assert [event.reason for event in trial.of(StoppingReplicas)] == ["replicas left: 1; a round needs 2"]


def test_unreadable_store_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    views: list[RunView] = []

    def read_view() -> RunView:
        if views:
            raise Retryable("the store is away")
        return VIEW

    trial = Trial(tmp_path, WAITS, read_view=read_view, on_view=views.append)

    def react(event: Event) -> None:
        if isinstance(event, StoreUnreadable) and trial.lines == ["ready"]:
            trial.supervisor.stop()

    trial.react = react
    assert trial.run() == [("a-0", ReplicaFate.STOPPED, 0)]
    assert set(views) == {VIEW}
    assert StoreUnreadable(error="the store is away") in trial.events


def test_error_in_a_callback_ends_the_run_and_every_process(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        Trial(tmp_path, WAITS, read_view=failing(ZeroDivisionError())).run()

    trial = Trial(tmp_path, WAITS)

    trial.react = when_ready(failing(KeyError()))
    with pytest.raises(KeyError):
        trial.run()
    assert trial.workspace.processes() == []
