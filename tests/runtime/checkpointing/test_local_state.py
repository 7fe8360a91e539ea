"""Local state of one replica: a restart restores its bits, and the run continues without it."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kit.events import logged_events
from tests.kit.managers import Island
from tests.kit.protocol import run_record
from tests.kit.records import commit
from tests.kit.stores import HookedStore
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.local_state import PrivateState, load_random_states, random_states
from skerry.runtime.checkpointing.recorder import LogPosition
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.contract import Contract
from skerry.runtime.errors import Diverged, Invalid, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, open_run
from skerry.runtime.log.records import GENESIS
from skerry.runtime.protocol.membership import Presence
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.runtime.log.records import CheckpointManifest
    from skerry.runtime.store import Store

FOLDER = keys.private_prefix("a")


class ClosedRounds:
    """A run of closed rounds, at which local state can be saved."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = SystemClock()
        self.log = RunLog(self.store, open_run(self.store, run_record(self.clock)))
        self.digests = [GENESIS]

    def standing(self, round_number: int) -> LogPosition:
        while len(self.digests) <= round_number:
            last = commit(len(self.digests) - 1, run=self.log.run.nonce, previous=self.digests[-1])
            self.digests.append(self.log.create(keys.commit(last.round), last).digest)
        return LogPosition(
            round=round_number,
            previous=self.digests[round_number],
            members=("a",),
            batches=round_number,
            work=float(round_number),
        )

    def presence(self, slot: str = "a") -> Presence:
        """A new incarnation of the slot."""
        return Presence(self.log, self.clock, slot, 1.0)

    def private(self, slot: str = "a", **values: Callable[[], object]) -> PrivateState:
        """The local state of a new incarnation. values: by name, the functions that read what is saved."""
        private = PrivateState(self.log, self.presence(slot), self.clock.nonce)
        for name, read in values.items():
            private.register(name, lambda _: None, read)
        return private

    def save(self, private: PrivateState, *rounds: int) -> None:
        """Save at these rounds, one after the other."""
        for number in rounds:
            private.record(self.standing(number), 1)
            self.wait(private)

    def wait(self, private: PrivateState) -> None:
        """Wait until no save is being written."""
        deadline = self.clock.now() + 10
        wait_until(self.clock, lambda: None if private.is_saving else True, deadline, Backoff(first=0.001, cap=0.02))

    def load(self) -> tuple[int | None, Any]:
        """Start the next incarnation. Returns the round and the value that it loads, or None."""
        values: list[object] = [None]
        private = self.private()
        private.register("value", values.append, lambda: None)
        newest = private.load_newest()
        private.close(wait=True)
        return newest, values[-1]


def ones() -> torch.Tensor:
    return torch.ones(3)


# Saving and loading.


def test_next_incarnation_loads_the_newest_save() -> None:
    rounds = ClosedRounds()
    value = 0
    private = rounds.private(value=lambda: value)
    for value in (10, 20, 30):
        rounds.save(private, value // 10)
    private.close(wait=True)
    assert rounds.load() == (3, 30)


def test_last_two_saves_stay_and_other_slots_are_untouched() -> None:
    rounds = ClosedRounds()
    mine, other = rounds.private(value=ones), rounds.private("a-2", value=ones)
    rounds.save(other, 1)
    rounds.store.create(keys.checkpoint_part(2, "f" * 32, FOLDER), b"of a dead incarnation")
    rounds.save(mine, 1, 2, 3, 4)
    assert checkpoint.complete(rounds.store, FOLDER) == [4, 3]
    assert len(rounds.store.list(FOLDER)) == 4
    assert checkpoint.complete(rounds.store, keys.private_prefix("a-2")) == [1]
    assert checkpoint.complete(rounds.store) == []
    for private in (mine, other):
        private.close(wait=True)


def test_old_saves_lose_their_manifest_first() -> None:
    class FailingStore(MemoryStore):
        def delete(self, key: str) -> None:
            super().delete(key)
            raise Retryable("the store is away")

    rounds = ClosedRounds(FailingStore())
    private = rounds.private(value=ones)
    rounds.save(private, 1, 2, 3)
    private.close(wait=True)
    assert checkpoint.complete(rounds.store, FOLDER) == [3, 2]
    for number in (3, 2):
        checkpoint.load(rounds.store, manifest_of(rounds.store, number), FOLDER)


def test_saves_follow_the_checkpoints_rounds() -> None:
    rounds = ClosedRounds()
    private = rounds.private(value=ones)
    for number in range(1, 5):
        private.record(rounds.standing(number), 2)
        rounds.wait(private)
    private.record(rounds.standing(6), None)  # no saves while a replica follows
    private.close(wait=True)
    assert checkpoint.complete(rounds.store, FOLDER) == [4, 2]


def test_no_registered_state_writes_no_save() -> None:
    rounds = ClosedRounds()
    private = rounds.private()
    private.record(rounds.standing(1), 1)
    private.close(wait=True)
    assert rounds.store.list(keys.PRIVATE) == []


def test_save_is_skipped_while_another_is_being_written() -> None:
    started, resumed = threading.Event(), threading.Event()

    def hold_uploads(verb: str, key: str) -> None:
        if verb == "create" and key.startswith(keys.PRIVATE):
            started.set()
            assert resumed.wait(10)

    rounds = ClosedRounds(HookedStore(hold_uploads))
    private = rounds.private(value=ones)
    private.record(rounds.standing(1), 1)
    assert started.wait(10)
    private.record(rounds.standing(2), 1)
    resumed.set()
    private.close(wait=True)
    assert checkpoint.complete(rounds.store, FOLDER) == [1]


# Failures.


def test_fenced_incarnation_leaves_no_visible_save(caplog: pytest.LogCaptureFixture) -> None:
    rounds = ClosedRounds()
    value = 1
    old = rounds.private(value=lambda: value)
    rounds.save(old, 1)
    rounds.presence()  # a newer incarnation owns the slot
    value = 2
    rounds.save(old, 2)
    old.close(wait=True)
    assert checkpoint.complete(rounds.store, FOLDER) == [1]
    assert any("local_state_failed" in line and "belongs to incarnation" in line for line in caplog.messages)
    assert rounds.load() == (1, 1)


@pytest.mark.parametrize("damaged", ["part", "manifest", "absent"])
def test_damaged_save_is_reported_and_the_older_one_loaded(damaged: str, caplog: pytest.LogCaptureFixture) -> None:
    rounds = ClosedRounds()
    number = 0
    private = rounds.private(value=lambda: torch.full((3,), number))
    for number in (1, 2):
        rounds.save(private, number)
    private.close(wait=True)
    damage(rounds.store, 2, damaged)
    loaded, value = rounds.load()
    assert loaded == 1
    assert value.tolist() == [1] * 3
    assert any("local_state_failed" in line and "round=2" in line for line in caplog.messages)


def test_all_saves_damaged_is_reported_and_inner_state_is_fresh(caplog: pytest.LogCaptureFixture) -> None:
    rounds = ClosedRounds()
    private = rounds.private(value=ones)
    rounds.save(private, 1, 2)
    private.close(wait=True)
    for number in (1, 2):
        damage(rounds.store, number, "part")
    caplog.set_level("INFO", "skerry")
    assert rounds.load() == (None, None)
    assert any("local_state_missing" in line for line in caplog.messages)


def manifest_of(store: Store, round_number: int) -> CheckpointManifest:
    manifest = checkpoint.manifest(store, round_number, FOLDER)
    assert manifest is not None
    return manifest


def damage(store: Store, round_number: int, damaged: str) -> None:
    part = keys.checkpoint_part(round_number, manifest_of(store, round_number).parts[0].digest, FOLDER)
    match damaged:
        case "part":
            body = bytearray(store.read(part) or b"")
            body[-1] ^= 1
            store.replace(part, body)
        case "manifest":
            store.replace(keys.checkpoint_manifest(round_number, FOLDER), b"{")
        case _:
            store.delete(part)


def test_refused_part_of_a_save_stays_fresh(caplog: pytest.LogCaptureFixture) -> None:
    rounds = ClosedRounds()
    private = rounds.private(optimizer=lambda: {"groups": 1}, sampler=lambda: 7)
    rounds.save(private, 1)
    private.close(wait=True)

    def refuse(_: object) -> None:
        raise ValueError("another number of groups")

    later, values = rounds.private(), list[object]()
    later.register("optimizer", refuse, lambda: None)
    later.register("sampler", values.append, lambda: None)
    later.register("new", values.append, lambda: None)
    assert later.load_newest() == 1
    later.close(wait=True)
    assert values == [7]
    assert [failure["key"] for failure in logged_events(caplog, "local_state_failed")] == ["optimizer", "new"]


def test_save_of_another_log_is_refused() -> None:
    rounds = ClosedRounds()
    private = rounds.private(value=ones)
    rounds.standing(3)
    rounds.save(private, 2)
    private.close(wait=True)
    key = keys.checkpoint_manifest(2, FOLDER)
    other = manifest_of(rounds.store, 2).model_copy(update={"commit": rounds.digests[3]})
    rounds.store.replace(key, other.to_bytes())
    with pytest.raises(Diverged, match=key):
        rounds.load()


def test_unsupported_local_state_is_reported_with_its_path(caplog: pytest.LogCaptureFixture) -> None:
    rounds = ClosedRounds()
    private = rounds.private(file=object)
    private.record(rounds.standing(1), 1)
    private.close(wait=True)
    assert any("local_state_failed" in line and "state.file" in line for line in caplog.messages)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_state_with_nan_is_not_saved(value: float, caplog: pytest.LogCaptureFixture) -> None:
    rounds = ClosedRounds()
    moments = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(4.0)}}}
    private = rounds.private(value=lambda: moments)
    rounds.save(private, 1)
    moments["state"][0]["exp_avg"][1] = value
    rounds.save(private, 2)
    private.close(wait=True)
    loaded, value_of_save = rounds.load()
    assert loaded == 1
    assert torch.equal(value_of_save["state"][0]["exp_avg"], torch.ones(3))
    assert any("local_state_failed" in line and "not finite" in line for line in caplog.messages)


def test_duplicate_or_late_registration_is_refused() -> None:
    rounds = ClosedRounds()
    private = rounds.private(value=ones)
    with pytest.raises(Invalid, match="twice"):
        private.register("value", lambda _: None, ones)
    private.load_newest()
    with pytest.raises(Invalid, match="after the join"):
        private.register("late", lambda _: None, lambda: 1)
    private.close(wait=True)


# Random states.


def draw() -> list[float]:
    return [
        torch.rand(1).item(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),  # noqa: NPY002  the global generator is saved
        float(np.random.randint(1 << 30)),  # noqa: NPY002
    ]


def test_random_states_are_restored_from_a_checkpoint() -> None:
    before = random_states()
    try:
        draw()  # an odd number of normal draws: half a pair is part of the state
        state = random_states()
        expected = draw()
        draw()
        kept: Any = checkpoint.snapshot(state)
        load_random_states(kept)
        assert draw() == expected
    finally:
        load_random_states(before)


# Real replicas.


class Sampler:
    """The position of a replica in its data."""

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
    """A training script with all kinds of local state: AdamW, data position, dropout."""

    def __init__(self, replica: Replica, uri: str, *, keep: bool = True) -> None:
        torch.manual_seed(replica.index)
        self.replica = replica
        self.uri = uri
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.sampler = Sampler()
        self.manager = replica.manager(state_dict=self.model.state_dict, load_state_dict=self.model.load_state_dict)
        if keep:
            replica.keep(inner=self.inner, sampler=self.sampler, random=True)
        self.trained_steps: list[int] = []

    def train(self, cut_after: int | None = None, idle_steps: int = 0) -> dict[str, torch.Tensor]:
        """Train to the end of the run. Returns the shared parameters.

        cut_after: raises OSError in the first step after so many rounds. idle_steps: step numbers that train nothing.
        """
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(self.manager, [self.model], self.inner, [outer], sync_every=4):
            for step in self.replica.steps(self.inner):
                if step < idle_steps:
                    continue
                self.trained_steps.append(step)
                # A save is skipped while the previous one is being written: wait, so that none is skipped.
                if cut_after is not None and self.manager.current_step() > 0 and step % 4 == 1:
                    wait_for_save(self.uri, self.manager.current_step())
                    if self.manager.current_step() == cut_after:
                        raise OSError("power cut")
                self.inner.zero_grad()
                self.model(self.sampler.next()).square().sum().backward()
                self.inner.step()
            return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def wait_for_save(uri: str, round_number: int) -> None:
    clock, store, folder = SystemClock(), open_store(uri), keys.private_prefix("r-0")
    saved = lambda: round_number in checkpoint.complete(store, folder) or None  # noqa: E731
    wait_until(clock, saved, clock.now() + 10, Backoff(first=0.001, cap=0.02))


def connect_to(uri: str) -> Replica:
    return connect(Contract(run_uri=uri, slot="r-0", index=0, replicas=1).environment())


def start_script(uri: str, *, keep: bool = True) -> tuple[Replica, Script]:
    replica = connect_to(uri)
    return replica, Script(replica, uri, keep=keep)


def create_run(folder: Path, rounds: int) -> str:
    open_store(folder.as_uri()).create(
        keys.RUN, run_record(SystemClock(), slots=("r-0",), rounds=rounds, min_replicas=1).to_bytes()
    )
    return folder.as_uri()


def test_restarted_replica_reaches_the_same_bits_as_an_undisturbed_one(tmp_path: Path) -> None:
    replica, script = start_script(create_run(tmp_path / "whole", rounds=5))
    with replica:
        expected = script.train()
    uri = create_run(tmp_path / "cut", rounds=5)
    replica, script = start_script(uri)
    with pytest.raises(SystemExit), replica:
        script.train(cut_after=3)
    replica, script = start_script(uri)
    with replica:
        resumed = script.train()
    assert script.trained_steps == list(range(12, 20))
    assert script.sampler.position == 20
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_step_numbers_continue_after_steps_without_a_round(tmp_path: Path) -> None:
    uri = create_run(tmp_path / "run", rounds=3)
    replica, script = start_script(uri)
    with pytest.raises(SystemExit), replica:
        script.train(cut_after=1, idle_steps=30)
    assert script.trained_steps[:4] == [30, 31, 32, 33]
    replica, script = start_script(uri)
    with replica:
        script.train()
    assert script.trained_steps == list(range(34, 42)), "no number, and so no batch, is used twice"


def test_keep_requires_a_manager_and_free_names(tmp_path: Path) -> None:
    replica = connect_to(create_run(tmp_path, 1))
    sampler = Sampler()
    with pytest.raises(Invalid, match=r"call replica\.manager"):
        replica.keep(sampler=sampler)
    manager = replica.manager()
    replica.keep(sampler=sampler)
    replica.keep(random=True)  # in two calls as in one
    with pytest.raises(Invalid, match="twice under 'sampler'"):
        replica.keep(sampler=sampler)
    manager.shutdown()


def test_inner_optimizer_is_fresh_without_keep(tmp_path: Path) -> None:
    uri = create_run(tmp_path / "run", rounds=2)
    replica, script = start_script(uri, keep=False)
    with replica:
        script.train()
    assert open_store(uri).list(keys.PRIVATE) == []


def test_survivor_is_not_asked_for_a_restarted_replicas_state() -> None:
    store = MemoryStore()
    loaded: list[int] = []
    for slot, rounds in (("a", 3), ("b", 4), ("a", 5)):
        island = Island(store, slot, minimum=1)
        island.manager.register_private_state("slot", loaded.append, lambda slot=slot: ord(slot))
        island.train(rounds)
    assert loaded == [ord("a")]
