"""Exchange over a memory store: contributions, decisions, commits, fencing, without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import pytest
from tests.kit.events import logged_events
from tests.kit.protocol import (
    EMPTY_INDEX,
    INDEX,
    Replica,
    contribution,
    draft,
    measure,
    policy,
    run_record,
    start_replica,
)
from tests.kit.stores import ForgetfulStore, HookedStore, ReadRecorder
from tests.support.clocks import FakeClock

from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt, Diverged, Fenced
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import MAX_RECORD_BYTES
from skerry.runtime.log.records import Link, makers_in
from skerry.runtime.protocol.exchange import Interrupted
from skerry.runtime.protocol.quorum import Undecided
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.records import Reduction
    from skerry.runtime.store.interface import Entry

OTHER_INDEX = "2" * 32

Start: TypeAlias = Callable[..., Replica]
"""Starts a replica; the parameters are a slot and, by name, other settings of the policy."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Retrying:
    return Retrying(MemoryStore(), clock)


@pytest.fixture
def start(store: Retrying, clock: FakeClock) -> Start:
    return lambda slot, **settings: start_replica(store, clock, slot, policy(**settings))


@pytest.fixture
def a(start: Start) -> Replica:
    return start("a")


@pytest.fixture
def b(start: Start) -> Replica:
    return start("b")


def contribute(*replicas: Replica) -> None:
    for replica in replicas:
        replica.contribute(f"{replica.presence.slot} {replica.round}".encode())


def train(a: Replica, b: Replica, rounds: int = 1) -> None:
    for _ in range(rounds):
        contribute(b, a)
        for replica in (a, b):
            replica.close(replica.decide())


def test_restarted_replica_adopts_its_earlier_contribution(start: Start, a: Replica, b: Replica) -> None:
    contribute(a, b)
    new = start("a")
    adopted = new.exchange.contribute(new.exchange_id, draft(b"after the restart")).record
    assert (adopted.incarnation, new.presence.incarnation) == (0, 1)
    assert new.members() == ["a", "b"]


def test_fenced_incarnation_writes_nothing(store: Retrying, start: Start, a: Replica, b: Replica) -> None:
    contribute(a, b)
    start("a")
    before = store.list("")
    with pytest.raises(Fenced, match="incarnation 1"):
        a.decide()
    a.round = 1
    with pytest.raises(Fenced, match="incarnation 1"):
        contribute(a)
    assert [entry.key for entry in store.list("")] == [entry.key for entry in before]


def test_late_replica_adopts_a_decision_without_it(store: Retrying, clock: FakeClock, a: Replica, b: Replica) -> None:
    late = start_replica(store, clock, "c", beat=False)
    train(a, b)
    assert late.members() == ["a", "b"]


def test_record_that_a_shared_folder_hides_at_first_is_read_again(clock: FakeClock) -> None:
    """Its cache says for two seconds after the first question that a record of another machine does not exist."""
    shared = MemoryStore()
    writer = start_replica(Retrying(shared, clock), clock, "a", policy(min_replicas=1))
    writer.contribute(b"a")
    decision = writer.decide()
    writer.close(decision)
    reader = start_replica(Retrying(ForgetfulStore(clock, 2.0, shared), clock), clock, "b", beat=False)
    assert [record.slot for record in reader.exchange.contributions(decision.record)] == ["a"]
    assert reader.log.read_last_commit(1) == writer.commits[0]


def damage_record(store: Retrying, _: Replica) -> None:
    store.create(keys.contribution(0, 0, "c"), b'{"run": 1')


def lose_payload(store: Retrying, c: Replica) -> None:
    contribute(c)
    (payload,) = store.list(keys.PAYLOADS)
    store.delete(payload.key)


def contribute_other_tensors(_: Retrying, c: Replica) -> None:
    c.contribute(b"c", index=OTHER_INDEX)


@pytest.mark.parametrize("spoil", [damage_record, lose_payload, contribute_other_tensors])
def test_unusable_contribution_is_no_member(
    store: Retrying, start: Start, a: Replica, b: Replica, spoil: Callable[[Retrying, Replica], None]
) -> None:
    c = start("c")
    spoil(store, c)
    contribute(a, b)
    assert a.members() == ["a", "b"]
    with pytest.raises(Diverged, match="other tensors"):
        c.decide(index=OTHER_INDEX)


def test_decision_names_the_members_in_the_region_that_reduces(store: Retrying, clock: FakeClock) -> None:
    run = run_record(clock, reduce_in="east")
    members = [start_replica(store, clock, slot, run=run) for slot in ("a", "b", "c")]
    for replica, region in zip(members, ("east", "west", "east"), strict=True):
        replica.presence.region = region
        replica.contribute(region.encode())
    proposer = members[0]
    proposed = proposer.exchange.decide(proposer.exchange_id, INDEX, reduction=lambda _: "reduce_scatter").record
    assert proposed.makers == ("a", "c")


def test_reduction_is_chosen_by_the_links_that_the_members_have_recorded(clock: FakeClock) -> None:
    """Not by what the proposer alone knows: the choice follows from the records that the decision names."""
    engine, links = MemoryStore(), [(6.25e6, 0.03), (1e9, 0.001)]
    members = [start_replica(Retrying(engine, clock), clock, slot) for slot in ("a", "b", "c")]
    for member, link in zip(members, links, strict=False):
        measure(member, *link)
        member.contribute(b"x")
    members[2].contribute(b"x")
    measure(members[0], 1.0, 1.0)
    seen: list[Sequence[Link | None]] = []

    def choose(known: Sequence[Link | None]) -> Reduction:
        seen.append(known)
        return "reduce_scatter"

    proposer = members[0]
    decision = proposer.exchange.decide(proposer.exchange_id, INDEX, reduction=choose).record
    assert decision.reduction == "reduce_scatter"
    assert seen == [[*(Link(bytes_per_s=rate, request_s=seconds) for rate, seconds in links), None]]
    recorded = [record.link for record in proposer.exchange.contributions(decision)]
    assert recorded == list(seen[0])


def test_few_members_in_the_region_do_not_reduce_for_all() -> None:
    regions: dict[str, str | None] = {f"r-{number}": "west" for number in range(8)}
    assert makers_in("east", regions) is None
    assert makers_in("east", regions | {"r-3": "east"}) == ("r-3",)
    assert makers_in("east", regions | {"r-3": "east", "r-8": None}) is None
    assert makers_in(None, regions | {"r-3": None}) is None


def test_other_average_in_a_commit_is_reported(a: Replica, b: Replica, caplog: pytest.LogCaptureFixture) -> None:
    a.contribute(b"a")
    b.contribute(b"b")
    named = a.close(a.decide())
    decision = b.decide()
    commit = b.exchange.close(b.exchange_id, [decision], work=2.0, averages=["f" * 32])
    assert commit == named
    assert commit.record.averages == (decision.digest[:32],)
    (event,) = logged_events(caplog, "averages_differ")
    assert (event["round"], event["slot"], event["mine"]) == (0, "b", "f" * 32)


def test_commit_of_an_old_run_names_no_averages(store: Retrying, clock: FakeClock) -> None:
    a = start_replica(store, clock, "a", policy(min_replicas=1), run_record(clock, layout=None))
    a.train(b"a")
    assert b"averages" not in bytes(store.read(keys.commit(0)) or b"")


def test_different_commit_of_a_round_is_divergence(a: Replica, b: Replica) -> None:
    contribute(b, a)
    decision = a.decide()
    a.close(decision)
    with pytest.raises(Diverged, match="committed differently"):
        b.close(decision._replace(digest="f" * 64))


def test_records_of_another_run_are_divergence(clock: FakeClock, a: Replica, b: Replica) -> None:
    train(a, b)
    a.log.run = run_record(clock)
    with pytest.raises(Diverged, match="two runs share this prefix"):
        a.log.read_commit(0)


def test_missing_commit_is_a_gap_in_the_log(store: Retrying, a: Replica, b: Replica) -> None:
    train(a, b, 3)
    assert a.log.find_head(0) == 3
    store.delete(keys.commit(1))
    with pytest.raises(Diverged, match="round 1 is not closed"):
        a.log.find_head(0)


def test_commit_missing_only_from_a_listing_is_no_gap(clock: FakeClock) -> None:
    class IncompleteListing(MemoryStore):
        def list(self, prefix: str, after: str | None = None) -> list[Entry]:
            return [entry for entry in super().list(prefix, after) if entry.key != keys.commit(1)]

    store = IncompleteListing()
    a, b = start_replica(store, clock, "a"), start_replica(store, clock, "b")
    train(a, b, 3)
    assert a.log.find_head(0) == 3


def test_replica_without_tensors_leaves_the_decision_to_others(store: Retrying, start: Start) -> None:
    a, b = start("a", min_replicas=1), start("b", min_replicas=1)
    contribute(a)
    with pytest.raises(Undecided, match="issued none"):
        b.contribute(b"", index=EMPTY_INDEX)
    assert store.read(keys.contribution(0, 0, "b")) is None
    with pytest.raises(Undecided, match="issued none"):
        b.decide(index=EMPTY_INDEX)
    assert store.read(keys.decision(0, 0)) is None
    assert a.members() == ["a"]
    with pytest.raises(Undecided, match="issued none"):
        b.decide(index=EMPTY_INDEX)


def test_other_tensors_of_an_earlier_incarnation_are_divergence(start: Start, a: Replica) -> None:
    a.contribute(b"a", index=OTHER_INDEX)
    with pytest.raises(Diverged, match="incarnation 0 of a has contributed other tensors"):
        contribute(start("a"))


def test_decision_on_another_base_is_divergence(a: Replica, b: Replica) -> None:
    contribute(b, a)
    a.decide()
    b.base = "e" * 64
    with pytest.raises(Diverged, match="builds on another log"):
        b.decide()


def test_contribution_changed_after_the_decision_is_corrupt(store: Retrying, a: Replica, b: Replica) -> None:
    contribute(b, a)
    decision = a.decide().record
    key = keys.contribution(0, 0, "b")
    store.replace(key, bytes(store.read(key) or b"").replace(b'"tokens":0', b'"tokens":9'))
    with pytest.raises(Corrupt, match="not the decided one"):
        b.exchange.contributions(decision)


def test_contributions_seen_in_the_wait_are_not_read_again(store: Retrying, a: Replica, b: Replica) -> None:
    contribute(b, a)
    decision = a.decide().record
    before = store.usage
    assert [record.slot for record in a.exchange.contributions(decision)] == ["a", "b"]
    assert (store.usage - before).requests == 0


def test_heartbeats_of_contributors_are_not_read(clock: FakeClock) -> None:
    """Sixteen replicas of which twelve have contributed, each of them looked at by the last."""
    reads: list[str] = []
    shared = HookedStore(lambda verb, key: reads.append(key) if verb == "read" else None)
    terms = policy(min_replicas=16, deadline_s=0.0)
    replicas = [start_replica(Retrying(shared, clock), clock, f"r-{number}", terms) for number in range(16)]
    contribute(*replicas[4:])
    reads.clear()
    with pytest.raises(TimeoutError):
        replicas[-1].decide()
    heartbeats = sorted(key for key in reads if key.startswith(keys.HEARTBEATS))
    assert heartbeats == sorted(keys.heartbeat(f"r-{number}") for number in range(4))


def test_only_the_first_contributor_looks_at_every_poll(clock: FakeClock) -> None:
    """The others read the decision alone, two polls out of three."""
    looks: dict[str, int] = {}
    for slot, others in (("a", "b"), ("b", "a")):
        seen: list[str] = []
        store = Retrying(HookedStore(lambda _, key, seen=seen: seen.append(key)), clock)
        terms = policy(min_replicas=3, deadline_s=20.0)
        replica = start_replica(store, clock, slot, terms)
        contribute(replica, start_replica(store, clock, others, terms))
        clock.on_pause = start_replica(store, clock, "c", terms).presence.beat
        seen.clear()
        with pytest.raises(TimeoutError):
            replica.decide()
        looks[slot] = seen.count(keys.contribution(0, 0, "c"))
    assert looks["a"] > 2 * looks["b"]


def test_replica_at_work_does_not_read_its_own_contribution(clock: FakeClock) -> None:
    """The proposer reads it once, as the others do: the store may hold other bytes than those that were written."""
    store = MemoryStore()
    views = [ReadRecorder(store), ReadRecorder(store)]
    a, b = (start_replica(Retrying(view, clock), clock, slot) for view, slot in zip(views, "ab", strict=True))
    train(a, b, 2)
    of_a, of_b = (
        [view.reads.count(keys.contribution(n, 0, slot)) for n in range(2)]
        for view, slot in zip(views, "ab", strict=True)
    )
    # An earlier incarnation may have contributed to the first round.
    assert (of_a, of_b) == ([2, 1], [1, 0])


@pytest.mark.parametrize(
    ("index", "error"), [("1" * 32, None), (OTHER_INDEX, "contributed other tensors"), (EMPTY_INDEX, "without tensors")]
)
def test_contribution_of_a_replaced_incarnation_counts_in_a_later_round(
    a: Replica, b: Replica, start: Start, index: str, error: str | None
) -> None:
    new = start("a")
    train(new, b)
    replaced = contribution("a", run=a.log.run.nonce, round=1, base=new.base, index=index)
    a.log.create(keys.contribution(1, 0, "a"), replaced)
    if error is None:
        assert new.exchange.contribute(new.exchange_id, draft(b"new")).record == replaced
    else:
        with pytest.raises((Diverged, Undecided), match=error):
            contribute(new)


@pytest.mark.parametrize(("slot", "other", "at_first"), [("a", "b", 1), ("b", "a", 0)])
def test_only_the_first_contributor_reads_heartbeats_at_once(
    clock: FakeClock, slot: str, other: str, at_first: int
) -> None:
    """The others do so after an interval."""
    reads: list[str] = []
    store = Retrying(HookedStore(lambda verb, key: reads.append(key) if verb == "read" else None), clock)
    me, others, c = (start_replica(store, clock, name, policy(min_replicas=3)) for name in (slot, other, "c"))
    contribute(c, others)
    me.train(b"0")
    for replica in (others, c):
        replica.close(replica.decide())
    contribute(me, others)
    reads.clear()
    counts: list[int] = []
    ends = clock.now() + 1.0

    def look() -> None:
        counts.append(reads.count(keys.heartbeat("c")))
        if clock.now() >= ends:
            contribute(c)

    clock.on_pause = look
    assert me.members() == ["a", "b", "c"]
    assert counts[0] == at_first
    assert counts[-1] >= 1


def test_heartbeats_are_read_before_a_missing_replica_counts_as_dead(start: Start, clock: FakeClock) -> None:
    a, b, c = (start(slot) for slot in "abc")
    contribute(c, b)
    a.train(b"a")
    for replica in (b, c):
        replica.close(replica.decide())
    clock.advance(60.0)  # b has not read a heartbeat for longer than a live replica may be silent
    c.presence.beat()
    contribute(a, b)
    clock.on_pause = lambda: contribute(c)
    assert b.members() == ["a", "b", "c"]


def many(store: Retrying, clock: FakeClock) -> list[Replica]:
    """Twelve replicas that have contributed: more than are looked at one by one."""
    replicas = [start_replica(store, clock, f"r-{number}", policy(min_replicas=2)) for number in range(12)]
    contribute(*replicas)
    return replicas


def test_listed_payloads_are_not_read_before_a_proposal(clock: FakeClock) -> None:
    reads: list[str] = []
    store = Retrying(HookedStore(lambda verb, key: reads.append(key) if verb == "read" else None), clock)
    assert len(many(store, clock)[0].members()) == 12
    assert not [key for key in reads if key.startswith(keys.PAYLOADS)]


def test_payload_missing_from_the_listing_and_the_store_is_no_member(store: Retrying, clock: FakeClock) -> None:
    replicas = many(store, clock)
    store.delete(next(entry.key for entry in store.list(keys.PAYLOADS) if keys.slot_of(entry.key) == "r-3"))
    assert "r-3" not in replicas[0].members()


def test_payload_missing_only_from_a_listing_is_a_member(clock: FakeClock) -> None:
    class IncompleteListing(MemoryStore):
        def list(self, prefix: str, after: str | None = None) -> list[Entry]:
            return [entry for entry in super().list(prefix, after) if "payloads/00000000/r-3/" not in entry.key]

    assert len(many(Retrying(IncompleteListing(), clock), clock)[0].members()) == 12


def test_commit_is_created_once_and_read_by_the_others(clock: FakeClock) -> None:
    calls: list[tuple[str, str]] = []
    store = Retrying(HookedStore(lambda *call: calls.append(call)), clock)
    a, b = start_replica(store, clock, "a"), start_replica(store, clock, "b")
    train(a, b)
    verbs = [verb for verb, key in calls if key == keys.commit(0)]
    assert verbs == ["create", "read"]


def test_stop_request_ends_the_wait_and_keeps_the_contribution(store: Retrying, clock: FakeClock, a: Replica) -> None:
    contribute(a)
    clock.on_pause = a.stop.set
    with pytest.raises(Interrupted):
        a.decide()
    assert store.read(keys.contribution(0, 0, "a")) is not None


def test_dead_replica_delays_the_round_by_its_stale_time(start: Start, clock: FakeClock) -> None:
    a, b, _ = (start(slot, stale_s=3.0) for slot in "abc")
    contribute(b)
    started = clock.now()
    clock.on_pause = b.presence.beat
    a.train(b"a")
    assert 0.0 < clock.now() - started <= 3.0 + 0.5


@pytest.mark.parametrize("seed", range(5))
def test_racing_replicas_agree_on_every_round(seed: int) -> None:
    clock, rounds, count = SystemClock(), 8, 4
    store = Retrying(MemoryStore(), clock)
    terms = policy(min_replicas=3, expected=frozenset(f"r-{i}" for i in range(count)), start_window_s=10.0)
    replicas = [start_replica(store, clock, f"r-{i}", terms) for i in range(count)]
    barrier = threading.Barrier(count)

    def work(replica: Replica) -> list[str]:
        barrier.wait()
        for r in range(rounds):
            replica.train(f"{seed} {replica.presence.slot} {r}".encode())
        return [commit.digest for commit in replica.commits]

    with ThreadPoolExecutor(count) as pool:
        chains = list(pool.map(work, replicas))
    assert all(chain == chains[0] for chain in chains)
    assert len(chains[0]) == rounds


def test_foreign_objects_among_the_records_are_ignored(
    store: Retrying, a: Replica, b: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    for key in (
        "heartbeats/_old.json",
        "commits/00000000.json.bak",
        "commits/00000001.json.bak",
        "commits/notes",
        "exchanges/00000001-0000.json.orig",
        "contributions/00000001-0000/_x.json",
        "contributions/00000001-0000/b.json.bak",
        "contributions/00000001-0000/b/x.json",
        "contributions/readme.txt",
    ):
        store.create(key, b"left here by an operator")
    train(a, b, 3)
    assert all(a.log.find_head(known) == 3 for known in range(4))
    refused = [event["slot"] for event in logged_events(caplog, "contribution_refused")]
    assert len(refused) == len(set(refused)) == 3, "each is logged once"
    assert all(key.startswith("contributions/00000001-0000/") for key in refused)


def test_oversized_record_is_not_read_completely(store: Retrying, a: Replica) -> None:
    oversized = b"x" * (MAX_RECORD_BYTES + 1_000_000)
    store.create(keys.contribution(0, 0, "c"), oversized)
    store.create(keys.heartbeat("c"), oversized)
    before = store.usage
    with pytest.raises(Corrupt, match="too large"):
        a.log.read_contribution(0, 0, "c")
    assert a.watch.refresh() == {}
    assert (store.usage - before).downloaded_bytes == 2 * (MAX_RECORD_BYTES + 1)
