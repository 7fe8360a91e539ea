"""Garbage collection: the rules as tables, collectors over a memory store, and whole runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.kit.events import logged_events
from tests.kit.fleet import Fleet, position, rounds_of
from tests.kit.managers import Island, assert_same_parameters, together
from tests.kit.protocol import heartbeat
from tests.kit.stores import HookedStore

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.garbage_collector import (
    ObservedRounds,
    Retention,
    SweepResult,
    first_needed,
    live_rounds,
    removable,
)
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import Pin
from skerry.runtime.protocol.quorum import ObservedHeartbeat
from skerry.runtime.store.interface import Entry
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.records import Phase

DIGEST = "d" * 32


# The rules, without a store.


def payloads(*rounds: int) -> list[Entry]:
    return [Entry(keys.payload(number, slot, DIGEST), 10, 1.0) for number in rounds for slot in ("a", "b")]


def checkpoints(*rounds: int) -> list[Entry]:
    return [
        Entry(key, 10, 1.0)
        for number in rounds
        for key in (keys.checkpoint_part(number, DIGEST), keys.checkpoint_manifest(number))
    ]


def decided(
    complete: Sequence[int],
    *,
    live: dict[str, int] | None = None,
    pins: frozenset[int] = frozenset(),
    unfinished: Sequence[Entry] = (),
    old_before: int = 100,
    **retention: float | None,
) -> tuple[list[int], list[int]]:
    """Rounds whose checkpoints, and rounds whose payloads, are removable. Rounds 0 to 12 have payloads."""
    observed = ObservedRounds(
        complete=sorted(complete, reverse=True),
        checkpoints=[*checkpoints(*complete), *unfinished],
        payloads=payloads(*range(13)),
        pins=pins,
        live=live or {},
        old_before=old_before,
        initial=frozenset({keys.checkpoint_part(0, DIGEST)}),
    )
    removed = removable(observed, Retention(**{"last": 2, **retention}))  # type: ignore[arg-type]
    entries = [*removed.first, *removed.then]
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
def test_newest_checkpoints_and_later_payloads_are_kept(complete: list[int], gone: list[int], before: int) -> None:
    assert decided(complete) == (gone, list(range(before)))


def test_initial_checkpoint_stays_and_parts_of_losing_writers_go() -> None:
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
def test_payloads_stay_until_every_live_member_applied_them(live: dict[str, int], gone: list[int], before: int) -> None:
    assert decided([0, 4, 8, 12], live=live) == (gone, list(range(before)))


def test_rounds_that_closed_a_short_time_ago_stay() -> None:
    assert decided([2, 4, 8], old_before=0) == ([], [])
    assert decided([2, 4, 8], old_before=3) == ([2], [0, 1, 2])
    assert decided([2, 4, 8], old_before=9) == ([2], [0, 1, 2, 3])


def test_pinned_and_periodic_checkpoints_stay_without_payloads() -> None:
    complete = range(0, 13, 2)
    assert decided(complete, every=4)[0] == [2, 6]
    assert decided(complete, pins=frozenset({6}))[0] == [2, 4, 8]
    assert decided(complete, every=4, pins=frozenset({6})) == ([2], list(range(10)))


def test_incomplete_checkpoint_is_deleted_with_its_round() -> None:
    parts = [Entry(keys.checkpoint_part(number, DIGEST), 10, 1.0) for number in (3, 8, 9, 11)]
    assert decided([4, 8, 10], unfinished=parts, every=3)[0] == [3, 4], "8 and later may still be finished"
    assert decided([4, 8, 10], unfinished=parts, old_before=3)[0] == []


def test_manifest_is_deleted_before_the_parts() -> None:
    observed = ObservedRounds(
        complete=[8, 4],
        checkpoints=checkpoints(0, 2, 4, 8),
        payloads=payloads(0),
        pins=frozenset(),
        live={},
        old_before=100,
    )
    removed = removable(observed, Retention(last=2, age_s=0.0))
    assert {entry.key for entry in removed.first} == {keys.checkpoint_manifest(2)}
    assert all(not entry.key.endswith("manifest.json") for entry in removed.then)


def test_foreign_objects_are_not_deleted() -> None:
    foreign = [Entry("payloads/readme.txt", 1, 1.0), Entry("checkpoints/latest", 1, 1.0)]
    observed = ObservedRounds(
        complete=[9, 8], checkpoints=foreign[1:], payloads=foreign[:1], pins=frozenset(), live={}, old_before=100
    )
    assert removable(observed, Retention(last=2, age_s=0.0)) == ([], [])


def peer(round_number: int, phase: Phase, changed_at: float, *, fresh: bool = True) -> ObservedHeartbeat:
    beat = heartbeat("x", round=round_number, phase=phase)
    return ObservedHeartbeat(heartbeat=beat, changed_at=changed_at, fresh=fresh)


def test_silent_or_departed_replicas_do_not_keep_payloads() -> None:
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
    assert live_rounds(peers, 95.0, 100.0, 10.0) == expected | {"dead": 1}, "no heartbeat could be read before"


def test_first_needed_round_is_the_lowest_needed_by_any() -> None:
    assert first_needed([], {}, Retention()) == 0
    assert first_needed([9, 6, 3, 0], {}, Retention(last=3)) == 3
    assert first_needed([9, 6, 3, 0], {"a": 2, "b": 9}, Retention(last=3)) == 2


@pytest.mark.parametrize("terms", [{"last": 0}, {"every": 0}, {"age_s": -1.0}])
def test_impossible_retention_is_refused(terms: dict[str, float]) -> None:
    with pytest.raises(Invalid, match="retention"):
        Retention(**terms)  # type: ignore[arg-type]


# Collectors of replicas that exchange bytes.


def test_run_keeps_payloads_since_its_last_checkpoints() -> None:
    fleet = Fleet()
    fleet.train(10)
    assert fleet.checkpoint_rounds() == [10, 9, 0]
    assert fleet.payload_rounds() == [9]
    assert fleet.can_follow_from(9, 10)


def test_live_member_behind_keeps_its_payloads_until_it_dies() -> None:
    fleet = Fleet()
    fleet.train(3)
    fleet.train(2, without=("c",))
    assert fleet.payload_rounds() == [2, 3, 4], "c is in round 3, and has not collected its own of round 2"
    slow = fleet.replicas.pop("c")
    fleet.train(4)
    assert fleet.payload_rounds()[:2] == [2, 3]
    fleet.train(4)
    assert slow.round == 3
    assert fleet.payload_rounds() == [12], "its heartbeat has not changed for longer than 5 s"


def test_each_replica_deletes_only_its_own_payloads() -> None:
    fleet = Fleet(own_roles=True)
    fleet.train(20)
    assert fleet.payload_rounds() == [19]
    assert fleet.refused() == []


def test_some_of_many_replicas_collect_at_each_checkpoint_in_rotation() -> None:
    fleet = Fleet(slots=tuple(f"r-{number}" for number in range(20)), own_roles=True)
    fleet.train(1)  # each begins
    fleet.train(2, collect=False)
    turns: list[set[str]] = []
    for turn in range(3):
        before = {keys.slot_of(entry.key) for entry in fleet.store.list(keys.payloads_prefix(0))}
        for collector in fleet.collectors.values():
            collector.collect_own(position(4, fleet.slots), turn)
        turns.append(before - {keys.slot_of(entry.key) for entry in fleet.store.list(keys.payloads_prefix(0))})
    assert all(turns)
    assert fleet.payload_rounds() == [2]


def test_each_of_many_collects_in_turn_although_one_misses_rounds() -> None:
    fleet = Fleet(slots=tuple(f"r-{number}" for number in range(10)), own_roles=True)
    for number in range(40):
        fleet.train(1, without=["r-0"] if number % 2 else [])
        slow, other = fleet.replicas["r-0"], fleet.replicas["r-1"]
        slow.round, slow.base, slow.work = other.round, other.base, other.work
        kept = Counter(keys.slot_of(entry.key) for entry in fleet.store.list(keys.PAYLOADS))
        assert max(kept.values()) <= 4, (number, kept)


@pytest.mark.parametrize("own_roles", [False, True])
def test_slot_that_dies_at_each_checkpoint_does_not_gather_payloads(own_roles: bool) -> None:  # noqa: FBT001
    fleet = Fleet(own_roles=own_roles, checkpoint_every=4)
    kept: list[int] = []
    for _ in range(20):
        fleet.train(3)
        del fleet.replicas["c"], fleet.collectors["c"]
        fleet.train(1)
        head = fleet.replicas["a"].round
        fleet.join("c", head).presence.enter("train", round_number=head)
        kept.append(sum(keys.slot_of(entry.key) == "c" for entry in fleet.store.list(keys.PAYLOADS)))
    assert max(kept) < 12
    assert max(kept) == max(kept[-3:]), "it grows with the rounds"


def test_payloads_of_a_slot_that_never_collects_are_deleted_in_the_end() -> None:
    fleet = Fleet()
    fleet.replicas["c"].stop.set()  # its collector deletes nothing
    fleet.train(250)
    first = min(keys.round_of(entry.key) for entry in fleet.store.list(keys.PAYLOADS))
    assert first > 100


def own_payloads(fleet: Fleet, slot: str) -> list[int]:
    entries = fleet.store.list(keys.PAYLOADS)
    return rounds_of([entry for entry in entries if keys.slot_of(entry.key) == slot], keys.PAYLOADS)


def test_checkpoint_counts_for_others_once_it_is_complete() -> None:
    fleet = Fleet(slots=("a", "b"), own_roles=True)
    fleet.train(10, collect=False)
    manifest = fleet.store.read(keys.checkpoint_manifest(10)) or b""
    fleet.store.delete(keys.checkpoint_manifest(10))
    fleet.collectors["a"].collect_own(position(10, fleet.slots), 0)
    assert own_payloads(fleet, "a")[0] == 8
    fleet.store.create(keys.checkpoint_manifest(10), manifest)
    fleet.collectors["a"].collect_own(position(10, fleet.slots), 0)
    assert own_payloads(fleet, "a")[0] == 9


def test_replica_collects_its_own_after_the_writer_has_collected() -> None:
    """The checkpoint of round 0, which always stays, does not take the place of one that the writer has deleted."""
    fleet = Fleet(slots=("a", "b"), own_roles=True)
    fleet.train(10, collect=False)
    fleet.collectors["b"].collect()
    assert fleet.checkpoint_rounds() == [10, 9, 0]
    fleet.collectors["a"].collect_own(position(10, fleet.slots), 0)
    assert own_payloads(fleet, "a") == [9]


def test_payloads_stay_for_a_member_that_has_started_again() -> None:
    """It loaded the checkpoint before the new one, which was not complete yet, and its heartbeat is read."""
    fleet = Fleet(retention=Retention(last=1, age_s=0.0), checkpoint_every=2, own_roles=True)
    fleet.train(10, collect=False)
    fleet.join("c", round_number=8)
    fleet.replicas["c"].presence.enter("joining", round_number=8)
    fleet.beat()
    fleet.collectors["a"].collect_own(position(10, fleet.slots), 0)
    assert own_payloads(fleet, "a") == [8, 9]


def test_refused_payloads_of_a_slot_that_left_stay_until_it_is_back() -> None:
    fleet = Fleet(own_roles=True)
    fleet.train(5)
    gone = fleet.replicas.pop("c")
    fleet.train(40)
    left = [entry.key for entry in fleet.store.list(keys.PAYLOADS) if keys.slot_of(entry.key) == "c"]
    assert left == [key for key in left if keys.round_of(key) == 4], "what it had not collected when it ended"
    assert rounds_of([e for e in fleet.store.list(keys.PAYLOADS) if e.key not in left], keys.PAYLOADS) == [44]
    assert sorted(fleet.refused()) == left * 2, "tried once by each of the others"
    fleet.join("c", round_number=45)
    fleet.replicas["c"].presence.enter("train", round_number=45)
    assert gone.round == 5
    fleet.train(6)
    assert fleet.payload_rounds() == [50]


def test_payloads_of_a_slot_that_left_are_deleted_where_allowed() -> None:
    fleet = Fleet()
    fleet.train(5)
    del fleet.replicas["c"]
    fleet.train(10)
    assert fleet.payload_rounds() == [14]


def test_replica_that_blocks_collection_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.train(3)
    fleet.train(1, without=("c",))
    caplog.set_level("INFO", "skerry")
    fleet.train(7, without=("c",))
    collections = logged_events(caplog, "garbage_collected")
    assert len(collections) == 2, "by each of the two collectors, at most once"
    assert {(fields["objects"], fields["before"], fields["held_by"]) for fields in collections} == {(0, 3, "c")}


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_jump_of_the_stores_clock_neither_deletes_nor_keeps(jump_s: float) -> None:
    fleet = Fleet(retention=Retention(last=2, age_s=8.5))
    fleet.train(6)
    fleet.store.jump(jump_s)
    fleet.train(4)
    assert fleet.payload_rounds() == list(range(1, 10)), "round 0 closed 9 s ago"
    fleet.train(10)
    assert fleet.payload_rounds() == list(range(11, 20))


def test_joining_replica_keeps_its_checkpoint_and_payloads() -> None:
    fleet = Fleet(retention=Retention(last=2, age_s=0.0))
    fleet.train(6)
    fleet.join("d", round_number=0).presence.enter("joining", round_number=0)
    loading = fleet.checkpoint_rounds()[0]
    fleet.train(5, without=("d",))
    assert loading in fleet.checkpoint_rounds(), "d loads it"
    assert fleet.can_follow_from(loading, 11)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (20, 60)])
def test_undecided_upload_is_deleted_also_after_its_rounds_sweep(before: int, after: int) -> None:
    fleet = Fleet()
    fleet.train(before)
    fleet.store.create(keys.payload(1, "a", "f" * 32), b"x" * 1000)
    fleet.train(after)
    assert fleet.payload_rounds() == [before + after - 1]


@pytest.mark.parametrize("damage", ["manifest", "short part", "no part"])
def test_damaged_checkpoint_does_not_count_as_newest(damage: str) -> None:
    fleet = Fleet()
    fleet.train(4, collect=False)
    manifest = checkpoint.manifest(fleet.store, 4)
    assert manifest is not None
    part = keys.checkpoint_part(4, manifest.parts[0].digest)
    match damage:
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


def test_collection_continues_its_payload_listing() -> None:
    fleet = Fleet(slots=("a",))
    fleet.train(20)
    fleet.store.listed.clear()
    fleet.train(1)
    assert [after for prefix, after in fleet.store.listed if prefix == keys.PAYLOADS] == ["payloads/00000019"]
    fleet.store.listed.clear()
    assert fleet.collectors["a"].collect() == SweepResult(0, 0)
    assert keys.PAYLOADS not in [prefix for prefix, _ in fleet.store.listed], "no round has become garbage since"


def test_two_collectors_at_once_are_harmless() -> None:
    fleet = Fleet()
    fleet.train(10, collect=False)
    results = together([collector.collect for collector in fleet.collectors.values()])
    assert max(result.objects for result in results) > 0
    assert fleet.payload_rounds() == [9]
    assert fleet.checkpoint_rounds() == [10, 9, 0]


def test_pin_keeps_a_checkpoint_until_it_is_deleted() -> None:
    fleet = Fleet()
    fleet.train(2)
    log = fleet.replicas["a"].log
    mine = Pin(run=log.run.nonce, round=2, by="alice", reason="the best so far", created="")
    assert fleet.store.create(keys.pin(2), mine.to_bytes())
    fleet.train(8)
    assert fleet.checkpoint_rounds() == [10, 9, 2, 0]
    fleet.store.delete(keys.pin(2))
    fleet.train(1)
    assert fleet.checkpoint_rounds() == [11, 10, 0]


def test_stopped_collection_is_completed_by_the_next() -> None:
    fleet = Fleet(slots=("a",))
    fleet.train(10, collect=False)
    fleet.replicas["a"].stop.set()
    assert fleet.collectors["a"].collect() == SweepResult(0, 0)
    assert fleet.payload_rounds() == list(range(10))
    fleet.replicas["a"].stop.clear()
    assert fleet.collectors["a"].collect().objects > 0
    assert fleet.payload_rounds() == [9]


# Whole runs.


def test_failed_collection_is_reported_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(verb: str, key: str) -> None:
        if verb == "delete" and key.startswith(keys.PAYLOADS):
            raise PermissionError("no right to delete")

    store = HookedStore(refuse, clock=SystemClock())
    island = Island(store, "a", minimum=1, retention=Retention(last=1, age_s=0.0)).train(5)
    assert island.manager.current_step() == 5
    assert logged_events(caplog, "garbage_collection_failed")


def test_replica_that_missed_a_sweep_continues_from_a_checkpoint() -> None:
    """The others do not keep payloads for a replica that has left."""
    store = MemoryStore(clock=SystemClock())
    terms = {"minimum": 1, "grace_s": 0.1, "retention": Retention(last=2, age_s=0.0)}
    survivor = Island(store, "a", **terms).train(2, close=False)
    late = Island(store, "b", seed=3, max_retries=None, **terms)
    late.join()
    late.manager.presence.stop("left")
    before = late.manager.current_step()
    survivor.train(9)
    assert before not in rounds_of(store.list(keys.PAYLOADS), keys.PAYLOADS)
    late.manager.lifecycle.at_boundary = True
    late.join()
    assert late.manager.current_step() == 9
    assert_same_parameters([survivor, late])


@pytest.mark.parametrize(("settled", "first"), [(None, 39), (40, 39), (39, 39), (38, 38), (24, 24), (23, 39), (0, 39)])
def test_last_settled_round_is_kept_to_recompute_from(settled: int | None, first: int) -> None:
    """Unless it is more than HELD_ROUNDS before the newest checkpoint."""
    fleet = Fleet()
    fleet.train(40, collect=False)
    for collector in fleet.collectors.values():
        collector.collect(settled)
    assert fleet.payload_rounds()[0] == first
    assert fleet.checkpoint_rounds() == [*range(40, first - 1, -1), 0]
