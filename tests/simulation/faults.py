"""Injects faults of store, network and machine into one process: the layer between `Retrying` and the memory engine.

Every call has two moments at which others may go first: before its effect (the request is under way) and after it
(the reply is). Faults strike there. Their rates come from the scenario; once the horizon is past there are none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from tests.simulation.border import BorderCheck
from tests.simulation.training import forged
from tests.simulation.world import SimulatedClock
from xxhash import xxh3_128_hexdigest

from skerry.runtime.errors import Ambiguous, Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.records import CheckpointManifest
from skerry.runtime.store.interface import Data, Entry, Profile, Span, buffers_of
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.simulation.invariants import Checker
    from tests.simulation.training import Document
    from tests.simulation.world import Process, World

T = TypeVar("T")
# A test's own faults: for each moment of each call a kind, "kind:seconds", or None.
Script: TypeAlias = "Callable[[Call], str | None]"

PROFILE: Final = Profile(piece_bytes=1 << 20, streams=1, poll_first=0.25, poll_cap=2.0)

# The faults of each verb; a scenario gives each kind a rate per call.
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "read": ("busy", "timeout", "truncated", "flipped"),
    "create": ("busy", "timeout", "lost_reply", "conflict", "repeated", "late", "duplicate"),
    "replace": ("busy", "timeout", "lost_reply", "late", "duplicate"),
    "list": ("busy", "timeout", "truncated"),
    "delete": ("busy", "timeout", "lost_reply", "late", "duplicate"),
}
CALL_FAULTS: Final = tuple(dict.fromkeys(kind for kinds in KINDS.values() for kind in kinds))
MACHINE_FAULTS: Final = (
    "crash",
    "pause",
    "cut_off",
    "stop",
    "delayed",
    "hidden",
    "vanished",
    "rot",
    "poison",
    "forged",
)
# When an object rots, and where.
ROT: Final = ("header at once", "body at once", "body once decided")


class Call(NamedTuple):
    """A store call as a script sees it. moment: "before" or "after" its effect."""

    process: Process
    verb: str
    key: str
    moment: str


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Probability of each kind per call.

    creates_x: how much likelier a crash or pause is at a create. vanished: of a payload that was acknowledged, once in
    a run: it stays out of every decision, and nothing else is lost. rot: of a payload at rest, once in a run, in one of
    these ways. forged: of a checkpoint that is made: a replica gone bad puts one of another state in its place.
    """

    calls: Mapping[str, float] = field(default_factory=dict[str, float])
    crash: float = 0.0
    pause: float = 0.0
    cut_off: float = 0.0
    stop: float = 0.0
    delayed: float = 0.0
    hidden: float = 0.0
    vanished: float = 0.0
    rot: float = 0.0
    rots: Sequence[str] = ROT
    forged: float = 0.0
    creates_x: float = 6.0
    latency_s: float = 0.02
    horizon_s: float = 0.0

    def of(self, verb: str) -> tuple[float, ...]:
        """Cumulated rates of the kinds of a verb."""
        return tuple(accumulate(self.calls.get(kind, 0.0) for kind in KINDS[verb]))


class Bucket:
    """The one store of a simulated run: the real memory engine, with the checker looking on at every write."""

    def __init__(
        self, world: World, checker: Checker, *, has_clock: bool, deadline_s: float, own_roles: bool = False
    ) -> None:
        """own_roles: each slot has a role that lets it delete no payload of another."""
        # The store's own clock, an hour off from the clocks of all processes.
        clock = SimulatedClock(world, 3600.0, 1.0) if has_clock else None
        self.engine = MemoryStore("memory://simulated", clock)  # type: ignore[arg-type]
        self._world = world
        self._checker = checker
        self._border = BorderCheck(world, checker, self.engine, deadline_s)
        self._own_roles = own_roles
        self._hidden: dict[str, float] = {}
        # A payload that is to rot as soon as a decision lists it.
        self._doomed: str | None = None

    def create(self, by: Process, began: int, key: str, data: Data) -> bool:
        is_new = self.engine.create(key, data)
        if is_new:
            self._checker.created(by, began, key, b"".join(buffers_of(data)))
            self._border.created(by, key)
            if self._doomed is not None and key.startswith(keys.EXCHANGES):
                self._decay(key)
        return is_new

    @property
    def is_whole(self) -> bool:
        """Nothing has rotted, nor is anything going to."""
        return self._doomed is None and not self._world.faults["rot"]

    def rot(self, key: str, how: str) -> None:
        """Damage a payload, now or once it is decided."""
        if how == "body once decided":
            self._doomed = key
            return
        body = bytearray(self.engine.read(key) or b"")
        self._checker.rotten[key] = bytes(body)
        self._world.fault("rot", "disk", key)
        body[20 if how == "header at once" else -1] ^= 1
        self.engine.replace(key, body)

    def forge(self, manifest: str) -> None:
        """Put another state in the place of a checkpoint's: every digest of its own is right."""
        number = keys.round_of(manifest)
        record = json.loads(bytes(self.engine.read(manifest) or b""))
        (part,) = record["parts"]
        body = bytes(self.engine.read(_part(number, part)) or b"")
        body = forged(body, part)
        part["digest"] = xxh3_128_hexdigest(body[: part["header_bytes"]])
        self._checker.forged(number)
        self._world.fault("forged", "somebody", manifest)
        self.engine.create(_part(number, part), body)
        # A forger makes the seal, too: only receipts tell that it is another state.
        replaced = CheckpointManifest.model_validate_json(json.dumps(record | {"seal": None}))
        self.engine.replace(manifest, replaced.sealed().to_bytes())

    def _decay(self, decision: str) -> None:
        doomed, self._doomed = self._doomed, None
        assert doomed is not None
        slot = f'"slot":"{keys.slot_of(doomed)}"'.encode()
        if keys.round_of(doomed) == keys.round_of(decision) and slot in bytes(self.engine.read(decision) or b""):
            self.rot(doomed, "body at once")

    def replace(self, by: Process, key: str, data: Data) -> None:
        self.engine.replace(key, data)
        self._checker.replaced(by, key)
        self._border.replaced(key)

    def refuses(self, by: Process, key: str) -> bool:
        """The process has no right to delete this key."""
        return self._own_roles and key.startswith(keys.PAYLOADS) and keys.slot_of(key) != by.slot

    def delete(self, by: Process, key: str) -> None:
        self.engine.delete(key)
        self._checker.deleted(by, key)

    def hide(self, key: str, seconds: float) -> None:
        """Leave `key` out of listings for so long."""
        self._hidden[key] = self._world.now + seconds

    def list(self, prefix: str, after: str | None) -> Sequence[Entry]:
        entries = self.engine.list(prefix, after)
        if self._hidden:
            entries = [entry for entry in entries if self._hidden.get(entry.key, 0.0) <= self._world.now]
        return entries


class FaultyStore:
    """One process's way to the bucket. on_pause: called when it falls asleep. script: faults beside the drawn ones."""

    def __init__(
        self,
        bucket: Bucket,
        process: Process,
        rates: Rates,
        on_pause: Callable[[Process, float], None],
        script: Script | None = None,
    ) -> None:
        self._bucket = bucket
        self._process = process
        self._world = process.world
        self._rates = rates
        self._on_pause = on_pause
        self._script = script
        self._tables = {verb: rates.of(verb) for verb in KINDS}

    @property
    def uri(self) -> str:
        return self._bucket.engine.uri

    @property
    def profile(self) -> Profile:
        return PROFILE

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        flip = False

        def effect() -> memoryview | None:
            body = self._bucket.engine.read(key, span, into)
            if not flip or not body:
                return body
            damaged = body if into is not None else memoryview(bytearray(body))
            damaged[self._world.random.choice((len(damaged) // 8, -1))] ^= 1
            return damaged

        kind = self._begin("read", key)
        if kind in {"busy", "truncated"}:
            raise self._fail("read", key, kind)
        if kind == "flipped" and key.startswith(keys.PAYLOADS):
            self._world.fault("flipped", self._process.name, key)
            flip = True
        return self._end("read", key, effect(), lambda body: "absent" if body is None else f"{len(body)}")

    def create(self, key: str, data: Data) -> bool:
        by, began = self._process, self._process.began
        return self._write("create", key, lambda: self._bucket.create(by, began, key, data), lie=False)

    def replace(self, key: str, data: Data) -> None:
        self._write("replace", key, lambda: self._bucket.replace(self._process, key, data), lie=None)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        kind = self._begin("list", prefix)
        if kind is not None:
            raise self._fail("list", prefix, kind)
        return self._end("list", prefix, self._bucket.list(prefix, after), lambda entries: f"{len(entries)}")

    def delete(self, key: str) -> None:
        if self._bucket.refuses(self._process, key):
            if self._begin("delete", key) == "busy":
                raise self._fail("delete", key, "busy")
            self._end("delete", key, None, lambda _: "refused")
            self._world.facts["deletions refused"] += 1
            raise Unauthorized(f"{self._process.slot} may not delete {key}")
        self._write("delete", key, lambda: self._bucket.delete(self._process, key), lie=None)

    def _write(self, verb: str, key: str, effect: Callable[[], T], lie: T) -> T:
        """One write. lie: what a client gets when its own repeat met its own success, or a 409."""
        kind = self._begin(verb, key)
        if kind == "busy":
            raise self._fail(verb, key, kind)
        if kind == "late":
            self._world.after(self._world.random.choice((0.5, 5.0, 30.0, 200.0)), lambda: self._land(verb, key, effect))
            raise self._fail(verb, key, kind)
        if kind == "conflict":
            self._world.fault(kind, self._process.name, key)
            return self._end(verb, key, lie, lambda _: "409, nothing written")
        if self._vanishes(verb, key):
            return self._end(verb, key, answer=True, tell=lambda _: "True, and gone")  # type: ignore[arg-type]
        answer = effect()
        self._maybe_hide(verb, key)
        self._maybe_rot(verb, key)
        self._maybe_forge(verb, key)
        if kind == "duplicate":
            self._world.fault(kind, self._process.name, key)
            self._world.after(self._world.random.choice((0.1, 2.0, 60.0)), lambda: self._land(verb, key, effect))
        if kind == "lost_reply":
            raise self._fail(verb, key, kind)
        if kind == "repeated":
            self._world.fault(kind, self._process.name, key)
            answer = lie
        return self._end(verb, key, answer, str)

    def _land(self, verb: str, key: str, effect: Callable[[], object]) -> None:
        self._world.note(self._process.name, verb, key, f"lands late: {effect()}")

    def _maybe_hide(self, verb: str, key: str) -> None:
        world = self._world
        # Not the start-up check's own object: a store that hides that is refused, and rightly.
        if verb == "create" and self._strikes(self._rates.hidden) and not key.startswith(keys.PROBE):
            world.fault("hidden", self._process.name, key)
            self._bucket.hide(key, world.random.choice((1.0, 10.0, 60.0)))

    def _maybe_rot(self, verb: str, key: str) -> None:
        if verb != "create" or not key.startswith(keys.PAYLOADS) or not self._bucket.is_whole:
            return
        if self._strikes(self._rates.rot):
            self._bucket.rot(key, self._world.random.choice(self._rates.rots))

    def _maybe_forge(self, verb: str, key: str) -> None:
        if verb != "create" or not key.startswith(keys.CHECKPOINTS) or not key.endswith(keys.MANIFEST):
            return
        if keys.round_of(key) and self._strikes(self._rates.forged):
            self._bucket.forge(key)

    def _vanishes(self, verb: str, key: str) -> bool:
        if verb != "create" or not key.startswith(keys.PAYLOADS) or self._world.faults["vanished"]:
            return False
        if not self._strikes(self._rates.vanished):
            return False
        self._world.fault("vanished", self._process.name, key)
        return True

    def _begin(self, verb: str, key: str) -> str | None:
        """The way there. Returns the fault that the call meets, and raises for one in which nothing arrives."""
        if self._process.dead:
            self._process.crash()
        self._draw_machine_faults(verb, key)
        scripted = self._follow_script(verb, key, "before")
        self._travel()
        if self._process.cut_off_until > self._world.now:
            self._world.fault("cut_off", self._process.name, key)
            raise self._fail(verb, key, "unreachable")
        kind = scripted or self._draw(verb)
        if kind == "timeout":
            raise self._fail(verb, key, kind)
        return kind

    def _end(self, verb: str, key: str, answer: T, tell: Callable[[T], str]) -> T:
        """The way back."""
        self._world.note(self._process.name, verb, key, tell(answer))
        self._draw_machine_faults(verb, key)
        self._follow_script(verb, key, "after")
        self._travel()
        return answer

    def _fail(self, verb: str, key: str, kind: str) -> Retryable:
        """The error of a call, after the time that it takes to notice."""
        if kind != "unreachable":
            self._world.fault(kind, self._process.name, key)
        self._world.note(self._process.name, verb, key, kind)
        if kind not in {"busy", "truncated"}:
            self._world.sleep(self._world.random.uniform(0.2, 6.0))
        clear = verb in {"read", "list"} or kind == "busy"
        return (Retryable if clear else Ambiguous)(f"{kind}: {verb} {key}")

    def _travel(self) -> None:
        draw = self._world.random
        seconds = self._rates.latency_s * (0.2 + 1.6 * draw.random())
        if self._strikes(self._rates.delayed):
            self._world.fault("delayed", self._process.name)
            seconds += draw.choice((1.0, 5.0, 30.0))
        self._world.sleep(seconds)

    def _draw_machine_faults(self, verb: str, key: str) -> None:
        """Draws faults of the machine itself between two calls."""
        rates = self._rates
        if self._world.now >= rates.horizon_s:
            return
        factor = rates.creates_x if verb == "create" else 1.0
        if self._strikes(rates.crash * factor):
            self._world.fault("crash", self._process.name, key)
            self._process.crash()
        if self._strikes(rates.pause * factor):
            self._sleep(key, self._world.random.choice((5.0, 20.0, 60.0, 200.0, 3600.0)))
        if self._strikes(rates.cut_off):
            self._process.cut_off_until = self._world.now + self._world.random.choice((3.0, 15.0, 60.0))
        if self._strikes(rates.stop):
            self._world.fault("stop", self._process.name)
            self._process.stop.set()

    def _follow_script(self, verb: str, key: str, moment: str) -> str | None:
        """Do what the script says. Returns a kind that only the call itself can meet."""
        what = self._script(Call(self._process, verb, key, moment)) if self._script else None
        kind, _, seconds = (what or "").partition(":")
        match kind:
            case "crash":
                self._world.fault("crash", self._process.name, key)
                self._process.crash()
            case "pause":
                self._sleep(key, float(seconds))
            case "delayed":
                self._world.fault("delayed", self._process.name, key)
                self._world.sleep(float(seconds))
            case "cut_off":
                self._process.cut_off_until = self._world.now + float(seconds)
            case _:
                return what
        return None

    def _sleep(self, key: str, seconds: float) -> None:
        world, process = self._world, self._process
        world.fault("pause", process.name, key)
        process.asleep_until = world.now + seconds
        self._on_pause(process, seconds)

    def _strikes(self, rate: float) -> bool:
        return rate > 0.0 and self._world.now < self._rates.horizon_s and self._world.random.random() < rate

    def _draw(self, verb: str) -> str | None:
        table = self._tables[verb]
        if not table[-1] or self._world.now >= self._rates.horizon_s:
            return None
        drawn = self._world.random.random()
        if drawn >= table[-1]:
            return None
        return next(kind for kind, upto in zip(KINDS[verb], table, strict=True) if drawn < upto)


def _part(round_number: int, part: Document) -> str:
    return keys.checkpoint_part(round_number, part["digest"])
