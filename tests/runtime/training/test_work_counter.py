"""With several fragments, a contribution weighs what was trained since that fragment's last exchange."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from tests.kit.managers import (
    Island,
    begin_run,
    contributions,
    fail_next_exchange,
    members,
    states,
    together,
    train_all,
    weights,
)

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Usage
from skerry.runtime.training.current_round import CurrentRound
from skerry.runtime.training.work_counter import WorkAmount, WorkCounter

F, S = 4, 3
"""Fragments, and inner steps of a round."""
AT_ONCE = timedelta(microseconds=1)


def count(counter: WorkCounter, *tokens: int) -> None:
    """One inner step for each number of tokens."""
    for amount in tokens:
        counter.count_tokens(amount)
        counter.count_step()


def test_each_fragment_counts_from_its_own_exchange() -> None:
    counter = WorkCounter()
    count(counter, 10, 20)
    counter.exchanged(0)
    counter.close_round("one round on", 2)
    counter.set_position("one round on")
    count(counter, 5)
    counter.resume(2, WorkAmount(4, 40))
    count(counter, 3)
    assert [counter.since(fragment) for fragment in range(3)] == [(2, 8), (4, 38), (5, 43)]


def test_tokens_of_the_next_step_outlive_a_checkpoint_that_is_loaded() -> None:
    """Without `catch_up` a join comes between the tokens and their step: the step is taken on what was loaded."""
    counter = WorkCounter()
    current = CurrentRound(since=0.0, usage=Usage(), counter=counter)
    current.count_tokens(10)
    assert counter.set_position("joined")
    current.throw_away_all()
    current.count_step(idle=False)
    assert not counter.set_position("joined")
    assert (counter.since(3), current.inner_steps, current.tokens) == (WorkAmount(1, 10), 1, 10)
    current.count_tokens(7)
    assert counter.set_position("jumped")
    current.throw_away_all()
    assert (counter.since(3), current.inner_steps, current.tokens) == (WorkAmount(0, 7), 0, 7)


# Real managers.


class Fragmented(Island):
    """A replica of four fragments whose every inner step takes `tokens` tokens."""

    def __init__(self, store: MemoryStore, slot: str = "a", tokens: int = 10, **more: object) -> None:
        settings: dict[str, object] = {"fragments": F, "sync_every": S, "lr": 0.01, "minimum": 1}
        super().__init__(store, slot, **(settings | more))  # type: ignore[arg-type]
        self.manager.register_private_state("nothing", lambda _: None, dict)
        self.tokens = tokens

    def step(self) -> None:
        self.manager.count_tokens(self.tokens)
        super().step()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def inner_steps(store: MemoryStore, slot: str = "a") -> list[int]:
    return [contribution.inner_steps for contribution in contributions(store) if contribution.slot == slot]


def steps_since(number: int, delay: int = 0) -> int:
    """Inner steps from a fragment's last exchange to the one in this round; those during the exchange are discarded."""
    return min(number + 1, F) * S - delay


@pytest.mark.parametrize("delay", [0, 1])
def test_each_record_weighs_the_tokens_since_the_fragments_last_exchange(store: MemoryStore, delay: int) -> None:
    begin_run(store, "ab", minimum=2, weighting="tokens")
    tokens, rounds = {"a": 10, "b": 70}, 3 * F
    settings: dict[str, object] = {"wrapper": {"fragment_sync_delay": delay}, "minimum": 2}
    train_all([Fragmented(store, slot, tokens[slot], **settings) for slot in tokens], rounds)
    assert weights(store) == [
        {slot: float(tokens[slot] * steps_since(number, delay)) for slot in tokens} for number in range(rounds)
    ]
    assert inner_steps(store) == [steps_since(number, delay) for number in range(rounds)]
    assert all(contribution.share == 1.0 for contribution in contributions(store))
    assert all(len(states(store, number)) == 1 for number in range(rounds))


@pytest.mark.parametrize("keep_unfinished", [AT_ONCE, None])
def test_work_of_a_killed_replica_counts_once(store: MemoryStore, keep_unfinished: timedelta | None) -> None:
    """Killed within round 5, with two of its inner steps. They are resumed if they were saved, otherwise lost."""
    begin_run(store, "a", weighting="tokens")
    Fragmented(store, keep_unfinished=keep_unfinished).train(5, close=False).take(2)
    back = Fragmented(store, keep_unfinished=keep_unfinished)
    back.join()
    assert back.manager.inner_steps == (0 if keep_unfinished is None else 2)
    back.train(2 * F + 2)
    if keep_unfinished is None:
        # Since its start it has trained one round for fragment 1, two for 2, three for 3, and then all of them.
        expected = [S, 2 * S, 3 * S, 4 * S, 4 * S, S, 2 * S, 3 * S, 4 * S, 4 * S]
        assert [c.share for c in contributions(store)] == [1.0] * 5 + [1 / 4, 2 / 4, 3 / 4, 1.0, 1.0]
    else:
        expected = [steps_since(number) for number in range(2 * F + 2)]
    assert inner_steps(store) == expected
    assert [c.tokens for c in contributions(store)] == [10 * steps for steps in expected]
    assert weights(store) == [{"a": 10.0 * steps} for steps in expected]


def test_save_without_counts_of_fragments_counts_the_round_alone(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions have saved it."""
    save = checkpoint.save

    def save_without_counts(*args: object, state: dict[str, object], **more: object) -> bool:
        older = {key: value for key, value in state.items() if key != "trained"}
        return save(*args, state=older, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save", save_without_counts)
    Fragmented(store, keep_unfinished=AT_ONCE).train(5, close=False).take(2)
    Fragmented(store, keep_unfinished=AT_ONCE).train(7)
    assert inner_steps(store)[5:] == [S, 2 * S]


def test_failed_round_discards_the_work_on_its_own_fragment_only(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Fragmented(store).train(2, close=False)
    fail_next_exchange(replica.manager, monkeypatch)
    replica.train(5)
    # Round 2 was trained for anew; fragments 3 and 0 were trained on in both attempts.
    assert inner_steps(store) == [S, 2 * S, S, 5 * S, 5 * S]
    assert [c.tokens for c in contributions(store)] == [10 * steps for steps in inner_steps(store)]
    assert [c.share for c in contributions(store)] == [1.0, 1.0, 1 / 3, 1.0, 1.0]


def test_all_fragments_are_trained_anew_after_tensors_that_are_not_finite(store: MemoryStore) -> None:
    """All fragments may hold the same, so all become the shared ones."""
    begin_run(store, "ab", minimum=2)
    replicas = [Fragmented(store, slot) for slot in "ab"]
    train_all(replicas, 2, close=False)
    together([lambda r=replica: r.take(1) for replica in replicas])
    with torch.no_grad():
        next(replicas[1].model[2].parameters()).fill_(torch.nan)
    train_all(replicas, 3 + F)
    assert members(store)[2] == ["a"]
    assert inner_steps(store, "b")[2:] == [S, 2 * S, 3 * S, 4 * S]
    assert inner_steps(store, "a")[3:] == [4 * S] * F
