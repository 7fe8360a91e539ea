"""Exchange over a memory store: contributions, decisions, commits, fencing, without torch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.kit.events import logged_events
from tests.kit.protocol import EMPTY_INDEX, Replica, draft, policy, run_record, start_replica
from tests.support.clocks import FakeClock

from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt, Diverged, Fenced
from skerry.runtime.log import keys
from skerry.runtime.log.records import MAX_RECORD_BYTES
from skerry.runtime.protocol.exchange import Interrupted
from skerry.runtime.protocol.quorum import Undecided
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from skerry.runtime.store.interface import Entry, Span

OTHER_INDEX = "2" * 32


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Retrying:
    return Retrying(MemoryStore(), clock)


@pytest.fixture
def pair(store: Retrying, clock: FakeClock) -> tuple[Replica, Replica]:
    return start_replica(store, clock, "a"), start_replica(store, clock, "b")


def train_rounds(a: Replica, b: Replica, rounds: int) -> None:
    for _ in range(rounds):
        b.contribute(b"b%d" % b.round)
        a.train(b"a%d" % a.round)
        b.close(b.decide())


def test_two_replicas_commit_the_same_round(pair: tuple[Replica, Replica]) -> None:
    a, b = pair
    b.contribute(b"from b")
    a.contribute(b"from a")
    assert a.members() == b.members() == ["a", "b"]
    assert a.close(a.decide()) == b.close(b.decide())


def test_restarted_replica_adopts_its_earlier_contribution(store: Retrying, clock: FakeClock) -> None:
    start_replica(store, clock, "b").contribute(b"b")
    old = start_replica(store, clock, "a")
    old.contribute(b"before the crash")
    new = start_replica(store, clock, "a")
    adopted = new.exchange.contribute(new.exchange_id, draft(b"after the restart")).record
    assert adopted.incarnation == old.presence.incarnation == 0
    assert new.presence.incarnation == 1
    assert new.members() == ["a", "b"]


def test_fenced_incarnation_writes_no_contribution(store: Retrying, clock: FakeClock) -> None:
    old = start_replica(store, clock, "a")
    start_replica(store, clock, "a")
    before = [entry.key for entry in store.list("")]
    with pytest.raises(Fenced, match="incarnation 1"):
        old.contribute(b"from the dead")
    assert [entry.key for entry in store.list("")] == before


def test_fenced_incarnation_cannot_propose(store: Retrying, clock: FakeClock, pair: tuple[Replica, Replica]) -> None:
    old, b = pair
    old.contribute(b"a")
    b.contribute(b"b")
    start_replica(store, clock, "a")
    with pytest.raises(Fenced):
        old.decide()
    assert store.read(keys.decision(0, 0)) is None


def test_late_replica_adopts_a_decision_without_it(
    store: Retrying, clock: FakeClock, pair: tuple[Replica, Replica]
) -> None:
    a, b = pair
    late = start_replica(store, clock, "c", beat=False)
    b.contribute(b"b")
    a.train(b"a")
    assert late.members() == ["a", "b"]


def test_contribution_without_its_payload_is_no_member(
    store: Retrying, clock: FakeClock, pair: tuple[Replica, Replica]
) -> None:
    for replica in (*pair, start_replica(store, clock, "c")):
        replica.contribute(replica.presence.slot.encode())
    (payload,) = [entry.key for entry in store.list(keys.PAYLOADS) if "/c/" in entry.key]
    store.delete(payload)
    assert pair[0].members() == ["a", "b"]


def test_contribution_of_other_tensors_is_no_member(
    store: Retrying, clock: FakeClock, pair: tuple[Replica, Replica]
) -> None:
    c = start_replica(store, clock, "c")
    c.contribute(b"c", index=OTHER_INDEX)
    for replica in pair:
        replica.contribute(replica.presence.slot.encode())
    assert pair[0].members() == ["a", "b"]
    with pytest.raises(Diverged, match="other tensors"):
        c.decide(index=OTHER_INDEX)


def test_damaged_contribution_is_no_member(store: Retrying, pair: tuple[Replica, Replica]) -> None:
    store.create(keys.contribution(0, 0, "c"), b'{"run": 1')
    for replica in pair:
        replica.contribute(replica.presence.slot.encode())
    assert pair[0].members() == ["a", "b"]


def test_different_commit_of_a_round_is_divergence(pair: tuple[Replica, Replica]) -> None:
    a, b = pair
    b.contribute(b"b")
    a.contribute(b"a")
    decision = a.decide()
    a.close(decision)
    with pytest.raises(Diverged, match="committed differently"):
        b.close(decision._replace(digest="f" * 64))


def test_records_of_another_run_are_divergence(clock: FakeClock, pair: tuple[Replica, Replica]) -> None:
    a, b = pair
    b.contribute(b"b")
    a.train(b"a")
    a.log.run = run_record(clock)
    with pytest.raises(Diverged, match="two runs share this prefix"):
        a.log.read_commit(0)


def test_missing_commit_is_a_gap_in_the_log(store: Retrying, pair: tuple[Replica, Replica]) -> None:
    a, b = pair
    train_rounds(a, b, 3)
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
    train_rounds(a, b, 3)
    assert a.log.find_head(0) == 3


def test_replica_without_tensors_leaves_the_decision_to_others(store: Retrying, clock: FakeClock) -> None:
    a, b = (start_replica(store, clock, slot, policy(min_replicas=1)) for slot in "ab")
    a.contribute(b"a")
    with pytest.raises(Undecided, match="issued none"):
        b.contribute(b"", index=EMPTY_INDEX)
    assert store.read(keys.contribution(0, 0, "b")) is None
    with pytest.raises(Undecided, match="issued none"):
        b.decide(index=EMPTY_INDEX)
    assert store.read(keys.decision(0, 0)) is None
    assert a.members() == ["a"]
    with pytest.raises(Undecided, match="issued none"):
        b.decide(index=EMPTY_INDEX)


def test_other_tensors_of_an_earlier_incarnation_are_divergence(store: Retrying, clock: FakeClock) -> None:
    start_replica(store, clock, "a").contribute(b"a", index=OTHER_INDEX)
    with pytest.raises(Diverged, match="incarnation 0 of a has contributed other tensors"):
        start_replica(store, clock, "a").contribute(b"a")


def test_decision_on_another_base_is_divergence(pair: tuple[Replica, Replica]) -> None:
    a, b = pair
    b.contribute(b"b")
    a.train(b"a")
    b.base = "e" * 64
    with pytest.raises(Diverged, match="builds on another log"):
        b.decide()


def test_contribution_changed_after_the_decision_is_corrupt(store: Retrying, pair: tuple[Replica, Replica]) -> None:
    a, b = pair
    b.contribute(b"b")
    a.contribute(b"a")
    decision = a.decide().record
    key = keys.contribution(0, 0, "b")
    store.replace(key, bytes(store.read(key) or b"").replace(b'"tokens":0', b'"tokens":9'))
    with pytest.raises(Corrupt, match="not the decided one"):
        a.exchange.contributions(decision)


def test_stop_request_ends_the_wait_and_keeps_the_contribution(store: Retrying, clock: FakeClock) -> None:
    a = start_replica(store, clock, "a")
    a.contribute(b"a")
    clock.on_pause = a.stop.set
    with pytest.raises(Interrupted):
        a.decide()
    assert store.read(keys.contribution(0, 0, "a")) is not None


def test_dead_replica_delays_the_round_by_its_stale_time(store: Retrying, clock: FakeClock) -> None:
    a, b, dead = (start_replica(store, clock, slot, policy(stale_s=3.0)) for slot in "abc")
    b.contribute(b"b")
    started = clock.now()
    clock.on_pause = b.presence.beat
    a.train(b"a")
    assert dead.presence.progress.phase == "train"
    assert clock.now() - started <= 3.0 + 0.5


def test_concurrent_heartbeats_are_written_in_order(store: Retrying) -> None:
    replica = start_replica(store, SystemClock(), "a")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: replica.presence.enter("train", round_number=i), range(200)))
    heartbeat = start_replica(store, SystemClock(), "b").watch.refresh()["a"].heartbeat
    assert heartbeat.round == replica.presence.progress.round


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
    store: Retrying, pair: tuple[Replica, Replica], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
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
    train_rounds(a, b, 3)
    assert all(a.log.find_head(known) == 3 for known in range(4))
    refused = [event["slot"] for event in logged_events(caplog, "contribution_refused")]
    assert sorted(set(refused)) == sorted(refused), "each is logged once"
    assert all(key.startswith("contributions/00000001-0000/") for key in refused)
    assert len(refused) == 3


def test_oversized_record_is_not_read_completely(clock: FakeClock) -> None:
    store = SizeRecordingStore()
    a = start_replica(store, clock, "a")
    store.create(keys.contribution(0, 0, "c"), b"x" * (MAX_RECORD_BYTES + 1_000_000))
    with pytest.raises(Corrupt, match="too large"):
        a.log.read_contribution(0, 0, "c")
    assert max(store.sizes) == MAX_RECORD_BYTES + 1


class SizeRecordingStore(MemoryStore):
    """Records how many bytes each read returned."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        data = super().read(key, span, into)
        self.sizes.append(0 if data is None else data.nbytes)
        return data
