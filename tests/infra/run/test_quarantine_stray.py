"""Records of a compromised replica stop a run, with a name for the cause; `doctor --quarantine` lets it go on."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.kit.forger import CLOSED, UNKNOWN, Forger, take_over, train_pair
from tests.kit.managers import assert_same_parameters, begin_run, islands_of, together
from tests.kit.stores import View
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.infra.observe.doctor.examine import examine_store
from skerry.infra.run.quarantine_stray import quarantine_stray
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.records import GENESIS
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.kit.managers import Island

    from skerry.infra.run.quarantine_stray import Quarantine
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Data, Entry, Profile, Store

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


def quarantine(store: Store, clock: Clock | None = None) -> Quarantine:
    return quarantine_stray(store, clock or SystemClock(), lambda: examine_store(store))


def assert_trained_alike(islands: Sequence[Island]) -> None:
    assert {island.manager.current_step() for island in islands} == {ROUNDS}
    assert_same_parameters(islands)


# The run stops, with a name for the cause; the operator moves the records away, and it goes on.

STOPS: dict[str, tuple[Callable[[Forger], object], str]] = {
    "commit of the open round": (lambda forger: forger.commit(CLOSED, forger.base(CLOSED)), "committed differently"),
    "commit of the next round": (lambda forger: forger.commit(CLOSED + 1), "committed differently"),
    "decision of a later round": (lambda forger: forger.decide(CLOSED + 2), "builds on another log"),
    "decision for itself": (lambda forger: forger.decide(CLOSED, forger.base(CLOSED)), "too few members"),
    "decision that lists itself twice": (
        lambda forger: forger.decide(CLOSED, forger.base(CLOSED), "m", "m"),
        "too few members",
    ),
    "decision that lists names of no slot": (
        lambda forger: forger.decide(CLOSED, forger.base(CLOSED), "a/b", ".."),
        "does not parse",
    ),
    "decision that does not parse": (lambda forger: forger.store.create(keys.decision(CLOSED, 0), b"{}"), "parse"),
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
    result = quarantine(store)
    assert result.moved
    assert not [item for item in result.log.findings if item.severity == "error"]
    again = restart(store)
    assert go_on(again) == ["", ""]
    assert_trained_alike(again)


UNUSABLE: dict[str, Callable[[Forger], object]] = {
    "settings that do not exist": lambda forger: forger.decide_for_all(CLOSED, settings=UNKNOWN),
    "contribution of no parts": lambda forger: (forger.contribute_nothing(CLOSED), forger.decide_for_all(CLOSED)),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_quarantine_moves_a_decision_that_no_replica_can_apply(name: str) -> None:
    store = Hijacked(UNUSABLE[name])
    islands = train_pair(store)
    store.is_armed = True
    assert all(go_on(islands))
    assert [record.key for record in quarantine(store).moved] == [keys.decision(CLOSED, 0)]
    again = restart(store)
    assert go_on(again) == ["", ""]
    assert_trained_alike(again)


class Hijacked(View):
    """Runs `attack` once it is armed, as soon as both replicas have contributed to the open round."""

    def __init__(self, attack: Callable[[Forger], object], store: Store | None = None) -> None:
        super().__init__(store or MemoryStore())
        self.attack, self.is_armed, self.lock = attack, False, threading.Lock()

    def create(self, key: str, data: Data) -> bool:
        if not key.startswith((keys.CONTRIBUTIONS, keys.EXCHANGES)):
            return self.store.create(key, data)
        with self.lock:  # no replica decides before the attack
            created = self.store.create(key, data)
            if self.is_armed and len(self.store.list(keys.contributions_prefix(CLOSED, 0))) == 2:
                self.is_armed = False
                self.attack(Forger(self.store))
        return created


def spoil(forger: Forger) -> None:
    """Contributes bytes without the digest of their record, and decides for them."""
    forger.contribute_damaged(CLOSED)
    forger.decide_for_all(CLOSED)


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[DirectoryStore, list[Island]]:
    """A run of which each replica has stopped at the damaged payload of m, which the open round's decision lists."""
    folder = DirectoryStore(tmp_path / "run")
    store = Hijacked(spoil, folder)
    islands = train_pair(store)
    store.is_armed = True
    errors = go_on(islands)
    assert ["payload is damaged" in error for error in errors] == [True, True], errors
    return folder, islands


DAMAGED = [keys.contribution(CLOSED, 0, "m"), keys.decision(CLOSED, 0)]


def test_quarantine_moves_a_damaged_contribution_when_all_have_ended(
    stopped: tuple[DirectoryStore, list[Island]],
) -> None:
    store, islands = stopped
    live = invoke("doctor", store.uri, "--deep", "--quarantine")
    assert live.exit_code == 1
    assert "not moved: end all replicas first, because one may still close the round: a on " in live.output
    for island in islands:
        island.stop()
    assert quarantine(store).moved == ()  # the damage is in the bytes, which only --deep reads
    before = {key: bytes(store.read(key) or b"") for key in DAMAGED}
    result = invoke("doctor", store.uri, "--deep", "--quarantine", "--json")
    assert result.exit_code == 0, result.output
    moved = {record["key"]: record["to"] for record in json.loads(result.stdout)["moved"]}
    assert list(moved) == DAMAGED
    assert {key: bytes(store.read(moved[key]) or b"") for key in moved} == before
    again = restart(store)
    assert go_on(again) == ["", ""]
    assert_trained_alike(again)


def test_quarantine_moves_a_contribution_without_its_payload(stopped: tuple[DirectoryStore, list[Island]]) -> None:
    store, islands = stopped
    for island in islands:
        island.stop()
    for entry in store.list(f"{keys.payloads_prefix(CLOSED)}m/"):
        store.delete(entry.key)
    assert [record.key for record in quarantine(store).moved] == DAMAGED
    again = restart(store)
    assert go_on(again) == ["", ""]
    assert_trained_alike(again)


@pytest.mark.parametrize("number", [0, 5])
def test_run_starts_after_what_only_looks_like_a_checkpoint_is_moved(number: int) -> None:
    store = MemoryStore()
    begin_run(store, "ab", minimum=2)
    key = keys.checkpoint_manifest(number)
    store.create(key, b"{}")
    errors = go_on(islands_of(store, "ab"))
    assert all(f"{key} kind=" in text and "`skerry doctor memory://`" in text for text in errors), errors
    assert [record.key for record in quarantine(store).moved] == [key]
    again = restart(store)
    assert go_on(again) == ["", ""]
    assert_trained_alike(again)


def test_damaged_first_checkpoint_stays_once_replicas_train_from_it() -> None:
    store = MemoryStore()
    for island in train_pair(store):
        island.stop()
    for folder in (keys.COMMITS, keys.EXCHANGES, keys.RECEIPTS):
        for entry in store.list(folder):
            store.delete(entry.key)
    store.replace(keys.checkpoint_manifest(0), b"{}")
    assert keys.checkpoint_manifest(0) not in {record.key for record in quarantine(store).moved}


def test_replicas_that_restart_name_a_commit_of_an_undecided_round() -> None:
    store = MemoryStore()
    islands = train_pair(store)
    for island in islands:
        island.stop()
    forger = Forger(store)
    forger.commit(CLOSED, forger.base(CLOSED))
    errors = go_on(restart(store))
    assert all("--quarantine" in text for text in errors), errors


def test_round_of_a_stray_commit_counts_after_a_quarantine() -> None:
    store = MemoryStore()
    islands = train_pair(store)
    Forger(store).commit(CLOSED + 1)
    log = RunLog(store, islands[0].manager.session.log.run)
    assert log.find_head(CLOSED) == CLOSED
    assert [record.key for record in quarantine(store).moved] == [keys.commit(CLOSED + 1)]
    assert go_on(islands) == ["", ""]
    assert log.find_head(CLOSED) == ROUNDS


def test_decision_that_no_commit_names_does_not_lower_the_quorum() -> None:
    store = MemoryStore()
    for island in train_pair(store):
        island.stop()
    forger = Forger(store)
    forger.decide(0, GENESIS, exchange=1)
    take_over(forger, ROUNDS)
    assert keys.commit(CLOSED) in {record.key for record in quarantine(store).moved}


def test_records_that_the_store_missed_at_first_stay() -> None:
    store, clock = LateListing(MemoryStore()), FakeClock()
    for island in train_pair(store.store):
        island.stop()
    clock.on_pause = store.missing.clear
    store.missing |= {keys.commit(CLOSED - 1), keys.receipt(CLOSED - 1, "a")}
    assert quarantine(store, clock).moved == ()
    assert clock.pauses == [store.profile.absence_s]


def test_record_that_replaced_a_stray_one_meanwhile_stays() -> None:
    store, clock = MemoryStore(), FakeClock()
    for island in train_pair(store):
        island.stop()
    forger = Forger(store)
    forger.commit(CLOSED + 1)
    clock.on_pause = lambda: store.replace(keys.commit(CLOSED + 1), b"{}")
    assert quarantine(store, clock).moved == ()


def test_doctor_reports_the_stray_records_of_two_readings() -> None:
    store = MemoryStore()
    for island in train_pair(store):
        island.stop()
    forger = Forger(store)
    forger.commit(CLOSED + 1)
    forger.commit(keys.MAX_ROUND)
    examination = examine_store(PassingRecord(store, keys.commit(CLOSED + 1)))
    assert [item.key for item in examination.findings if item.kind == "stray-record"] == [keys.commit(keys.MAX_ROUND)]


class PassingRecord(View):
    """Deletes an object after its first listing."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(store)
        self.key = key

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        if prefix == keys.OUTCOMES:  # after the commits
            self.store.delete(self.key)
        return self.store.list(prefix, after)


class LateListing(View):
    """Does not list the objects `missing`."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.missing: set[str] = set()

    @property
    def profile(self) -> Profile:
        return replace(self.store.profile, absence_s=10.0)

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        return [entry for entry in self.store.list(prefix, after) if entry.key not in self.missing]


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
