"""`skerry runs`, and commands that take the URI of a run in place of its spec."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.infra.runs import write_spec
from tests.kit.protocol import run_record
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.runtime.log import keys

if TYPE_CHECKING:
    from pathlib import Path


def fleet_of(folder: Path) -> Fleet:
    return Fleet(folder, run_record(FakeClock(), name=folder.name, slots=SLOTS, rounds=8, min_replicas=1))


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A run of eight rounds below a store, of which two are closed, and whose replicas have ended."""
    fleet = fleet_of(tmp_path / "store" / "test-run")
    for number in range(2):
        fleet.train(number, *SLOTS)
    for slot in SLOTS:
        fleet.end(slot)
    return fleet


def test_runs_below_a_store_are_listed_with_their_states(fleet: Fleet, tmp_path: Path) -> None:
    other = fleet_of(tmp_path / "store" / "other")
    other.train(0, *SLOTS)
    (tmp_path / "store" / "notes").mkdir()
    (tmp_path / "store" / "damaged").mkdir()
    (tmp_path / "store" / "damaged" / "run.json").write_text("{")
    store = (tmp_path / "store").as_uri()
    assert invoke("extend", fleet.store.uri, "--rounds", "9").exit_code == 0
    result = invoke("runs", store, "--json")
    listed = {run["name"]: (run["closed"], run["state"]) for run in json.loads(result.stdout)["runs"]}
    assert listed == {"test-run": (2, "stopped"), "other": (1, "running"), "damaged": (0, "unreadable")}
    header, *lines = invoke("runs", f"{store}/").stdout.splitlines()
    assert invoke("runs", str(tmp_path / "store")).stdout.splitlines() == [header, *lines]
    assert header.split() == ["run", "rounds", "state", "last", "activity"]
    assert [line.split()[:3] for line in lines if line.startswith("test-run")] == [["test-run", "2/9", "stopped"]]
    # Of a spec, its store is listed; of the URI of a run, the run.
    assert json.loads(invoke("runs", write_spec(tmp_path), "--json").stdout)["uri"] == store
    (line,) = invoke("runs", fleet.store.uri).stdout.splitlines()[1:]
    assert line.startswith("test-run")
    assert "no runs at" in invoke("runs", f"{store}/notes").stdout


def test_status_and_destroy_take_the_uri_of_a_run(fleet: Fleet) -> None:
    assert "2 of 8 rounds" in invoke("status", fleet.store.uri).stdout
    logs = invoke("logs", fleet.store.uri)
    assert (logs.exit_code, "go to the folder of its spec" in logs.output) == (1, True)
    assert invoke("destroy", fleet.store.uri, "--yes").exit_code == 0
    assert fleet.store.list(keys.COMMITS) == []
