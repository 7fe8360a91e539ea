"""A run whose end and outer loop change: torchft's DiLoCo applies them in the same round on every replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kit.events import logged_events
from tests.kit.fragments import outer_optimizers_in
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    decisions,
    islands_of,
    states,
    together,
    train_all,
    wait_for,
)

from skerry.runtime.checkpointing.replica_position_in_log import LogPosition, is_due
from skerry.runtime.contract import Contract
from skerry.runtime.errors import Corrupt, Diverged
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS, Decision, Heartbeat
from skerry.runtime.log.run_record import Run, Settings
from skerry.runtime.log.setting_changes import RunSettings
from skerry.runtime.replica import connect
from skerry.runtime.store import Store, open_store
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path


def change(store: Store, run: Run, number: int, previous: str = GENESIS, **changes: object) -> str:
    """Store settings with other values than run.json's. Returns their digest."""
    values: dict[str, Any] = {
        "from_round": 0,
        "rounds": run.rounds,
        "work": None,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    }
    named = {"run": run.nonce, "number": number, "previous": previous, "by": "operator", "created": ""}
    body = Settings(**(named | values | changes)).to_bytes()  # type: ignore[arg-type]
    assert store.create(keys.settings(number), body)
    return digest_of(body)


def outer_of(island: Island) -> set[tuple[float, float]]:
    groups = [group for outer in outer_optimizers_in(island.diloco) for group in outer.param_groups]
    return {(group["lr"], group["momentum"]) for group in groups}


def named(store: MemoryStore) -> list[str | None]:
    return [decision.settings for decision in decisions(store)]


def test_outer_loop_changes_in_the_round_that_the_decisions_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    store = MemoryStore()
    run = begin_run(store, ("a", "b"), minimum=2, rounds=5)
    digest = change(store, run, 1, from_round=2, outer_lr=0.25, outer_momentum=0.5)
    islands = islands_of(store, ("a", "b"), fragments=2, lr=0.01)
    train_all(islands, rounds=5)
    assert named(store) == [None, None, digest, digest, digest]
    assert b"settings" not in bytes(store.read(keys.decision(0, 0)) or b""), "as before settings could change"
    assert [outer_of(island) for island in islands] == [{(0.25, 0.5)}] * 2
    assert_same_parameters(islands)
    assert all(len(states(store, number)) == 1 for number in range(5))
    applied = logged_events(caplog, "settings_applied")
    assert {(event["slot"], event["round"], event["number"], event["outer_lr"]) for event in applied} == {
        ("a", 2, 1, 0.25),
        ("b", 2, 1, 0.25),
    }


@pytest.mark.parametrize("checkpoint_every", [1, 100])
def test_replica_that_follows_a_change_has_the_same_state(checkpoint_every: int) -> None:
    store = MemoryStore()
    run = begin_run(store, ("a", "b"), minimum=2, rounds=4)
    change(store, run, 1, from_round=1, outer_lr=0.25)
    islands = islands_of(store, ("a", "b"), checkpoint_every=checkpoint_every)
    train_all(islands, rounds=3, close=False)
    late = Island(store, "late", seed=9, minimum=1, checkpoint_every=checkpoint_every)
    late.join()
    assert late.manager.current_step() == 3
    assert outer_of(late) == {(0.25, 0.9)}
    assert_same_parameters([islands[0], late])


def test_shards_follow_the_slots_that_decisions_name(tmp_path: Path) -> None:
    uri = (tmp_path / "run").as_uri()
    store = open_store(uri)
    run = begin_run(store, ("a", "b"), minimum=1, rounds=6, start_window_s=0.0, spec="0" * 64)
    environment = Contract(run_uri=uri, slot="b", index=1, replicas=2).environment()
    numbers: list[tuple[int, int, list[int]]] = []
    with connect(environment) as replica:
        manager = replica.manager()
        for closed in range(6):
            if closed == 1:
                first = change(store, run, 1, slots=("a", "b", "c"))
            if closed == 3:
                change(store, run, 2, first, slots=("b", "c"))
            manager.start_quorum()
            numbers.append((replica.index, replica.replicas, replica.shard(range(6))))
            manager.allreduce(torch.ones(2)).wait()
            assert manager.should_commit()
    assert numbers == [
        *[(1, 2, [1, 3, 5])] * 2,  # the decision of round 1 names the change
        *[(1, 3, [1, 4])] * 2,
        *[(0, 2, [0, 2, 4])] * 2,
    ]


@pytest.mark.parametrize(("slot", "index"), [("b", 1), ("c", 2)])
def test_started_replica_has_the_slots_of_its_round(tmp_path: Path, slot: str, index: int) -> None:
    uri = (tmp_path / "run").as_uri()
    store = open_store(uri)
    run = begin_run(store, ("a", "b"), minimum=1, rounds=6, start_window_s=0.0, spec="0" * 64)
    Island(store, "a", minimum=1).train(1, close=False)
    change(store, run, 1, from_round=1, slots=("a", "b", "c"))
    environment = Contract(run_uri=uri, slot=slot, index=index, replicas=3).environment()
    with connect(environment) as replica:
        replica.manager().start_quorum()
        # "b" trains the round as the others do; "c" is new, and no slot of that round.
        assert (replica.index, replica.replicas) == (index, 2 if slot == "b" else 3)


def test_change_of_slots_leaves_the_outer_loop_of_the_script() -> None:
    store = MemoryStore()
    run = begin_run(store, ("a",), minimum=1, rounds=4)
    first = change(store, run, 1, slots=("a", "b"), outer_lr=0.5)
    island = Island(store, "a", minimum=1, lr=0.125)
    own = outer_of(island)
    island.train(2, close=False)
    assert outer_of(island) == own
    change(store, run, 2, first, slots=("a", "b"), outer_lr=0.25)
    island.train(4)
    assert outer_of(island) == {(0.25, 0.9)}


def test_finished_run_continues_after_an_extension() -> None:
    store = MemoryStore()
    run = begin_run(store, ("a", "b"), minimum=2, rounds=2)
    train_all(islands_of(store, ("a", "b")), rounds=2)
    (still_over,) = islands_of(store, ("a",))
    still_over.join()
    assert still_over.manager.finished
    still_over.manager.shutdown()
    change(store, run, 1, rounds=4)
    again = islands_of(store, ("a", "b"))
    train_all(again, rounds=4)
    assert [island.manager.finished for island in again] == [True, True]
    assert len(decisions(store)) == 4
    assert_same_parameters(again)


def test_extended_run_waits_for_all_replicas_to_start_again() -> None:
    store = MemoryStore()
    run = begin_run(store, ("a", "b"), rounds=2, start_window_s=60.0)
    first = islands_of(store, ("a", "b"), minimum=1, grace_s=0.0)
    train_all(first, rounds=2)
    for island in first:
        island.manager.shutdown()
    change(store, run, 1, from_round=2, rounds=3)
    (early,) = islands_of(store, ("a",), minimum=1, grace_s=0.0)

    def late() -> None:
        """Start when the other one waits, or has decided alone."""
        wait_for(lambda: waits_for(store, "a") == ("b",) or len(decisions(store)) > 2)
        islands_of(store, ("b",), minimum=1, grace_s=0.0)[0].train(3)

    together([lambda: early.train(3), late])
    assert [share.slot for share in decisions(store)[2].members] == ["a", "b"]


def waits_for(store: MemoryStore, slot: str) -> tuple[str, ...]:
    heartbeat = Heartbeat.parse(bytes(store.read(keys.heartbeat(slot)) or b""), "")
    return heartbeat.waiting_for if heartbeat.round == 2 else ()


def test_extension_before_the_last_boundary_keeps_replicas_training() -> None:
    store = MemoryStore()
    run = begin_run(store, ("a",), minimum=1, rounds=1)
    island = Island(store, "a", minimum=1)
    island.train(1, close=False)
    assert island.manager.finished
    change(store, run, 1, rounds=2)
    island.train(2)
    assert len(decisions(store)) == 2


def test_checkpoint_is_due_once_at_each_end_that_the_run_has_had() -> None:
    store = MemoryStore()
    log = RunLog(store, begin_run(store, ("a",), rounds=2, checkpoint_every=100))
    log.set_end(3, None)
    log.set_end(4, 10.0)  # other replicas may know of none of the later ends, and have left
    rounds = [LogPosition(round=n, previous="", members=("a",), batches=0, work=2.0 * n) for n in range(1, 8)]
    assert [position.round for position in rounds if is_due(position, 100, log)] == [2, 3, 5, 6, 7]
    log.set_end(9, None)
    assert [position.round for position in rounds if is_due(position, 100, log)] == [2, 3, 5]


def test_end_that_was_extended_in_time_has_a_checkpoint() -> None:
    store = MemoryStore()
    run = begin_run(store, ("a",), minimum=1, rounds=1)
    change(store, run, 1, rounds=3)
    island = Island(store, "a", minimum=1, checkpoint_every=100)
    island.train(2, close=False)
    island.manager.shutdown()
    assert store.read(keys.checkpoint_manifest(1)) is not None
    assert store.read(keys.checkpoint_manifest(2)) is None


def settings_of(rounds: int = 2) -> tuple[RunSettings, MemoryStore, Run]:
    store = MemoryStore()
    run = begin_run(store, ("a",), rounds=rounds)
    return RunSettings(RunLog(store, run)), store, run


def test_settings_are_read_in_order_and_used_from_their_round() -> None:
    settings, store, run = settings_of()
    settings.read()
    assert (settings.of_round(9), settings.end) == (None, (2, None))
    first = change(store, run, 1, from_round=3, rounds=5)
    second = change(store, run, 2, first, from_round=4, rounds=7)
    settings.read()
    assert [settings.of_round(number) for number in (2, 3, 4, 9)] == [None, first, second, second]
    assert settings.end == (7, None)
    assert settings.named(first, 3).number == 1


@pytest.mark.parametrize(
    ("changes", "reopened"),
    [
        ([], []),
        ([{"from_round": 5, "rounds": 8}], [5]),
        ([{"from_round": 3, "rounds": 8}], []),  # it was not over
        ([{"from_round": 5, "rounds": 5, "outer_lr": 0.3}], []),
        ([{"from_round": 7, "rounds": 9}], []),  # the outer loop changes later
        ([{"from_round": 3, "rounds": 8}, {"from_round": 8, "rounds": 9}], [8]),
        ([{"from_round": 7, "rounds": 9, "work": 18.0}], []),
    ],
)
def test_rounds_that_open_an_extended_run(changes: list[dict[str, Any]], reopened: list[int]) -> None:
    settings, store, run = settings_of(rounds=5)
    digest = GENESIS
    for number, values in enumerate(changes, 1):
        digest = change(store, run, number, digest, **values)
    settings.read()
    assert [number for number in range(12) if settings.reopens(number)] == reopened


def test_run_that_made_up_for_lost_work_opens_after_its_last_round() -> None:
    store = MemoryStore()
    run = begin_run(store, ("a",), rounds=5, work=10.0)
    settings = RunSettings(RunLog(store, run))
    change(store, run, 1, from_round=7, rounds=9, work=18.0)
    settings.read()
    assert [number for number in range(12) if settings.reopens(number)] == [7]


def test_settings_named_before_their_round_or_not_stored_are_refused() -> None:
    settings, store, run = settings_of()
    digest = change(store, run, 1, from_round=3)
    with pytest.raises(Diverged, match="before their time"):
        settings.named(digest, 2)
    with pytest.raises(Corrupt, match="settings are missing"):
        settings.named("0" * 64, 3)


def test_settings_that_do_not_follow_their_predecessor_are_refused() -> None:
    settings, store, run = settings_of()
    change(store, run, 1)
    change(store, run, 2, "1" * 64)
    with pytest.raises(Diverged, match="do not follow"):
        settings.read()


def test_decision_without_settings_has_the_bytes_of_earlier_versions() -> None:
    store = MemoryStore()
    begin_run(store, ("a",), minimum=1, rounds=1)
    Island(store, "a", minimum=1).train(1)
    (decision,) = decisions(store)
    assert "settings" not in decision.model_dump()
    with_settings = decision.model_copy(update={"settings": "a" * 64})
    assert Decision.parse(with_settings.to_bytes(), "x").settings == "a" * 64
