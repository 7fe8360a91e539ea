"""Keeps the replicas of one run going on this machine: starts them, starts crashed ones again, stops them all.

One loop in the caller's thread owns all state; everything else (an ended process, a look at the store, a signal) is a
message in its inbox. What follows from an ending is decided in `policy`. When `run` returns or raises, no replica runs.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from skerry.infra.errors import in_short
from skerry.infra.policy import Again, Fate, Over, RestartPolicy, hopeless, is_stillborn, judge
from skerry.infra.reports import (
    Ended,
    Killing,
    Lines,
    LostSight,
    ReplicaResult,
    Report,
    Restarting,
    Started,
    Stopping,
    Untracked,
)
from skerry.infra.tail import Tail
from skerry.infra.view import RunView
from skerry.runtime.clock import Backoff
from skerry.runtime.contract import STOP_BUDGET_S
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from skerry.infra.executor import Ending, ReplicaHandle
    from skerry.runtime.clock import Clock

# How often logs are read and shown; a person reads no faster.
_TICK_S: Final = 0.25
# A start costs seconds (the interpreter, torch, the log); a crash loop must not take the machine from the others.
BACKOFF: Final = Backoff(first=1.0, cap=60.0)


class Replicas(Protocol):
    """What a supervisor needs of an executor: `targets.local.LocalExecutor` is one."""

    untracked: str | None
    """Why which processes run could not be written down, if it once could not."""

    def launch_replicas(self, n_replicas: int, entrypoint: str, entrypoint_args: Sequence[str]) -> list[ReplicaHandle]:
        """See ServerlessExecutor."""
        ...

    def relaunch(self, handle: ReplicaHandle) -> ReplicaHandle:
        """Start the replica of a handle that has ended once more."""
        ...

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """See ServerlessExecutor."""
        ...

    def log_file(self, handle: ReplicaHandle) -> Path:
        """Where this start writes."""
        ...

    def close(self) -> None:
        """End what is left."""
        ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to supervise. look_s: seconds between looks at the store; each costs a few requests."""

    command: tuple[str, ...]
    replicas: int
    min_replicas: int
    restarts: RestartPolicy
    backoff: Backoff = BACKOFF
    stop_budget_s: float = STOP_BUDGET_S
    look_s: float = 1.0


@dataclass(kw_only=True)
class _Place:
    """One replica as the loop knows it. due: when it is started again; None while it runs or is over.

    stillborn: how many starts in a row ended before any heartbeat. last_line: the last that was told and not empty.
    """

    handle: ReplicaHandle
    tail: Tail
    restarts: list[float] = field(default_factory=list[float])
    stillborn: int = 0
    last_line: str | None = None
    due: float | None = None
    over: Over | None = None


@dataclass(frozen=True, kw_only=True)
class _Ended:
    handle: ReplicaHandle
    ending: Ending


@dataclass(frozen=True, kw_only=True)
class _Stop:
    """insist: kill if stopping already."""

    insist: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Kill:
    slot: str


@dataclass(frozen=True, kw_only=True)
class _Broken:
    error: Exception


_Message: TypeAlias = _Ended | _Stop | _Kill | _Broken | LostSight | RunView


class Supervisor:
    """One run of N replicas. Use once: `run`. `stop` and `kill` may be called from anywhere, signal handlers included.

    executor: made with a callback that it must call for every ending. on_report, on_view: called in `run`'s thread.
    """

    def __init__(
        self,
        settings: Settings,
        executor: Callable[[Callable[[ReplicaHandle, Ending], None]], Replicas],
        look: Callable[[], RunView],
        clock: Clock,
        *,
        on_report: Callable[[Report], None],
        on_view: Callable[[RunView], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._look = look
        self._on_report = on_report
        self._on_view = on_view
        # SimpleQueue: its put may be called by a signal handler that has interrupted its get.
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._executor = executor(lambda handle, ending: self._inbox.put(_Ended(handle=handle, ending=ending)))
        self._places: dict[str, _Place] = {}
        self._closing = threading.Event()
        self._kill_at: float | None = None
        self._before: RunView | None = None
        self._beating: set[str] = set()
        self._told_untracked = False
        self.last_view: RunView | None = None

    def stop(self, reason: str = "on request", *, insist: bool = True) -> None:
        """Ask every replica to stop cleanly; kill what is left after the stop budget.

        insist: kill at once when they were asked before.
        """
        self._inbox.put(_Stop(reason=reason, insist=insist))

    def kill(self, slot: str) -> None:
        """SIGKILL one replica, as a lost machine would; it is started again as after any crash."""
        self._inbox.put(_Kill(slot=slot))

    def run(self, before: RunView | None = None) -> tuple[ReplicaResult, ...]:
        """Start the replicas and stay until each is over; what became of them, in slot order of the run.

        before: the run at a look before this start; a heartbeat that it shows is of an earlier one.
        Raises OSError if the machine cannot start a process, and whatever a callback raises.
        """
        watcher = threading.Thread(target=self._watch, name="look", daemon=True)
        self._before = self.last_view = before
        try:
            self._start()
            watcher.start()
            while any(place.over is None for place in self._places.values()):
                self._take_message()
                self._restart_due()
                self._kill_late()
                self._tell_lines()
        finally:
            self._closing.set()
            self._executor.close()
            if watcher.ident is not None:
                # A look may be stuck in the store's retries; it is a daemon and writes nothing.
                watcher.join(timeout=_TICK_S)
            for place in self._places.values():
                self._tell(place, place.tail.close())
        return tuple(self._results())

    def _start(self) -> None:
        command, *arguments = self._settings.command
        for handle in self._executor.launch_replicas(self._settings.replicas, command, arguments):
            self._places[handle.slot] = _Place(handle=handle, tail=Tail(self._executor.log_file(handle)))
            self._on_report(Started(handle=handle))

    def _take_message(self) -> None:
        """Wait for one message, at most until the next moment at which something is due."""
        try:
            message = self._inbox.get(timeout=self._until_due())
        except queue.Empty:
            return
        match message:
            case _Ended():
                self._ended(message.handle, message.ending)
            case _Stop():
                self._stop(message.reason, insist=message.insist)
            case _Kill():
                if place := self._places.get(message.slot):
                    self._executor.cancel(place.handle, kill=True)
            case RunView():
                self._seen(message)
            case LostSight():
                self._on_report(message)
            case _Broken():
                raise message.error

    def _until_due(self) -> float:
        moments = [place.due for place in self._places.values() if place.due is not None]
        if self._kill_at is not None:
            moments.append(self._kill_at)
        return min([_TICK_S, *(max(0.0, moment - self._clock.now()) for moment in moments)])

    def _seen(self, view: RunView) -> None:
        earlier = {} if self._before is None else {old.slot: old.incarnation for old in self._before.replicas}
        self._beating |= {new.slot for new in view.replicas if new.incarnation != earlier.get(new.slot)}
        self.last_view = view
        self._on_view(view)

    def _ended(self, handle: ReplicaHandle, ending: Ending) -> None:
        place = self._places[handle.slot]
        self._tell(place, place.tail.close())
        if self._executor.untracked is not None and not self._told_untracked:
            self._told_untracked = True
            self._on_report(Untracked(error=self._executor.untracked))
        now = self._clock.now()
        place.stillborn = place.stillborn + 1 if is_stillborn(ending) and handle.slot not in self._beating else 0
        verdict = judge(
            ending,
            place.restarts,
            now,
            self._settings.restarts,
            stillborn=place.stillborn,
            stopping=self._stopping,
        )
        match verdict:
            case Over():
                self._over(place, verdict)
            case Again(recent=recent):
                delay_s = self._settings.backoff.delay(recent, self._clock)
                place.due = now + delay_s
                self._on_report(Restarting(slot=handle.slot, ending=ending, delay_s=delay_s))

    def _over(self, place: _Place, verdict: Over) -> None:
        place.over, place.due = verdict, None
        self._on_report(Ended(slot=place.handle.slot, fate=verdict.fate, reason=verdict.reason))
        fates = [None if other.over is None else other.over.fate for other in self._places.values()]
        if not self._stopping and hopeless(fates, self._settings.min_replicas):
            left = fates.count(None)
            self._stop(f"only {left} left of the {self._settings.min_replicas} that a round needs")

    def _restart_due(self) -> None:
        for place in self._places.values():
            if place.due is not None and place.due <= self._clock.now():
                place.due = None
                place.restarts.append(self._clock.now())
                place.handle = self._executor.relaunch(place.handle)
                place.tail = Tail(self._executor.log_file(place.handle))
                self._on_report(Started(handle=place.handle))

    @property
    def _stopping(self) -> bool:
        return self._kill_at is not None

    def _stop(self, reason: str, *, insist: bool = False) -> None:
        if self._stopping:
            if insist:
                self._kill_all("asked again")
            return
        self._kill_at = self._clock.now() + self._settings.stop_budget_s
        self._on_report(Stopping(reason=reason, budget_s=self._settings.stop_budget_s))
        for place in self._places.values():
            if place.due is not None:
                self._over(place, Over(fate=Fate.STOPPED, reason="stopped before it was started again"))
            elif place.over is None:
                self._executor.cancel(place.handle)

    def _kill_late(self) -> None:
        if self._kill_at is not None and self._clock.now() >= self._kill_at:
            self._kill_all(f"still running after {self._settings.stop_budget_s:g} s")

    def _kill_all(self, reason: str) -> None:
        self._kill_at = float("inf")
        self._on_report(Killing(reason=reason))
        for place in self._places.values():
            if place.over is None:
                self._executor.cancel(place.handle, kill=True)

    def _tell_lines(self) -> None:
        for place in self._places.values():
            if place.over is None and place.due is None:
                self._tell(place, place.tail.lines())

    def _tell(self, place: _Place, lines: tuple[str, ...]) -> None:
        if lines:
            place.last_line = next((line for line in reversed(lines) if line.strip()), place.last_line)
            self._on_report(Lines(slot=place.handle.slot, lines=lines))

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                self._inbox.put(self._look())
            except SkerryError as error:
                self._inbox.put(LostSight(error=in_short(error)))
            except Exception as error:  # noqa: BLE001  a thread's entry: the loop raises it
                self._inbox.put(_Broken(error=error))
                return
            self._clock.pause(self._settings.look_s, self._closing)

    def _results(self) -> Iterator[ReplicaResult]:
        for slot, place in self._places.items():
            over = place.over or Over(fate=Fate.FAILED, reason="the supervisor failed")
            yield ReplicaResult(
                slot=slot,
                fate=over.fate,
                reason=over.reason,
                restarts=len(place.restarts),
                last_line=place.last_line,
            )


@contextlib.contextmanager
def stopped_by_signals(supervisor: Supervisor) -> Generator[None]:
    """SIGINT, SIGTERM and SIGHUP of this process stop the replicas; a second one kills them. Main thread only.

    A closed terminal says SIGHUP more than once (the kernel and the shell do), so that one never kills; under nohup it
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
