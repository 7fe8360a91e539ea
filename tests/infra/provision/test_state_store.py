"""One holder at a time, nothing noted is ever lost, and nobody reads what he does not understand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.infra import state as state_module
from skerry.infra.graph import Life
from skerry.infra.handler import Made
from skerry.infra.state import VERSION, Entry, Holder, Id, Phase, State
from skerry.infra.statefile import StateFile
from skerry.runtime import keys
from skerry.runtime.errors import Conflict, Corrupt, Invalid
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RUN = "memory://here/run"


class Place:
    """A store, a clock, and the holders that are known to be gone."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.store = open_store(folder.as_uri(), clock=self.clock)
        self.gone: set[str] = set()
        self.file = StateFile(self.store, self.clock, abandoned=lambda holder: holder.who in self.gone)

    def hold(self, who: str) -> object:
        return self.file.hold(holder(who), self.file.load(), RUN)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def holder(who: str) -> Holder:
    return Holder(token=who, who=who, host="here", doing="apply", since="noon", pid=7, started=1, boot="b")


def entry(address: str = "thing.a", generation: int = 0, phase: Phase = Phase.READY) -> Entry:
    made = Made(
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
    return Entry(made=made, phase=phase)


def test_there_is_no_state_before_the_first_apply(place: Place) -> None:
    assert place.file.load() is None


def test_what_was_noted_is_in_the_next_serial_and_its_lineage_stays(place: Place) -> None:
    with_one = place.file.hold(holder("me"), None, RUN)
    with_one.note(Id("thing.a", 0), entry())
    first = with_one.release()
    assert (first.serial, first.entries, first.holder) == (2, (entry(),), None)
    second = place.file.hold(holder("me"), first, RUN)
    second.note(Id("thing.a", 0), None)
    assert second.release().entries == ()
    state = place.file.load()
    assert state is not None
    assert (state.serial, state.lineage, state.run) == (4, first.lineage, RUN)


def test_a_journal_that_a_crash_left_is_read(place: Place) -> None:
    hold = place.file.hold(holder("me"), None, RUN)
    hold.note(Id("thing.a", 0), entry(phase=Phase.CREATING))
    state = place.file.load()
    assert state is not None
    assert state.holder == holder("me")
    assert state.entries == (entry(phase=Phase.CREATING),)


def test_a_second_holder_hears_who_and_since_when(place: Place) -> None:
    place.hold("ann")
    with pytest.raises(Conflict, match=r"apply by ann \(pid 7\) since noon.*skerry unlock"):
        place.hold("bob")


def test_of_two_that_read_the_same_state_one_holds_it(place: Place) -> None:
    seen = place.file.load()
    place.file.hold(holder("ann"), seen, RUN).release()
    with pytest.raises(Conflict, match="moved on"):
        place.file.hold(holder("bob"), seen, RUN)


def test_of_two_that_write_at_once_one_holds_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ann's write falls between Bob's last look and his own.
    create = place.store.create

    def late(key: str, data: object) -> bool:
        monkeypatch.undo()
        place.hold("ann")
        return create(key, data)  # type: ignore[arg-type]

    monkeypatch.setattr(place.store, "create", late)
    with pytest.raises(Conflict, match="somebody else was first: apply by ann"):
        place.hold("bob")


def test_a_holder_that_is_certainly_gone_is_followed_by_the_next(place: Place) -> None:
    first = place.file.hold(holder("ann"), None, RUN)
    first.note(Id("thing.a", 0), entry())
    place.gone.add("ann")
    second = place.file.hold(holder("bob"), place.file.load(), RUN)
    assert second.entries == [entry()]


def test_unlock_ends_a_hold_keeps_what_it_noted_and_stops_its_holder(place: Place) -> None:
    zombie = place.file.hold(holder("ann"), None, RUN)
    zombie.note(Id("thing.a", 0), entry())
    assert place.file.unlock() == holder("ann")
    assert place.file.unlock() is None
    # What it noted late is still read; and soon it hears that it must stop.
    zombie.note(Id("thing.b", 0), entry("thing.b"))
    state = place.file.load()
    assert state is not None
    assert state.holder is None
    assert {one.made.address for one in state.entries} == {"thing.a", "thing.b"}
    place.clock.advance(2)
    with pytest.raises(Conflict, match="unlocked while this was at work"):
        zombie.note(Id("thing.c", 0), entry("thing.c"))


def test_old_serials_and_folded_notes_are_deleted(place: Place) -> None:
    for number in range(12):
        hold = place.file.hold(holder("me"), place.file.load(), RUN)
        hold.note(Id("thing.a", 0), entry(generation=number))
        hold.release()
    left = [found.key for found in place.store.list(keys.STATE)]
    assert left == [keys.state(serial) for serial in range(15, 25)]


def test_removed_is_as_if_it_had_never_been(place: Place) -> None:
    place.hold("ann")
    place.file.remove()
    assert place.store.list("") == []


def test_a_newer_version_is_refused(place: Place) -> None:
    hold = place.file.hold(holder("me"), None, RUN)
    document = json.loads(hold.release().to_bytes())
    newer = json.dumps(document | {"version": VERSION + 1, "colour": "red"}).encode()
    with pytest.raises(Invalid, match="upgrade skerry"):
        State.parse(newer, "state/1.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version": "1"}', b'{"version": 1, "lineage": 3}'])
def test_damage_is_told(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"state/1\.json"):
        State.parse(data, "state/1.json")


def test_an_older_version_is_upgraded_step_by_step(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = place.file.hold(holder("me"), None, RUN)
    hold.note(Id("thing.a", 0), entry())
    now = hold.release()
    # What is called serial now was number in version 1, and count before that.
    document = json.loads(now.to_bytes())
    oldest = {name: value for name, value in document.items() if name != "serial"} | {"version": 0, "count": 2}

    def renamed(old: str, new: str, version: int) -> Callable[[dict[str, object]], dict[str, object]]:
        return lambda tree: {new if name == old else name: tree[name] for name in tree} | {"version": version}

    upgrades = {0: renamed("count", "number", 1), 1: renamed("number", "serial", 2)}
    monkeypatch.setattr(state_module, "_UPGRADES", upgrades)
    monkeypatch.setattr(state_module, "VERSION", 2)
    upgraded = State.parse(json.dumps(oldest).encode(), "state/1.json")
    assert (upgraded.serial, upgraded.entries) == (now.serial, now.entries)
