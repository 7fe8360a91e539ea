"""Replicas in one thread that exchange opaque bytes, with checkpoints and garbage collectors. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.garbage_collector import GarbageCollector, Retention
from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
from skerry.runtime.errors import Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.records import Contribution, Decision
from skerry.runtime.store.memory import MemoryStore
from tests.kit.protocol import Replica, policy, run_record, start_replica
from tests.kit.records import write_checkpoint
from tests.kit.stores import View
from tests.support.clocks import FakeClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Entry, Store


class ListingStore(MemoryStore):
    """A memory store that records what is listed."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.listed: list[tuple[str, str | None]] = []
        self._before: set[str] = set()
        self._jump_s = 0.0

    def jump(self, seconds: float) -> None:
        """The store's own clock shows so many seconds more, or less, for what is written from now on."""
        self._before = {entry.key for entry in super().list("")}
        self._jump_s = seconds

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self.listed.append((prefix, after))
        entries = super().list(prefix, after)
        return [
            entry if entry.key in self._before else entry._replace(modified=entry.modified + self._jump_s)
            for entry in entries
        ]


class OwnRights(View):
    """A slot's way to the store, as its role allows: it deletes no payload of another slot. refused: what it tried."""

    def __init__(self, store: Store, slot: str) -> None:
        super().__init__(store)
        self.refused: list[str] = []
        self._slot = slot

    def delete(self, key: str) -> None:
        if key.startswith(keys.PAYLOADS) and keys.slot_of(key) != self._slot:
            self.refused.append(key)
            raise Unauthorized(f"no right to delete {key}")
        self.store.delete(key)


@dataclass
class Fleet:
    """Replicas in step: in each round all contribute, decide and commit, one writes the checkpoint, and all collect.

    own_roles: the store is an `OwnRights` for each slot.
    """

    slots: tuple[str, ...] = ("a", "b", "c")
    retention: Retention = field(default_factory=lambda: Retention(last=2, age_s=0.0))
    checkpoint_every: int = 1
    payload_bytes: int = 100
    own_roles: bool = False

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.store = ListingStore(self.clock)
        self.run = run_record(self.clock)
        self.replicas: dict[str, Replica] = {}
        self.collectors: dict[str, GarbageCollector] = {}
        self.clock.on_pause = self.beat
        for slot in self.slots:
            self.join(slot)
        write_checkpoint(self.store, 0, run=self.run.nonce)

    def join(self, slot: str, round_number: int = 0) -> Replica:
        """Start a new incarnation at a round. After round 0 it stays in phase joining."""
        store = cast("Store", OwnRights(self.store, slot)) if self.own_roles else self.store
        replica = start_replica(store, self.clock, slot, policy(min_replicas=1), self.run, beat=False)
        replica.presence.enter("joining", round_number=0)
        replica.presence.beat()
        self.collectors[slot] = GarbageCollector(
            log=replica.log,
            presence=replica.presence,
            watch=replica.watch,
            clock=self.clock,
            retention=self.retention,
            stale_s=5.0,
            stop=replica.stop,
        )
        last = replica.log.read_last_commit(round_number)
        if last is not None:
            replica.round, replica.base, replica.work = round_number, last.digest, last.record.work
        self.replicas[slot] = replica
        if round_number == 0:
            replica.presence.enter("train", round_number=0)
        return replica

    def beat(self) -> None:
        for replica in self.replicas.values():
            replica.presence.beat()

    def train(self, rounds: int, *, without: Sequence[str] = (), collect: bool = True) -> None:
        """without: slots that send heartbeats and do not take part."""
        for _ in range(rounds):
            self.clock.advance(1.0)
            self.beat()
            active = [replica for slot, replica in self.replicas.items() if slot not in without]
            for replica in active:
                replica.contribute(bytes([replica.round % 251]) * self.payload_bytes + replica.presence.slot.encode())
            for replica in active:
                replica.close(replica.decide())
            head = active[0].round
            is_due = head % self.checkpoint_every == 0
            turn = head // self.checkpoint_every
            writer = active[turn % len(active)].presence.slot
            if is_due:
                write_checkpoint(self.store, head, run=self.run.nonce)
            members = tuple(replica.presence.slot for replica in active)
            for slot in members:
                self.collectors[slot].note_closed(head)
                if collect and is_due and slot == writer:
                    self.collectors[slot].collect()
                elif collect:
                    self.collectors[slot].collect_own(position(head, members), turn if is_due else None)

    def refused(self) -> list[str]:
        """The keys that replicas tried to delete without the right to."""
        return [key for replica in self.replicas.values() for key in cast("OwnRights", replica.log.store).refused]

    def payload_rounds(self) -> list[int]:
        return rounds_of(self.store.list(keys.PAYLOADS), keys.PAYLOADS)

    def checkpoint_rounds(self) -> list[int]:
        return checkpoint.complete(self.store)

    def can_follow_from(self, first: int, head: int) -> bool:
        """Every payload that a decision of these rounds lists exists."""
        return all(_readable(self.store, number) for number in range(first, head))


def _readable(store: Store, round_number: int) -> bool:
    key = keys.decision(round_number, 0)
    for share in Decision.parse(store.read(key) or b"", key).members:
        key = keys.contribution(round_number, 0, share.slot)
        for part in Contribution.parse(store.read(key) or b"", key).parts:
            if store.read(keys.payload(round_number, share.slot, part.digest)) is None:
                return False
    return True


def rounds_of(entries: Sequence[Entry], folder: str) -> list[int]:
    """The rounds of the entries below a folder."""
    return sorted({keys.round_of(entry.key) for entry in entries if entry.key.startswith(folder)})


def position(rounds: int, members: Sequence[str]) -> LogPosition:
    """The position after so many rounds, the last one with these members."""
    return LogPosition(round=rounds, previous="", members=tuple(members), batches=0, work=0.0)
