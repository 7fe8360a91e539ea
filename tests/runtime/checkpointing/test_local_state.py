"""Local state of one replica: a restart restores its bits, and the run continues without it."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kit.events import logged_events
from tests.kit.managers import Island, begin_run, wait_for
from tests.kit.protocol import run_record
from tests.kit.records import commit
from tests.kit.stores import HookedStore, damage
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.local_state import PrivateState, load_random_states, random_states
from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import Contract
from skerry.runtime.errors import Diverged, Invalid, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, open_run
from skerry.runtime.log.records import GENESIS
from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.log.records import CheckpointManifest
    from skerry.runtime.store import Store

FOLDER = keys.private_prefix("a")


class Rounds:
    """A run of closed rounds, at which replicas save their local state: `value`."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = SystemClock()
        self.log = RunLog(self.store, open_run(self.store, run_record(self.clock)))
        self.value: object = torch.ones(3)
        self.digests = [GENESIS]
        for number in range(6):
            closed = commit(number, run=self.log.run.nonce, previous=self.digests[-1])
            self.digests.append(self.log.create(keys.commit(number), closed).digest)

    def position(self, number: int) -> LogPosition:
        return LogPosition(
            round=number, previous=self.digests[number], members=("a",), batches=number, work=float(number)
        )

    def presence(self, slot: str = "a") -> Presence:
        """A new incarnation of the slot."""
        return Presence(self.log, self.clock, slot, 1.0)

    def private(self, slot: str = "a") -> PrivateState:
        """The local state of a new incarnation, without any registered value."""
        return PrivateState(self.log, self.presence(slot), self.clock.nonce)

    def saving(self, slot: str = "a") -> PrivateState:
        """The local state of a new incarnation that saves `value`."""
        private = self.private(slot)
        private.register("value", lambda _: None, lambda: self.value)
        return private

    def save(self, private: PrivateState, *rounds: int, every: int | None = 1) -> None:
        """Save at these rounds, one after the other."""
        for number in rounds:
            private.record(self.position(number), every)
            wait_for(lambda: not private.is_saving)

    def load(self) -> tuple[int | None, Any]:
        """Start the next incarnation. Returns the round and the value that it loads, or None."""
        values: list[object] = [None]
        private = self.private()
        private.register("value", values.append, lambda: None)
        return private.load_newest(), values[-1]

    def saved(self, slot: str = "a") -> list[int]:
        """The rounds of the slot's saves, newest first."""
        return checkpoint.complete(self.store, keys.private_prefix(slot))

    def manifest(self, number: int) -> CheckpointManifest:
        manifest = checkpoint.manifest(self.store, number, FOLDER)
        assert manifest is not None
        return manifest

    def damage(self, number: int, what: str = "part") -> None:
        part = keys.checkpoint_part(number, self.manifest(number).parts[0].digest, FOLDER)
        match what:
            case "part":
                damage(self.store, part)
            case "manifest":
                self.store.replace(keys.checkpoint_manifest(number, FOLDER), b"{")
            case _:
                self.store.delete(part)


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


# Saving and loading.


def test_next_incarnation_loads_the_newest_of_two_saves(rounds: Rounds) -> None:
    mine, other = rounds.saving(), rounds.saving("a-2")
    rounds.save(other, 1)
    rounds.store.create(keys.checkpoint_part(2, "f" * 32, FOLDER), b"of a dead incarnation")
    for number in (1, 2, 3, 4):
        rounds.value = torch.tensor(10 * number)
        rounds.save(mine, number)
    assert (rounds.saved(), rounds.saved("a-2"), checkpoint.complete(rounds.store)) == ([4, 3], [1], [])
    assert len(rounds.store.list(FOLDER)) == 4
    assert rounds.load() == (4, 40)


def test_old_saves_lose_their_manifest_first() -> None:
    class DeletesOne(MemoryStore):
        def delete(self, key: str) -> None:
            super().delete(key)
            raise Retryable("the store is away")

    rounds = Rounds(DeletesOne())
    rounds.save(rounds.saving(), 1, 2, 3)
    assert rounds.saved() == [3, 2]
    for number in (3, 2):
        checkpoint.load(rounds.store, rounds.manifest(number), FOLDER)


def test_saves_follow_the_checkpoints_rounds(rounds: Rounds) -> None:
    private = rounds.saving()
    rounds.save(private, 1, 2, 3, 4, every=2)
    rounds.save(private, 6, every=None)  # no saves while a replica follows
    assert rounds.saved() == [4, 2]


def test_no_registered_state_writes_no_save(rounds: Rounds) -> None:
    rounds.save(rounds.private(), 1)
    assert rounds.store.list(keys.PRIVATE) == []


def test_save_is_skipped_while_another_is_being_written() -> None:
    started, resumed = threading.Event(), threading.Event()

    def hold_uploads(verb: str, key: str) -> None:
        if verb == "create" and key.startswith(keys.PRIVATE):
            started.set()
            assert resumed.wait(300)

    rounds = Rounds(HookedStore(hold_uploads))
    private = rounds.saving()
    private.record(rounds.position(1), 1)
    assert started.wait(300)
    private.record(rounds.position(2), 1)
    resumed.set()
    private.close(wait=True)
    assert rounds.saved() == [1]


# Failures.


def failures(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """The round and the error of each failure that was logged."""
    return [(event["round"], event["error"]) for event in logged_events(caplog, "local_state_failed")]


def test_fenced_incarnation_leaves_no_visible_save(rounds: Rounds, caplog: pytest.LogCaptureFixture) -> None:
    old = rounds.saving()
    rounds.value = 1
    rounds.save(old, 1)
    rounds.presence()  # a newer incarnation owns the slot
    rounds.value = 2
    rounds.save(old, 2)
    ((number, error),) = failures(caplog)
    assert number == 2
    assert "belongs to incarnation" in error
    assert rounds.load() == (1, 1)


@pytest.mark.parametrize("damaged", ["part", "manifest", "absent"])
def test_damaged_save_is_reported_and_the_older_one_loaded(
    rounds: Rounds, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    private = rounds.saving()
    for number in (1, 2):
        rounds.value = torch.tensor(number)
        rounds.save(private, number)
    rounds.damage(2, damaged)
    assert rounds.load() == (1, 1)
    assert [number for number, _ in failures(caplog)] == [2]


def test_inner_state_is_fresh_after_damage_to_all_saves(rounds: Rounds, caplog: pytest.LogCaptureFixture) -> None:
    rounds.save(rounds.saving(), 1, 2)
    for number in (1, 2):
        rounds.damage(number)
    caplog.set_level("INFO", "skerry")
    assert rounds.load() == (None, None)
    assert logged_events(caplog, "local_state_missing")


def test_refused_part_of_a_save_stays_fresh(rounds: Rounds, caplog: pytest.LogCaptureFixture) -> None:
    private = rounds.private()
    private.register("optimizer", lambda _: None, lambda: {"groups": 1})
    private.register("sampler", lambda _: None, lambda: 7)
    rounds.save(private, 1)

    def refuse(_: object) -> None:
        raise ValueError("another number of groups")

    later, values = rounds.private(), list[object]()
    for name, load in {"optimizer": refuse, "sampler": values.append, "new": values.append}.items():
        later.register(name, load, lambda: None)
    assert later.load_newest() == 1
    assert values == [7]
    assert [failure["key"] for failure in logged_events(caplog, "local_state_failed")] == ["optimizer", "new"]


def test_save_of_another_log_is_refused(rounds: Rounds) -> None:
    rounds.save(rounds.saving(), 2)
    key = keys.checkpoint_manifest(2, FOLDER)
    other = rounds.manifest(2).model_copy(update={"commit": rounds.digests[3]}).sealed()
    rounds.store.replace(key, other.to_bytes())
    with pytest.raises(Diverged, match=key):
        rounds.load()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (object(), "state.value"),
        ({"state": {0: {"exp_avg": torch.tensor([1.0, float("nan")]), "step": torch.tensor(4.0)}}}, "not finite"),
        (torch.tensor([float("inf")]), "not finite"),
    ],
)
def test_unsupported_or_non_finite_state_is_reported_and_not_saved(
    rounds: Rounds, value: object, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    private = rounds.saving()
    rounds.value = 1
    rounds.save(private, 1)
    rounds.value = value
    rounds.save(private, 2)
    assert rounds.load() == (1, 1)
    ((number, reported),) = failures(caplog)
    assert number == 2
    assert error in reported


def test_duplicate_or_late_registration_is_refused(rounds: Rounds) -> None:
    private = rounds.saving()
    with pytest.raises(Invalid, match="twice"):
        private.register("value", lambda _: None, lambda: 1)
    private.load_newest()
    with pytest.raises(Invalid, match="after the join"):
        private.register("late", lambda _: None, lambda: 1)


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

    def __init__(self, uri: str, *, keep: bool = True) -> None:
        """Connects to the run."""
        torch.manual_seed(0)
        self.store = open_store(uri)
        self.replica = connect_to(uri)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.sampler = Sampler()
        self.manager = self.replica.manager(
            state_dict=self.model.state_dict, load_state_dict=self.model.load_state_dict
        )
        if keep:
            self.replica.keep(inner=self.inner, sampler=self.sampler, random=True)
        self.trained_steps: list[int] = []

    def train(self, cut_after: int | None = None, idle_steps: int = 0) -> None:
        """Train to the end of the run.

        cut_after: ends the replica in the first step after so many rounds. idle_steps: step numbers that train nothing.
        """
        with pytest.raises(SystemExit) if cut_after is not None else nullcontext(), self.replica:
            self._train(cut_after, idle_steps)

    def _train(self, cut_after: int | None, idle_steps: int) -> None:
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(self.manager, [self.model], self.inner, [outer], sync_every=4):
            for step in self.replica.steps(self.inner):
                if step < idle_steps:
                    continue
                self.trained_steps.append(step)
                # A save is skipped while the previous one is being written: wait, so that none is skipped.
                if cut_after is not None and (number := self.manager.current_step()) > 0 and step % 4 == 1:
                    wait_for(lambda n=number: n in checkpoint.complete(self.store, keys.private_prefix("r-0")))
                    if number == cut_after:
                        raise OSError("power cut")
                self.inner.zero_grad()
                self.model(self.sampler.next()).square().sum().backward()
                self.inner.step()


def connect_to(uri: str) -> Replica:
    return connect(Contract(run_uri=uri, slot="r-0", index=0, replicas=1).environment())


def create_run(folder: Path, rounds: int) -> str:
    begin_run(open_store(folder.as_uri()), ["r-0"], rounds=rounds)
    return folder.as_uri()


def test_restarted_replica_reaches_the_same_bits_as_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = Script(create_run(tmp_path / "whole", rounds=5))
    undisturbed.train()
    uri = create_run(tmp_path / "cut", rounds=5)
    Script(uri).train(cut_after=3)
    resumed = Script(uri)
    resumed.train()
    assert resumed.trained_steps == list(range(12, 20))
    assert resumed.sampler.position == 20
    assert all(map(torch.equal, resumed.model.parameters(), undisturbed.model.parameters()))


def test_step_numbers_continue_after_steps_without_a_round(tmp_path: Path) -> None:
    uri = create_run(tmp_path, rounds=3)
    cut = Script(uri)
    cut.train(cut_after=1, idle_steps=30)
    assert cut.trained_steps[:4] == [30, 31, 32, 33]
    resumed = Script(uri)
    resumed.train()
    assert resumed.trained_steps == list(range(34, 42)), "no number, and so no batch, is used twice"


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


def test_nothing_is_saved_without_keep(tmp_path: Path) -> None:
    script = Script(create_run(tmp_path, rounds=2), keep=False)
    script.train()
    assert script.store.list(keys.PRIVATE) == []


def test_restarted_replica_loads_its_own_state_not_the_survivors() -> None:
    store = MemoryStore()
    loaded: list[int] = []
    for slot, rounds in (("a", 3), ("b", 4), ("a", 5)):
        island = Island(store, slot, minimum=1)
        island.manager.register_private_state("slot", loaded.append, lambda slot=slot: ord(slot))
        island.train(rounds)
    assert loaded == [ord("a")]
