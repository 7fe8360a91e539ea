"""A store that is unreachable, or refuses, while replicas train: what continues, waits and ends, and what is logged."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kit.events import logged_events
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    commits,
    manager_of,
    receipts,
    together,
    wait_for,
)
from tests.kit.protocol import policy, start_replica
from tests.kit.stores import HookedStore
from tests.support.clocks import FakeClock
from tests.support.s3server import Rule, S3Server
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.clock import Backoff, SystemClock
from skerry.runtime.contract import Contract, ExitCode
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.records import Outcome
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store import open_store, retrying
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

QUICK = Backoff(first=0.002, cap=0.05)


class Switched(HookedStore):
    """A memory store that answers with `error` while there is one."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.error: Exception | None = None
        self.refused = 0

    def _answer(self, _verb: str, _key: str) -> None:
        if (error := self.error) is not None:
            self.refused += 1
            raise error

    def fail(self) -> None:
        self.error = Retryable("connection refused")

    def recover(self) -> None:
        self.error = None


@pytest.fixture
def store() -> Switched:
    return Switched()


# Unreachable.


def test_training_continues_to_the_sync_point_and_the_round_has_all(
    store: Switched, caplog: pytest.LogCaptureFixture
) -> None:
    """Unreachable from the middle of round 1 on, for longer than a silent replica counts as alive."""
    begin_run(store, "ab")
    steps_in_outage, clock = {"a": 0, "b": 0}, SystemClock()
    both_in_round_1 = threading.Barrier(2, action=store.fail)
    own = {slot: Retrying(store, clock, backoff=QUICK) for slot in "ab"}

    def end_outage() -> None:
        """Ends it when it has lasted long enough for both, and both are at the sync point."""
        wait_for(lambda: all(view.usage.retries for view in own.values()))
        clock.pause(2.6)
        wait_for(lambda: set(steps_in_outage.values()) == {4} and all(view.usage.retries > 50 for view in own.values()))
        store.recover()

    class Trains(Island):
        def step(self) -> None:
            if self.steps == 11:
                both_in_round_1.wait(300)
            in_outage = store.error is not None
            super().step()
            if in_outage and self.steps < 16:
                steps_in_outage[self.manager.presence.slot] += 1

    caplog.set_level(logging.INFO, "skerry")
    began = clock.now()
    islands = [Trains(own[slot], slot, seed=ord(slot), sync_every=8, minimum=1) for slot in "ab"]
    together([end_outage, *(lambda island=island: island.train(3) and None for island in islands)])
    assert [commit.participants for commit in commits(store)] == [2, 2, 2]
    assert all(island.steps == 24 for island in islands)
    assert steps_in_outage == {"a": 4, "b": 4}
    assert all(sorted(receipts(store, number)) == ["a", "b"] for number in range(3))
    assert_same_parameters(islands)
    # Each is logged once by each replica, and nothing else is.
    assert [r.levelname for r in caplog.records if getattr(r, "event", "") == "store_retry"] == ["WARNING"] * 2
    ends = logged_events(caplog, "store_recovered")
    assert len(ends) == 2
    assert all(2.6 <= fields["waited_s"] <= clock.now() - began and fields["retries"] > 50 for fields in ends)
    assert logged_events(caplog, "round_failed") == logged_events(caplog, "heartbeat_failed") == []


def test_replica_that_starts_during_an_outage_waits(store: Switched) -> None:
    begin_run(store, "a")
    store.fail()

    def recover() -> None:
        wait_for(lambda: store.refused > 20)
        store.recover()

    together([recover, lambda: Island(Retrying(store, SystemClock(), backoff=QUICK), "a", minimum=1).train(1) and None])
    assert len(commits(store)) == 1


def test_first_replica_to_recover_does_not_take_the_others_for_dead(store: Switched) -> None:
    """Another thread of a reaches the store again before its heartbeat does; b's retry comes a little later."""
    clock = FakeClock()
    own = Retrying(store, clock, backoff=QUICK)
    a = start_replica(own, clock, "a", policy(min_replicas=1, stale_s=0.5, expected=frozenset({"a", "b"})))
    b = start_replica(Retrying(store, clock), clock, "b")
    a.contribute(b"a")
    a.watch.refresh()
    store.fail()
    recovers_at = clock.now() + 0.6
    contributes = [b.contribute]

    def pause() -> None:
        if clock.now() >= recovers_at:
            store.recover()
        if clock.now() >= recovers_at + 0.2 and contributes:
            contributes.pop()(b"b")

    clock.on_pause = pause
    own.list("")
    assert clock.now() >= recovers_at
    assert a.members() == ["a", "b"]


# Refused.


@pytest.mark.parametrize(
    "error",
    [
        Unauthorized("the store refuses these credentials: status code: 403: AccessDenied"),
        Invalid("no such bucket: s3://acme/run; make it, or correct the URI and the endpoint"),
    ],
)
def test_lasting_refusal_during_a_round_is_raised_by_should_commit(
    store: Switched, error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "REFUSAL_PATIENCE_S", 0.1)
    begin_run(store, "a")
    manager = manager_of(store, "a", minimum=1, max_retries=None)
    caplog.set_level(logging.INFO, "skerry")
    manager.start_quorum()
    work = manager.allreduce(torch.ones(3))
    store.error = error
    assert not work.wait()
    with pytest.raises(type(error), match=str(error)[:20]):
        manager.should_commit()
    # The heartbeat is tried again, and that is logged once.
    before = store.refused
    wait_for(lambda: store.refused > before + 20)
    manager.shutdown()
    assert len(logged_events(caplog, "store_retry")) == isinstance(error, Unauthorized)
    assert len(logged_events(caplog, "heartbeat_failed")) <= 2  # the beats, and the last one
    assert len(caplog.records) < 10


URI = "s3://bucket/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(buckets=frozenset({"bucket"})) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield running


def train(replica: Replica, in_round_1: Callable[[], None]) -> None:
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    with DiLoCo(manager, [model], inner, [outer], sync_every=replica.run.sync_every):
        for step in replica.steps(inner):
            if step == 5:
                in_round_1()
            inner.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            inner.step()


def end_of(server: S3Server, in_round_1: Callable[[], None]) -> Outcome | None:
    """Run a replica in the server's bucket, and end it for good in the middle of round 1. Returns its outcome."""
    begin_run(open_store(URI), ["r-0"], rounds=5)
    place = Contract(run_uri=URI, slot="r-0", index=0, replicas=1).environment()
    with pytest.raises(SystemExit) as ended, connect(place) as replica:
        train(replica, in_round_1)
    assert ended.value.code == ExitCode.PERMANENT
    server.faults.set()
    server.buckets = frozenset({"bucket"})
    key = keys.outcome("r-0", 0)
    data = open_store(URI).read(key)
    return None if data is None else Outcome.parse(data, key)


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        ("403", "skerry.runtime.errors.Unauthorized: the store refuses these credentials: .*AccessDenied"),
        ("bucket deleted", "skerry.runtime.errors.Invalid: no such bucket: s3://bucket/run"),
    ],
)
def test_revoked_rights_or_a_deleted_bucket_end_the_replica_for_good(
    server: S3Server,
    refusal: str,
    error: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retrying, "REFUSAL_PATIENCE_S", 0.1)

    def refuse() -> None:
        if refusal == "403":
            server.faults.set(Rule("403", times=1_000_000))
        else:
            server.buckets = frozenset()

    assert end_of(server, refuse) is None  # it was refused, too
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match(error, last), last
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) < 10


def test_revoked_rights_on_one_prefix_leave_an_outcome(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "REFUSAL_PATIENCE_S", 0.1)
    outcome = end_of(server, lambda: server.faults.set(Rule("403", "PUT", key="run/contributions/", times=1_000_000)))
    assert outcome is not None
    assert (outcome.status, outcome.exit_code, outcome.round) == ("failed", ExitCode.PERMANENT, 1)
    assert outcome.reason.startswith("Unauthorized: the store refuses these credentials: create key=contributions/")


def test_refusals_that_pass_end_no_replica(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    run = begin_run(open_store(URI), ["r-0"], rounds=5)
    place = Contract(run_uri=URI, slot="r-0", index=0, replicas=1).environment()
    caplog.set_level(logging.INFO, "skerry")
    with connect(place) as replica:
        train(replica, lambda: server.faults.set(Rule("403", times=5)))
    assert RunLog(open_store(URI), run).find_head(0) == 5
    assert "refused, although this store accepted these credentials before" in caplog.text


def test_denials_of_a_folder_for_0_7_s_end_no_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a file server that maps users again: each function of the system meets it, from its next call on."""
    run = begin_run(open_store(tmp_path.as_uri()), ["r-0"], rounds=5)
    place = Contract(run_uri=tmp_path.as_uri(), slot="r-0", index=0, replicas=1).environment()
    begun, until = False, dict[str, float]()

    def deny(name: str) -> None:
        call = getattr(os, name)

        def checked(path: Any, *arguments: Any, **options: Any) -> Any:
            now = time.monotonic()
            if begun and str(path).startswith(str(tmp_path)) and now < until.setdefault(name, now + 0.7):
                raise PermissionError(errno.EACCES, "denied", path)
            return call(path, *arguments, **options)

        monkeypatch.setattr(os, name, checked)

    def begin() -> None:
        nonlocal begun
        begun = True

    for name in ("open", "link", "lstat", "scandir", "replace", "unlink"):
        deny(name)
    caplog.set_level(logging.INFO, "skerry")
    with connect(place) as replica:
        train(replica, begin)
    assert until.keys() >= {"open", "lstat", "scandir"}
    assert RunLog(open_store(tmp_path.as_uri()), run).find_head(0) == 5
    assert "refused, although this store accepted these credentials before" in caplog.text
