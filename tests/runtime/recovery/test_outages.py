"""A store that is away, or says no, while replicas train: what goes on, what waits, what ends and how it is told."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import Island, commits, manager_of, receipts, together
from tests.kit.protocol import policy, run_record, start_replica
from tests.support.clocks import FakeClock
from tests.support.s3server import Rule, S3Server
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.garbage_collector import GarbageCollector, Retention, live_rounds
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.contract import Contract, ExitCode
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.records import Outcome
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from skerry.runtime.store import Data, Entry, Span

QUICK = Backoff(first=0.002, cap=0.05)


class Switched(MemoryStore):
    """A memory store that answers with `error` while there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.refused = 0
        self.allows: Callable[[str, str], bool] = lambda _verb, _key: False

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self._answer("read", key)
        return super().read(key, span, into)

    def create(self, key: str, data: Data) -> bool:
        self._answer("create", key)
        return super().create(key, data)

    def replace(self, key: str, data: Data) -> None:
        self._answer("replace", key)
        super().replace(key, data)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self._answer("list", prefix)
        return super().list(prefix, after)

    def delete(self, key: str) -> None:
        self._answer("delete", key)
        super().delete(key)

    def _answer(self, verb: str, key: str) -> None:
        error = self.error
        if error is not None and not self.allows(verb, key):
            self.refused += 1
            raise error


def begin(store: MemoryStore, slots: str = "ab", minimum: int = 2) -> None:
    store.create(keys.RUN, run_record(SystemClock(), slots=tuple(slots), min_replicas=minimum).to_bytes())


def told(caplog: pytest.LogCaptureFixture, name: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == name]


# Away.


@pytest.mark.parametrize("minimum", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_goes_on_to_the_sync_point_and_the_round_has_everybody(
    minimum: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Away from the middle of round 1 on, for longer than a silent replica counts as alive."""
    store = Switched()
    begin(store, minimum=minimum)
    clock = SystemClock()
    steps_while_away = {"a": 0, "b": 0}

    def goes_away() -> None:
        store.error = Retryable("connection refused")
        threading.Timer(2.6, comes_back).start()

    def comes_back() -> None:
        store.error = None

    both_in_round_1 = threading.Barrier(2, action=goes_away)

    class Trains(Island):
        def step(self) -> None:
            round_number = self.manager.current_step()
            if self.steps == 11:
                both_in_round_1.wait(20)
            is_away = store.error is not None
            super().step()
            if is_away and self.manager.current_step() == round_number == 1:
                steps_while_away[self.manager.presence.slot] += 1

    def work(slot: str, seed: int) -> Island:
        own = Retrying(store, clock, backoff=QUICK)
        return Trains(own, slot, seed=seed, sync_every=8, minimum=minimum).train(3)

    with caplog.at_level(logging.INFO, "skerry"):
        islands = together([lambda: work("a", 0), lambda: work("b", 1)])
    assert [commit.participants for commit in commits(store)] == [2, 2, 2]
    assert all(island.steps == 24 for island in islands)
    assert steps_while_away == {"a": 4, "b": 4}
    assert all(sorted(receipts(store, r)) == ["a", "b"] for r in range(3))
    assert torch.equal(islands[0].originals["weight"], islands[1].originals["weight"])
    assert store.refused > 100
    # One of each for each replica: a process has one engine.
    assert [record.levelname for record in told(caplog, "store_retry")] == ["WARNING", "WARNING"]
    ends = told(caplog, "store_recovered")
    assert len(ends) == 2
    assert all(2.4 < record.fields["waited_s"] < 10 and record.fields["retries"] > 20 for record in ends)  # type: ignore[attr-defined]
    assert told(caplog, "round_failed") == []
    assert told(caplog, "heartbeat_failed") == []


def test_first_replica_to_recover_does_not_take_the_others_for_dead() -> None:
    """The exchange thread hears the store again before this replica's own heartbeat does."""
    store = Switched()
    begin(store, minimum=1)
    clock = SystemClock()
    own = Retrying(store, clock, backoff=QUICK)
    a = start_replica(own, clock, "a", policy(min_replicas=1, stale_s=0.5, expected=frozenset({"a", "b"})))
    b = start_replica(Retrying(store, clock), clock, "b")
    a.contribute(b"a")
    a.watch.refresh()
    store.error = Retryable("connection refused")
    stale = clock.now() + 0.6
    back = threading.Event()

    def silence() -> None:
        clock.pause(stale - clock.now())
        store.error = None
        back.set()

    waits = threading.Thread(target=silence)
    waits.start()
    own.list("")  # what any thread of a does meanwhile
    waits.join()

    def late() -> None:
        clock.pause(0.2)  # b's back-off ends a little later
        b.contribute(b"b")

    coming = threading.Thread(target=late)
    coming.start()
    try:
        assert [share.slot for share in a.decide().record.members] == ["a", "b"]
    finally:
        coming.join()


def test_a_replica_that_starts_while_the_store_is_away_waits_for_it() -> None:
    store = Switched()
    begin(store, "a", minimum=1)
    store.error = Retryable("connection refused")
    clock = SystemClock()

    def comes_back() -> None:
        wait_until(clock, lambda: True if store.refused > 20 else None, clock.now() + 10, QUICK)
        store.error = None

    waits = threading.Thread(target=comes_back)
    waits.start()
    Island(Retrying(store, clock, backoff=QUICK), "a", minimum=1).train(1)
    waits.join()
    assert len(commits(store)) == 1


def test_outage_kills_no_replica_before_it_can_have_come_back() -> None:
    """Longer than the time between two beats (0.5 s), and the others were heard long before it."""
    store, clock = Switched(), FakeClock()
    own = Retrying(store, clock, backoff=Backoff(first=0.1, cap=0.1))
    a, b = start_replica(own, clock, "a", policy(stale_s=5.0)), start_replica(Retrying(store, clock), clock, "b")
    a.watch.refresh()
    clock.advance(4.5)
    store.error = Retryable("connection refused")
    back = clock.now() + 1.0

    def comes_back() -> None:
        if clock.now() >= back:
            store.error = None

    clock.on_pause = comes_back
    peers = a.watch.refresh()
    assert b.presence.slot in live_rounds(peers, a.presence.steady_since, clock.now(), 5.0)
    clock.advance(4.9)
    assert b.presence.slot in live_rounds(a.watch.refresh(), a.presence.steady_since, clock.now(), 5.0)
    clock.advance(0.2)
    assert live_rounds(a.watch.refresh(), a.presence.steady_since, clock.now(), 5.0) == {}


def test_garbage_is_bounded_in_a_store_that_fails_now_and_then() -> None:
    """One listing in twenty fails once, and a replica that died in round 3 must not hold all payloads."""
    clock = FakeClock()

    class Sick(MemoryStore):
        listings = 0

        def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
            self.listings += 1
            if self.listings % 20 == 0:
                raise Retryable("503 SlowDown")
            return super().list(prefix, after)

    store = Sick(clock=clock)
    own = Retrying(store, clock)
    a = start_replica(own, clock, "a", policy(min_replicas=1, stale_s=32.0))
    dead = start_replica(Retrying(store, clock), clock, "b")
    collector = GarbageCollector(
        log=a.log,
        presence=a.presence,
        watch=a.watch,
        clock=clock,
        retention=Retention(),
        stale_s=32.0,
        stop=threading.Event(),
    )
    left: list[int] = []
    for number in range(40):
        if number == 3:
            dead.presence.enter("train", round_number=3)
        clock.advance(10.0)
        a.train(b"x" * 1000 + b"%d" % number)
        for _ in range(5):
            own.list(keys.COMMITS)
        checkpoint.save(
            own,
            run=a.log.run.nonce,
            round_number=a.round,
            commit=a.base,
            members=("a",),
            batches=0,
            writer="a",
            nonce=clock.nonce(),
            state={"x": torch.zeros(1)},
        )
        collector.collect()
        left.append(len(MemoryStore.list(store, keys.PAYLOADS)))
    assert own.usage.retries > 20
    assert max(left[20:]) < 15


# No.


@pytest.mark.parametrize(
    "error",
    [
        Unauthorized("the store refuses these credentials: status code: 403: AccessDenied"),
        Invalid("no such bucket: s3://acme/run; make it, or correct the URI and the endpoint"),
    ],
)
def test_a_no_in_mid_run_comes_out_of_should_commit_at_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    store = Switched()
    begin(store, "a", minimum=1)
    manager = manager_of(store, "a", minimum=1, max_retries=None)
    with caplog.at_level(logging.INFO, "skerry"):
        manager.start_quorum()
        work = manager.allreduce(torch.ones(3))
        store.error = error
        assert not work.wait()
        with pytest.raises(type(error), match=str(error)[:20]):
            manager.should_commit()
        # The heartbeat goes on trying, and says so once.
        before, clock = store.refused, SystemClock()
        wait_until(clock, lambda: True if store.refused > before + 20 else None, clock.now() + 20, QUICK)
        manager.shutdown()
    assert told(caplog, "store_retry") == []
    assert len(told(caplog, "heartbeat_failed")) <= 2  # the beats, and the last word
    assert len(caplog.records) < 10


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(buckets=frozenset({"bucket"})) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield running


URI = "s3://bucket/run"


def train(replica: Replica, at_step: int, then: Callable[[], None]) -> None:
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    with DiLoCo(manager, [model], inner, [outer], sync_every=replica.run.sync_every):
        for step in replica.steps(inner):
            if step == at_step:
                then()
            inner.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            inner.step()


def end_of(server: S3Server, then: Callable[[], None]) -> int | str | None:
    """Run a replica in the server's bucket and call `then` in the middle of round 1. Returns its exit code."""
    store = open_store(URI)
    store.create(keys.RUN, run_record(SystemClock(), slots=("r-0",), rounds=5, min_replicas=1).to_bytes())
    place = Contract(run_uri=URI, slot="r-0", index=0, replicas=1).environment()
    with pytest.raises(SystemExit) as ended, connect(place) as replica:
        train(replica, 5, then)
    server.faults.set()
    return ended.value.code


def outcome_of() -> Outcome | None:
    key = keys.outcome("r-0", 0)
    data = open_store(URI).read(key)
    return None if data is None else Outcome.parse(data, key)


def test_rights_that_are_taken_away_end_the_replica_for_good(
    server: S3Server, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    code = end_of(server, lambda: server.faults.set(Rule("403", times=1_000_000)))
    assert code == ExitCode.PERMANENT
    assert outcome_of() is None  # that was refused, too
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("skerry.runtime.errors.Unauthorized: the store refuses these credentials: ")
    assert "AccessDenied" in last
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) < 10


def test_rights_on_one_prefix_that_are_taken_away_leave_an_outcome(server: S3Server) -> None:
    def revoke() -> None:
        server.faults.set(Rule("403", "PUT", key="run/contributions/", times=1_000_000))

    assert end_of(server, revoke) == ExitCode.PERMANENT
    outcome = outcome_of()
    assert outcome is not None
    assert (outcome.status, outcome.exit_code, outcome.round) == ("failed", ExitCode.PERMANENT, 1)
    assert outcome.reason.startswith("Unauthorized: the store refuses these credentials: create key=contributions/")


def test_a_bucket_that_is_deleted_ends_the_replica_for_good(
    server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def delete() -> None:
        server.buckets = frozenset()

    code = end_of(server, delete)
    assert code == ExitCode.PERMANENT
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("skerry.runtime.errors.Invalid: no such bucket: s3://bucket/run")
