"""The state admits one holder at a time, loses no journaled change, and rejects unknown versions."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.infra.provision.account import holder
from tests.kit.stores import View
from tests.support.clocks import FakeClock

from skerry.infra.provision import state as state_module
from skerry.infra.provision.graph import Life
from skerry.infra.provision.handler import StateRecord
from skerry.infra.provision.state import VERSION, Entry, Id, State, StatePhase
from skerry.infra.provision.state_store import LockedState, StateStore
from skerry.runtime.errors import Conflict, Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from skerry.runtime.store import Store
    from skerry.runtime.store.interface import Entry as Listed

RUN = "memory://here/run"


class StateFolder:
    """A store, a clock, and the holders that are known to be gone."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.store = open_store(folder.as_uri(), clock=self.clock)
        self.dead: set[str] = set()
        self.file = StateStore(self.store, self.clock, abandoned=lambda holder: holder.who in self.dead)

    @property
    def state(self) -> State:
        state = self.file.load()
        assert state is not None
        return state

    def lock(self, who: str = "ann") -> LockedState:
        return self.file.hold(holder(who), self.file.load(), RUN)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path)


def entry(address: str = "thing.a", generation: int = 0, phase: StatePhase = StatePhase.READY) -> Entry:
    record = StateRecord(
        address=address,
        kind="thing",
        name="a",
        generation=generation,
        region="",
        life=Life.OWNED,
        brought=False,
        settings={"size": [1, {"deep": None}]},
        outputs={"id": "x"},
        needs=(),
    )
    return Entry(record=record, phase=phase)


def test_release_folds_the_journal_into_the_next_serial(folder: StateFolder) -> None:
    assert folder.file.load() is None
    locked = folder.lock()
    locked.note(Id("thing.a", 0), entry())
    first = locked.release()
    assert (first.serial, first.entries, first.holder) == (2, (entry(),), None)
    assert json.loads(first.to_bytes())["entries"][0]["made"]["address"] == "thing.a"
    second = folder.lock()
    second.note(Id("thing.a", 0), None)
    assert second.release().entries == ()
    assert (folder.state.serial, folder.state.lineage, folder.state.run) == (4, first.lineage, RUN)


def test_journal_of_a_crashed_holder_is_read(folder: StateFolder) -> None:
    folder.lock().note(Id("thing.a", 0), entry(phase=StatePhase.CREATING))
    assert folder.state.holder == holder("ann")
    assert folder.state.entries == (entry(phase=StatePhase.CREATING),)


def test_second_holder_gets_a_conflict_with_the_first(folder: StateFolder) -> None:
    folder.lock()
    with pytest.raises(Conflict, match=r"apply by ann \(pid 7\) since noon.*skerry unlock"):
        folder.lock("bob")


def test_stale_state_cannot_be_locked(folder: StateFolder) -> None:
    folder.lock().release()
    with pytest.raises(Conflict, match="the state has changed"):
        folder.file.hold(holder("bob"), None, RUN)


def test_concurrent_locks_admit_one_holder(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ann's write falls between Bob's last read and his own write.
    create = folder.store.create

    def late(key: str, data: bytes) -> bool:
        monkeypatch.undo()
        folder.lock()
        return create(key, data)

    monkeypatch.setattr(folder.store, "create", late)
    with pytest.raises(Conflict, match="another process was first: apply by ann"):
        folder.lock("bob")


def test_lock_of_a_dead_holder_is_taken_over(folder: StateFolder) -> None:
    folder.lock().note(Id("thing.a", 0), entry())
    folder.dead.add("ann")
    assert folder.lock("bob").entries == [entry()]


def test_unlock_keeps_the_journal_and_stops_the_holder(folder: StateFolder) -> None:
    zombie = folder.lock()
    zombie.note(Id("thing.a", 0), entry())
    assert folder.file.unlock() == holder("ann")
    assert folder.file.unlock() is None
    # Its late entries are still read, until it finds that it must stop.
    zombie.note(Id("thing.b", 0), entry("thing.b"))
    assert folder.state.holder is None
    assert {item.record.address for item in folder.state.entries} == {"thing.a", "thing.b"}
    folder.clock.advance(2)
    with pytest.raises(Conflict, match="unlocked during this operation"):
        zombie.note(Id("thing.c", 0), entry("thing.c"))


def test_check_of_the_lock_lists_no_journal(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, listing, lengths = folder.lock(), type(folder.store).list, list[int]()

    def measured(store: Store, prefix: str, after: str | None = None) -> Sequence[Listed]:
        entries = listing(store, prefix, after)
        lengths.append(len(entries))
        return entries

    for number in range(20):
        locked.note(Id(f"thing.{number}", 0), entry(f"thing.{number}"))
    monkeypatch.setattr(type(folder.store), "list", measured)
    folder.clock.advance(2)
    locked.note(Id("thing.a", 0), entry())
    assert lengths == [0, 1]


def test_old_serials_and_folded_journals_are_deleted(folder: StateFolder) -> None:
    for number in range(12):
        locked = folder.lock()
        locked.note(Id("thing.a", 0), entry(generation=number))
        locked.release()
    left = [listed.key for listed in folder.store.list(keys.STATE)]
    assert left == [keys.state(serial) for serial in range(15, 25)]


def test_removed_state_is_none(folder: StateFolder) -> None:
    folder.lock()
    folder.file.remove()
    assert folder.store.list("") == []


def test_newer_version_is_rejected(folder: StateFolder) -> None:
    document = json.loads(folder.lock().release().to_bytes())
    newer = json.dumps(document | {"version": VERSION + 1, "colour": "red"}).encode()
    with pytest.raises(Invalid, match="upgrade skerry"):
        State.parse(newer, "state/1.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version": "1"}', b'{"version": 1, "lineage": 3}'])
def test_damaged_state_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"state/1\.json"):
        State.parse(data, "state/1.json")


def test_older_version_is_upgraded_step_by_step(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = folder.lock()
    locked.note(Id("thing.a", 0), entry())
    now = locked.release()
    # The serial was called number in version 1, and count before that.
    document = json.loads(now.to_bytes())
    oldest = {name: value for name, value in document.items() if name != "serial"} | {"version": 0, "count": 2}

    def renamed(old: str, new: str, version: int) -> Callable[[dict[str, object]], dict[str, object]]:
        return lambda tree: {new if name == old else name: tree[name] for name in tree} | {"version": version}

    upgrades = {0: renamed("count", "number", 1), 1: renamed("number", "serial", 2)}
    monkeypatch.setattr(state_module, "UPGRADES", upgrades)
    monkeypatch.setattr(state_module, "VERSION", 2)
    upgraded = State.parse(json.dumps(oldest).encode(), "state/1.json")
    assert (upgraded.serial, upgraded.entries) == (now.serial, now.entries)


@pytest.mark.parametrize("damaged", ["state", "journal"])
def test_error_for_a_damaged_document_names_a_command_that_works(tmp_path: Path, damaged: str) -> None:
    folder = StateFolder(tmp_path / "two words, 100% & 'quotes'")
    folder.lock().release()
    locked = folder.lock()
    for address in ("thing.a", "thing.b"):
        locked.note(Id(address, 0), entry(address))
    key = keys.state(3) if damaged == "state" else keys.state_note(3, 1)
    folder.store.replace(key, b"{")
    with pytest.raises(Corrupt, match=re.escape(key)) as raised:
        folder.file.load()
    command = re.search("`(rm [^`]*)`", str(raised.value))
    assert command is not None
    subprocess.run(command[1], shell=True, check=True)  # noqa: S602  as a user does
    # Without the command nothing of the journal is lost but the damaged entry, and its lock stays.
    assert ("skerry unlock" in str(raised.value)) == (damaged == "journal")
    assert folder.file.unlock() == (holder("ann") if damaged == "journal" else None)
    after = folder.lock("bob")
    after.note(Id("thing.c", 0), entry("thing.c"))
    kept = {"thing.b", "thing.c"} if damaged == "journal" else {"thing.c"}
    assert {item.record.address for item in after.release().entries} == kept


@pytest.mark.parametrize(
    ("uri", "command"),
    [
        ("s3://acme/runs/tiny", "aws s3 rm --recursive s3://acme/runs/tiny/state/"),
        ("gs://acme/runs/tiny", "gcloud storage rm -r gs://acme/runs/tiny/state/"),
        ("az://acme/runs/tiny", "az storage blob delete-batch --source acme --pattern 'runs/tiny/state/*'"),
        ("hf://ann/acme/runs/tiny", "hf buckets rm --recursive hf://buckets/ann/acme/runs/tiny/state/"),
    ],
)
def test_command_that_removes_a_damaged_state_is_one_of_its_cloud(uri: str, command: str) -> None:
    class InCloud(View):
        @property
        def uri(self) -> str:
            return uri

    clock = FakeClock()
    store = MemoryStore()
    store.create(keys.state(1), b"\x80")
    with pytest.raises(Corrupt, match=re.escape(f"keep a copy of {uri}/state/, then remove it with `{command}`")):
        StateStore(InCloud(store), clock, abandoned=lambda _: False).load()  # type: ignore[arg-type]


def test_state_that_is_removed_while_it_is_locked_is_a_conflict(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A destroy ends between Ann's write and her look at the newest serial.
    create = folder.store.create

    def removed(key: str, data: bytes) -> bool:
        created = create(key, data)
        folder.file.remove()
        return created

    monkeypatch.setattr(folder.store, "create", removed)
    with pytest.raises(Conflict, match="the state has changed"):
        folder.lock()
