"""Progress in a round that is not over: the replica's next incarnation resumes it, and it counts once."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import Island, contributions, members, together
from tests.kit.protocol import start_replica
from tests.support.clocks import FakeClock

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Fenced
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS
from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
from skerry.runtime.ranks.interface import SingleRank
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.resumable_round import PartialRound
from skerry.runtime.training.resumable_round_store import PartialRoundStore

if TYPE_CHECKING:
    from skerry.runtime.store import Store

AT_ONCE = timedelta(microseconds=1)
H = 6
"""Inner steps of a round."""
START = LogPosition(round=0, previous=GENESIS, members=(), batches=0, work=0.0)


class Saved(Island):
    """A replica whose private state is its inner optimizer's, and whose every inner step is saved."""

    def __init__(self, store: Store, slot: str = "a", **more: object) -> None:
        super().__init__(store, slot, **({"sync_every": H, "minimum": 1, "keep_unfinished": AT_ONCE} | more))  # type: ignore[arg-type]
        self.inner.param_groups[0]["momentum"] = 0.9
        self.manager.register_private_state("inner", self.inner.load_state_dict, self.inner.state_dict)

    @property
    def momenta(self) -> list[torch.Tensor]:
        return [self.inner.state[parameter]["momentum_buffer"].clone() for parameter in self.model.parameters()]

    @property
    def state(self) -> list[torch.Tensor]:
        return [*(parameter.detach().clone() for parameter in self.model.parameters()), *self.momenta]

    @property
    def progress(self) -> tuple[int, int]:
        """Closed rounds, and inner steps of the current one."""
        return self.manager.current_step(), self.manager.inner_steps


def saves(store: Store, slot: str = "a") -> list[int]:
    return checkpoint.complete(store, keys.unfinished_prefix(slot))


def inner_steps(store: Store) -> dict[tuple[int, str], int]:
    return {(contribution.round, contribution.slot): contribution.inner_steps for contribution in contributions(store)}


def partial(inner_steps: int, elements: int) -> PartialRound:
    """Progress in round 0 of one fragment of so many elements."""
    deltas = ((torch.ones(elements),),)
    return PartialRound(
        round=0, previous=GENESIS, inner_steps=inner_steps, tokens=0, seconds=1.0, deltas=deltas, private={}
    )


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


# Resuming.


@pytest.mark.parametrize("fragments", [1, 2])
def test_next_incarnation_continues_within_the_round(store: MemoryStore, fragments: int) -> None:
    """With two fragments, one is exchanged in the round and both have been trained."""
    died = Saved(store, fragments=fragments, lr=0.01).take(H + 4)
    (number,) = saves(store)
    assert {keys.round_of(entry.key) for entry in store.list(keys.unfinished_prefix("a"))} == {number}
    back = Saved(store, fragments=fragments, lr=0.01, seed=5).take(0)
    assert back.progress == (1, 4)
    torch.testing.assert_close(back.state, died.state)
    assert back.take(2).progress == (2, 0)
    assert inner_steps(store) == {(0, "a"): H, (1, "a"): H * fragments}


def test_stopped_replica_continues_where_it_was(store: MemoryStore) -> None:
    stopped = Saved(store, keep_unfinished=timedelta(hours=1)).take(3)
    assert saves(store) == []
    stopped.stop()
    assert saves(store) == [1]
    assert Saved(store, seed=5).take(0).progress == (0, 3)


def test_nothing_is_saved_or_resumed_unless_configured(store: MemoryStore) -> None:
    Saved(store, keep_unfinished=None).take(3).stop()
    assert store.list(keys.UNFINISHED) == []
    Saved(store).take(3)
    assert Saved(store, keep_unfinished=None).take(0).progress == (0, 0)


def test_replicas_stopped_together_end_as_undisturbed_ones(store: MemoryStore) -> None:
    """Two are stopped within a round and started again: the same inner steps are in the same records."""
    both = [Saved(store, slot, minimum=2, seed=seed) for seed, slot in enumerate("ab")]
    together([lambda replica=replica: replica.take(4) for replica in both])
    for replica in both:
        replica.stop()
    again = [Saved(store, slot, minimum=2, seed=seed) for seed, slot in enumerate("ab", 5)]
    together([lambda replica=replica: replica.take(H - 4) for replica in again])
    assert inner_steps(store) == {(0, "a"): H, (0, "b"): H}
    assert members(store) == [["a", "b"]]
    assert [replica.progress for replica in again] == [(1, 0), (1, 0)]


# Progress counts once.


def test_round_closed_meanwhile_drops_progress_but_not_private_state(store: MemoryStore) -> None:
    killed = Saved(store, "a", grace_s=0.0).take(4)
    Saved(store, "b", grace_s=0.0).take(H)
    assert members(store) == [["b"]]
    back = Saved(store, "a", grace_s=0.0, seed=5).take(0)
    assert back.progress == (1, 0)
    assert all(map(torch.equal, back.momenta, killed.momenta))
    back.take(H)
    assert inner_steps(store)[1, "a"] == H


def test_contributed_steps_are_not_contributed_again(store: MemoryStore) -> None:
    Saved(store).take(H)  # its last save is of step H - 1, and the round is closed with all of them
    assert Saved(store, seed=5).take(H).progress == (2, 0)
    assert inner_steps(store) == {(0, "a"): H, (1, "a"): H}


def test_each_fragment_is_resumed_until_its_own_exchange_is_closed() -> None:
    begun = PartialRound(round=4, previous=GENESIS, inner_steps=3, tokens=0, seconds=1.0, deltas=((),) * 3, private={})
    open_fragments = {head: [f for f in range(3) if begun.is_open(f, head)] for head in (4, 5, 10)}
    assert open_fragments == {4: [0, 1, 2], 5: [0, 2], 10: []}, "round 4 exchanges fragment 1"


# Failures are logged, and training continues.


def test_damaged_save_is_skipped(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    Saved(store).take(4)
    (number,) = saves(store)
    key = next(e.key for e in store.list(keys.unfinished_prefix("a")) if not e.key.endswith(keys.MANIFEST))
    data = bytearray(store.read(key) or b"")
    data[-1] ^= 1
    store.replace(key, bytes(data))
    back = Saved(store, seed=5).take(0)
    assert back.progress == (0, 0)
    assert f"unfinished_round_failed round={number}" in caplog.text
    assert back.take(H).progress == (1, 0)
    assert saves(store) > [number]


def test_progress_beyond_the_followed_log_is_dropped(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage ends following early: what was trained on later parameters does not belong on these."""
    Saved(store, checkpoint_every=100).take(H + 4)
    back = Saved(store, checkpoint_every=100, seed=5)
    monkeypatch.setattr(back.manager.lifecycle.log_follower, "is_behind", lambda: False)
    assert back.take(0).progress == (0, 0)
    assert "the log was not followed to it" in caplog.text


def test_progress_of_another_model_is_dropped(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    Saved(store).manager.lifecycle.log_follower.unfinished.save(START, partial(3, elements=9), wait=True)
    assert Saved(store).take(0).progress == (0, 0)
    assert "another model" in caplog.text


def test_progress_of_another_run_is_left_alone(store: MemoryStore) -> None:
    Saved(store).take(4)
    for entry in store.list(""):
        if not entry.key.startswith(keys.UNFINISHED):
            store.delete(entry.key)
    assert Saved(store, seed=5).take(0).progress == (0, 0)


def test_progress_that_is_not_finite_is_not_saved(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    replica = Saved(store).take(2)
    before = saves(store)
    with torch.no_grad():
        next(replica.model.parameters()).fill_(torch.nan)
    replica.take(1)
    assert saves(store) == before
    assert "not finite" in caplog.text


def test_replaced_incarnation_publishes_nothing(store: MemoryStore) -> None:
    old = Saved(store).take(2)
    before = saves(store)
    Presence(old.manager.session.log, SystemClock(), "a", 1.0)
    old.take(1)
    assert saves(store) == before
    with pytest.raises(Fenced):
        old.manager.presence.raise_if_fenced()


def test_save_is_due_after_its_time_only(store: MemoryStore) -> None:
    clock = FakeClock()
    replica = start_replica(store, clock, "a")
    unfinished = PartialRoundStore(replica.log, replica.presence, clock, SingleRank(), 5.0)
    assert not unfinished.is_due(0, 1, now=False)
    clock.advance(5.0)
    assert not unfinished.is_due(0, 0, now=False)
    assert unfinished.is_due(0, 1, now=False)
    unfinished.save(START, partial(1, elements=2), wait=True)
    assert not unfinished.is_due(0, 1, now=True)
    assert unfinished.is_due(0, 2, now=True)
    assert not unfinished.is_due(0, 2, now=False)
    unfinished.close(wait=True)
