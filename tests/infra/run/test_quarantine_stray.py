"""Records of a compromised replica stop a run, with a name for the cause; `doctor --quarantine` lets it go on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.kit.forger import CLOSED, Forger, take_over, train_pair
from tests.kit.managers import assert_same_parameters, islands_of, together
from tests.support.command_line import invoke

from skerry.infra.observe.doctor.examine import examine_store
from skerry.infra.run.quarantine_stray import quarantine_stray
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.kit.managers import Island

    from skerry.runtime.store import Store

ROUNDS = 5


def go_on(islands: Sequence[Island]) -> list[str]:
    """Train on; the error of each replica, "" for none."""

    def attempt(island: Island) -> str:
        try:
            island.train(ROUNDS)
        except (SkerryError, RuntimeError) as error:
            return str(error)
        return ""

    return together([lambda island=island: attempt(island) for island in islands])


def restart(store: Store) -> list[Island]:
    """New incarnations of both replicas."""
    return islands_of(store, "ab")


def assert_trained_alike(islands: Sequence[Island]) -> None:
    assert {island.manager.current_step() for island in islands} == {ROUNDS}
    assert_same_parameters(islands)


# The run stops, with a name for the cause; the operator moves the records away, and it goes on.

STOPS: dict[str, tuple[Callable[[Forger], object], str]] = {
    "commit of the open round": (lambda forger: forger.commit(CLOSED, forger.base(CLOSED)), "committed differently"),
    "commit of the next round": (lambda forger: forger.commit(CLOSED + 1), "committed differently"),
    "decision of a later round": (lambda forger: forger.decide(CLOSED + 2), "builds on another log"),
    "decision for itself": (lambda forger: forger.decide(CLOSED, forger.base(CLOSED)), "too few members"),
    "decision with contributions that it has not": (
        lambda forger: forger.decide(CLOSED, forger.base(CLOSED), "a", "b"),
        "contribution is missing",
    ),
    "all rounds to come": (lambda forger: take_over(forger, ROUNDS), "too few members"),
}


@pytest.mark.parametrize("name", STOPS)
def test_quarantine_ends_what_stops_the_run(name: str) -> None:
    attack, error = STOPS[name]
    store = MemoryStore()
    islands = train_pair(store)
    attack(Forger(store))
    errors = go_on(islands)
    assert [error in text and "--quarantine" in text for text in errors] == [True, True], errors
    result = quarantine_stray(store, lambda: examine_store(store))
    assert result.moved
    assert not [item for item in result.log.findings if item.severity == "error"]
    again = restart(store)
    assert go_on(again) == ["", ""]
    assert_trained_alike(again)


def test_replicas_that_restart_name_a_commit_of_an_undecided_round() -> None:
    store = MemoryStore()
    islands = train_pair(store)
    for island in islands:
        island.stop()
    forger = Forger(store)
    forger.commit(CLOSED, forger.base(CLOSED))
    errors = go_on(restart(store))
    assert all("--quarantine" in text for text in errors), errors


# The command.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for island in train_pair(DirectoryStore(tmp_path / "run")):
        island.stop()
    return tmp_path / "run"


def test_command_moves_stray_records_and_keeps_their_bytes(folder: Path) -> None:
    store = DirectoryStore(folder)
    forger = Forger(store)
    take_over(forger, ROUNDS)
    forger.commit(keys.MAX_ROUND)
    before = {entry.key: bytes(store.read(entry.key) or b"") for entry in store.list("")}
    report = invoke("doctor", folder.as_uri())
    assert report.exit_code == 1
    stray = [line for line in report.output.splitlines() if "stray-record" in line]
    assert [line.split("key=")[1].split("/")[0] for line in stray] == [
        "commits",
        "exchanges",
        "contributions",
        "checkpoints",
    ]
    assert "it names m as its author" in stray[1]
    result = invoke("doctor", folder.as_uri(), "--quarantine", "--json")
    assert result.exit_code == 0, result.output
    moved = json.loads(result.stdout)["moved"]
    assert len(moved) == 3 * (ROUNDS - CLOSED) + 2 - 1  # without the contribution to the open round
    after = {entry.key: bytes(store.read(entry.key) or b"") for entry in store.list("")}
    assert {item["to"]: before[item["key"]] for item in moved} == {
        key: after[key] for key in after if key.startswith(keys.QUARANTINE)
    }
    assert {key: data for key, data in after.items() if not key.startswith(keys.QUARANTINE)} == {
        key: data for key, data in before.items() if key not in {item["key"] for item in moved}
    }
    second = invoke("doctor", folder.as_uri(), "--quarantine", "--json")
    assert json.loads(second.stdout)["moved"] == []


def test_sound_run_and_damaged_run_have_nothing_to_move(folder: Path) -> None:
    store = DirectoryStore(folder)
    assert json.loads(invoke("doctor", folder.as_uri(), "--quarantine", "--json").stdout)["moved"] == []
    store.delete(keys.contribution(CLOSED - 1, 0, "a"))
    result = invoke("doctor", folder.as_uri(), "--quarantine", "--json")
    assert (result.exit_code, json.loads(result.stdout)["moved"]) == (1, [])


def test_stray_commit_does_not_mislead_other_readers(folder: Path) -> None:
    Forger(DirectoryStore(folder)).commit(keys.MAX_ROUND)
    [row] = json.loads(invoke("runs", folder.parent.as_uri(), "--json").stdout)["runs"]
    assert row["closed"] == CLOSED
