"""Every interleaving of a small run, up to a stated bound: the order of all store calls varies.

A store call is one step; between two of its calls a replica does nothing that another could see. A fiber cannot be
copied, so each schedule starts over and repeats the choices that led to it. Two schedules that reach the same state
have the same future: what is in the bucket, what each replica has seen so far (its state is a function of that), and
what is left of the bounds. Such a state is explored once.

Time passes when no replica has a call to make; then the earliest pause ends. `early` allows so many pauses to end while
others still have calls to make: those others are slow. `crashes` kills a replica between two calls, `replaced` starts
a second incarnation while the first goes on. Both may happen before any call.

Without a limit of preemptions and without faults, orders of calls that cannot affect each other are explored once: what
others can neither see nor change runs at once, and of two calls that commute only one order is followed (sleep sets,
with states as in P. Godefroid, Partial-Order Methods for the Verification of Concurrent Systems, 1996).
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from tests.simulation.faults import PROFILE
from tests.simulation.invariants import Checker
from tests.simulation.replica import Replica
from tests.simulation.scenario import calm
from tests.simulation.world import Fiber, Process, SimulatedClock, World

from skerry.runtime.log import keys
from skerry.runtime.store.interface import Data, Entry, Profile, Span, buffers_of
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.simulation.session import ReplicaSettings

Path: TypeAlias = "tuple[Path, int] | None"
"""Choices, the last first."""
Begin: TypeAlias = "tuple[Path, frozenset[str]]"
"""What to repeat, and the replicas whose next calls need not be tried first after it: they were, in the other order."""

# Keys that no other replica ever reads: the order of their writes makes no difference.
PRIVATE: Final = (keys.RECEIPTS, keys.PROBE)
# And what only a second incarnation of the same slot looks at.
OWN: Final = (keys.MEMBERS,)
# Once there, these stay as they are in such short runs: a read gives the same before and after any call of others.
SETTLED: Final = (keys.RUN, keys.CONTRIBUTIONS, keys.PAYLOADS, keys.EXCHANGES, keys.COMMITS, keys.CHECKPOINTS)
# A replica counts its traffic in these records. They are for people: no replica acts on the counts.
COUNTED: Final = (keys.HEARTBEATS, keys.RECEIPTS)
_COUNTERS: Final = re.compile(rb'"(?:uploaded_bytes|downloaded_bytes|requests|seconds)":(?:\d+|{[^}]*})')
# What no other replica can see or change: a fiber begins, or goes on after a pause.
LOCAL: Final = ("start", "wake")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits. preemptions: how often a replica that could go on is kept from it; None is without limit."""

    replicas: int = 2
    rounds: int = 1
    min_replicas: int = 2
    preemptions: int | None = None
    early: int = 0
    crashes: int = 0
    replaced: int = 0
    max_schedules: int | None = None


@dataclass(kw_only=True)
class Explored:
    """The totals of an exploration. complete: nothing within the bounds was left out."""

    bounds: Bounds
    schedules: int = 0
    steps: int = 0
    states: int = 0
    complete: bool = True
    violations: tuple[str, ...] = ()


# What `scripts/bench simulate --explore` goes through.
LISTED: Final = (
    Bounds(replicas=3, rounds=2, preemptions=1),
    Bounds(rounds=2, preemptions=0, crashes=1),
    Bounds(rounds=2, preemptions=0, replaced=1),
    Bounds(rounds=2, preemptions=1, early=1),
    Bounds(rounds=2, preemptions=2),
    Bounds(),
    Bounds(rounds=2),
)


# Beside a million waiting paths Python seldom looks for cycles by itself; an ended replica keeps mapped memory in one.
_COLLECT_EVERY: Final = 200


class _Pruned(Exception):  # noqa: N818  no error
    """This state was explored before."""


class _Clock(SimulatedClock):
    """Exact, and with nonces of the process's own, so that equal histories are equal."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.world, 0.0, 1.0)
        self._name = process.name
        self._count = itertools.count()

    def fraction(self) -> float:
        return 0.5

    def nonce(self) -> str:
        return hashlib.md5(f"{self._name}/{next(self._count)}".encode()).hexdigest()  # noqa: S324  a name, no secret


class Steps(World):
    """A world in which every store call is a choice of the fiber that runs next."""

    def __init__(self, bounds: Bounds, begin: Begin, visited: dict[int, frozenset[str]], todo: list[Begin]) -> None:
        super().__init__(0)
        path, self._sleep_then = begin
        self._sleep: frozenset[str] = frozenset()
        self._reduced = bounds.preemptions is None and not (bounds.early or bounds.crashes or bounds.replaced)
        self.settled: Callable[[str], bool] = _never
        self.launch: Callable[[str], None] = _not_launched
        self.content = 0
        self._private = PRIVATE if bounds.crashes or bounds.replaced else PRIVATE + OWN
        self._visited = visited
        self._todo = todo
        self._given: list[int] = []
        self._path = path
        while path is not None:
            path, choice = path
            self._given.append(choice)
        self._ready: list[Fiber] = []
        self._asleep: dict[Fiber, float] = {}
        self._pending: dict[Fiber, str] = {}
        self._history: dict[Fiber, int] = {}
        self._left = {"early": bounds.early, "crash": bounds.crashes, "replace": bounds.replaced}
        self._preemptions = bounds.preemptions

    # What fibers call.

    def spawn(self, process: Process, body: Callable[[], None]) -> Fiber:
        fiber = Fiber(self, process, body)
        self._fibers.append(fiber)
        self._ready.append(fiber)
        self._pending[fiber] = "start"
        self._history[fiber] = hash(process.name)
        return fiber

    def sleep(self, seconds: float) -> None:
        fiber = self.current
        self._ready.remove(fiber)
        self._pending[fiber] = "wake"
        self._asleep[fiber] = self.now + seconds
        self.switch(fiber)

    def wait(self, waiting: list[tuple[Fiber, int]], seconds: float | None = None) -> None:
        del waiting
        assert seconds is not None
        self.sleep(seconds)

    def step(self, what: str) -> None:
        """Before a store call: others may go first."""
        fiber = self.current
        self._pending[fiber] = what
        if not what.startswith(self._private, what.index(" ") + 1):
            self.switch(fiber)

    def report_state(self, local: Callable[[], object]) -> None:
        """A replica with nothing under way: all that it has seen is in this."""
        fiber = self.current
        self._history[fiber] = hash((fiber.process.name, local()))

    def saw(self, answer: object) -> None:
        """After a store call: what came back is all that the replica learned."""
        fiber = self.current
        self._history[fiber] = hash((self._history[fiber], self._pending[fiber], answer, self.now))

    # The scheduler.

    def explore(self) -> str:
        """One schedule to its end."""
        running: Fiber | None = None
        while not self.broken:
            options = self._options(running)
            if not options:
                return "idle"
            try:
                kind, fiber = options[self._choose(options, running)]
            except _Pruned:
                return "pruned"
            self._sleep = frozenset(
                other.process.name
                for other in self._fibers
                if other.process.name in self._sleep and commute(self._pending[other], self._pending[fiber])
            )
            running = self._take(kind, fiber, running)
        return "broken"

    def _take(self, kind: str, fiber: Fiber, running: Fiber | None) -> Fiber | None:
        if kind in self._left:
            self._left[kind] -= 1
        if kind == "crash":
            self.note(fiber.process.name, "FAULT", self._pending[fiber], "crash")
            self._ready.remove(fiber)
            fiber.process.kill()
            self.launch(fiber.process.slot)
            return None
        if kind == "replace":
            self.note(fiber.process.name, "FAULT", self._pending[fiber], "replaced")
            self.launch(fiber.process.slot)
            return fiber
        if fiber in self._asleep:
            self._wake_due(self._asleep[fiber])
        elif running is not None and running is not fiber and running in self._ready and self._preemptions is not None:
            self._preemptions -= 1
        self.events += 1
        self._current = fiber
        fiber.glet.switch()
        if fiber.ended:
            self._ready.remove(fiber)
            return None
        return fiber

    def _wake_due(self, at: float) -> None:
        """Advance to this time: all fibers that slept until then are ready, all at once."""
        self.now = max(self.now, at)
        due = [fiber for fiber, until in self._asleep.items() if until <= self.now]
        for fiber in due:
            del self._asleep[fiber]
        self._ready = sorted([*self._ready, *due], key=lambda fiber: fiber.process.name)

    def _options(self, running: Fiber | None) -> list[tuple[str, Fiber]]:
        """List the next possible events, the most ordinary first."""
        if self._reduced:
            fibers = self._ready or sorted(self._asleep, key=self._asleep.__getitem__)[:1]
            alone = next((fiber for fiber in fibers if self._is_alone(self._pending[fiber])), None)
            return [("run", fiber) for fiber in ([alone] if alone is not None else fibers)]
        runnable = running if running is not None and running in self._ready else None
        options = [("run", runnable)] if runnable is not None else []
        if runnable is None or self._preemptions is None or self._preemptions > 0:
            options += [("run", fiber) for fiber in self._ready if fiber is not running]
        if self._asleep and (not self._ready or self._left["early"]):
            earliest = min(self._asleep.values())
            kind = "early" if self._ready else "run"
            options += [(kind, fiber) for fiber, at in self._asleep.items() if at == earliest]
        if runnable is not None:
            options += [(kind, runnable) for kind in ("crash", "replace") if self._left[kind]]
        return options

    def _is_alone(self, call: str) -> bool:
        """Tell whether this call commutes with all that others may ever call: nothing else has to be tried first."""
        what, _, key = call.partition(" ")
        return call in LOCAL or (what == "read" and key.startswith(SETTLED) and self.settled(key))

    def _choose(self, options: Sequence[tuple[str, Fiber]], running: Fiber | None) -> int:
        names = [fiber.process.name for _, fiber in options]
        if len(options) == 1:
            if names[0] in self._sleep:
                raise _Pruned
            return 0
        if self._given:
            choice = self._given.pop()
            if not self._given:
                self._sleep = self._sleep_then
            return choice
        state = self._state(running)
        passed_over = self._visited.get(state)
        # A state that was seen is followed only by what was passed over then and is not now.
        new = [
            choice
            for choice, name in enumerate(names)
            if name not in self._sleep and (passed_over is None or name in passed_over)
        ]
        self._visited[state] = self._sleep if passed_over is None else self._sleep & passed_over
        if not new:
            raise _Pruned
        follow: list[Begin] = []
        sleep = self._sleep
        for choice in new:
            follow.append(((self._path, choice), sleep))
            if self._reduced:
                sleep |= {names[choice]}
        # The last is taken first: a choice is explored to its end before the next that relies on it.
        self._todo.extend(reversed(follow[1:]))
        self._path = follow[0][0]
        return new[0]

    def _state(self, running: Fiber | None) -> int:
        fibers = tuple(
            sorted(
                (f.process.name, self._history[f], self._pending[f], self._asleep.get(f, -1.0), f.process.dead)
                for f in self._fibers
                if not f.ended
            )
        )
        bound = None
        if self._preemptions is not None:
            bound = self._preemptions
        # A crash or a replacement is a choice of the fiber that ran last, and going on costs it nothing.
        last = running.process.name if running is not None and running in self._ready else ""
        bound = (bound, last if bound is not None or self._left["crash"] or self._left["replace"] else "")
        return hash((self.content, fibers, tuple(self._left.values()), bound))


class _PlainStore:
    """One process's way to the shared memory engine: a choice before every call, no fault."""

    def __init__(self, engine: MemoryStore, process: Process, checker: Checker) -> None:
        self._engine = engine
        self._process = process
        self._checker = checker
        world = process.world
        assert isinstance(world, Steps)
        self._world = world

    @property
    def uri(self) -> str:
        return self._engine.uri

    @property
    def profile(self) -> Profile:
        return PROFILE

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self._world.step(f"read {key}")
        body = self._engine.read(key, span, into)
        self._world.saw(None if body is None else essence(key, bytes(body)))
        return body

    def create(self, key: str, data: Data) -> bool:
        self._world.step(f"create {key}")
        is_new = self._engine.create(key, data)
        if is_new:
            self._changed(key, data)
            self._checker.created(self._process, self._process.began, key, b"".join(buffers_of(data)))
        self._world.note(self._process.name, "create", key, str(is_new))
        self._world.saw(is_new)
        return is_new

    def replace(self, key: str, data: Data) -> None:
        assert not key.startswith(SETTLED), key
        self._world.step(f"replace {key}")
        before = self._engine.read(key)
        if before is not None:
            self._world.content ^= hash((key, essence(key, bytes(before))))
        self._engine.replace(key, data)
        self._changed(key, data)
        self._checker.replaced(self._process, key)
        self._world.saw(None)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self._world.step(f"list {prefix}")
        entries = self._engine.list(prefix, after)
        # Parts of a checkpoint are listed and passed over.
        visible = [e for e in entries if not e.key.startswith(keys.CHECKPOINTS) or e.key.endswith("/manifest.json")]
        self._world.saw(tuple((e.key, 0 if e.key.startswith(COUNTED) else e.size, e.modified) for e in visible))
        return entries

    def delete(self, key: str) -> None:
        assert not key.startswith(SETTLED), key
        self._world.step(f"delete {key}")
        self._engine.delete(key)
        self._checker.deleted(self._process, key)

    def _changed(self, key: str, data: Data) -> None:
        self._world.content ^= hash((key, essence(key, b"".join(buffers_of(data)))))


def commute(call: str, other: str) -> bool:
    """Tell whether two calls of different replicas have the same effects in both orders."""
    if call in LOCAL or other in LOCAL:
        return True
    (what, _, key), (others_what, _, others_key) = call.partition(" "), other.partition(" ")
    if what == "list":
        return others_what in {"read", "list"} or not others_key.startswith(key)
    if others_what == "list":
        return what == "read" or not key.startswith(others_key)
    return key != others_key or what == others_what == "read"


def essence(key: str, body: bytes) -> bytes:
    """The bytes of an object that a replica may act on."""
    return _COUNTERS.sub(b"", body) if key.startswith(COUNTED) else body


def explore(bounds: Bounds) -> Explored:
    """Every schedule within the bounds, or the first that breaks an invariant."""
    visited: dict[int, frozenset[str]] = {}
    todo: list[Begin] = [(None, frozenset())]
    seen = Explored(bounds=bounds)
    while todo:
        if bounds.max_schedules is not None and seen.schedules >= bounds.max_schedules:
            seen.complete = False
            break
        world = Steps(bounds, todo.pop(), visited, todo)
        checker = _explore_schedule(world, bounds)
        seen.schedules += 1
        seen.steps += world.events
        if seen.schedules % _COLLECT_EVERY == 0:
            gc.collect()
        if checker.violations:
            seen.violations = tuple(checker.violations + [str(line) for line in world.trace])
            break
    seen.states = len(visited)
    return seen


def _explore_schedule(world: Steps, bounds: Bounds) -> Checker:
    """One schedule, from the empty bucket to its end or to a state that was explored before."""
    settings = _settings(bounds)
    checker = Checker(world, settings.run, spares=False)
    engine = MemoryStore("memory://explored")
    checker.watch(engine)
    world.settled = lambda key: engine.read(key, Span(0, 0)) is not None
    processes: list[Process] = []
    starts = itertools.count(1)

    def launch(slot: str) -> None:
        process = Process(world, f"{slot}#{next(starts)}", slot)
        processes.append(process)
        replica = Replica(process, _PlainStore(engine, process, checker), settings, checker, _Clock(process))
        process.spawn(replica.main)

    world.launch = launch
    for slot in settings.run.slots:
        launch(slot)
    ended = world.explore()
    if ended == "idle":
        _at_the_end(checker, processes, bounds)
    world.close()
    return checker


def _at_the_end(checker: Checker, processes: Sequence[Process], bounds: Bounds) -> None:
    if checker.head != bounds.rounds:
        checker.broken("liveness", f"{checker.head} of {bounds.rounds} rounds were closed")
    refused = [p.status for p in processes if p.status not in {"done", "finished", "fenced", "crashed"}]
    if refused:
        checker.broken("fail closed", f"stopped without a cause: {refused}")
    checker.rebuild("at the end")


def _settings(bounds: Bounds) -> ReplicaSettings:
    """A short run without background fibers: every call is made by the one fiber of its replica."""
    return calm(
        bounds.replicas,
        rounds=bounds.rounds,
        min_replicas=bounds.min_replicas,
        start_window_s=0.0,
        heartbeat_s=0.5,
        train_s=1.0,
        jitter=0.0,
        background=False,
    ).settings[0]


def _never(key: str) -> bool:
    del key
    return False


def _not_launched(slot: str) -> None:
    """Nothing is launched before the explorer says how."""
    raise AssertionError(slot)
