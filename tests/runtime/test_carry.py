"""A late replica's work counts: what no record lists is kept, and brought to a later round."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from tests.support import logs
from tests.support.managers import Island, contributions, decisions, receipts, together

from skerry.runtime.carry import Carry, Trained, full_steps_of, kept_of
from skerry.runtime.carry import together as joined
from skerry.runtime.codec.layout import Index, TensorSpec
from skerry.runtime.records import Contribution, Part
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.carry import Kept

INDEX = Index((TensorSpec("0", "float32", (2,)),))
H = 6


def kept(value: float, *, steps: int = 2, full: int = 6, round_number: int = 0, fragment: int = 0) -> Kept:
    trained = Trained(tokens=10 * steps, inner_steps=steps, fragment=fragment)
    return kept_of([torch.full((2,), value)], INDEX, round_number, trained, full)


def test_who_was_late_holds_back_once_and_then_no_more() -> None:
    carry = Carry()
    carry.keep(kept(1.0, steps=5))
    assert carry.to_offer(0) is None, "the others wait for it in the next round: it is on time again"
    assert not carry.keeps(1)
    carry.keep(kept(2.0, steps=5))
    brought = carry.to_offer(0)
    assert brought is not None
    assert brought.tensors[0].tolist() == [3.0, 3.0], "what came late twice is brought together"
    assert brought.inner_steps == 10


def test_what_is_held_back_is_part_of_the_next_pseudo_gradient() -> None:
    carry = Carry()
    carry.keep(kept(1.0, steps=5))
    tensor = torch.full((2,), 10.0)
    mine = carry.to_add(0, INDEX)
    assert mine is not None
    assert [one.tolist() for one in joined([tensor], mine)] == [[11.0, 11.0]]
    assert tensor.tolist() == [10.0, 10.0], "either may still be wanted alone"
    trained = Trained(tokens=60, inner_steps=6, share=0.5).plus(mine)
    added = Trained(tokens=60, inner_steps=11, share=0.5, late=5 / 6)
    assert trained == added, "what is added does not weigh, and is work all the same"


@pytest.mark.parametrize(("steps", "share", "tokens"), [(2, 1 / 3, 20), (6, 1.0, 60), (9, 1.0, 60)])
def test_what_is_late_weighs_its_share_of_a_round_and_never_more_than_one(
    steps: int, share: float, tokens: int
) -> None:
    assert kept(1.0, steps=steps).share == pytest.approx(share)
    assert kept(1.0, steps=steps).tokens == tokens


def test_a_round_is_as_long_as_those_took_who_were_in_time_and_whole() -> None:
    def record(steps: int, *, share: float = 1.0, discount: float = 1.0) -> Contribution:
        sealed = logs.load(b"x")
        return Contribution(
            run="0" * 32, round=0, exchange=0, slot="a", incarnation=0, base="0" * 64, index=sealed.index,
            parts=tuple(sealed.parts), tokens=0, inner_steps=steps, share=share, discount=discount, nonce="0" * 32,
        )  # fmt: skip

    early, added, brought, whole = record(2, share=1 / 3), record(11), record(18, discount=0.5), record(6)
    assert full_steps_of([early, added, brought, whole]) == 6
    assert full_steps_of([early, brought]) == 18


PARTS = (Part(digest="1" * 32, header_bytes=64, total_bytes=72),)
OTHERS = (Part(digest="2" * 32, header_bytes=64, total_bytes=72),)


@pytest.mark.parametrize("counted", [None, OTHERS])
def test_what_was_offered_and_not_counted_is_brought_again_at_once(counted: tuple[Part, ...] | None) -> None:
    carry = Carry()
    carry.keep(kept(1.0))
    carry.stake(0, 1, 0, PARTS)
    assert not carry.keeps(0)
    carry.settle(0, counted)
    carry.keep(kept(2.0))
    brought = carry.to_offer(0)
    assert brought is not None
    assert brought.tensors[0].tolist() == [3.0, 3.0]


def test_what_was_counted_is_brought_no_more() -> None:
    carry = Carry()
    carry.keep(kept(1.0))
    carry.stake(0, 1, 0, PARTS)
    carry.settle(0, PARTS)
    assert not carry.keeps(0)
    assert carry.at_stake(0) is None


def test_who_was_late_twice_holds_nothing_back_even_if_it_was_never_asked() -> None:
    carry = Carry()
    carry.keep(kept(1.0))
    carry.keep(kept(2.0))
    assert carry.to_offer(0) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_kept(value: float) -> None:
    carry = Carry()
    assert not carry.keep(kept(value))
    assert not carry.keeps(0)


class Pace:
    """Lets the fast replicas close a round only when the slow one has taken its steps for it."""

    def __init__(self) -> None:
        self._allowed = 0
        self._changed = threading.Condition()

    def allow(self, rounds: int) -> None:
        with self._changed:
            self._allowed = max(self._allowed, rounds)
            self._changed.notify_all()

    def until(self, round_number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._allowed > round_number, timeout=30)


def fast(store: MemoryStore, slot: str, seed: int, pace: Pace, rounds: int, grace_s: float) -> Island:
    island = Island(store, slot, sync_every=H, seed=seed, minimum=2, grace_s=grace_s)
    with island.diloco:
        while island.manager.current_step() < rounds:
            island.manager.catch_up(island.inner)
            pace.until(island.manager.current_step())
            island.step()
    island.manager.shutdown()
    return island


def slow(store: MemoryStore, pace: Pace, rounds: int) -> Island:
    """Takes a third of the others' inner steps in each round, and lets the others finish it before it takes more."""
    island = Island(store, "r-9", sync_every=H, seed=9, minimum=2)
    with island.diloco:
        island.manager.catch_up(island.inner)
        while (round_number := island.manager.current_step()) < rounds:
            for _ in range(H // 3):
                island.step()
            pace.allow(round_number + 1)
            while island.manager.current_step() == round_number:
                island.manager.catch_up(island.inner)  # until it sees that the others are done
    island.manager.shutdown()
    return island


def trained_together(rounds: int, grace_s: float) -> tuple[MemoryStore, list[Island]]:
    store, pace = MemoryStore(), Pace()
    islands = together(
        [
            lambda: fast(store, "r-0", 0, pace, rounds, grace_s),
            lambda: fast(store, "r-1", 1, pace, rounds, grace_s),
            lambda: slow(store, pace, rounds),
        ]
    )
    for number in range(rounds - 1):
        assert len({receipt.state for receipt in receipts(store, number).values()}) == 1
    assert len({island.originals["weight"].sum().item() for island in islands}) == 1
    return store, islands


def members(store: MemoryStore) -> Counter[str]:
    return Counter(share.slot for decision in decisions(store) for share in decision.members)


def test_a_replica_three_times_slower_is_in_nearly_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.runtime.pace._MARGIN", 0.0)  # steps take no time here: it would seem to be nearly done
    store, _ = trained_together(10, grace_s=10.0)
    counted = members(store)
    assert counted["r-0"] == counted["r-1"] == 10
    assert counted["r-9"] >= 8
    shares = [share for decision in decisions(store) for share in decision.members if share.slot == "r-9"]
    assert [share.weight for share in shares] == pytest.approx([1 / 3] * len(shares))
    assert all(one.inner_steps == H // 3 for one in contributions(store) if one.slot == "r-9")


@pytest.mark.slow
def test_what_never_comes_in_time_is_brought_late_and_counts_once() -> None:
    store, _ = trained_together(12, grace_s=0.2)
    late = [one for one in contributions(store) if one.slot == "r-9"]
    listed = {share.contribution for decision in decisions(store) for share in decision.members}
    assert members(store)["r-9"] >= 4
    assert all(one.share * one.discount == pytest.approx(0.5 * min(1.0, one.inner_steps / H)) for one in late)
    assert sum(one.inner_steps for one in late) <= 12 * H // 3, "nothing counts twice"
    assert len(listed) == sum(members(store).values())
