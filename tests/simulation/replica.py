"""A replica without tensors: the real protocol below, and around it what the manager does with torch.

Its state is a digest that folds what every closed round brought, in order; its contributions are bytes that only this
incarnation, round, state and attempt could have made. A wrong byte, order, weight or round anywhere shows in the state.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import xxhash
from tests.simulation.invariants import fold
from tests.simulation.world import Signal, SimulatedClock, Turn

from skerry.runtime import keys
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Corrupt, Diverged, Fenced, Invalid, Retryable, RunFinished, SkerryError
from skerry.runtime.exchange import Exchange, Interrupted, Load, Place
from skerry.runtime.garbage import Collector, Retention
from skerry.runtime.journal import Journal, open_run
from skerry.runtime.membership import Presence, Watch
from skerry.runtime.records import GENESIS, CheckpointManifest, Part, Receipt, Run
from skerry.runtime.rounds import Policy, Unreachable
from skerry.runtime.store.probe import probe
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulation.invariants import Checker
    from tests.simulation.world import Fiber, Process

    from skerry.runtime.journal import Sealed
    from skerry.runtime.records import Decision
    from skerry.runtime.store.interface import Store

INDEX: Final = "1" * 32
NOTHING: Final = "0" * 32
LATE_DISCOUNT: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How one replica goes about its work.

    jitter: how much its training times differ, as a share. abstains: rate per round. parts: payload objects of one
    contribution. retention: None deletes nothing. background: heartbeats, and what is left behind, have fibers of
    their own.
    """

    policy: Policy
    run: Run
    heartbeat_s: float
    train_s: float
    store_deadline_s: float
    start_deadline_s: float = 30.0
    max_retries: int = 4
    checkpoint_every: int = 1
    abstains: float = 0.0
    parts: int = 1
    jitter: float = 0.4
    keeps_late: bool = True
    retention: Retention | None = None
    background: bool = True


class _Failed(SkerryError):  # noqa: N818  ends the replica as max_retries does
    """Too many rounds failed in a row."""


class _Heart:
    """What `Presence` takes for its thread."""

    def __init__(self, fiber: Fiber) -> None:
        self._fiber = fiber

    def join(self) -> None:
        while not self._fiber.ended:
            self._fiber.world.sleep(0.05)


class SimulatedPresence(Presence):
    """The real one; its background thread is a fiber."""

    def live(self, process: Process) -> None:
        """What `start` does."""
        self._wake = Signal(process.world)  # type: ignore[assignment]
        self._write_lock = Turn(process.world)  # type: ignore[assignment]
        self.beat()
        self._thread = _Heart(process.spawn(self._run))  # type: ignore[assignment]


class Replica:
    """One incarnation from its start to its end, which is left in `process.status`."""

    def __init__(
        self, process: Process, engine: Store, habits: Habits, checker: Checker, clock: SimulatedClock
    ) -> None:
        self.process = process
        self._engine = engine
        self._habits = habits
        self._checker = checker
        self._clock = clock
        self._random = random.Random(process.world.random.getrandbits(64))
        self._state = f"weights {clock.nonce()}"
        self._members: tuple[str, ...] = ()
        self._base = GENESIS
        self._round = 0
        self._kept: bytes | None = None
        self._failures = 0
        self._round_began = clock.now()
        self._round_seconds: float | None = None
        self._checkpointing: Fiber | None = None
        self._background: list[Fiber] = []

    def main(self) -> None:
        """The process. Whatever is raised ends it; what the end means is for the launcher to read."""
        try:
            self._take_seat()
        except Retryable:
            self.process.status = "retry"
            return
        except (Diverged, Corrupt, Invalid) as error:
            self.process.status = f"refused: {error!r}"
            return
        try:
            self._work()
            self._end("finished" if self._finished else "left")
            self.process.status = "done" if self._finished else "stopped"
        except Fenced:
            self._end("failed")
            self.process.status = "fenced"
        except RunFinished:
            self._end("finished")
            self.process.status = "finished"
        except (Retryable, _Failed):
            self._end("failed")
            self.process.status = "retry"
        except (Diverged, Corrupt, Invalid) as error:
            self.process.status = f"refused: {error!r}"

    @property
    def _finished(self) -> bool:
        return self._round >= (self._habits.run.rounds or 0)

    def _count(self, fact: str, amount: int = 1) -> None:
        self.process.world.facts[fact] += amount

    def _local(self) -> tuple[object, ...]:
        """All that decides what this replica does from here on, but for the bucket."""
        peers = tuple((slot, p.heartbeat.sequence, p.changed_at, p.fresh) for slot, p in self._watch.peers.items())
        mine = (self._round, self._state, self._base, self._members, self._kept, self._failures)
        times = (self._round_began, self._round_seconds)
        return (*mine, *times, self._presence.progress, self._random.getstate(), peers)

    # The seat.

    def _take_seat(self) -> None:
        habits, process, clock = self._habits, self.process, self._clock
        store = Retrying(self._engine, clock, deadline_s=habits.start_deadline_s)
        if habits.background:
            probe(store, clock)
        run = open_run(store, replace_nonce(habits.run, clock))
        self._store = store.insisting(habits.store_deadline_s, process.stop)  # type: ignore[arg-type]
        self._journal = Journal(self._store, run)
        self._presence = SimulatedPresence(self._journal, clock, process.slot, habits.heartbeat_s)
        process.incarnation = self._presence.incarnation
        self._watch = Watch(self._journal, clock, process.slot)
        self._exchange = Exchange(
            journal=self._journal,
            presence=self._presence,
            watch=self._watch,
            clock=clock,
            policy=habits.policy,
            look_every_s=habits.heartbeat_s,
            stop=process.stop,  # type: ignore[arg-type]
            nothing=NOTHING,
        )
        self._collector = (
            None
            if habits.retention is None
            else Collector(
                journal=self._journal,
                presence=self._presence,
                watch=self._watch,
                clock=clock,
                retention=habits.retention,
                stale_s=habits.policy.stale_s,
                stop=process.stop,  # type: ignore[arg-type]
            )
        )
        if habits.background:
            self._presence.live(process)

    def _end(self, phase: str) -> None:
        for fiber in self._background:
            while not fiber.ended:
                self._clock.pause(0.05)
        self._presence.stop(phase)  # type: ignore[arg-type]

    # The loop of a training script.

    def _work(self) -> None:
        self._join()
        while not self._finished and not self.process.stop.is_set():
            self._catch_up()
            if self._finished or self.process.stop.is_set():
                return
            self._presence.enter("train", round_number=self._round)
            if self._kept is not None and self._offer_kept():
                continue
            trained = self._train()
            self._sync(trained)

    def _train(self) -> bytes:
        began = self._round
        self.process.world.settled(self._local())
        self._clock.pause(self._habits.train_s * (1.0 + self._habits.jitter * (self._random.random() - 0.5)))
        return f"{self.process.name}/{began}/{self._state}/{self._random.getrandbits(32)}".encode()

    def _sync(self, trained: bytes | None) -> bool:
        """One attempt at the round: offer what was trained, and take part in what is decided. None follows only."""
        try:
            self._attempt(trained)
        except (Unreachable, TimeoutError, Retryable, Corrupt, Interrupted) as error:
            if isinstance(error, Corrupt) and not str(error).startswith("payload"):
                raise
            return self._round_failed()
        self._failures = 0
        return True

    def _round_failed(self) -> bool:
        self._failures += 1
        self._count("rounds failed")
        if self._failures > self._habits.max_retries:
            raise _Failed("max_retries")
        return False

    def _attempt(self, trained: bytes | None) -> None:
        place = Place(self._round, 0, self._base)
        self._begin_exchange()
        mine: list[bytes] | None = None
        abstaining = False
        if trained is not None and self._journal.decision(place.round, 0) is None:
            abstaining = self._random.random() < self._habits.abstains
            if abstaining:
                self._presence.abstain(place.round, "not finite")
                self._count("abstentions")
            else:
                self._presence.withdraw_abstention()
                mine = self._contribute(place, trained)
        decided = self._exchange.decide(place, INDEX, abstaining=abstaining, round_seconds=self._round_seconds)
        after = self._average(decided.record, mine)
        listed = self.process.slot in {share.slot for share in decided.record.members}
        if trained is not None and not abstaining and (mine is None or not listed):
            self._kept = trained if self._habits.keeps_late else None
        commit = self._exchange.close(place, [decided])
        self._apply(after, commit.digest, decided, following=trained is None)

    def _begin_exchange(self) -> None:
        self.process.began = self.process.world.events
        self._presence.fence()

    def _contribute(self, place: Place, content: bytes, discount: float = 1.0) -> list[bytes] | None:
        """Offer it. None if something else stands for this slot already."""
        parts = split(content, self._habits.parts)
        load = Load(
            index=INDEX,
            parts=[
                Part(digest=xxhash.xxh3_128_hexdigest(part), header_bytes=0, total_bytes=len(part)) for part in parts
            ],
            data=lambda i: parts[i],
            tokens=len(content) if self._random.random() < 0.9 else 0,
            inner_steps=1,
            discount=discount,
        )
        stands = self._exchange.contribute(place, load).record
        self._count("contributions adopted" if stands.parts != tuple(load.parts) else "contributions made")
        return parts if tuple(stands.parts) == tuple(load.parts) else None

    def _offer_kept(self) -> bool:
        """A late delta goes to the head round at once. True if the head has moved meanwhile."""
        place, content = Place(self._round, 0, self._base), b"late " + (self._kept or b"")
        try:
            self._begin_exchange()
            if self._journal.decision(place.round, 0) is not None:
                return self._sync(None) or True
            self._contribute(place, content, LATE_DISCOUNT)
            self._count("late deltas offered")
        except Retryable:
            return not self._round_failed()
        self._kept = None
        return False

    def _average(self, decision: Decision, mine: Sequence[bytes] | None) -> str:
        """The state after the round, from every listed payload in the order of the record."""
        members: list[tuple[str, float, Sequence[bytes]]] = []
        for share, contribution in zip(decision.members, self._exchange.contributions(decision), strict=True):
            if mine is not None and share.slot == self.process.slot:
                members.append((share.slot, share.weight, mine))
                continue
            parts = [self._payload(keys.payload(decision.round, share.slot, p.digest), p) for p in contribution.parts]
            members.append((share.slot, share.weight, parts))
        return fold(self._state, members)

    def _payload(self, key: str, part: Part) -> bytes:
        body = self._store.read(key)
        if body is None or xxhash.xxh3_128_hexdigest(body) != part.digest:
            raise Corrupt(f"payload is missing or damaged: key={key}")
        return bytes(body)

    def _apply(self, state: str, commit: str, decided: Sealed[Decision], *, following: bool) -> None:
        self._checker.applied(self.process, self._round, state)
        self._state = state
        self._base = commit
        self._members = tuple(share.slot for share in decided.record.members)
        closed, self._round = self._round, self._round + 1
        self.process.round = self._round
        now = self._clock.now()
        self._count("rounds followed" if following else "rounds trained")
        if not following:
            self._round_seconds = now - self._round_began
        self._round_began = now
        self._presence.enter("joining" if following else "train", round_number=self._round)
        self._record(closed, may_save=not following)

    # Joining and following.

    def _join(self) -> None:
        if not self._checkpoints():
            self._save(0, GENESIS, (), self._state)
        self._load_newest(beyond=-1)

    def _catch_up(self) -> None:
        """Follow the log to its head."""
        head = self._journal.head(self._round)
        if head > self._round:
            self._presence.enter("joining", round_number=self._round)
        while self._round < head and not self.process.stop.is_set():
            if not self._sync(None) and not self._load_newest(beyond=self._round):
                self._clock.pause(Backoff().delay(self._failures, self._clock), self.process.stop)
            if self._round >= head:
                head = self._journal.head(self._round)

    def _load_newest(self, beyond: int) -> bool:
        tried: set[int] = set()
        # Listed again when all have failed: while one was being read, it may have made way for newer ones.
        while there := [n for n in self._checkpoints() if n > beyond and n not in tried]:
            for round_number in there:
                tried.add(round_number)
                try:
                    self._load(round_number)
                except Corrupt:
                    continue
                return True
        if beyond < 0:
            raise Retryable("no checkpoint can be read")
        return False

    def _load(self, round_number: int) -> None:
        key = keys.checkpoint_manifest(round_number)
        data = self._store.read(key)
        if data is None:
            raise Corrupt(f"manifest is gone: {key}")
        manifest = CheckpointManifest.parse(data, key)
        if manifest.commit != self._journal.previous(round_number):
            raise Diverged(f"checkpoint {round_number} is not of this log")
        state = b"".join(self._payload(keys.checkpoint_part(round_number, p.digest), p) for p in manifest.parts)
        self._state = state.decode()
        self._base = manifest.commit
        self._members = manifest.members
        self._round = self.process.round = round_number
        self._count("checkpoints loaded")
        if round_number:
            self._checker.applied(self.process, round_number - 1, self._state)

    def _checkpoints(self) -> list[int]:
        listed = [entry.key for entry in self._store.list(keys.CHECKPOINTS)]
        return [keys.round_of(key) for key in reversed(listed) if key.endswith("/manifest.json")]

    # What is left behind.

    def _record(self, closed: int, *, may_save: bool) -> None:
        standing = (self._round, self._base, self._members, self._state)
        save = may_save and self._my_turn() and (self._checkpointing is None or self._checkpointing.ended)

        def write() -> None:
            try:
                self._write_receipt(closed, *standing)
                if save and self._save(*standing) and self._collector is not None:
                    self._count("objects deleted", self._collector.collect().objects)
            except SkerryError as error:
                self.process.world.note(self.process.name, "told", "recorder", repr(error)[:80])

        if not self._habits.background:
            write()
            return
        fiber = self.process.spawn(write)
        self._background = [one for one in self._background if not one.ended] + [fiber]
        if save:
            self._checkpointing = fiber

    def _my_turn(self) -> bool:
        every = self._habits.checkpoint_every
        if self._round % every and not self._finished:
            return False
        return self._members[(self._round // every) % len(self._members)] == self.process.slot

    def _write_receipt(self, closed: int, round_number: int, base: str, members: tuple[str, ...], state: str) -> None:
        del round_number
        receipt = Receipt(
            run=self._journal.run.nonce,
            round=closed,
            slot=self.process.slot,
            incarnation=self._presence.incarnation,
            commit=base,
            averages=(),
            state=xxhash.xxh3_128_hexdigest(state.encode()),
            scope="registered",
            contributed=self.process.slot in members,
            uploaded_bytes=0,
            downloaded_bytes=0,
            requests=0,
            seconds={},
        )
        self._journal.create(keys.receipt(closed, self.process.slot), receipt)

    def _save(self, round_number: int, base: str, members: tuple[str, ...], state: str) -> bool:
        """Parts, then the manifest: a checkpoint is complete or invisible."""
        body = state.encode()
        parts = [
            Part(digest=xxhash.xxh3_128_hexdigest(piece), header_bytes=0, total_bytes=len(piece))
            for piece in (body[:20], body[20:])
        ]
        manifest = CheckpointManifest(
            run=self._journal.run.nonce,
            round=round_number,
            commit=base,
            members=members,
            batches=0,
            index=INDEX,
            parts=tuple(parts),
            tree="",
            writer=self.process.slot,
            nonce=self._clock.nonce(),
        )
        for part, piece in zip(parts, (body[:20], body[20:]), strict=True):
            self._store.create(keys.checkpoint_part(round_number, part.digest), piece)
        return self._store.create(keys.checkpoint_manifest(round_number), manifest.to_bytes())


def split(content: bytes, parts: int) -> list[bytes]:
    """The content in so many pieces, none of them empty."""
    size = max(1, -(-len(content) // parts))
    return [content[start : start + size] for start in range(0, len(content), size)]


def replace_nonce(run: Run, clock: SimulatedClock) -> Run:
    """The run as this process would start it, were it the first."""
    return run.model_copy(update={"nonce": clock.nonce()})
