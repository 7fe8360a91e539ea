"""What only one replica has: it comes back to the bit after a restart, and is never needed for the run to go on."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.logs import run_record
from tests.support.managers import Island
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime import checkpoint, keys
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.contract import Contract
from skerry.runtime.errors import Diverged, Invalid, Retryable
from skerry.runtime.journal import Journal, open_run
from skerry.runtime.membership import Presence
from skerry.runtime.private import PrivateState, load_random_states, random_states
from skerry.runtime.recording import Standing
from skerry.runtime.records import GENESIS, Commit
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.runtime.store import Data, Store

A = keys.private_of("a")


class Log:
    """A run with closed rounds, so that states may be saved at them."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or MemoryStore()
        clock = SystemClock()
        self.clock = clock
        self.journal = Journal(self.store, open_run(self.store, run_record(clock)))
        self.digests = [GENESIS]

    def standing(self, round_number: int) -> Standing:
        while len(self.digests) <= round_number:
            commit = Commit(
                run=self.journal.run.nonce,
                round=len(self.digests) - 1,
                exchanges=("0" * 64,),
                participants=1,
                work=float(len(self.digests)),
                previous=self.digests[-1],
            )
            self.digests.append(self.journal.create(keys.commit(commit.round), commit).digest)
        return Standing(
            round=round_number,
            previous=self.digests[round_number],
            members=("a",),
            batches=round_number,
            work=float(round_number),
        )

    def presence(self, slot: str = "a") -> Presence:
        """A new incarnation of the slot."""
        return Presence(self.journal, self.clock, slot, 1.0)

    def private(self, presence: Presence | None = None) -> PrivateState:
        return PrivateState(self.journal, presence or self.presence(), self.clock.nonce)

    def saved(self, private: PrivateState, *rounds: int) -> None:
        """Save at these rounds, one after the other."""
        for number in rounds:
            private.record(self.standing(number), 1)
            assert private._saving is not None
            private._saving.result(timeout=10)

    def load(self, slot: str = "a") -> tuple[int | None, object]:
        """What the next incarnation of the slot finds: the round, and the value."""
        got: list[object] = [None]
        private = self.private(self.presence(slot))
        private.register("value", got.append, lambda: None)
        found = private.load_newest()
        private.close(wait=True)
        return found, got[-1]


def counting(private: PrivateState) -> list[int]:
    """Registers a number; returns the cell that holds it."""
    cell = [0]
    private.register("value", lambda value: cell.__setitem__(0, value), lambda: cell[0])
    return cell


# Saving and loading.


def test_the_next_incarnation_finds_what_was_saved_last() -> None:
    log = Log()
    private = log.private()
    cell = counting(private)
    for number in (1, 2, 3):
        cell[0] = 10 * number
        log.saved(private, number)
    private.close(wait=True)
    assert log.load() == (3, 30)


def test_the_last_two_stay_and_other_slots_are_left_alone() -> None:
    log = Log()
    mine, other = log.private(), log.private(log.presence("a-2"))
    for private in (mine, other):
        private.register("value", lambda _: None, lambda: torch.ones(3))
    log.saved(other, 1)
    log.store.create(keys.checkpoint_part(2, "f" * 32, A), b"of an incarnation that died")
    log.saved(mine, 1, 2, 3, 4)
    assert checkpoint.complete(log.store, A) == [4, 3]
    assert len(log.store.list(A)) == 4
    assert checkpoint.complete(log.store, keys.private_of("a-2")) == [1]
    assert checkpoint.complete(log.store) == []
    for private in (mine, other):
        private.close(wait=True)


def test_old_saves_become_invisible_before_they_are_incomplete() -> None:
    class Dying(MemoryStore):
        def delete(self, key: str) -> None:
            super().delete(key)
            raise Retryable("the store is away")

    log = Log(Dying())
    private = log.private()
    private.register("value", lambda _: None, lambda: torch.ones(3))
    log.saved(private, 1, 2, 3)
    private.close(wait=True)
    assert checkpoint.complete(log.store, A) == [3, 2]
    for number in (3, 2):
        found = checkpoint.manifest(log.store, number, A)
        assert found is not None
        checkpoint.load(log.store, found, A)


def test_saves_follow_the_checkpoints_rounds() -> None:
    log = Log()
    private = log.private()
    counting(private)
    for number in range(1, 5):
        private.record(log.standing(number), 2)
        if private._saving is not None:
            private._saving.result(timeout=10)
    private.record(log.standing(6), None)  # not while following
    private.close(wait=True)
    assert checkpoint.complete(log.store, A) == [4, 2]


def test_without_anything_registered_nothing_is_written() -> None:
    log = Log()
    private = log.private()
    private.record(log.standing(1), 1)
    private.close(wait=True)
    assert log.store.list(keys.PRIVATE) == []


def test_while_one_save_is_on_its_way_the_next_is_left_out() -> None:
    log = Log()
    private = log.private()
    counting(private)
    started, go_on = wait_for_upload(log)
    private.record(log.standing(1), 1)
    started()
    private.record(log.standing(2), 1)
    go_on()
    private.close(wait=True)
    assert checkpoint.complete(log.store, A) == [1]


def wait_for_upload(log: Log) -> tuple[Callable[[], object], Callable[[], object]]:
    """The next create waits between these two."""
    started, go_on = threading.Event(), threading.Event()
    create = log.store.create

    def slow(key: str, data: Data) -> bool:
        if key.startswith(keys.PRIVATE):
            started.set()
            assert go_on.wait(10)
        return create(key, data)

    log.store.create = slow  # type: ignore[method-assign]
    return lambda: started.wait(10), go_on.set


# What goes wrong.


def test_a_replaced_incarnation_leaves_nothing_that_can_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    old = log.private()
    cell = counting(old)
    cell[0] = 1
    log.saved(old, 1)
    log.presence()  # the slot is somebody else's now
    cell[0] = 2
    log.saved(old, 2)
    old.close(wait=True)
    assert checkpoint.complete(log.store, A) == [1]
    assert any("private_failed" in line and "belongs to incarnation" in line for line in caplog.messages)
    assert log.load() == (1, 1)


@pytest.mark.parametrize("what", ["part", "manifest", "absent"])
def test_a_damaged_save_is_told_and_the_next_older_one_is_used(what: str, caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    private = log.private()
    held = torch.zeros(3)
    private.register("value", held.copy_, lambda: held)
    for number in (1, 2):
        held.fill_(number)
        log.saved(private, number)
    private.close(wait=True)
    damage(log.store, 2, what)
    found, value = log.load()
    assert found == 1
    assert isinstance(value, torch.Tensor)
    assert value.tolist() == [1.0] * 3
    assert any("private_failed" in line and "round=2" in line for line in caplog.messages)


def test_when_all_is_damaged_that_is_told_and_inner_state_is_fresh(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    private = log.private()
    private.register("value", lambda _: None, lambda: torch.ones(3))
    log.saved(private, 1, 2)
    private.close(wait=True)
    for number in (1, 2):
        damage(log.store, number, "part")
    caplog.set_level("INFO", "skerry")
    assert log.load() == (None, None)
    assert any("private_fresh" in line for line in caplog.messages)


def damage(store: Store, round_number: int, what: str) -> None:
    found = checkpoint.manifest(store, round_number, A)
    assert found is not None
    part = keys.checkpoint_part(round_number, found.parts[0].digest, A)
    match what:
        case "part":
            spoiled = bytearray(store.read(part) or b"")
            spoiled[-1] ^= 1
            store.replace(part, spoiled)
        case "manifest":
            store.replace(keys.checkpoint_manifest(round_number, A), b"{")
        case _:
            store.delete(part)


def test_a_script_that_refuses_its_state_trains_on_with_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    private = log.private()
    private.register("optimizer", lambda _: None, lambda: {"groups": 1})
    private.register("sampler", lambda _: None, lambda: 7)
    log.saved(private, 1)
    private.close(wait=True)

    def refuse(_: object) -> None:
        raise ValueError("another number of groups")

    later, got = log.private(), list[object]()
    later.register("optimizer", refuse, lambda: None)
    later.register("sampler", got.append, lambda: None)
    later.register("new", got.append, lambda: None)
    assert later.load_newest() == 1
    later.close(wait=True)
    assert got == [7]
    told = [line for line in caplog.messages if "private_failed" in line]
    assert [next(name for name in ("optimizer", "new") if f"key={name}" in line) for line in told] == [
        "optimizer",
        "new",
    ]


def test_a_save_of_another_log_is_refused() -> None:
    log = Log()
    private = log.private()
    counting(private)
    log.standing(3)
    log.saved(private, 2)
    private.close(wait=True)
    found = checkpoint.manifest(log.store, 2, A)
    assert found is not None
    key = keys.checkpoint_manifest(2, A)
    log.store.replace(key, found.model_copy(update={"commit": log.digests[3]}).to_bytes())
    with pytest.raises(Diverged, match=key):
        log.load()


def test_a_state_that_cannot_be_stored_is_told_by_its_path(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    private = log.private()
    private.register("file", lambda _: None, object)
    private.record(log.standing(1), 1)
    private.close(wait=True)
    assert any("private_failed" in line and "state.file" in line for line in caplog.messages)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_went_nan_is_not_brought_back_by_a_restart(value: float, caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    private = log.private()
    moments = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(4.0)}}}
    private.register("value", lambda _: None, lambda: moments)
    log.saved(private, 1)
    moments["state"][0]["exp_avg"][1] = value
    log.saved(private, 2)
    private.close(wait=True)
    found, got = log.load()
    assert found == 1
    assert torch.equal(got["state"][0]["exp_avg"], torch.ones(3))  # type: ignore[index]
    assert any("private_failed" in line and "not finite" in line for line in caplog.messages)


def test_a_key_twice_or_after_the_join_is_refused() -> None:
    log = Log()
    private = log.private()
    counting(private)
    with pytest.raises(Invalid, match="twice"):
        counting(private)
    private.load_newest()
    with pytest.raises(Invalid, match="after the join"):
        private.register("late", lambda _: None, lambda: 1)
    private.close(wait=True)


# Random states.


def drawn() -> list[float]:
    return [
        torch.rand(1).item(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),  # noqa: NPY002  the global generator is what is kept
        float(np.random.randint(1 << 30)),  # noqa: NPY002
    ]


def test_random_states_come_back_through_a_checkpoint() -> None:
    before = random_states()
    try:
        drawn()  # an odd number of normal draws: half a pair is part of the state
        state = random_states()
        expected = drawn()
        drawn()
        kept: Any = checkpoint.snapshot(state)
        load_random_states(kept)
        assert drawn() == expected
    finally:
        load_random_states(before)


# Real replicas.


class Sampler:
    """Where a replica is in its data."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def next(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(self.position))


class Script:
    """A training script with everything that a replica has of its own: AdamW, data position, dropout."""

    def __init__(self, replica: Replica, *, keep: bool = True) -> None:
        torch.manual_seed(replica.index)
        self.replica = replica
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.sampler = Sampler()
        self.manager = replica.manager(state_dict=self.model.state_dict, load_state_dict=self.model.load_state_dict)
        if keep:
            replica.keep(inner=self.inner, sampler=self.sampler, random=True)
        self.seen: list[int] = []

    def train(self, cut_after: int | None = None) -> dict[str, torch.Tensor]:
        """cut_after: the power goes at the first step of this round, once what was due before is in the store."""
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(self.manager, [self.model], self.inner, [outer], sync_every=4) as diloco:
            for step in self.replica.steps(self.inner):
                self.seen.append(step)
                # While a save is on its way the next one is left out: none may be.
                if cut_after is not None and self.manager.current_step() > 0 and step % 4 == 1:
                    wait_for(self.replica, self.manager.current_step())
                    if self.manager.current_step() == cut_after:
                        raise OSError("power cut")
                self.inner.zero_grad()
                self.model(self.sampler.next()).square().sum().backward()
                self.inner.step()
            return {name: one.clone() for name, one in diloco._fragments[0].original_parameters.items()}


def wait_for(replica: Replica, round_number: int) -> None:
    clock, store, folder = SystemClock(), replica._store, keys.private_of(replica.slot)
    saved = lambda: round_number in checkpoint.complete(store, folder) or None  # noqa: E731
    wait_until(clock, saved, clock.now() + 10, Backoff(first=0.001, cap=0.02))


def started(uri: str, **more: bool) -> tuple[Replica, Script]:
    replica = connect(Contract(run_uri=uri, slot="r-0", index=0, replicas=1).environment())
    return replica, Script(replica, **more)


def begin(folder: Path, rounds: int) -> str:
    open_store(folder.as_uri()).create(
        keys.RUN, run_record(SystemClock(), slots=("r-0",), rounds=rounds, min_replicas=1).to_bytes()
    )
    return folder.as_uri()


def test_a_restarted_replica_trains_on_to_the_same_bits_as_if_nothing_had_happened(tmp_path: Path) -> None:
    replica, script = started(begin(tmp_path / "whole", rounds=5))
    with replica:
        expected = script.train()
    uri = begin(tmp_path / "cut", rounds=5)
    replica, script = started(uri)
    with pytest.raises(SystemExit), replica:
        script.train(cut_after=3)
    replica, script = started(uri)
    with replica:
        resumed = script.train()
    assert script.seen == list(range(12, 20))
    assert script.sampler.position == 20
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_step_numbers_go_on_after_what_was_saved_though_failed_rounds_took_more_steps(tmp_path: Path) -> None:
    uri = begin(tmp_path / "run", rounds=3)
    replica, script = started(uri)
    replica._step = 29  # as if rounds had failed
    with pytest.raises(SystemExit), replica:
        script.train(cut_after=1)
    assert script.seen[:4] == [30, 31, 32, 33]
    replica, script = started(uri)
    with replica:
        script.train()
    assert script.seen == list(range(34, 42)), "no number, and so no batch, comes twice"


def test_keeping_is_for_after_the_manager_and_under_names_of_ones_own(tmp_path: Path) -> None:
    replica = connect(Contract(run_uri=begin(tmp_path, 1), slot="r-0", index=0, replicas=1).environment())
    sampler = Sampler()
    with pytest.raises(Invalid, match=r"call replica\.manager"):
        replica.keep(sampler=sampler)
    manager = replica.manager()
    replica.keep(sampler=sampler)
    replica.keep(random=True)  # in two calls as in one
    with pytest.raises(Invalid, match="twice under 'sampler'"):
        replica.keep(sampler=sampler)
    manager.shutdown()


def test_without_keep_the_inner_optimizer_starts_afresh_and_nothing_of_it_is_stored(tmp_path: Path) -> None:
    uri = begin(tmp_path / "run", rounds=2)
    replica, script = started(uri, keep=False)
    with replica:
        script.train()
    assert open_store(uri).list(keys.PRIVATE) == []


def test_a_survivor_is_not_asked_for_a_restarted_replicas_state() -> None:
    """The private state is the slot's own, and follows nobody else's."""
    store = MemoryStore()
    got: list[int] = []
    for slot, rounds in (("a", 3), ("b", 4), ("a", 5)):
        island = Island(store, slot, minimum=1)
        island.manager.register_private_state("slot", got.append, lambda slot=slot: ord(slot))
        island.train(rounds)
    assert got == [ord("a")]
