"""Unmodified torchft consumers in real processes, over a directory and over an S3 server."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import begin_run, contributions, decisions, members, receipts
from tests.support.processes import Workers
from tests.support.s3server import S3Server

from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.runtime.store import Store

pytestmark = pytest.mark.slow

CASES = ["diloco/1/0/0", "diloco/4/1/0.5", "local_sgd/1/0/0", "ddp/1/0/0"]
# Cases to kill in addition to plain DiLoCo, with the inner steps of one round when sync_every is 8.
KILLED = [("diloco/4/1/0.5", 2), ("local_sgd/1/0/0", 8), ("ddp/1/0/0", 1)]
ROUNDS = 6
SLOTS = ["r-0", "r-1", "r-2"]


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store URI that this process and its children can open."""
    if request.param == "file":
        yield (tmp_path / "store").as_uri()
        return
    with S3Server() as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }.items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/run"


def store_of(place: str, case: str) -> Store:
    return open_store(f"{place}/{case.replace('/', '-')}")


def test_every_consumer_trains_to_the_same_bits(place: str, tmp_path: Path) -> None:
    with Workers(tmp_path, place) as workers:
        arguments = ["--cases", *CASES, "--rounds", str(ROUNDS), "--sync-every", "8"]
        processes = [workers.start(i, *arguments) for i in range(2)]
        first, second = (workers.reports(process) for process in processes)
    for case in CASES:
        a, b = first[case], second[case]
        assert a["digests"] == b["digests"], case
        assert sorted(map(int, a["digests"])) == list(range(1, ROUNDS + 1)), case
        assert len(set(a["digests"].values())) == ROUNDS, f"{case}: parameters did not move"
        assert a["batches"] == b["batches"] == 2 * ROUNDS, case
        store = store_of(place, case)
        assert all(len(slots) == 2 for slots in members(store)), case
        if not case.startswith("ddp"):
            # One contribution for each round and replica, whatever the number of tensors.
            assert len(contributions(store)) == 2 * ROUNDS, case
        for r in range(ROUNDS - 1):
            round_receipts = receipts(store, r)
            assert len(round_receipts) == 2, case
            assert len({(receipt.averages, receipt.state) for receipt in round_receipts.values()}) == 1, case


@pytest.mark.parametrize(("case", "every", "per_round"), [(CASES[0], 4, 4), *((c, 8, p) for c, p in KILLED)])
def test_killed_replica_rejoins_and_no_replica_loses_a_step(
    tmp_path: Path, case: str, every: int, per_round: int
) -> None:
    """SIGKILL in the middle of a round: the others go on, its next incarnation comes to the same bits."""
    place, rounds = (tmp_path / "store").as_uri(), 10
    begin_run(store_of(place, case), SLOTS, rounds=rounds)
    common = ["--replicas", "3", "--cases", case, "--rounds", str(rounds), "--sync-every", str(every)]
    common += ["--heartbeat", "4"]  # a survivor on a busy machine must not seem dead
    with Workers(tmp_path, place) as workers:
        survivors = [workers.start(i, *common) for i in range(2)]
        victim = workers.start(2, *common, "--die-at", str(2 * per_round + per_round // 2))
        assert victim.wait(300) == -signal.SIGKILL
        restarted = workers.start(2, *common)
        reports = [workers.reports(process)[case] for process in [*survivors, restarted]]
    assert len({report["final"] for report in reports}) == 1
    for report in reports[:2]:
        assert report["steps"] == rounds * per_round, "a survivor lost inner steps"
        assert report["digests"] == reports[0]["digests"]
    assert reports[2]["incarnation"] == 1
    assert reports[2]["batches"] == reports[0]["batches"]


def test_all_replicas_killed_resume_from_the_log(tmp_path: Path) -> None:
    place = (tmp_path / "store").as_uri()
    common = ["--rounds", "6", "--sync-every", "4"]
    with Workers(tmp_path, place) as workers:
        for process in [workers.start(i, *common, "--die-at", "14") for i in range(2)]:
            assert process.wait(300) == -signal.SIGKILL
        reports = [workers.reports(p)[CASES[0]] for p in [workers.start(i, *common) for i in range(2)]]
    assert [d.round for d in decisions(store_of(place, CASES[0]))] == list(range(6))
    assert reports[0]["final"] == reports[1]["final"]
    # Three rounds were closed (12 steps): only the other three were trained again.
    assert all(report["steps"] == 3 * 4 for report in reports)


def test_a_replica_that_went_nan_abstains_and_follows_the_others(tmp_path: Path) -> None:
    """AdamW's moments stay NaN for good: the replica never contributes again, and still holds the shared state."""
    place = (tmp_path / "store").as_uri()
    begin_run(store_of(place, CASES[0]), SLOTS)
    common = ["--replicas", "3", "--rounds", "4", "--sync-every", "4", "--grace", "30"]
    with Workers(tmp_path, place) as workers:
        processes = [workers.start(0, *common, "--nan-at", "1"), *(workers.start(i, *common) for i in (1, 2))]
        reports = [workers.reports(process)[CASES[0]] for process in processes]
    assert len({report["final"] for report in reports}) == 1
    assert members(store_of(place, CASES[0])) == [["r-1", "r-2"]] * 4
