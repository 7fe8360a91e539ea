"""Supervises the replicas of one run on this machine: starts them, restarts crashed ones, stops them all.

One loop in the caller's thread owns all state. Every other thread and signal handler (an ended process, a view of the
store, a request to stop) puts a function into its inbox, which the loop calls. `restart_policy` decides about restarts.
When `run` returns or raises, no replica runs.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

from skerry.infra.local.follow_log_file import LogTail
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
from skerry.infra.run.restart_policy import (
    NotRestarted,
    ReplicaFate,
    RestartAfter,
    RestartPolicy,
    decide_restart,
    failed_at_startup,
    too_few_left,
)
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.clock import Backoff
from skerry.runtime.contract import STOP_BUDGET_S
from skerry.runtime.errors import SkerryError
from skerry.runtime.log.keys import slot_order
from skerry.runtime.structured_logging import level_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import FrameType

    from skerry.infra.local.replica_starts import AnyStarts
    from skerry.infra.observe.run_view import RunView
    from skerry.infra.run.executor import Ending, ReplicaHandle
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.runtime.clock import Clock

# How often logs are read and shown.
_TICK_S: Final = 0.25
# A start costs seconds of CPU (the interpreter, torch); a crash loop must not slow down the other replicas.
BACKOFF: Final = Backoff(first=1.0, cap=60.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a supervisor. poll_s: seconds between reads of the store, of a few requests each."""

    command: tuple[str, ...]
    replicas: int
    min_replicas: int
    restarts: RestartPolicy
    backoff: Backoff = BACKOFF
    stop_budget_s: float = STOP_BUDGET_S
    poll_s: float = 1.0


@dataclass(kw_only=True)
class _ReplicaState:
    """One replica. due: the time of its next start; None while it runs or has ended for good.

    startup_failures: starts in a row that ended before any heartbeat. last_line: the last non-empty line reported.
    kill_at: when to kill it, if it was removed from the run and has not ended.
    """

    handle: ReplicaHandle
    tail: LogTail
    restarts: list[float] = field(default_factory=list[float])
    startup_failures: int = 0
    last_line: str | None = None
    due: float | None = None
    kill_at: float | None = None
    result: ReplicaResult | None = None


class Supervisor:
    """One run of N replicas. Use once: `run`. `stop` and `kill` may be called from anywhere, signal handlers included.

    open_starts: called with the callback for endings. on_event, on_view: called in `run`'s thread.
    """

    def __init__(
        self,
        settings: Settings,
        open_starts: Callable[[Callable[[ReplicaHandle, Ending], None]], AnyStarts],
        read_view: Callable[[], RunView],
        clock: Clock,
        *,
        on_event: Callable[[Event], None],
        on_view: Callable[[RunView], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._read_view = read_view
        self._on_event = on_event
        self._on_view = on_view
        # SimpleQueue: its put may be called by a signal handler that has interrupted its get.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._starts = open_starts(lambda handle, ending: self._inbox.put(lambda: self._handle_end(handle, ending)))
        self._replicas: dict[str, _ReplicaState] = {}
        self._closed = threading.Event()
        self._kill_at: float | None = None
        self._before: RunView | None = None
        self._with_heartbeat: set[str] = set()
        self._killed: set[str] = set()
        self._removed: set[str] = set()
        self._reported_untracked = False
        self.last_view: RunView | None = None

    def stop(self, reason: str = "on request", *, insist: bool = True) -> None:
        """Ask every replica to stop cleanly; kill those that still run after the stop budget.

        insist: kill at once if they were asked before.
        """
        self._inbox.put(lambda: self._stop(reason, insist=insist))

    def kill(self, slot: str) -> None:
        """Send SIGKILL to one replica, as if its machine was lost; it is restarted as after any crash."""
        self._inbox.put(lambda: self._kill(slot))

    def report(self, event: Event) -> None:
        """Pass an event of another thread to `on_event`, in `run`'s thread."""
        self._inbox.put(partial(self._on_event, event))

    def expect(self, replicas: Sequence[ReplicaSlot]) -> None:
        """From any thread: the run has these replicas from now on. Start new ones, and stop those that are not here."""
        self._inbox.put(lambda: self._expect(replicas))

    def run(self, before: RunView | None = None) -> tuple[ReplicaResult, ...]:
        """Start the replicas and wait until each has ended for good; the results, in slot order of the run.

        before: the view before this start, whose heartbeats are of earlier incarnations.
        Raises OSError if the machine cannot start a process, and whatever a callback raises.
        """
        poller = threading.Thread(target=self._poll_store, name="look", daemon=True)
        self._before = self.last_view = before
        try:
            self._start()
            poller.start()
            while any(replica.result is None for replica in self._replicas.values()):
                self._take_message()
                self._restart_due()
                self._kill_after_budget()
                self._report_all_lines()
        finally:
            self._closed.set()
            self._starts.close()
            if poller.ident is not None:
                # A read may be stuck in the store's retries; the thread is a daemon and writes nothing.
                poller.join(timeout=_TICK_S)
            for replica in self._replicas.values():
                self._report_lines(replica, replica.tail.close())
        return tuple(replica.result for replica in self._replicas.values() if replica.result is not None)

    def _start(self) -> None:
        for handle in self._starts.launch(self._settings.replicas, self._settings.command):
            self._replicas[handle.slot] = _ReplicaState(handle=handle, tail=LogTail(self._starts.log_file(handle)))
            self._on_event(ReplicaStarted(handle=handle))

    def _take_message(self) -> None:
        """Wait for one message, at most until the next restart or kill is due."""
        try:
            handle_message = self._inbox.get(timeout=self._until_due())
        except queue.Empty:
            return
        handle_message()

    def _until_due(self) -> float:
        moments = [self._kill_at, *(moment for each in self._replicas.values() for moment in (each.due, each.kill_at))]
        now = self._clock.now()
        return min([_TICK_S, *(max(0.0, moment - now) for moment in moments if moment is not None)])

    def _take_view(self, view: RunView) -> None:
        earlier = {} if self._before is None else {old.slot: old.incarnation for old in self._before.replicas}
        self._with_heartbeat |= {new.slot for new in view.replicas if new.incarnation != earlier.get(new.slot)}
        self.last_view = view
        self._on_view(view)

    def _handle_end(self, handle: ReplicaHandle, ending: Ending) -> None:
        replica = self._replicas[handle.slot]
        self._report_lines(replica, replica.tail.close())
        if self._starts.untracked is not None and not self._reported_untracked:
            self._reported_untracked = True
            self._on_event(UntrackedProcess(error=self._starts.untracked))
        now = self._clock.now()
        if handle.slot in self._killed:
            self._killed.remove(handle.slot)
            ending = replace(ending, why="on purpose, by the process that started it")
        replica.startup_failures = (
            replica.startup_failures + 1 if failed_at_startup(ending) and handle.slot not in self._with_heartbeat else 0
        )
        decision = decide_restart(
            ending,
            replica.restarts,
            now,
            self._settings.restarts,
            startup_failures=replica.startup_failures,
            stopping=self._stopping or replica.kill_at is not None,
        )
        match decision:
            case NotRestarted():
                self._finish(replica, decision, ending)
                # It was added again while it stopped.
                if replica.kill_at is not None and handle.slot not in self._removed and not self._stopping:
                    self._start_added(handle.slot)
            case RestartAfter(recent=recent):
                delay_s = self._settings.backoff.delay(recent, self._clock)
                replica.due = now + delay_s
                self._on_event(
                    ReplicaRestarting(slot=handle.slot, ending=ending, delay_s=delay_s, last_line=replica.last_line)
                )

    def _finish(self, replica: _ReplicaState, decision: NotRestarted, ending: Ending | None = None) -> None:
        replica.due = None
        replica.result = ReplicaResult(
            slot=replica.handle.slot,
            fate=decision.fate,
            reason=decision.reason,
            restarts=len(replica.restarts),
            last_line=replica.last_line,
            ending=ending,
        )
        self._on_event(replica.result)
        fates = [None if other.result is None else other.result.fate for other in self._replicas.values()]
        if not self._stopping and too_few_left(fates, self._settings.min_replicas):
            left = fates.count(None)
            self._stop(f"replicas left: {left}; a round needs {self._settings.min_replicas}")

    def _expect(self, replicas: Sequence[ReplicaSlot]) -> None:
        if self._stopping:
            return
        slots = {replica.slot for replica in replicas}
        added = slots.difference(self._replicas) | slots.intersection(self._removed)
        self._removed = self._replicas.keys() - slots
        for replica in self._replicas.values():
            if replica.handle.slot in slots or replica.result is not None or replica.kill_at is not None:
                continue
            if replica.due is not None:
                self._finish(replica, NotRestarted(fate=ReplicaFate.STOPPED, reason="removed from the run"))
            else:
                replica.kill_at = self._clock.now() + self._settings.stop_budget_s
                self._starts.cancel(replica.handle)
        self._starts.expect(replicas)
        for slot in sorted(added, key=slot_order):
            if (before := self._replicas.get(slot)) is None or before.result is not None:
                self._start_added(slot)

    def _start_added(self, slot: str) -> None:
        handle = self._starts.start(slot)
        self._replicas[slot] = _ReplicaState(handle=handle, tail=LogTail(self._starts.log_file(handle)))
        self._on_event(ReplicaStarted(handle=handle))

    def _restart_due(self) -> None:
        for replica in self._replicas.values():
            if replica.due is not None and replica.due <= self._clock.now():
                replica.due = None
                replica.restarts.append(self._clock.now())
                replica.handle = self._starts.relaunch(replica.handle)
                replica.tail = LogTail(self._starts.log_file(replica.handle))
                self._on_event(ReplicaStarted(handle=replica.handle))

    @property
    def _stopping(self) -> bool:
        return self._kill_at is not None

    def _stop(self, reason: str, *, insist: bool = False) -> None:
        if self._stopping:
            if insist:
                self._kill_all("asked again")
            return
        self._kill_at = self._clock.now() + self._settings.stop_budget_s
        self._on_event(StoppingReplicas(reason=reason, budget_s=self._settings.stop_budget_s))
        for replica in self._replicas.values():
            if replica.due is not None:
                self._finish(replica, NotRestarted(fate=ReplicaFate.STOPPED, reason="stopped before its restart"))
            elif replica.result is None:
                self._starts.cancel(replica.handle)

    def _kill_after_budget(self) -> None:
        if self._kill_at is not None and self._clock.now() >= self._kill_at:
            self._kill_all(f"still running after {self._settings.stop_budget_s:g} s")
        for slot, replica in self._replicas.items():
            if replica.result is None and replica.kill_at is not None and self._clock.now() >= replica.kill_at:
                replica.kill_at = float("inf")
                reason = f"removed from the run, and still running after {self._settings.stop_budget_s:g} s"
                self._on_event(KillingReplicas(reason=reason, slot=slot))
                self._kill(slot)

    def _kill_all(self, reason: str) -> None:
        self._kill_at = float("inf")
        self._on_event(KillingReplicas(reason=reason))
        for replica in self._replicas.values():
            if replica.result is None:
                self._killed.add(replica.handle.slot)
                self._starts.cancel(replica.handle, kill=True)

    def _kill(self, slot: str) -> None:
        if replica := self._replicas.get(slot):
            self._killed.add(slot)
            self._starts.cancel(replica.handle, kill=True)

    def _report_all_lines(self) -> None:
        for replica in self._replicas.values():
            if replica.result is None and replica.due is None:
                self._report_lines(replica, replica.tail.lines())

    def _report_lines(self, replica: _ReplicaState, lines: tuple[str, ...]) -> None:
        if lines:
            own = (line.strip() for line in reversed(lines) if line.strip() and level_of(line) is None)
            replica.last_line = next(own, replica.last_line)
            self._on_event(LogLines(slot=replica.handle.slot, lines=lines))

    def _poll_store(self) -> None:
        while not self._closed.is_set():
            try:
                view = self._read_view()
            except SkerryError as error:
                unreadable = StoreUnreadable(error=in_short(error))
                self._inbox.put(partial(self._on_event, unreadable))
            except Exception as error:  # noqa: BLE001  a thread's entry: the loop raises it
                self._inbox.put(partial(_raise, error))
                return
            else:
                self._inbox.put(partial(self._take_view, view))
            self._clock.pause(self._settings.poll_s, self._closed)


def _raise(error: Exception) -> NoReturn:
    raise error


@contextlib.contextmanager
def stop_on_signals(supervisor: Supervisor) -> Generator[None]:
    """Stop the replicas on SIGINT, SIGTERM and SIGHUP; kill them on a second signal. Main thread only.

    SIGHUP never kills, because a closed terminal sends it more than once (the kernel and the shell do); under nohup it
    stays ignored.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def handle(number: int, _frame: FrameType | None) -> None:
        supervisor.stop(insist=number != signal.SIGHUP)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
