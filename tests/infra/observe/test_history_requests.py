"""The requests for the history of a long run and of one of many replicas, and what a first look then shows.

Together: a run of 10,000 rounds of 64 replicas takes 100 + 2 * 64 + 7 requests, however often replicas restarted.
"""

from __future__ import annotations

import pytest
from tests.infra.observe.rolled_up_run import RolledUpRun

from skerry.infra.observe.history import read_history
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.observe.read_participation import read_participation


@pytest.mark.parametrize("restarts", [0, 30])
def test_history_costs_a_request_for_a_hundred_rounds(restarts: int) -> None:
    rolled_up = RolledUpRun(10_000, 4, restarts)
    history = read_history(rolled_up.store)
    assert rolled_up.store.requests == 100 + 2 * 4 + 7
    assert [item.round for item in history.rounds] == list(range(10_000))
    assert {len(item.replicas) for item in history.rounds} == {4}
    absent = [item.round for item in history.rounds if item.replicas[0].part == "absent"]
    assert absent == [number for number in range(10_000) if number % 100 == 96]
    assert (len(history.starts), len(history.heartbeats)) == (4 * (1 + restarts), 4)
    assert all(start.outcome is not None for start in history.starts)


def test_first_look_and_participation_use_roll_ups() -> None:
    rolled_up = RolledUpRun(300, 64)
    history = read_history(rolled_up.store)
    assert rolled_up.store.requests == 3 + 2 * 64 + 7
    rolled_up.store.forget()
    view = Observer(rolled_up.store, RunSettings(first=rolled_up.run), rolled_up.clock, history, reread=0).view()
    assert rolled_up.store.requests < 10
    assert (view.closed, len(view.recent), view.losses[-1][0]) == (300, 64, 299)
    assert (view.replicas[0].in_rounds, view.replicas[1].in_rounds) == (297, 300)
    assert view.finished
    taken = read_participation(rolled_up.store)
    assert (taken.rounds, taken.complete) == (300, 297)
    assert taken.replicas[0].missing == (96, 196, 296)
