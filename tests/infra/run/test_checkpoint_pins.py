"""`skerry pin` and `skerry unpin` on a real run's folder, and what its collector makes of it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import write_spec
from tests.kit.managers import Island
from tests.kit.protocol import start_replica
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.infra.run import checkpoint_pins, run_record
from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.garbage_collector import GarbageCollector, Retention
from skerry.runtime.errors import Conflict, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.records import CheckpointManifest, Pin
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.runtime.log.run_record import Run

ROUNDS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One replica, four rounds, all checkpoints."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    for rounds in range(1, ROUNDS + 1):
        # A checkpoint is left out while the last is being written: the replica that ends has written it.
        Island(DirectoryStore(folder), "a", minimum=1).train(rounds)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "store" / "test-run")


@pytest.fixture
def store(folder: Path) -> DirectoryStore:
    return DirectoryStore(folder)


def run_of(store: DirectoryStore) -> Run:
    run = run_record.load_run(store)
    assert run is not None
    return run


def output_of(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def error_of(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    return result.stderr


def collect(store: DirectoryStore) -> list[int]:
    """Collect garbage as the run does, keeping the newest and the first checkpoint; the rounds of those left."""
    clock = FakeClock()
    replica = start_replica(store, clock, "z", beat=False)
    collector = GarbageCollector(
        log=replica.log,
        presence=replica.presence,
        watch=replica.watch,
        clock=clock,
        retention=Retention(last=1, age_s=0.0),
        stale_s=5.0,
        stop=replica.stop,
    )
    collector.note_closed(5)
    collector.collect()
    return checkpoint.complete(store)


def test_garbage_collection_keeps_pinned_checkpoints(store: DirectoryStore) -> None:
    assert checkpoint.complete(store) == [4, 3, 2, 1, 0]
    output_of("pin", store.uri, 2, "--reason", "the best so far")
    assert collect(store) == [4, 2, 0]
    manifest = checkpoint.manifest(store, 2)
    assert manifest is not None
    checkpoint.load(store, manifest)
    output_of("doctor", store.uri, "--deep")
    output_of("unpin", store.uri, 2)
    assert collect(store) == [4, 0]


def test_pin_records_user_time_and_reason(store: DirectoryStore) -> None:
    output = output_of("pin", store.uri, 3, "--reason", "the best so far")
    pin = Pin.parse(store.read(keys.pin(3)) or b"", "key")
    assert (pin.run, pin.round, pin.reason) == (run_of(store).nonce, 3, "the best so far")
    assert "@" in pin.by
    line = f"round 3: the best so far ({pin.by}, {pin.created})\n"
    assert output == f"pinned {line}"
    assert output_of("pin", store.uri, "--list") == line
    assert output_of("unpin", store.uri, 3) == f"unpinned {line}"
    assert store.read(keys.pin(3)) is None
    assert output_of("pin", store.uri, "--list") == "nothing is pinned\n"


def test_pin_commands_accept_a_spec(folder: Path, store: DirectoryStore) -> None:
    spec = write_spec(folder.parents[1])
    output_of("pin", spec, 0)
    assert store.read(keys.pin(0)) is not None
    assert output_of("pin", spec, "--list").startswith("round 0: no reason given (")
    output_of("unpin", spec, 0)


def test_pin_commands_print_json(store: DirectoryStore) -> None:
    pinned = json.loads(output_of("pin", store.uri, 3, "--reason", "good", "--json"))
    assert (pinned["round"], pinned["complete"], pinned["reason"]) == (3, True, "good")
    assert json.loads(output_of("pin", store.uri, "--list", "--json")) == {"pins": [pinned]}
    assert json.loads(output_of("unpin", store.uri, 3, "--json")) == pinned
    assert json.loads(output_of("pin", store.uri, "--list", "--json")) == {"pins": []}
    failed = invoke("unpin", store.uri, 3, "--json")
    assert (failed.exit_code, json.loads(failed.stdout)["ok"]) == (1, False)


def test_unreadable_pin_is_listed_and_can_be_deleted(folder: Path, store: DirectoryStore) -> None:
    output_of("pin", store.uri, 3)
    shutil.rmtree(folder / f"{keys.CHECKPOINTS}00000003")
    store.create(keys.pin(7), b"{}")
    store.create(f"{keys.PINS}notes.txt", b"not ours")
    first, second = output_of("pin", store.uri, "--list").splitlines()
    assert first.startswith("round 3, which has NO complete checkpoint: no reason given (")
    assert second == "round 7, which has NO complete checkpoint (the pin cannot be read)"
    for number in (3, 7):
        output_of("unpin", store.uri, number)
    assert [entry.key for entry in store.list(keys.PINS)] == [f"{keys.PINS}notes.txt"]


@pytest.mark.parametrize("damage", ["no manifest", "no part", "length", "manifest", "run"])
def test_damaged_checkpoint_cannot_be_pinned(folder: Path, store: DirectoryStore, damage: str) -> None:
    path = folder / keys.checkpoint_manifest(3)
    manifest = CheckpointManifest.parse(path.read_bytes(), "key")
    part = folder / keys.checkpoint_part(3, manifest.parts[0].digest)
    match damage:
        case "no manifest":
            path.unlink()
        case "no part":
            part.unlink()
        case "length":
            part.write_bytes(part.read_bytes()[:-1])
        case "manifest":
            path.write_bytes(b"{}")
        case _:
            path.write_bytes(manifest.model_copy(update={"run": "f" * 32}).sealed().to_bytes())
    for number in (3, 99):
        others = "complete checkpoints: rounds 0, 1, 2, 4"
        expected = f"round {number} has no complete checkpoint at {store.uri}; {others}\n"
        assert error_of("pin", store.uri, number) == expected
    assert store.list(keys.PINS) == []


class CollectingStore(DirectoryStore):
    """Deletes a checkpoint right after it was pinned, as a garbage collection in progress may."""

    def create(self, key: str, data: object) -> bool:
        created = super().create(key, data)  # type: ignore[arg-type]
        self.delete(keys.checkpoint_manifest(3))
        return created


def test_checkpoint_deleted_during_pin_leaves_no_pin(folder: Path) -> None:
    store = CollectingStore(folder)
    with pytest.raises(SkerryError, match="round 3 has no complete checkpoint"):
        checkpoint_pins.pin(store, run_of(store), 3, by="me", reason="", now="now")
    assert store.list(keys.PINS) == []


def test_second_pin_of_a_round_is_a_conflict(store: DirectoryStore) -> None:
    checkpoint_pins.pin(store, run_of(store), 3, by="another", reason="the first", now="then")
    with pytest.raises(Conflict, match="round 3 is pinned already by another at then: the first; run `skerry unpin`"):
        checkpoint_pins.pin(store, run_of(store), 3, by="me", reason="mine", now="now")
    assert "is pinned already by another" in error_of("pin", store.uri, 3, "--reason", "mine")
    assert [pin.reason for pin in checkpoint_pins.pins(store, run_of(store))] == ["the first"]


def test_pin_of_a_round_alone_is_of_the_run_of_this_folder(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_spec(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "round 3" in output_of("pin", 3)
    assert "round 3" in output_of("pin", "--list")
    output_of("unpin", 3)
    assert store.list(keys.PINS) == []
    assert invoke("unpin").exit_code == 2


def test_unpin_of_an_unpinned_round_is_an_error(store: DirectoryStore) -> None:
    assert error_of("unpin", store.uri, 2) == f"round 2 is not pinned at {store.uri}; no round is pinned\n"
    output_of("pin", store.uri, 3)
    assert error_of("unpin", store.uri, 2) == f"round 2 is not pinned at {store.uri}; pinned rounds: 3\n"


def test_pin_commands_without_a_run_are_an_error(tmp_path: Path) -> None:
    uri = DirectoryStore(tmp_path / "empty").uri
    remedy = "start it with `skerry up`, or name a spec, or the URI of a run's own prefix"
    for arguments in (("pin", uri, 3), ("pin", uri, "--list"), ("unpin", uri, 3)):
        assert error_of(*arguments) == f"no run at {uri}; {remedy}\n"


@pytest.mark.parametrize(
    "arguments", [(), (3, "--list"), ("--list", "--reason", "x"), ("-1",), ("three",), (100_000_000,)]
)
def test_pin_rejects_arguments_without_a_round(store: DirectoryStore, arguments: Sequence[object]) -> None:
    result = invoke("pin", store.uri, *arguments)
    assert result.exit_code == 2, result.output
    assert store.list(keys.PINS) == []
