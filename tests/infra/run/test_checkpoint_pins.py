"""`skerry pin` and `skerry unpin` on a real run's folder, and what its collector makes of it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import write_spec
from tests.infra.test_cli import skerry
from tests.support.clocks import FakeClock
from tests.support.logs import start
from tests.support.managers import Island

from skerry.infra import founding, pins
from skerry.runtime import checkpoint, keys
from skerry.runtime.errors import Conflict, SkerryError
from skerry.runtime.garbage import Collector, Retention
from skerry.runtime.records import CheckpointManifest, Pin
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from click.testing import Result

    from skerry.runtime.records import Run

ROUNDS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One replica, four rounds, all checkpoints."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    for rounds in range(1, ROUNDS + 1):
        # A checkpoint is left out while the last is being written: whoever ends has written it.
        Island(DirectoryStore(folder), "a", minimum=1).train(rounds)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "store" / "test-run")


@pytest.fixture
def store(folder: Path) -> DirectoryStore:
    return DirectoryStore(folder)


def run_of(store: DirectoryStore) -> Run:
    found = founding.find_run(store)
    assert found is not None
    return found


def said(ran: Result) -> dict[str, object]:
    assert ran.exit_code == 0, ran.output
    found: dict[str, object] = json.loads(ran.stdout)
    return found


def collect(store: DirectoryStore) -> list[int]:
    """The run's own collector keeps the newest checkpoint and the first, and what is pinned; what it has left."""
    clock = FakeClock()
    replica = start(store, clock, "z", beat=False)
    Collector(
        journal=replica.journal,
        presence=replica.presence,
        watch=replica.watch,
        clock=clock,
        retention=Retention(last=1, age_s=0.0),
        stale_s=5.0,
        stop=replica.stop,
    ).collect()
    return checkpoint.complete(store)


# What a pin does.


def test_the_collector_keeps_what_is_pinned_and_deletes_it_once_it_is_unpinned(store: DirectoryStore) -> None:
    assert checkpoint.complete(store) == [4, 3, 2, 1, 0]
    assert skerry("pin", store.uri, 2, "--reason", "the best so far").exit_code == 0
    assert collect(store) == [4, 2, 0]
    found = checkpoint.manifest(store, 2)
    assert found is not None
    checkpoint.load(store, found)
    assert skerry("doctor", store.uri, "--deep").exit_code == 0
    assert skerry("unpin", store.uri, 2).exit_code == 0
    assert collect(store) == [4, 0]


# What is written, and said.


def test_a_pin_says_who_when_and_why(store: DirectoryStore) -> None:
    ran = skerry("pin", store.uri, 3, "--reason", "the best so far")
    found = Pin.parse(store.read(keys.pin(3)) or b"", "key")
    assert (found.run, found.round, found.reason) == (run_of(store).nonce, 3, "the best so far")
    assert "@" in found.by
    assert ran.stdout == f"pinned round 3: the best so far ({found.by}, {found.created})\n"
    assert skerry("pin", store.uri, "--list").stdout == f"round 3: the best so far ({found.by}, {found.created})\n"
    assert skerry("unpin", store.uri, 3).stdout == f"unpinned round 3: the best so far ({found.by}, {found.created})\n"
    assert store.read(keys.pin(3)) is None
    assert skerry("pin", store.uri, "--list").stdout == "nothing is pinned\n"


def test_a_run_is_named_by_its_spec_as_well(folder: Path, store: DirectoryStore) -> None:
    spec = write_spec(folder.parents[1])
    assert skerry("pin", spec, 0).exit_code == 0
    assert store.read(keys.pin(0)) is not None
    assert skerry("pin", spec, "--list").stdout.startswith("round 0: no reason given (")
    assert skerry("unpin", spec, 0).exit_code == 0


def test_everything_is_there_as_json(store: DirectoryStore) -> None:
    made = said(skerry("pin", store.uri, 3, "--reason", "good", "--json"))
    assert (made["round"], made["complete"], made["reason"]) == (3, True, "good")
    assert said(skerry("pin", store.uri, "--list", "--json")) == {"pins": [made]}
    assert said(skerry("unpin", store.uri, 3, "--json")) == made
    assert said(skerry("pin", store.uri, "--list", "--json")) == {"pins": []}
    failed = skerry("unpin", store.uri, 3, "--json")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["ok"] is False


def test_a_pin_that_keeps_nothing_or_cannot_be_read_is_listed_and_can_be_deleted(
    folder: Path, store: DirectoryStore
) -> None:
    assert skerry("pin", store.uri, 3).exit_code == 0
    shutil.rmtree(folder / f"{keys.CHECKPOINTS}00000003")
    store.create(keys.pin(7), b"{}")
    store.create(f"{keys.PINS}notes.txt", b"not ours")
    first, second = skerry("pin", store.uri, "--list").stdout.splitlines()
    assert first.startswith("round 3, which has NO complete checkpoint: no reason given (")
    assert second == "round 7, which has NO complete checkpoint (the pin cannot be read)"
    assert [skerry("unpin", store.uri, number).exit_code for number in (3, 7)] == [0, 0]
    assert [entry.key for entry in store.list(keys.PINS)] == [f"{keys.PINS}notes.txt"]


# What cannot be.


def test_a_round_without_a_complete_checkpoint_cannot_be_pinned(store: DirectoryStore) -> None:
    store.delete(keys.checkpoint_manifest(1))
    for number in (1, 99):
        ran = skerry("pin", store.uri, number)
        assert ran.exit_code == 1
        there = "there are those of rounds 0, 2, 3, 4"
        assert ran.stderr == f"round {number} has no complete checkpoint at {store.uri}; {there}\n"
    assert store.list(keys.PINS) == []


@pytest.mark.parametrize("damage", ["part", "length", "manifest", "run"])
def test_a_checkpoint_that_cannot_be_loaded_cannot_be_pinned(folder: Path, store: DirectoryStore, damage: str) -> None:
    path = folder / keys.checkpoint_manifest(3)
    found = CheckpointManifest.parse(path.read_bytes(), "key")
    part = folder / keys.checkpoint_part(3, found.parts[0].digest)
    match damage:
        case "part":
            part.unlink()
        case "length":
            part.write_bytes(part.read_bytes()[:-1])
        case "manifest":
            path.write_bytes(b"{}")
        case _:
            path.write_bytes(found.model_copy(update={"run": "f" * 32}).to_bytes())
    ran = skerry("pin", store.uri, 3)
    assert ran.exit_code == 1
    assert ran.stderr == f"round 3 has no complete checkpoint at {store.uri}; there are those of rounds 0, 1, 2, 4\n"
    assert store.list(keys.PINS) == []


class Collected(DirectoryStore):
    """A store in which a collection that is under way deletes the checkpoint right after it was pinned."""

    def create(self, key: str, data: object) -> bool:
        made = super().create(key, data)  # type: ignore[arg-type]
        self.delete(keys.checkpoint_manifest(3))
        return made


def test_a_checkpoint_that_goes_while_it_is_pinned_leaves_no_pin(folder: Path) -> None:
    store = Collected(folder)
    with pytest.raises(SkerryError, match="round 3 has no complete checkpoint"):
        pins.pin(store, run_of(store), 3, by="me", reason="", now="now")
    assert store.list(keys.PINS) == []


def test_a_round_is_pinned_once_and_the_first_pin_stays(store: DirectoryStore) -> None:
    pins.pin(store, run_of(store), 3, by="somebody", reason="the first", now="then")
    with pytest.raises(Conflict, match="round 3 is pinned already by somebody at then: the first; `skerry unpin`"):
        pins.pin(store, run_of(store), 3, by="me", reason="mine", now="now")
    ran = skerry("pin", store.uri, 3, "--reason", "mine")
    assert (ran.exit_code, "is pinned already by somebody" in ran.stderr) == (1, True)
    assert [found.reason for found in pins.pins(store, run_of(store))] == ["the first"]


def test_what_is_not_pinned_cannot_be_unpinned(store: DirectoryStore) -> None:
    assert skerry("unpin", store.uri, 2).stderr == f"round 2 is not pinned at {store.uri}; there are no pins\n"
    skerry("pin", store.uri, 3)
    ran = skerry("unpin", store.uri, 2)
    assert (ran.exit_code, ran.stderr) == (1, f"round 2 is not pinned at {store.uri}; there are pins of 3\n")


def test_what_is_no_run_has_no_pins(tmp_path: Path) -> None:
    uri = DirectoryStore(tmp_path / "empty").uri
    for arguments in (("pin", uri, 3), ("pin", uri, "--list"), ("unpin", uri, 3)):
        ran = skerry(*arguments)
        assert (ran.exit_code, ran.stderr) == (
            1,
            f"no run at {uri}; name a spec, or the URI of a run's own prefix\n",
        )


@pytest.mark.parametrize(
    "arguments",
    [(), (3, "--list"), ("--list", "--reason", "x"), ("-1",), ("three",), (100_000_000,)],
)
def test_what_names_no_round_is_bad_usage(store: DirectoryStore, arguments: Sequence[object]) -> None:
    ran = skerry("pin", store.uri, *arguments)
    assert ran.exit_code == 2, ran.output
    assert store.list(keys.PINS) == []
