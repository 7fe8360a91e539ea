"""Every interleaving of small runs. `scripts/bench simulate --explore` goes further and says how many states."""

from __future__ import annotations

import itertools

import pytest
from tests.simulation.explore import Bounds, commute, explore
from tests.simulation.mutants import named
from tests.simulation.search import quiet

from skerry.runtime.store.memory import MemoryStore

KEYS = ("a/1", "a/2", "b/1")
CALLS = (
    "list a/",
    "list b/",
    *(f"{what} {key}" for key in KEYS for what in ("read", "create", "replace", "delete")),
)


@pytest.mark.parametrize(
    ("bounds", "at_least"),
    [
        (Bounds(rounds=1, preemptions=1), 50),
        pytest.param(Bounds(rounds=2, preemptions=1), 100, marks=pytest.mark.slow),
        pytest.param(Bounds(rounds=1, preemptions=0, crashes=1), 100, marks=pytest.mark.slow),
        pytest.param(Bounds(rounds=1, preemptions=0, replaced=1), 100, marks=pytest.mark.slow),
        (Bounds(replicas=3, rounds=1, preemptions=0), 30),
    ],
    ids=str,
)
def test_no_interleaving_breaks_an_invariant(bounds: Bounds, at_least: int) -> None:
    with quiet():
        seen = explore(bounds)
    assert seen.complete
    assert not seen.violations, "\n".join(seen.violations)
    assert seen.schedules >= at_least


@pytest.mark.parametrize(
    ("bug", "bounds"),
    [
        ("the loser of a proposal uses its own decision", Bounds(preemptions=2)),
        ("the loser of a proposal uses its own decision", Bounds()),
        ("a checkpoint is visible before its parts", Bounds(preemptions=0)),
        pytest.param(
            "a replaced incarnation is not fenced",
            Bounds(rounds=2, preemptions=0, replaced=1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_exploration_finds_a_deliberate_bug(bug: str, bounds: Bounds) -> None:
    with named(bug).alive(), quiet():
        assert explore(bounds).violations


def both(store: MemoryStore, calls: tuple[str, str]) -> tuple[dict[str, object], list[tuple[str, bytes]]]:
    """The answers to the two calls, and what is in the store afterwards."""
    answers: dict[str, object] = {}
    for call in calls:
        what, _, key = call.partition(" ")
        match what:
            case "create" | "replace":
                answers[call] = getattr(store, what)(key, call.encode())
            case "list":
                answers[call] = [entry.key for entry in store.list(key)]
            case _:
                answers[call] = getattr(store, what)(key)
    return answers, [(entry.key, bytes(store.read(entry.key) or b"")) for entry in store.list("")]


@pytest.mark.parametrize("present", [(), ("a/1",), ("a/1", "b/1")])
def test_calls_that_commute_have_the_same_effects_in_both_orders(present: tuple[str, ...]) -> None:
    for first, second in itertools.permutations(CALLS, 2):
        ends: list[object] = []
        for calls in ((first, second), (second, first)):
            store = MemoryStore("memory://two")
            for key in present:
                store.create(key, b"before")
            ends.append(both(store, calls))
        assert ends[0] == ends[1] or not commute(first, second), (first, second)
    assert commute("list a/", "create b/1")
    assert not commute("list a/", "create a/1")
