"""Progress in a round that is not over: the replica's next incarnation resumes it, and it counts once."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import Island, contributions, decisions, together
from tests.kit.protocol import run_record
from tests.support.clocks import FakeClock
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.recorder import LogPosition
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Fenced
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, open_run
from skerry.runtime.log.records import GENESIS
from skerry.runtime.protocol.membership import Presence
from skerry.runtime.ranks.interface import SingleRank
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.resumable_round import PartialRound
from skerry.runtime.training.resumable_round_store import PartialRoundStore

if TYPE_CHECKING:
    from skerry.runtime.store import Store

AT_ONCE = timedelta(microseconds=1)
H = 6


class Lone(Island):
    """A replica whose private state is its inner optimizer's, and whose every inner step is saved."""

    def __init__(self, store: Store, slot: str = "a", **more: object) -> None:
        super().__init__(store, slot, **({"sync_every": H, "minimum": 1, "keep_unfinished": AT_ONCE} | more))  # type: ignore[arg-type]
        self.inner.param_groups[0]["momentum"] = 0.9
        self.manager.register_private_state("inner", self.inner.load_state_dict, self.inner.state_dict)

    def take(self, steps: int) -> Lone:
        """Inner steps, and then the look that saves the last of them. The process lives on, as one that hangs does."""
        with self.diloco:
            for _ in range(steps):
                self.manager.catch_up(self.inner)
                self.step()
                settle(self)
            self.manager.catch_up(self.inner)
        settle(self)
        return self

    def come_back(self, steps: int = 0) -> Lone:
        """Join, and train on for some steps."""
        with self.diloco:
            self.manager.catch_up(self.inner)
            for _ in range(steps):
                self.step()
                self.manager.catch_up(self.inner)
        return self

    @property
    def state(self) -> list[torch.Tensor]:
        momenta = [self.inner.state[p]["momentum_buffer"] for p in self.model.parameters()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *momenta)]


def settle(island: Island) -> None:
    """Wait until the current save is written."""
    saving = island.manager.lifecycle.course.unfinished._saving
    if saving is not None:
        saving.result(timeout=10)


class Halves(Lone):
    """A model of two fragments, which are exchanged in turn."""

    model: nn.Module

    def __init__(self, store: Store, slot: str = "a", *, seed: int = 0, **more: object) -> None:
        super().__init__(store, slot, seed=seed, **more)
        torch.manual_seed(seed)
        parts = [nn.Linear(4, 3), nn.Linear(3, 2)]
        self.model = nn.Sequential(*parts)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager._state._loads.clear()
        self.manager._state._saves.clear()
        outers = [torch.optim.SGD(part.parameters(), lr=0.7) for part in parts]
        self.diloco = DiLoCo(self.manager, parts, self.inner, outers, sync_every=2 * H)


def saves(store: Store, slot: str = "a") -> list[int]:
    return checkpoint.complete(store, keys.unfinished_prefix(slot))


def inner_steps(store: Store) -> dict[tuple[int, str], int]:
    return {(contribution.round, contribution.slot): contribution.inner_steps for contribution in contributions(store)}


# Going on.


def test_the_next_incarnation_goes_on_within_the_round() -> None:
    store = MemoryStore()
    died = Lone(store).take(H + 4)
    back = Lone(store, seed=5).come_back()
    assert (back.manager.current_step(), back.manager.inner_steps) == (1, 4)
    torch.testing.assert_close(back.state, died.state)
    back.come_back(2)
    assert back.manager.current_step() == 2
    assert inner_steps(store) == {(0, "a"): H, (1, "a"): H}
    back.manager.shutdown()


def test_a_stopped_replica_goes_on_where_it_was() -> None:
    store = MemoryStore()
    stopped = Lone(store, keep_unfinished=timedelta(hours=1)).take(3)
    assert saves(store) == []
    stopped.manager.request_stop()
    stopped.manager.shutdown()
    assert saves(store) == [1]
    assert Lone(store, seed=5).come_back().manager.inner_steps == 3


def test_only_the_newest_save_stays() -> None:
    store = MemoryStore()
    Lone(store).take(H + 4)
    (number,) = saves(store)
    folder = keys.unfinished_prefix("a")
    assert {keys.round_of(entry.key) for entry in store.list(folder)} == {number}


def test_nothing_is_saved_unless_asked_for() -> None:
    store = MemoryStore()
    quiet = Island(store, "a", sync_every=H, minimum=1).train(1, close=False)
    quiet.manager.request_stop()
    quiet.manager.shutdown()
    assert store.list(keys.UNFINISHED) == []
    Lone(store).take(3)
    assert Lone(store, keep_unfinished=None).come_back().manager.inner_steps == 0


# What was begun counts once.


def test_progress_of_a_round_that_was_closed_meanwhile_is_dropped() -> None:
    store = MemoryStore()
    slow = Lone(store, "a", minimum=1, grace_s=0.0).take(4)
    Lone(store, "b", minimum=1, grace_s=0.0).come_back(H)
    assert [[share.slot for share in decision.members] for decision in decisions(store)] == [["b"]]
    back = Lone(store, "a", minimum=1, grace_s=0.0, seed=5).come_back()
    assert (back.manager.current_step(), back.manager.inner_steps) == (1, 0)
    back.come_back(H)
    assert inner_steps(store)[1, "a"] == H
    slow.manager.request_stop()


def test_what_stands_in_a_decision_is_not_brought_again() -> None:
    store = MemoryStore()
    Lone(store, "a").take(H)  # its last save is of step H - 1, and the round is closed with all of them
    assert inner_steps(store) == {(0, "a"): H}
    back = Lone(store, "a", seed=5).come_back(H)
    assert back.manager.current_step() == 2
    assert inner_steps(store) == {(0, "a"): H, (1, "a"): H}


def test_each_fragment_is_resumed_until_its_own_exchange_is_closed() -> None:
    begun = PartialRound(round=4, previous=GENESIS, inner_steps=3, tokens=0, seconds=1.0, deltas=((),) * 3, private={})

    def open_fragments(head: int) -> list[int]:
        return [fragment for fragment in range(3) if begun.is_open(fragment, head)]

    assert open_fragments(4) == [0, 1, 2]
    assert open_fragments(5) == [0, 2], "round 4 exchanges fragment 1"
    assert open_fragments(10) == []


# What fails is told, and training goes on.


def test_a_damaged_save_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    Lone(store).take(4)
    (number,) = saves(store)
    key = next(e.key for e in store.list(keys.unfinished_prefix("a")) if not e.key.endswith(keys.MANIFEST))
    data = bytearray(store.read(key) or b"")
    data[-1] ^= 1
    store.replace(key, bytes(data))
    with caplog.at_level("WARNING", logger="skerry"):
        back = Lone(store, seed=5).come_back()
    assert back.manager.inner_steps == 0
    assert f"unfinished_round_failed round={number}" in caplog.text
    back.come_back(H)
    assert back.manager.current_step() == 1
    assert saves(store) > [number]


def test_progress_beyond_the_followed_log_is_logged_and_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage ends following early: what was trained on later parameters does not belong on these."""
    store = MemoryStore()
    Lone(store, checkpoint_every=100).take(H + 4)
    back = Lone(store, checkpoint_every=100, seed=5)
    monkeypatch.setattr(back.manager.lifecycle.course, "is_behind", lambda: False)
    with caplog.at_level("WARNING"):
        back.come_back()
    assert (back.manager.current_step(), back.manager.inner_steps) == (0, 0)
    assert "the log was not followed to it" in caplog.text
    back.manager.request_stop()
    back.manager.shutdown()


def test_progress_of_another_model_is_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    first = Lone(store)
    first.manager.lifecycle.course.unfinished.save(
        LogPosition(round=0, previous=GENESIS, members=(), batches=0, work=0.0),
        PartialRound(
            round=0, previous=GENESIS, inner_steps=3, tokens=0, seconds=1.0, deltas=((torch.ones(9),),), private={}
        ),
        wait=True,
    )
    with caplog.at_level("WARNING", logger="skerry"):
        back = Lone(store).come_back()
    assert back.manager.inner_steps == 0
    assert "another model" in caplog.text


def test_what_is_not_finite_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    replica = Lone(store).take(2)
    before = saves(store)
    with torch.no_grad():
        next(replica.model.parameters()).fill_(torch.nan)
    with caplog.at_level("WARNING", logger="skerry"):
        replica.take(1)
    assert saves(store) == before
    assert "not finite" in caplog.text


def test_what_is_of_another_run_is_left_alone() -> None:
    store = MemoryStore()
    Lone(store).take(4)
    left = [entry for entry in store.list("") if not entry.key.startswith(keys.UNFINISHED)]
    for entry in left:
        store.delete(entry.key)
    assert Lone(store, seed=5).come_back().manager.inner_steps == 0


def test_a_replaced_incarnation_publishes_nothing() -> None:
    store = MemoryStore()
    old = Lone(store).take(2)
    before = saves(store)
    Presence(old.manager.session.log, SystemClock(), "a", 1.0)
    old.take(1)
    assert saves(store) == before
    with pytest.raises(Fenced):
        old.manager.presence.raise_if_fenced()


def test_several_fragments_go_on_together() -> None:
    """Two fragments in turn: one is exchanged in the round, both have been trained."""
    store = MemoryStore()
    died = Halves(store, seed=1).take(H + 3)
    back = Halves(store, seed=2).come_back()
    assert (back.manager.current_step(), back.manager.inner_steps) == (1, 3)
    torch.testing.assert_close(list(back.model.parameters()), list(died.model.parameters()))
    back.come_back(H - 3)
    assert back.manager.current_step() == 2


def test_two_that_stop_together_end_as_if_they_had_not() -> None:
    """A run of two is stopped within a round and started again: the same inner steps are in the same records."""
    store = MemoryStore()
    both = [Lone(store, slot, minimum=2, seed=seed) for seed, slot in enumerate("ab")]
    together([lambda replica=replica: replica.take(4) for replica in both])
    for replica in both:
        replica.manager.request_stop()
        replica.manager.shutdown()
    again = [Lone(store, slot, minimum=2, seed=seed) for seed, slot in enumerate("ab", 5)]
    together([lambda replica=replica: replica.come_back(H - 4) for replica in again])
    assert inner_steps(store) == {(0, "a"): H, (0, "b"): H}
    assert [len(decision.members) for decision in decisions(store)] == [2]
    assert not [replica for replica in again if replica.manager.current_step() != 1]


def test_seconds_and_tokens_go_on_too() -> None:
    store = MemoryStore()
    first = Lone(store)
    with first.diloco:
        for _ in range(3):
            first.manager.catch_up(first.inner)
            first.manager.count_tokens(10)
            first.step()
            settle(first)
        first.manager.catch_up(first.inner)
    settle(first)
    back = Lone(store).come_back(H - 3)
    assert back.manager.current_step() == 1
    assert [contribution.tokens for contribution in contributions(store)] == [30]


def test_a_save_is_due_after_its_time_only() -> None:
    store, clock = MemoryStore(), FakeClock()
    log = RunLog(store, open_run(store, run_record(clock)))
    unfinished = PartialRoundStore(log, Presence(log, clock, "a", 1.0), clock, SingleRank(), 5.0)
    standing = LogPosition(round=0, previous=GENESIS, members=(), batches=0, work=0.0)
    assert not unfinished.is_due(0, 1, now=False)
    clock.advance(5.0)
    assert not unfinished.is_due(0, 0, now=False)
    assert unfinished.is_due(0, 1, now=False)
    begun = PartialRound(
        round=0, previous=GENESIS, inner_steps=1, tokens=0, seconds=1.0, deltas=((torch.ones(2),),), private={}
    )
    unfinished.save(standing, begun, wait=True)
    assert not unfinished.is_due(0, 1, now=True)
    assert unfinished.is_due(0, 2, now=True)
    assert not unfinished.is_due(0, 2, now=False)
    unfinished.close(wait=True)
