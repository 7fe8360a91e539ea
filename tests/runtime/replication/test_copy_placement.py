"""Cliques and plans, alone and against NVIDIA's resiliency extension."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from skerry.runtime.errors import Invalid
from skerry.runtime.replication import ExchangePlan, NoReplicasAvailableError, parse_group_sequence
from skerry.runtime.replication.copy_placement import plan_exchange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SIZES = range(1, 65)


class Rank:
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def get_global_rank(self, group_rank: int | None = None) -> int:
        return self.rank if group_rank is None else group_rank


def cliques() -> Iterator[tuple[int, int, int, list[tuple[int, ...]]]]:
    for world in SIZES:
        for jump in SIZES:
            for factor in SIZES:
                if world % (jump * factor) == 0:
                    yield world, jump, factor, parse_group_sequence(jump, factor, world)


def planned(wanted: Mapping[int, Sequence[Any]], available: Mapping[int, set[Any]]) -> ExchangePlan:
    plan, lost = plan_exchange(Rank(), wanted, available)
    assert not lost
    return plan


def test_cliques_of_the_documented_example() -> None:
    groups = parse_group_sequence(replication_jump=8, replication_factor=2, world_size=32)
    assert groups == [(n, n + 8) for n in (*range(8), *range(16, 24))]


def test_ranks_of_a_clique_are_a_jump_apart() -> None:
    for world, jump, factor, groups in cliques():
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert all(len(group) == factor for group in groups)
        assert all(b - a == jump for group in groups for a, b in pairwise(group))


@pytest.mark.parametrize(("jump", "factor", "world"), [(3, 2, 8), (8, 2, 8), (0, 2, 8), (1, 0, 8)])
def test_ranks_that_cannot_be_divided_are_refused(jump: int, factor: int, world: int) -> None:
    with pytest.raises(Invalid, match=r"divide|at least 1"):
        parse_group_sequence(jump, factor, world)


def test_own_copy_is_preferred_and_needs_no_transfer() -> None:
    plan = planned({0: ["a"], 1: ["a"]}, {0: {"a"}, 1: {"a"}})
    assert [(entry.sender, entry.receiver) for entry in plan.entries] == [(0, 0), (1, 1)]


def test_senders_are_balanced() -> None:
    ids = [f"id {number}" for number in range(8)]
    plan = planned({0: ids, 1: [], 2: []}, {0: set(), 1: set(ids), 2: set(ids)})
    assert Counter(entry.sender for entry in plan.entries) == {1: 4, 2: 4}


def test_id_that_is_wanted_twice_is_sent_once() -> None:
    assert len(planned({0: ["a", "a"], 1: []}, {0: set(), 1: {"a"}}).entries) == 1


def test_plan_names_the_other_holders_as_alternates() -> None:
    (entry,) = planned({0: ["a"], 1: [], 2: [], 3: []}, {0: set(), 1: {"a"}, 2: set(), 3: {"a"}}).entries
    assert (entry.sender, entry.alternates) == (1, (3,))


def test_required_ids_are_those_to_send_and_on_request_the_alternates() -> None:
    plan = planned({0: ["a"], 1: [], 2: []}, {0: set(), 1: {"a"}, 2: {"a"}})
    assert [plan.required_ids(rank) for rank in range(3)] == [set(), {"a"}, set()]
    assert plan.required_ids(2, alternates=True) == {"a"}


def test_id_without_a_copy_is_listed_with_the_ranks_that_lack_it() -> None:
    _, lost = plan_exchange(Rank(), {0: ["a"], 4: []}, {0: set(), 4: set()})
    assert lost == ["'a': ranks 0, 4 do not hold it"]
    assert "no copy is left: 'a': ranks 0, 4" in str(NoReplicasAvailableError(lost))


class Gathered:
    """A group of the extension, with what its ranks want."""

    def __init__(self, wanted: Mapping[int, Sequence[Any]]) -> None:
        self.ranks = list(wanted)
        self._wanted = wanted

    def all_gather_object(self, _: object) -> list[Sequence[Any]]:
        return list(self._wanted.values())


def test_cliques_equal_those_of_the_extension() -> None:
    extension = pytest.importorskip("nvidia_resiliency_ext.checkpointing.local.replication.group_utils")
    for world, jump, factor, groups in cliques():
        assert groups == extension.parse_group_sequence(jump, factor, world)
    for world in (1, 6, 64):
        for jump in SIZES:
            for factor in SIZES:
                if world % (jump * factor):
                    with pytest.raises(AssertionError):
                        extension.parse_group_sequence(jump, factor, world)


def test_plans_serve_the_same_wishes_as_those_of_the_extension() -> None:
    extension = pytest.importorskip("nvidia_resiliency_ext.checkpointing.local.replication.strategies")
    strategy = extension.CliqueReplicationStrategy.__new__(extension.CliqueReplicationStrategy)
    for world, jump, factor, groups in cliques():
        draw = random.Random(f"{world} {jump} {factor}")
        lost_ranks = {rank for rank in range(world) if draw.random() < 0.3}
        for group in groups:
            available = {rank: set[int]() if rank in lost_ranks else set(group) for rank in group}
            wanted = {rank: [rank] for rank in group}
            strategy.local_group = Gathered(wanted)
            plan, lost = plan_exchange(Rank(), wanted, available)
            try:
                reference = strategy.retrieve_plan(available, None)
            except extension.NoReplicasAvailableError:
                assert lost
                continue
            assert not lost
            assert [(e.receiver, e.id_) for e in plan.entries] == [(e.receiver, e.id_) for e in reference.entries]
            assert all(entry.id_ in available[entry.sender] for entry in plan.entries)
            for entry, other in zip(plan.entries, reference.entries, strict=True):
                if entry.receiver not in lost_ranks or not entry.alternates:
                    assert entry.sender == other.sender
            assert most_sent(plan.entries) <= most_sent(reference.entries)


def most_sent(entries: Sequence[Any]) -> int:
    return max(Counter(entry.sender for entry in entries if entry.sender != entry.receiver).values(), default=0)
