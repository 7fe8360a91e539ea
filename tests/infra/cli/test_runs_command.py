"""`skerry runs`, and commands that take the URI of a run in place of its spec."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.infra.runs import write_spec
from tests.kit.protocol import run_record
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.runtime.log import keys
from skerry.runtime.log.records import Member, Place
from skerry.runtime.log.run_record import Elsewhere, Parent

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


def test_uri_of_a_run_in_a_cloud_is_destroyed_only_with_data(fleet: Fleet, tmp_path: Path) -> None:
    for slot in SLOTS:
        key = keys.member(slot, 0)
        member = Member.parse(fleet.store.read(key) or b"", key)
        fleet.store.replace(key, member.model_copy(update={"place": Place(cloud="aws", region="us-east-1")}).to_bytes())
    mirror = tmp_path / "mirror"
    shutil.copytree(tmp_path / "store" / "test-run", mirror)
    mark = Elsewhere(why="mirror", uri=fleet.store.uri, run=fleet.nonce, round=2, by="a-0", created="now")
    (mirror / keys.ELSEWHERE).write_bytes(mark.to_bytes())
    refused = invoke("destroy", fleet.store.uri, "--yes")
    assert refused.exit_code == 2
    assert "were started in aws, and its store does not name their jobs: name its spec" in refused.stderr
    assert len(fleet.store.list(keys.COMMITS)) == 2
    assert invoke("destroy", mirror.as_uri(), "--yes").exit_code == 0
    assert not (mirror / "commits").exists()
    assert invoke("destroy", fleet.store.uri, "--yes", "--data").exit_code == 0
    assert fleet.store.list(keys.COMMITS) == []


def test_run_that_left_a_cloud_is_not_destroyed_by_its_uri(fleet: Fleet) -> None:
    key = keys.member(SLOTS[0], 0)
    first = Member.parse(fleet.store.read(key) or b"", key)
    fleet.store.replace(key, first.model_copy(update={"place": Place(cloud="aws")}).to_bytes())
    here = first.model_copy(update={"incarnation": 1, "place": Place(cloud="local")})
    fleet.store.create(keys.member(SLOTS[0], 1), here.to_bytes())
    fleet.end(SLOTS[0], 1)
    refused = invoke("destroy", fleet.store.uri, "--yes")
    assert (refused.exit_code, "were started in aws" in refused.stderr) == (2, True)
    assert len(fleet.store.list(keys.COMMITS)) == 2


def test_refused_destroy_of_a_restored_run_names_the_run_before_it(fleet: Fleet) -> None:
    parent = Parent(uri="s3://acme/runs/first", run=fleet.nonce, round=1, commit="a" * 64)
    fleet.store.replace(keys.RUN, fleet.run.model_copy(update={"parent": parent}).to_bytes())
    key = keys.member(SLOTS[0], 0)
    copied = Member.parse(fleet.store.read(key) or b"", key).model_copy(update={"place": Place(cloud="aws")})
    fleet.store.replace(key, copied.to_bytes())
    refused = invoke("destroy", fleet.store.uri, "--yes").stderr
    assert f"replicas of {fleet.store.uri}, or of {parent.uri}, which it continues, were started in aws" in refused


def test_data_of_a_run_of_this_machine_is_not_destroyed_by_uri(fleet: Fleet) -> None:
    refused = invoke("destroy", fleet.store.uri, "--yes", "--data")
    assert (refused.exit_code, "which its spec names: name that, or leave it out" in refused.stderr) == (2, True)
    assert len(fleet.store.list(keys.COMMITS)) == 2
