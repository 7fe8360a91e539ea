"""The driver over a real memory store: contributions, decisions, commits, fencing, without torch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock
from tests.support.logs import Replica, load, policy, run_record, start

from skerry.runtime import keys
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt, Diverged, Fenced
from skerry.runtime.exchange import Interrupted
from skerry.runtime.records import MAX_RECORD_BYTES
from skerry.runtime.rounds import Unreachable
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from skerry.runtime.store.interface import Entry, Span


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Retrying:
    return Retrying(MemoryStore(), clock)


def test_two_replicas_close_a_round_with_the_same_members(store: Retrying, clock: FakeClock) -> None:
    a, b = start(store, clock, "a"), start(store, clock, "b")
    b.offer(b"from b")
    first = a.train(b"from a")
    second = b.close(b.decide())
    assert first == second
    assert [
        share.slot for share in b.exchange.decide(a.place._replace(round=0, base="0" * 64), "1" * 32).record.members
    ] == ["a", "b"]


def test_a_contribution_that_stands_is_adopted_not_overwritten(store: Retrying, clock: FakeClock) -> None:
    start(store, clock, "b").offer(b"b")
    old = start(store, clock, "a")
    old.offer(b"before the crash")
    new = start(store, clock, "a")
    stands = new.exchange.contribute(new.place, load(b"after the restart")).record
    assert stands.incarnation == old.presence.incarnation == 0
    assert new.presence.incarnation == 1
    members = new.decide().record.members
    assert [share.slot for share in members] == ["a", "b"]


def test_a_superseded_incarnation_is_fenced_before_it_writes(store: Retrying, clock: FakeClock) -> None:
    old = start(store, clock, "a")
    start(store, clock, "a")
    before = [entry.key for entry in store.list("")]
    with pytest.raises(Fenced, match="incarnation 1"):
        old.offer(b"from the dead")
    assert [entry.key for entry in store.list("")] == before


def test_a_superseded_incarnation_cannot_propose(store: Retrying, clock: FakeClock) -> None:
    old, b = start(store, clock, "a"), start(store, clock, "b")
    old.offer(b"a")
    b.offer(b"b")
    start(store, clock, "a")
    with pytest.raises(Fenced):
        old.decide()
    assert store.read(keys.decision(0, 0)) is None


def test_a_late_replica_adopts_a_decision_that_does_not_list_it(store: Retrying, clock: FakeClock) -> None:
    a, b = start(store, clock, "a"), start(store, clock, "b")
    late = start(store, clock, "c", beat=False)
    b.offer(b"b")
    a.train(b"a")
    decision = late.decide().record
    assert [share.slot for share in decision.members] == ["a", "b"]


def test_a_contribution_without_its_payload_is_in_no_decision(store: Retrying, clock: FakeClock) -> None:
    a, b, c = (start(store, clock, slot) for slot in "abc")
    for replica in (a, b, c):
        replica.offer(replica.presence.slot.encode())
    (lost,) = [entry.key for entry in store.list(keys.PAYLOADS) if "/c/" in entry.key]
    store.delete(lost)
    assert [share.slot for share in a.decide().record.members] == ["a", "b"]


def test_other_tensors_are_refused_and_the_round_goes_on(store: Retrying, clock: FakeClock) -> None:
    a, b, c = (start(store, clock, slot) for slot in "abc")
    c.offer(b"c", index="2" * 32)
    b.offer(b"b")
    a.offer(b"a")
    assert [share.slot for share in a.decide().record.members] == ["a", "b"]
    with pytest.raises(Diverged, match="other tensors"):
        c.decide(index="2" * 32)


def test_a_damaged_contribution_record_is_refused(store: Retrying, clock: FakeClock) -> None:
    a, b = start(store, clock, "a"), start(store, clock, "b")
    store.create(keys.contribution(0, 0, "c"), b'{"run": 1')
    b.offer(b"b")
    a.offer(b"a")
    assert [share.slot for share in a.decide().record.members] == ["a", "b"]


def test_the_round_is_not_closed_twice_differently(store: Retrying, clock: FakeClock) -> None:
    a, b = start(store, clock, "a"), start(store, clock, "b")
    b.offer(b"b")
    a.offer(b"a")
    decision = a.decide()
    a.close(decision)
    forged = decision._replace(digest="f" * 64)
    with pytest.raises(Diverged, match="closed differently"):
        b.close(forged)


def test_two_runs_on_one_prefix_stop_the_replica(store: Retrying, clock: FakeClock) -> None:
    a, b = start(store, clock, "a"), start(store, clock, "b")
    b.offer(b"b")
    a.train(b"a")
    a.journal.run = run_record(clock)
    with pytest.raises(Diverged, match="two runs share this prefix"):
        a.journal.commit(0)


def test_a_missing_commit_in_the_middle_is_a_broken_log(store: Retrying, clock: FakeClock) -> None:
    a, b = start(store, clock, "a"), start(store, clock, "b")
    for _ in range(3):
        b.offer(b"b%d" % b.round)
        a.train(b"a%d" % a.round)
        b.close(b.decide())
    assert a.journal.head(0) == 3
    store.delete(keys.commit(1))
    with pytest.raises(Diverged, match="round 1 is not closed"):
        a.journal.head(0)


def test_a_commit_that_a_listing_misses_is_no_gap(clock: FakeClock) -> None:
    class Forgetful(MemoryStore):
        def list(self, prefix: str, after: str | None = None) -> list[Entry]:
            return [entry for entry in super().list(prefix, after) if entry.key != keys.commit(1)]

    store = Forgetful()
    a, b = start(store, clock, "a"), start(store, clock, "b")
    for _ in range(3):
        b.offer(b"b%d" % b.round)
        a.train(b"a%d" % a.round)
        b.close(b.decide())
    assert a.journal.head(0) == 3


def test_a_replica_without_tensors_leaves_the_decision_to_those_who_have_some(
    store: Retrying, clock: FakeClock
) -> None:
    nothing = "0" * 32
    a, b = start(store, clock, "a", policy(min_replicas=1)), start(store, clock, "b", policy(min_replicas=1))
    a.offer(b"a")
    with pytest.raises(Unreachable, match="issued none"):
        b.offer(b"", index=nothing)
    assert store.read(keys.contribution(0, 0, "b")) is None
    with pytest.raises(Unreachable, match="issued none"):
        b.decide(index=nothing)
    assert store.read(keys.decision(0, 0)) is None
    assert [share.slot for share in a.decide().record.members] == ["a"]
    with pytest.raises(Unreachable, match="issued none"):
        b.decide(index=nothing)


def test_other_tensors_of_an_earlier_incarnation_are_named(store: Retrying, clock: FakeClock) -> None:
    start(store, clock, "a").offer(b"a", index="2" * 32)
    with pytest.raises(Diverged, match="incarnation 0 of a has contributed other tensors"):
        start(store, clock, "a").offer(b"a")


def test_a_decision_on_another_base_is_divergence(store: Retrying, clock: FakeClock) -> None:
    a, b = start(store, clock, "a"), start(store, clock, "b")
    b.offer(b"b")
    a.train(b"a")
    b.base = "e" * 64
    with pytest.raises(Diverged, match="builds on another log"):
        b.decide()


def test_a_listed_contribution_that_changed_is_refused(store: Retrying, clock: FakeClock) -> None:
    a, b = start(store, clock, "a"), start(store, clock, "b")
    b.offer(b"b")
    a.offer(b"a")
    decision = a.decide().record
    key = keys.contribution(0, 0, "b")
    changed = bytes(store.read(key) or b"").replace(b'"tokens":0', b'"tokens":9')
    store.replace(key, changed)
    with pytest.raises(Corrupt, match="not the decided one"):
        a.exchange.contributions(decision)


def test_a_stop_request_ends_the_wait_and_keeps_the_contribution(store: Retrying, clock: FakeClock) -> None:
    a = start(store, clock, "a")
    a.offer(b"a")
    clock.on_pause = a.stop.set
    with pytest.raises(Interrupted):
        a.decide()
    assert store.read(keys.contribution(0, 0, "a")) is not None


def test_a_dead_replica_costs_at_most_its_stale_time(store: Retrying, clock: FakeClock) -> None:
    a, b, dead = (start(store, clock, slot, policy(stale_s=3.0)) for slot in "abc")
    b.offer(b"b")
    began = clock.now()

    def others_beat() -> None:
        b.presence.beat()

    clock.on_pause = others_beat
    a.train(b"a")
    assert dead.presence.progress.phase == "train"
    assert clock.now() - began <= 3.0 + 0.5


def test_heartbeats_are_written_in_order_under_contention(store: Retrying) -> None:
    replica = start(store, SystemClock(), "a")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: replica.presence.enter("train", round_number=i), range(200)))
    heartbeat = start(store, SystemClock(), "b").watch.look()["a"].heartbeat
    assert heartbeat.round == replica.presence.progress.round


@pytest.mark.parametrize("seed", range(5))
def test_racing_replicas_agree_on_every_round(seed: int) -> None:
    """Real threads over one store: whoever wins each race, all hold the same chain."""
    clock, rounds, count = SystemClock(), 8, 4
    store = Retrying(MemoryStore(), clock)
    terms = policy(min_replicas=3, expected=frozenset(f"r-{i}" for i in range(count)), start_window_s=10.0)
    replicas = [start(store, clock, f"r-{i}", terms) for i in range(count)]
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


def test_what_lies_among_the_records_and_is_nobodys_stops_nobody(
    store: Retrying, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = start(store, clock, "a"), start(store, clock, "b")
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
        store.create(key, b"left here by somebody")
    for number in range(3):
        b.offer(b"b%d" % number)
        a.train(b"a%d" % number)
        b.close(b.decide())
    assert all(a.journal.head(known) == 3 for known in range(4))
    refused = [
        record.fields["slot"] for record in caplog.records if getattr(record, "event", "") == "contribution_refused"
    ]  # type: ignore[attr-defined]
    assert sorted(set(refused)) == sorted(refused), "each is told once"
    assert all(one.startswith("contributions/00000001-0000/") for one in refused)
    assert len(refused) == 3


def test_a_huge_record_is_not_read_whole(clock: FakeClock) -> None:
    sizes: list[int] = []

    class Counts(MemoryStore):
        def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
            found = super().read(key, span, into)
            sizes.append(0 if found is None else found.nbytes)
            return found

    store = Counts()
    a = start(store, clock, "a")
    store.create(keys.contribution(0, 0, "c"), b"x" * (MAX_RECORD_BYTES + 1_000_000))
    with pytest.raises(Corrupt, match="too large"):
        a.journal.contribution(0, 0, "c")
    assert max(sizes) == MAX_RECORD_BYTES + 1
