"""Virtual time and turn-taking: fibers of simulated processes in one thread, woken in the order of a heap.

Everything that happens follows from the seed: one random source, one heap, no thread, no real clock. A process is one
start of a replica with a clock of its own; killing it stops its fibers wherever they wait.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Self

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from collections.abc import Callable


class Killed(BaseException):
    """The process of this fiber is gone. No Exception: nothing in the runtime may catch it."""


class TraceLine(NamedTuple):
    """One line of a trace: what a process did at the store, or what befell it."""

    at: float
    actor: str
    what: str
    key: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.at:10.3f} {self.actor:8} {self.what:8} {self.key} {self.outcome}"


class Fiber:
    """One line of execution of a process. ticket: which of its sleeps is meant by an entry of the heap."""

    __slots__ = ("body", "ended", "glet", "process", "ticket", "waiting", "world")

    def __init__(self, world: World, process: Process, body: Callable[[], None]) -> None:
        self.world = world
        self.process = process
        self.body = body
        self.ticket = 0
        self.ended = False
        self.waiting: list[tuple[Fiber, int]] = []
        self.glet = greenlet(self._main, parent=world.hub)

    def join(self, seconds: float | None = None) -> bool:
        """From another fiber: until this one has ended, at most so long; whether it has."""
        if not self.ended:
            self.world.wait(self.waiting, seconds)
        return self.ended

    def _main(self) -> None:
        try:
            if not self.process.dead:
                self.body()
        except Killed:
            pass
        finally:
            self.ended = True
            self.world.wake(self.waiting)


class World:
    """The scheduler. `broken` is set by the checker at a violation, and ends the run after the current event."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.hub = getcurrent()
        self.broken = False
        self._stopped: str | None = None
        self.events: int = 0
        self.trace: list[TraceLine] = []
        self.faults: Counter[str] = Counter()
        self.facts: Counter[str] = Counter()
        self._heap: list[tuple[float, int, Fiber | Callable[[], None], int]] = []
        self._order = 0
        self._current: Fiber | None = None
        self._fibers: list[Fiber] = []

    @property
    def current(self) -> Fiber:
        """The fiber that is running."""
        assert self._current is not None
        return self._current

    def note(self, actor: str, what: str, key: str, outcome: str) -> None:
        self.trace.append(TraceLine(self.now, actor, what, key, outcome))

    def fault(self, kind: str, actor: str, key: str = "") -> None:
        """Count and tell one fault."""
        self.faults[kind] += 1
        self.note(actor, "FAULT", key, kind)

    def after(self, seconds: float, task: Callable[[], None]) -> None:
        """Run `task` in the scheduler itself; it must not sleep."""
        self._push(self.now + seconds, task, 0)

    def spawn(self, process: Process, body: Callable[[], None]) -> Fiber:
        fiber = Fiber(self, process, body)
        self._fibers.append(fiber)
        self._push(self.now, fiber, 0)
        return fiber

    def sleep(self, seconds: float) -> None:
        """Let the others go on for so long. Raises Killed if this process does not outlive it."""
        fiber = self.current
        fiber.ticket += 1
        self._push(self.now + seconds, fiber, fiber.ticket)
        self.switch(fiber)

    def wait(self, waiting: list[tuple[Fiber, int]], seconds: float | None = None) -> None:
        """Sleep until woken through `waiting`, at most so long."""
        fiber = self.current
        fiber.ticket += 1
        waiting.append((fiber, fiber.ticket))
        if seconds is not None:
            self._push(self.now + seconds, fiber, fiber.ticket)
        self.switch(fiber)

    def wake(self, waiting: list[tuple[Fiber, int]]) -> None:
        for fiber, ticket in waiting:
            self._push(self.now, fiber, ticket)
        waiting.clear()

    def switch(self, fiber: Fiber) -> None:
        """Let the scheduler go on. Raises Killed if the process is dead: its clean-up waits for nothing."""
        if fiber.process.dead:
            raise Killed
        self.hub.switch()
        if fiber.process.dead:
            raise Killed

    def report_state(self, local: Callable[[], object]) -> None:
        """A replica tells that nothing is under way, and all that it holds. Only an explorer wants to know."""

    def stop(self, why: str) -> None:
        """Stop after the current event."""
        self._stopped = why

    def run(self, until: float, max_events: int) -> str:
        """Go on until nothing is left to happen ("idle"), "time", "events", "broken", or why it was stopped."""
        heap = self._heap
        while heap:
            if self.broken:
                return "broken"
            if self._stopped is not None:
                return self._stopped
            if heap[0][0] > until:
                return "time"
            if self.events >= max_events:
                return "events"
            self.now, _, task, ticket = heapq.heappop(heap)
            if isinstance(task, Fiber):
                self._resume(task, ticket)
            else:
                task()
        return "broken" if self.broken else "idle"

    def close(self) -> None:
        """End every fiber, so that nothing of this world is left to the garbage collector."""
        for fiber in self._fibers:
            fiber.process.dead = True
        for fiber in self._fibers:
            if not fiber.ended and fiber.glet:
                fiber.glet.throw(Killed)

    def _resume(self, fiber: Fiber, ticket: int) -> None:
        if fiber.ended or ticket != fiber.ticket:
            return
        if fiber.process.asleep_until > self.now and not fiber.process.dead:
            self._push(fiber.process.asleep_until, fiber, ticket)
            return
        self.events += 1
        self._current = fiber
        fiber.glet.switch()

    def _push(self, at: float, task: Fiber | Callable[[], None], ticket: int) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, task, ticket))


class Process:
    """One start of a replica: a slot, a clock that is wrong in its own way, and the faults that it has met."""

    def __init__(self, world: World, name: str, slot: str) -> None:
        self.world = world
        self.name = name
        self.slot = slot
        self.incarnation: int | None = None
        # In events of the world: when the current exchange began.
        self.began = 0
        self.dead = False
        self.asleep_until = 0.0
        self.cut_off_until = 0.0
        self.status = "running"
        self.stop = FiberEvent(world)
        self.round = 0
        self._on_end: Callable[[], None] = lambda: None

    def on_end(self, then: Callable[[], None]) -> None:
        """Set the function to call, once, when this process is gone."""
        self._on_end = then

    def spawn(self, body: Callable[[], None]) -> Fiber:
        return self.world.spawn(self, body)

    def over(self) -> None:
        """The process has come to its own end."""
        self.dead = True
        self._on_end()

    def crash(self) -> None:
        """End here: the fiber that runs, and every other at its next turn."""
        if not self.dead:
            self.kill()
        raise Killed

    def kill(self) -> None:
        """End from outside."""
        self.status = "crashed"
        self.over()


class FiberEvent(threading.Event):
    """A threading.Event of simulated fibers."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._set = False
        self._waiting: list[tuple[Fiber, int]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._world.wake(self._waiting)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._world.wait(self._waiting, timeout)
            self._waiting = [entry for entry in self._waiting if entry[0] is not self._world.current]
        return self._set


class FiberLock:
    """A threading.Lock of simulated fibers, for code that holds one over a store call."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False
        self._waiting: list[tuple[Fiber, int]] = []

    def __enter__(self) -> Self:
        while self._held:
            self._world.wait(self._waiting)
        self._held = True
        return self

    def __exit__(self, *_: object) -> None:
        self._held = False
        if not self._world.current.process.dead:
            self._world.wake(self._waiting)


class SimulatedClock:
    """A clock of its own: it started elsewhere and runs a little fast or slow."""

    def __init__(self, world: World, offset_s: float, rate: float) -> None:
        self._world = world
        self.offset_s = offset_s
        self._rate = rate

    def now(self) -> float:
        return self.offset_s + self._rate * self._world.now

    def utc_text(self) -> str:
        return f"2026-01-01T00:00:00+{int(self.offset_s)}"

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        real = max(0.0, seconds) / self._rate
        if wake is None:
            self._world.sleep(real)
        else:
            wake.wait(real)

    def fraction(self) -> float:
        return self._world.random.random()

    def nonce(self) -> str:
        return f"{self._world.random.getrandbits(128):032x}"
