"""With several fragments, a contribution weighs what was trained since that fragment's last exchange."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import Pace, contributions, decisions, manager_of, receipts, together
from tests.kit.protocol import run_record
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.clock import SystemClock
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.work_counter import WorkAmount, WorkCounter

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.log.records import Contribution
    from skerry.runtime.store import Store

F, S = 4, 3
SLOTS = ("a", "b")


def test_each_fragment_counts_from_its_own_exchange() -> None:
    tally = WorkCounter()
    for tokens in (10, 20):
        tally.count_tokens(tokens)
        tally.count_step()
    tally.exchanged(0)
    tally.count_tokens(5)
    tally.count_step()
    assert (tally.since(0), tally.since(1)) == (WorkAmount(1, 5), WorkAmount(3, 35))


def test_what_the_next_step_takes_outlives_a_checkpoint_that_is_loaded() -> None:
    """Without `catch_up` a join comes between the tokens and their step: the step is taken on what was loaded."""
    tally = WorkCounter()
    tally.count_tokens(10)
    tally.stands("joined")
    tally.count_step()
    tally.stands("joined")
    assert tally.since(3) == WorkAmount(1, 10)
    tally.count_tokens(7)
    tally.stands("jumped")
    assert tally.since(3) == WorkAmount(0, 7)


def test_a_round_that_was_closed_leaves_the_other_fragments_alone() -> None:
    tally = WorkCounter()
    tally.count_tokens(10)
    tally.count_step()
    tally.exchanged(0)
    tally.moved("one round on", 1)
    tally.stands("one round on")
    assert (tally.since(0), tally.since(1)) == (WorkAmount(0, 0), WorkAmount(1, 10))


def test_what_was_taken_up_goes_on() -> None:
    tally = WorkCounter()
    tally.resume(2, WorkAmount(4, 40))
    tally.count_tokens(3)
    tally.count_step()
    assert tally.since(2) == WorkAmount(5, 43)


class Streaming:
    """A replica whose model has four fragments. Every inner step takes `tokens` tokens."""

    def __init__(self, store: Store, slot: str, tokens: int, *, delay: int = 0, sync: int = S, **more: object) -> None:
        torch.manual_seed(len(slot) + tokens)
        self.model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(F)))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.manager = manager_of(store, slot, **({"minimum": 1} | more))  # type: ignore[arg-type]
        outers = [torch.optim.SGD(part.parameters(), lr=0.7) for part in self.model]
        self.diloco = DiLoCo(
            self.manager, list(self.model), self.inner, outers, sync_every=F * sync, fragment_sync_delay=delay
        )
        self.manager.register_private_state("nothing", lambda _: None, dict)
        self.tokens = tokens

    def step(self) -> None:
        self.inner.zero_grad()
        (self.model(torch.ones(2, 3)) ** 2).sum().backward()
        self.manager.count_tokens(self.tokens)
        self.inner.step()

    def train(self, rounds: int, steps: int = 0, *, close: bool = False) -> Streaming:
        """Until `rounds` rounds are closed, and some steps more."""
        with self.diloco:
            while True:
                self.manager.catch_up(self.inner)
                saving = self.manager.lifecycle.course.unfinished._saving
                if saving is not None:
                    saving.result(timeout=10)
                at = self.manager.current_step(), self.manager.inner_steps
                if at >= (rounds, steps):
                    break
                self.step()
        if close:
            self.manager.shutdown()
        return self


def begin(store: MemoryStore, weighting: str = "tokens", slots: tuple[str, ...] = SLOTS) -> None:
    run = run_record(SystemClock(), slots=slots, min_replicas=len(slots))
    store.create(keys.RUN, run.model_copy(update={"weighting": weighting}).to_bytes())


def weights(store: MemoryStore) -> list[dict[str, float]]:
    return [{share.slot: share.weight for share in decision.members} for decision in decisions(store)]


def of(store: MemoryStore, slot: str) -> list[Contribution]:
    return [contribution for contribution in contributions(store) if contribution.slot == slot]


def steps_since(number: int, delay: int) -> int:
    """Inner steps from a fragment's last exchange to the one in this round; what is taken meanwhile is thrown away."""
    return min(number + 1, F) * S - delay


@pytest.mark.parametrize("delay", [0, 1])
def test_each_record_weighs_the_tokens_since_that_fragments_last_exchange(delay: int) -> None:
    store, rounds = MemoryStore(), 3 * F
    begin(store)
    replicas = [
        Streaming(store, slot, tokens, delay=delay, minimum=2) for slot, tokens in zip(SLOTS, (10, 70), strict=True)
    ]
    together([lambda r=replica: r.train(rounds, close=True) for replica in replicas])
    expected = [
        {slot: float(tokens * steps_since(number, delay)) for slot, tokens in zip(SLOTS, (10, 70), strict=True)}
        for number in range(rounds)
    ]
    assert weights(store) == expected
    assert [contribution.inner_steps for contribution in of(store, "a")] == [
        steps_since(number, delay) for number in range(rounds)
    ]
    assert all(contribution.share == 1.0 for contribution in contributions(store))
    for number in range(rounds - 1):
        assert len({receipt.state for receipt in receipts(store, number).values()}) == 1


@pytest.mark.parametrize("keep_unfinished", [timedelta(microseconds=1), None])
def test_what_a_replica_that_was_killed_has_trained_counts_once(keep_unfinished: timedelta | None) -> None:
    """Killed within round 5, with two of its inner steps; what it has saved goes on, and what it has not is gone."""
    store, tokens = MemoryStore(), 10
    begin(store, slots=("a",))
    Streaming(store, "a", tokens, keep_unfinished=keep_unfinished).train(5, steps=2)
    back = Streaming(store, "a", tokens, keep_unfinished=keep_unfinished).train(5)
    assert back.manager.inner_steps == (0 if keep_unfinished is None else 2)
    back.train(2 * F + 2, close=True)
    steps_by_round = [contribution.inner_steps for contribution in of(store, "a")]
    if keep_unfinished is None:
        # Since its start it has trained one round for fragment 1, two for 2, three for 3, and then all of them.
        assert steps_by_round == [S, 2 * S, 3 * S, 4 * S, 4 * S, S, 2 * S, 3 * S, 4 * S, 4 * S]
    else:
        assert steps_by_round == [steps_since(number, 0) for number in range(2 * F + 2)]
    assert [contribution.tokens for contribution in of(store, "a")] == [tokens * steps for steps in steps_by_round]
    assert weights(store) == [{"a": float(tokens * steps)} for steps in steps_by_round]


def test_replica_with_one_trained_round_of_four_weighs_a_quarter() -> None:
    """Without tokens: a share of the inner steps, of a replica that has joined anew."""
    store = MemoryStore()
    begin(store, "uniform", slots=("a",))
    Streaming(store, "a", 10).train(5)
    Streaming(store, "a", 10).train(F + 6, close=True)
    assert [contribution.share for contribution in of(store, "a")] == [1.0] * 5 + [1 / 4, 2 / 4, 3 / 4, 1.0, 1.0]


def test_a_save_of_the_round_alone_goes_on_with_the_rounds_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier versions have saved it."""
    save = checkpoint.save
    monkeypatch.setattr(
        checkpoint,
        "save",
        lambda *args, state, **more: save(
            *args, state={key: value for key, value in state.items() if key != "trained"}, **more
        ),
    )
    store, tokens = MemoryStore(), 10
    begin(store, slots=("a",))
    Streaming(store, "a", tokens, keep_unfinished=timedelta(microseconds=1)).train(5, steps=2)
    Streaming(store, "a", tokens, keep_unfinished=timedelta(microseconds=1)).train(7, close=True)
    assert [contribution.inner_steps for contribution in of(store, "a")[5:]] == [S, 2 * S]


def test_a_failed_round_throws_away_its_own_fragment_only() -> None:
    store = MemoryStore()
    begin(store, slots=("a",))
    replica = Streaming(store, "a", 10).train(2)
    failed: list[int] = []
    run = replica.manager.session.averager.run

    def fail_once(*args: object, **more: object) -> object:
        if not failed:
            failed.append(1)
            raise TimeoutError("the store was away")
        return run(*args, **more)  # type: ignore[arg-type]

    replica.manager.session.averager.run = fail_once  # type: ignore[method-assign,assignment]
    replica.train(5, close=True)
    # Round 2 was trained for anew; fragments 3 and 0 were trained on in both attempts.
    assert [contribution.inner_steps for contribution in of(store, "a")] == [S, 2 * S, S, 5 * S, 5 * S]
    assert [contribution.share for contribution in of(store, "a")] == [1.0, 1.0, 1 / 3, 1.0, 1.0]


def test_what_comes_after_tensors_that_are_not_finite_is_trained_anew() -> None:
    """All fragments may hold the same, so all become the shared ones."""
    store = MemoryStore()
    begin(store)
    well, sick = replicas = [Streaming(store, slot, 10, minimum=1) for slot in SLOTS]
    together([lambda r=replica: r.train(2, steps=1) for replica in replicas])
    with torch.no_grad():
        next(sick.model[2].parameters()).fill_(torch.nan)
    together([lambda r=replica: r.train(3 + F, close=True) for replica in replicas])
    assert [share.slot for share in decisions(store)[2].members] == ["a"]
    assert [contribution.inner_steps for contribution in of(store, "b")[2:]] == [S, 2 * S, 3 * S, 4 * S]
    assert [contribution.inner_steps for contribution in of(store, "a")[3:]] == [4 * S] * F
    assert well.manager.current_step() == 3 + F


def test_replica_that_jumps_by_a_checkpoint_counts_from_it() -> None:
    """Without `catch_up`, what was trained on the other fragments is loaded over."""
    store = MemoryStore()
    begin(store)
    other, jumps = (Streaming(store, slot, 10, minimum=1, grace_s=0.0) for slot in SLOTS)
    together([lambda: other.train(2), lambda: jumps.train(2, steps=S - 1)])
    other.train(6, close=True)
    with jumps.diloco:
        jumps.step()  # round 2 is over, and it is late
        for _ in range(2 * S):
            jumps.step()
    assert jumps.manager.current_step() == 8
    jumps.manager.shutdown()
    assert [(contribution.round, contribution.inner_steps) for contribution in of(store, "b")][-1] == (7, 2 * S)


@pytest.mark.slow
def test_rounds_ended_early_weigh_their_share_of_the_fragments_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of the others' inner steps in every round, so a third of their weight in every record."""
    monkeypatch.setattr(
        "skerry.runtime.training.early_end_policy._MARGIN", 0.0
    )  # steps take no time here: it would seem to be nearly done
    store, pace, rounds, sync = MemoryStore(), Pace(), 2 * F + 2, 6
    begin(store, "uniform", slots=("a", "b", "z"))

    def fast(slot: str) -> None:
        replica = Streaming(store, slot, 10, sync=sync, minimum=2)
        for number in range(rounds):
            replica.train(number)
            pace.until(number)
            replica.train(number + 1)
        replica.manager.shutdown()

    def slow() -> None:
        replica = Streaming(store, "z", 10, sync=sync, minimum=2)
        with replica.diloco:
            replica.manager.catch_up(replica.inner)
            while (number := replica.manager.current_step()) < rounds:
                for _ in range(sync // 3):
                    replica.step()
                pace.allow(number + 1)
                while replica.manager.current_step() == number:
                    pace.wait_for_look()
                    replica.manager.catch_up(replica.inner)
        replica.manager.shutdown()

    works: list[Callable[[], None]] = [lambda: fast("a"), lambda: fast("b"), slow]
    together(works)
    z_weights = [weight["z"] for weight in weights(store) if "z" in weight]
    assert len(z_weights) >= rounds - 2
    assert z_weights == pytest.approx([1 / 3] * len(z_weights))
    assert [contribution.inner_steps for contribution in of(store, "z")] == [
        min(contribution.round + 1, F) * sync // 3 for contribution in of(store, "z")
    ]
