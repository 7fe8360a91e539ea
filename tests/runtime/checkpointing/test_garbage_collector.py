"""What is deleted and what never is: the rules as tables, collectors over real stores, and whole runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import xxhash
from tests.support.clocks import FakeClock
from tests.support.logs import Replica, policy, run_record, start
from tests.support.managers import Island, together

from skerry.runtime import checkpoint, keys
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, Retryable
from skerry.runtime.garbage import (
    AGE_ROUNDS,
    Collector,
    Retention,
    Seen,
    Swept,
    first_needed,
    live_rounds,
    removable,
)
from skerry.runtime.records import GENESIS, CheckpointManifest, Contribution, Decision, Heartbeat, Part, Pin
from skerry.runtime.rounds import Peer
from skerry.runtime.store.interface import Entry
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.records import Phase
    from skerry.runtime.store import Store

DIGEST = "d" * 32
RECORDS = (keys.COMMITS, keys.EXCHANGES, keys.CONTRIBUTIONS, keys.MEMBERS, keys.RECEIPTS)


# The decision, without any store.


def payloads(*rounds: int, modified: float = 1.0) -> list[Entry]:
    return [Entry(keys.payload(number, slot, DIGEST), 10, modified) for number in rounds for slot in ("a", "b")]


def checkpoints(*rounds: int, modified: float = 1.0) -> list[Entry]:
    return [
        Entry(key, 10, modified)
        for number in rounds
        for key in (keys.checkpoint_part(number, DIGEST), keys.checkpoint_manifest(number))
    ]


def rounds_of(entries: Sequence[Entry], folder: str) -> list[int]:
    return sorted({keys.round_of(entry.key) for entry in entries if entry.key.startswith(folder)})


def decided(
    complete: Sequence[int],
    *,
    live: dict[str, int] | None = None,
    pins: frozenset[int] = frozenset(),
    unfinished: Sequence[Entry] = (),
    modified: float = 1.0,
    newest: float = 1000.0,
    **retention: float | None,
) -> tuple[list[int], list[int]]:
    """Rounds whose checkpoints, and rounds whose payloads, may go; there are payloads for rounds 0 to 12."""
    seen = Seen(
        complete=sorted(complete, reverse=True),
        checkpoints=[*checkpoints(*complete, modified=modified), *unfinished],
        payloads=[*payloads(*range(12), modified=modified), *payloads(12, modified=newest)],
        pins=pins,
        live=live or {},
        initial=frozenset({keys.checkpoint_part(0, DIGEST)}),
    )
    found = removable(seen, Retention(**{"last": 2, **retention}))  # type: ignore[arg-type]
    entries = [*found.first, *found.then]
    assert len(entries) == len(set(entries))
    return rounds_of(entries, keys.CHECKPOINTS), rounds_of(entries, keys.PAYLOADS)


@pytest.mark.parametrize(
    ("complete", "gone", "before"),
    [
        ([], [], 0),
        ([0], [], 0),
        ([0, 4], [], 0),
        ([0, 4, 8], [], 4),
        ([0, 2, 4, 8, 10], [2, 4], 8),
    ],
)
def test_the_newest_checkpoints_stay_with_all_that_leads_on_from_them(
    complete: list[int], gone: list[int], before: int
) -> None:
    assert decided(complete) == (gone, list(range(before)))


def test_initial_weights_stay_for_good_and_what_others_left_beside_them_goes() -> None:
    assert decided([0], last=1) == ([], [])
    assert decided([0, 1], last=1) == ([], [0])
    other = Entry(keys.checkpoint_part(0, "f" * 32), 10, 1.0)
    assert decided([0], last=1, unfinished=[other]) == ([], [])
    assert decided([0, 1], last=1, unfinished=[other]) == ([0], [0])


@pytest.mark.parametrize(
    ("live", "gone", "before"),
    [
        ({"a": 12, "b": 12}, [4], 8),
        ({"a": 12, "b": 8}, [4], 8),
        ({"a": 12, "b": 6}, [4], 6),
        ({"a": 12, "b": 4}, [], 4),
        ({"a": 12, "joining": 0}, [], 0),
    ],
)
def test_nothing_goes_that_a_live_member_has_not_applied(live: dict[str, int], gone: list[int], before: int) -> None:
    assert decided([0, 4, 8, 12], live=live) == (gone, list(range(before)))


@pytest.mark.parametrize(("age", "goes"), [(59.0, False), (60.0, True)])
def test_age_is_the_distance_to_the_newest_object_by_the_stores_clock(age: float, goes: bool) -> None:  # noqa: FBT001
    gone, swept = decided([2, 4, 8], modified=5e9, newest=5e9 + age)
    assert (gone, swept) == (([2], [0, 1, 2, 3]) if goes else ([], []))


def test_where_a_store_has_no_clock_rounds_are_the_age() -> None:
    assert AGE_ROUNDS == 2
    assert decided([5, 6], modified=0.0, newest=0.0) == ([], [0, 1, 2, 3, 4])
    assert decided([5, 6], modified=0.0, newest=0.0, last=1) == ([], [0, 1, 2, 3, 4])
    assert decided([4, 5, 6], modified=0.0, newest=0.0, last=1) == ([4], [0, 1, 2, 3, 4])


def test_pinned_checkpoints_and_every_mth_stay_but_not_their_payloads() -> None:
    complete = range(0, 13, 2)
    assert decided(complete, every=4)[0] == [2, 6]
    assert decided(complete, pins=frozenset({6}))[0] == [2, 4, 8]
    assert decided(complete, every=4, pins=frozenset({6})) == ([2], list(range(10)))


def test_what_was_never_finished_goes_like_a_checkpoint_of_its_round() -> None:
    parts = [Entry(keys.checkpoint_part(number, DIGEST), 10, 1.0) for number in (3, 8, 9, 11)]
    assert decided([4, 8, 10], unfinished=parts, every=3)[0] == [3, 4], "8 and later may still be finished"
    fresh = [Entry(keys.checkpoint_part(3, DIGEST), 10, 999.0)]
    assert decided([4, 8, 10], unfinished=fresh)[0] == [4]


def test_a_checkpoint_is_invisible_before_it_is_incomplete() -> None:
    seen = Seen(complete=[8, 4], checkpoints=checkpoints(0, 2, 4, 8), payloads=payloads(0), pins=frozenset(), live={})
    found = removable(seen, Retention(last=2, age_s=0.0))
    assert {entry.key for entry in found.first} == {keys.checkpoint_manifest(2)}
    assert all(not entry.key.endswith("manifest.json") for entry in found.then)


def test_strange_objects_are_left_alone() -> None:
    strange = [Entry("payloads/readme.txt", 1, 1.0), Entry("checkpoints/latest", 1, 1.0)]
    seen = Seen(complete=[9, 8], checkpoints=strange[1:], payloads=strange[:1], pins=frozenset(), live={})
    assert removable(seen, Retention(last=2, age_s=0.0)) == ([], [])


def peer(round_number: int, phase: Phase, changed_at: float, *, fresh: bool = True) -> Peer:
    heartbeat = Heartbeat(
        run="0" * 32,
        slot="x",
        incarnation=0,
        sequence=1,
        round=round_number,
        inner_step=0,
        phase=phase,
        abstains=None,
        loss=None,
        tokens=0,
        tokens_per_s=None,
        uploaded_bytes=0,
        downloaded_bytes=0,
        waiting_for=(),
        notice=None,
    )
    return Peer(heartbeat=heartbeat, changed_at=changed_at, fresh=fresh)


def test_who_is_silent_for_too_long_or_has_left_is_not_waited_for() -> None:
    peers = {
        "joins": peer(0, "joining", 99.0),
        "trains": peer(7, "train", 95.0),
        "waits": peer(8, "sync", 90.0),
        "stops": peer(6, "stopping", 99.0),
        "unknown": peer(3, "train", 99.0, fresh=False),
        "dead": peer(1, "train", 89.9),
        "finished": peer(9, "finished", 99.0),
        "left": peer(2, "left", 99.0),
        "failed": peer(2, "failed", 99.0),
    }
    expected = {"joins": 0, "trains": 7, "waits": 8, "stops": 6, "unknown": 3}
    assert live_rounds(peers, 0.0, 100.0, 10.0) == expected
    assert live_rounds(peers, 95.0, 100.0, 10.0) == expected | {"dead": 1}, "nobody could be heard before"


def test_the_first_needed_round_is_the_lowest_of_all_that_need_one() -> None:
    assert first_needed([], {}, Retention()) == 0
    assert first_needed([9, 6, 3, 0], {}, Retention(last=3)) == 3
    assert first_needed([9, 6, 3, 0], {"a": 2, "b": 9}, Retention(last=3)) == 2


@pytest.mark.parametrize("terms", [{"last": 0}, {"every": 0}, {"age_s": -1.0}])
def test_a_retention_that_cannot_work_is_refused(terms: dict[str, float]) -> None:
    with pytest.raises(Invalid, match="retention"):
        Retention(**terms)  # type: ignore[arg-type]


# A collector over a store: replicas without torch, which exchange bytes.


class Lines(MemoryStore):
    """A memory store that lists by folder, so that a run of many rounds is quick; counts what is asked."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.listed: list[tuple[str, str | None]] = []
        self.deleted: list[str] = []

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self.listed.append((prefix, after))
        with self._lock:
            found = [key for key in self._objects if key.startswith(prefix) and (after is None or key > after)]
            return [Entry(key, len(self._objects[key][0]), self._objects[key][1]) for key in sorted(found)]

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        super().delete(key)

    def size_bytes(self, folder: str) -> int:
        with self._lock:
            return sum(len(body) for key, (body, _) in self._objects.items() if key.startswith(folder))


def save(store: Store, round_number: int, run: str, *, part: bytes = b"state") -> None:
    """A checkpoint as `checkpoint.save` writes it, of opaque bytes."""
    digest = xxhash.xxh3_128_hexdigest(part + bytes([round_number % 251]))
    manifest = CheckpointManifest(
        run=run,
        round=round_number,
        commit=GENESIS,
        members=("a",),
        batches=0,
        index="0" * 32,
        parts=(Part(digest=digest, header_bytes=0, total_bytes=len(part)),),
        tree='{"t":0}',
        writer="a",
        nonce="1" * 32,
    )
    store.create(keys.checkpoint_part(round_number, digest), part)
    store.create(keys.checkpoint_manifest(round_number), manifest.to_bytes())


@dataclass
class Fleet:
    """Replicas in step, one thread: each round all offer, all decide, all close, and one writes the checkpoint."""

    slots: tuple[str, ...] = ("a", "b", "c")
    retention: Retention = field(default_factory=lambda: Retention(last=2, age_s=0.0))
    checkpoint_every: int = 1
    payload_bytes: int = 100

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.store = Lines(self.clock)
        self.run = run_record(self.clock)
        self.replicas: dict[str, Replica] = {}
        self.collectors: dict[str, Collector] = {}
        self.clock.on_pause = self.beat
        for slot in self.slots:
            self.join(slot)
        save(self.store, 0, self.run.nonce)

    def join(self, slot: str, round_number: int = 0) -> Replica:
        """A new incarnation; it says "joining, round 0" until the caller says otherwise."""
        replica = start(self.store, self.clock, slot, policy(min_replicas=1), self.run, beat=False)
        replica.presence.enter("joining", round_number=0)
        replica.presence.beat()
        self.collectors[slot] = Collector(
            journal=replica.journal,
            presence=replica.presence,
            watch=replica.watch,
            clock=self.clock,
            retention=self.retention,
            stale_s=5.0,
            stop=replica.stop,
        )
        last = replica.journal.last_commit(round_number)
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
        """without: alive, and not taking part."""
        for _ in range(rounds):
            self.clock.advance(1.0)
            self.beat()
            at_work = [replica for slot, replica in self.replicas.items() if slot not in without]
            for replica in at_work:
                replica.offer(bytes([replica.round % 251]) * self.payload_bytes + replica.presence.slot.encode())
            for replica in at_work:
                replica.close(replica.decide())
            head = at_work[0].round
            if head % self.checkpoint_every == 0:
                writer = at_work[head // self.checkpoint_every % len(at_work)].presence.slot
                save(self.store, head, self.run.nonce)
                if collect:
                    self.collectors[writer].collect()

    def payload_rounds(self) -> list[int]:
        return rounds_of(MemoryStore.list(self.store, keys.PAYLOADS), keys.PAYLOADS)

    def checkpoint_rounds(self) -> list[int]:
        return checkpoint.complete(self.store)

    def can_follow_from(self, first: int, head: int) -> bool:
        """Every payload that a decision of these rounds lists is there."""
        return all(_readable(self.store, number) for number in range(first, head))


def _readable(store: Store, round_number: int) -> bool:
    key = keys.decision(round_number, 0)
    for share in Decision.parse(store.read(key) or b"", key).members:
        where = keys.contribution(round_number, 0, share.slot)
        for part in Contribution.parse(store.read(where) or b"", where).parts:
            if store.read(keys.payload(round_number, share.slot, part.digest)) is None:
                return False
    return True


def test_a_run_keeps_what_its_last_checkpoints_lead_on_with() -> None:
    fleet = Fleet()
    fleet.train(10)
    assert fleet.checkpoint_rounds() == [10, 9, 0]
    assert fleet.payload_rounds() == [9]
    assert fleet.can_follow_from(9, 10)


def test_records_are_never_deleted() -> None:
    fleet = Fleet()
    fleet.train(12)
    assert fleet.store.deleted
    assert all(key.startswith((keys.PAYLOADS, keys.CHECKPOINTS)) for key in fleet.store.deleted)
    assert len(fleet.store.list(keys.COMMITS)) == len(fleet.store.list(keys.EXCHANGES)) == 12
    assert len(fleet.store.list(keys.CONTRIBUTIONS)) == 36


def test_a_live_member_that_is_behind_keeps_its_payloads_until_it_is_dead() -> None:
    fleet = Fleet()
    fleet.train(3)
    fleet.train(2, without=("c",))
    assert fleet.payload_rounds()[0] == 3, "c is in round 3"
    slow = fleet.replicas.pop("c")
    fleet.train(4)
    assert fleet.payload_rounds()[0] == 3
    fleet.train(4)
    assert slow.round == 3
    assert fleet.payload_rounds() == [12], "its heartbeat has not changed for longer than 5 s"


def test_who_holds_garbage_back_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.train(3)
    fleet.train(2, without=("c",))
    caplog.set_level("INFO", "skerry")
    fleet.train(6, without=("c",))
    told = [line for line in caplog.messages if line.startswith("garbage_collected")]
    assert 1 <= len(told) <= 2, "by each of the two collectors, at most once"
    assert all("objects=0" in line and "before=3" in line and "held_by=c" in line for line in told)


def test_a_joining_replica_loses_neither_its_checkpoint_nor_its_log() -> None:
    fleet = Fleet(retention=Retention(last=2, age_s=0.0))
    fleet.train(6)
    fleet.join("d", round_number=0).presence.enter("joining", round_number=0)
    loading = fleet.checkpoint_rounds()[0]
    fleet.train(5, without=("d",))
    assert loading in fleet.checkpoint_rounds(), "it is being loaded"
    assert fleet.can_follow_from(loading, 11)


def test_what_a_replica_uploaded_and_nobody_decided_goes_with_its_round() -> None:
    fleet = Fleet()
    fleet.train(2)
    orphan = fleet.replicas["a"]
    orphan.journal.store.create(keys.payload(1, "a", "f" * 32), b"x" * 1000)
    fleet.train(3)
    assert fleet.payload_rounds() == [4]


def test_an_upload_that_lands_after_its_round_was_swept_is_found_later() -> None:
    fleet = Fleet()
    fleet.train(20)
    fleet.store.create(keys.payload(1, "a", "f" * 32), b"late")
    fleet.train(60)
    assert fleet.payload_rounds() == [79]


@pytest.mark.parametrize("what", ["manifest", "short part", "no part"])
def test_a_damaged_checkpoint_does_not_count_as_one_of_the_newest(what: str) -> None:
    fleet = Fleet()
    fleet.train(4)
    found = checkpoint.manifest(fleet.store, 4)
    assert found is not None
    part = keys.checkpoint_part(4, found.parts[0].digest)
    match what:
        case "manifest":
            fleet.store.replace(keys.checkpoint_manifest(4), b"{")
        case "short part":
            fleet.store.replace(part, b"stat")
        case _:
            fleet.store.delete(part)
    fleet.train(1)
    assert fleet.checkpoint_rounds() == [5, 4, 3, 0]
    assert fleet.payload_rounds() == [3, 4], "3 and 5 are the last two complete ones"
    fleet.train(1)
    assert fleet.checkpoint_rounds() == [6, 5, 0]
    assert fleet.payload_rounds() == [5]


def test_a_collection_lists_payloads_once_and_from_where_it_was() -> None:
    fleet = Fleet(slots=("a",))
    fleet.train(20)
    fleet.store.listed.clear()
    fleet.train(1)
    assert [after for prefix, after in fleet.store.listed if prefix == keys.PAYLOADS] == ["payloads/00000019"]
    fleet.store.listed.clear()
    assert fleet.collectors["a"].collect() == Swept(0, 0)
    assert keys.PAYLOADS not in [prefix for prefix, _ in fleet.store.listed], "no round has become garbage since"


def test_what_is_too_young_is_found_again_when_it_is_old() -> None:
    fleet = Fleet(slots=("a",), retention=Retention(last=2, age_s=5.0))
    fleet.train(12)
    assert fleet.payload_rounds()[0] == 7, "a round takes a second"
    assert fleet.checkpoint_rounds() == [12, 11, 10, 9, 8, 0]


def test_two_collectors_at_once_are_harmless() -> None:
    fleet = Fleet()
    fleet.train(10, collect=False)
    swept = together([collector.collect for collector in fleet.collectors.values()])
    assert max(one.objects for one in swept) > 0
    assert fleet.payload_rounds() == [9]
    assert fleet.checkpoint_rounds() == [10, 9, 0]


def test_a_pin_keeps_a_checkpoint_and_letting_it_go_is_enough() -> None:
    fleet = Fleet()
    fleet.train(2)
    journal = fleet.replicas["a"].journal
    mine = Pin(run=journal.run.nonce, round=2, by="a person", reason="the best so far", created="")
    assert fleet.store.create(keys.pin(2), mine.to_bytes())
    fleet.train(8)
    assert fleet.checkpoint_rounds() == [10, 9, 2, 0]
    fleet.store.delete(keys.pin(2))
    fleet.train(1)
    assert fleet.checkpoint_rounds() == [11, 10, 0]


def test_a_stop_request_ends_a_collection_and_the_next_one_finds_the_rest() -> None:
    fleet = Fleet(slots=("a",))
    fleet.train(10, collect=False)
    fleet.replicas["a"].stop.set()
    assert fleet.collectors["a"].collect() == Swept(0, 0)
    assert fleet.payload_rounds() == list(range(10))
    fleet.replicas["a"].stop.clear()
    assert fleet.collectors["a"].collect().objects > 0
    assert fleet.payload_rounds() == [9]


def test_an_interrupted_deletion_leaves_no_checkpoint_that_is_seen_and_incomplete() -> None:
    fleet = Fleet(slots=("a",))
    fleet.train(10, collect=False)
    keep, allowed = fleet.store.delete, iter(range(5))

    def dying(key: str) -> None:
        if next(allowed, None) is None:
            raise Retryable("the store is away")
        keep(key)

    fleet.store.delete = dying  # type: ignore[method-assign]
    with pytest.raises(Retryable):
        fleet.collectors["a"].collect()
    for number in fleet.checkpoint_rounds():
        found = checkpoint.manifest(fleet.store, number)
        assert found is not None
        assert fleet.store.read(keys.checkpoint_part(number, found.parts[0].digest)) is not None
    fleet.store.delete = keep  # type: ignore[method-assign]
    fleet.collectors["a"].collect()
    assert rounds_of(fleet.store.list(keys.CHECKPOINTS), keys.CHECKPOINTS) == [0, 9, 10]


# Whole runs.


@pytest.mark.slow
def test_over_1000_rounds_live_payload_bytes_do_not_grow() -> None:
    fleet = Fleet(checkpoint_every=5, retention=Retention(last=3, age_s=20.0))
    one_round = 3 * 101
    sizes: list[int] = []
    for number in range(1000):
        if number == 300:
            fleet.replicas.pop("c")  # it dies without a word
        if number == 500:
            newest = fleet.checkpoint_rounds()[0]
            back = fleet.join("c", round_number=500)
            assert fleet.can_follow_from(newest, 500)
            back.presence.enter("train", round_number=500)
        fleet.train(1)
        sizes.append(fleet.store.size_bytes(keys.PAYLOADS) // one_round)
        if number % 5 == 4:
            kept = fleet.checkpoint_rounds()[:3]
            assert fleet.can_follow_from(kept[-1], number + 1)
    # 10 rounds from the third newest checkpoint to the newest, 5 until the next, 20 s of age or 5 s of staleness.
    assert max(sizes) <= 35
    assert max(sizes[900:]) <= max(sizes[100:200])
    assert len(fleet.store.list(keys.COMMITS)) == 1000


@pytest.mark.slow
def test_over_200_real_rounds_live_payload_bytes_do_not_grow() -> None:
    store = Measured()
    terms = {"grace_s": 2.0, "retention": Retention(last=3, age_s=0.0)}
    islands = together([lambda i=i: Island(store, f"r-{i}", seed=i, **terms).train(200) for i in range(3)])
    assert [island.manager.current_step() for island in islands] == [200] * 3
    one_round = sum(entry.size for entry in store.list(keys.PAYLOADS) if keys.round_of(entry.key) == 199)
    assert one_round > 0
    live = [size / one_round for size in store.sizes]
    assert len(live) == 200
    assert max(live) <= 30, "rounds are faster than the recorder's thread; unswept it would be 200"
    assert sum(live[100:]) / 100 <= sum(live[:100]) / 100 + 5, "unswept it would be 100 more"
    # The state at the head can still be rebuilt, by the same bits.
    late = Island(store, "late", seed=9, minimum=1)
    with late.diloco:
        late.manager.catch_up(late.inner)
    late.manager.shutdown()
    assert late.manager.current_step() == 200
    assert all((late.originals[name] == original).all() for name, original in islands[0].originals.items())


class Measured(MemoryStore):
    """Notes how many bytes of payloads there are whenever a round is closed."""

    def __init__(self) -> None:
        super().__init__(clock=SystemClock())
        self.sizes: list[int] = []

    def create(self, key: str, data: object) -> bool:
        made = super().create(key, data)  # type: ignore[arg-type]
        if made and key.startswith(keys.COMMITS):
            with self._lock:
                self.sizes.append(sum(len(b) for k, (b, _) in self._objects.items() if k.startswith(keys.PAYLOADS)))
        return made


def test_a_collection_that_fails_is_told_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Forbidding(MemoryStore):
        def delete(self, key: str) -> None:
            if key.startswith(keys.PAYLOADS):
                raise PermissionError("no right to delete")
            super().delete(key)

    store = Forbidding(clock=SystemClock())
    island = Island(store, "a", minimum=1, retention=Retention(last=1, age_s=0.0)).train(5)
    assert island.manager.current_step() == 5
    assert any("garbage_failed" in line for line in caplog.messages)


def test_a_replica_that_slept_through_a_sweep_goes_on_from_a_checkpoint() -> None:
    """It was taken for dead, and what it would have followed is gone."""
    store = MemoryStore(clock=SystemClock())
    terms = {"minimum": 1, "grace_s": 0.1, "retention": Retention(last=2, age_s=0.0)}
    survivor = Island(store, "a", **terms).train(2, close=False)
    late = Island(store, "b", seed=3, max_retries=None, **terms)
    with late.diloco:
        late.manager.catch_up(late.inner)
        late.manager.presence._stopped.set()  # it beats no more
        before = late.manager.current_step()
        survivor.manager._seat.collector._stale_s = 0.0
        survivor.train(9)
        swept = [entry for entry in store.list(keys.PAYLOADS) if keys.round_of(entry.key) == before]
        assert swept == []
        late.manager._at_boundary = True
        late.manager.catch_up(late.inner)
    assert late.manager.current_step() == 9
    assert (late.originals["weight"] == survivor.originals["weight"]).all()
    late.manager.shutdown()
