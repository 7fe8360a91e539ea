"""`skerry extend` on a folder: what it stores, what it refuses, and what a spec may say afterwards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import Skerry, write_spec
from tests.kit.records import commit
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.infra import targets
from skerry.infra.observe.observer import Observer
from skerry.infra.run import change_run_settings, run_record
from skerry.infra.run.change_run_settings import WantedChange
from skerry.infra.spec import model
from skerry.runtime.errors import Conflict, Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS
from skerry.runtime.log.run_record import Settings
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.observe.read_changed_settings import RunSettings
    from skerry.infra.spec.model import SpecFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_spec(tmp_path)


def spec_of(path: Path, *overrides: str) -> SpecFile:
    return model.load(path, targets.kinds(), overrides)


@pytest.fixture
def store(path: Path, tmp_path: Path) -> DirectoryStore:
    """A run of three rounds, of which one is closed."""
    store = DirectoryStore(tmp_path / "store" / "test-run")
    run, _ = run_record.create_or_load_run(store, spec_of(path), FakeClock())
    store.create(keys.commit(0), commit(0, run=run.nonce, previous=GENESIS).to_bytes())
    return store


def stored(store: DirectoryStore, number: int) -> Settings:
    return Settings.parse(store.read(keys.settings(number)) or b"", keys.settings(number))


def settings_of(store: DirectoryStore) -> RunSettings:
    settings = run_record.load_settings(store)
    assert settings is not None
    return settings


def refusal_of(*arguments: object) -> str:
    result = invoke("extend", *arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_each_change_follows_the_one_before_it(store: DirectoryStore, path: Path) -> None:
    result = invoke("extend", path, "--rounds", 9, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rounds"] == 9
    result = invoke("extend", path, "--outer-lr", 0.5, "--outer-momentum", 0.8, "--at", 4)
    assert "outer_lr=0.5 outer_momentum=0.8 from round 4 on" in result.stdout
    assert invoke("extend", store.uri, "--rounds", 12).exit_code == 0
    first, second, third = (stored(store, number) for number in (1, 2, 3))
    assert (first.from_round, first.rounds, first.outer_lr, first.previous) == (1, 9, 0.7, GENESIS)
    assert (second.from_round, second.rounds, second.outer_lr, second.outer_momentum) == (4, 9, 0.5, 0.8)
    assert second.previous == digest_of(store.read(keys.settings(1)) or b"")
    assert (third.from_round, third.rounds, third.outer_lr) == (4, 12, 0.5), "a round never goes back"
    view = Observer(store, settings_of(store), FakeClock()).view()
    assert (view.rounds, view.finished) == (12, False)


def test_change_that_cannot_be_made_is_refused(store: DirectoryStore, path: Path) -> None:
    assert "nothing would change: rounds=3 outer_lr=0.7" in refusal_of(path)
    assert "nothing would change" in refusal_of(path, "--rounds", 3)
    assert "a run can only become longer: rounds=3 wanted=2" in refusal_of(path, "--rounds", 2)
    assert "--at 0 is too early: 1 rounds are closed" in refusal_of(path, "--outer-lr", 0.5, "--at", 0)
    assert "rounds are added at once" in refusal_of(path, "--rounds", 9, "--at", 5)
    for value in (0, "nan", 100.1):
        assert "--outer-lr must be above 0 and at most 100, and" in refusal_of(path, "--outer-lr", value)
    for value in (1, "-0.1"):
        assert "--outer-momentum from 0 to below 1" in refusal_of(path, "--outer-momentum", value)
    assert not store.list(keys.SETTINGS)
    assert invoke("extend", path, "--outer-lr", 0.5, "--at", 7).exit_code == 0
    assert "an earlier change begins in round 7" in refusal_of(path, "--outer-lr", 0.3, "--at", 6)


def test_second_of_two_operators_gets_a_conflict(store: DirectoryStore) -> None:
    before = settings_of(store)
    change_run_settings.change(store, before, WantedChange(rounds=5), 1, by="a", now="")
    with pytest.raises(Conflict, match="at the same time"):
        change_run_settings.change(store, before, WantedChange(rounds=6), 1, by="b", now="")
    assert settings_of(store).now.rounds == 5


def test_work_that_is_due_grows_with_the_rounds(path: Path, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "another")
    run_record.create_or_load_run(store, spec_of(path, "faults.make_up=true"), FakeClock())
    change_run_settings.change(store, settings_of(store), WantedChange(rounds=5), 0, by="a", now="")
    assert settings_of(store).now.work == 10.0


def test_spec_may_have_the_first_values_or_the_new_ones(store: DirectoryStore, path: Path) -> None:
    change_run_settings.change(store, settings_of(store), WantedChange(rounds=5, outer_lr=0.5), 1, by="a", now="")
    for overrides in ((), ("outer.rounds=5",), ("outer.rounds=5", "outer.lr=0.5")):
        run, _ = run_record.create_or_load_run(store, spec_of(path, *overrides), FakeClock())
        assert (run.rounds, run.outer_lr) == (5, 0.5)
    with pytest.raises(Invalid, match=r"rounds: 5 -> 8 .*`skerry extend --rounds 8` changes it"):
        run_record.create_or_load_run(store, spec_of(path, "outer.rounds=8"), FakeClock())
    with pytest.raises(Invalid, match="rounds: 5 -> 2") as shorter:
        run_record.create_or_load_run(store, spec_of(path, "outer.rounds=2"), FakeClock())
    assert "skerry extend" not in str(shorter.value)
    with pytest.raises(Invalid) as refused:
        run_record.create_or_load_run(store, spec_of(path, "outer.codec=bf16"), FakeClock())
    assert "skerry extend" not in str(refused.value)


def test_changeable_settings_are_marked_in_schema_and_errors(store: DirectoryStore, path: Path) -> None:
    sections = json.loads(model.schema(targets.kinds()))["$defs"]
    marks = {
        f"{section}.{name}": mark
        for section, fields in sections.items()
        for name, field in fields.get("properties", {}).items()
        if (mark := field.get("x-changed-by")) is not None
    }
    assert marks == {
        "Outer.rounds": "skerry extend --rounds",
        "Outer.lr": "skerry extend --outer-lr",
        "Outer.momentum": "skerry extend --outer-momentum",
        "Replicas.count": "skerry apply",
    }
    assert sorted(run_record.CHANGEABLE.values()) == sorted(set(marks.values()) - {"skerry apply"})
    changed = spec_of(path, "outer.momentum=0.8", "outer.rounds=2", "outer.sync_every=7", "replicas[0].count=3")
    with pytest.raises(Invalid) as refused:
        run_record.create_or_load_run(store, changed, FakeClock())
    _, *lines = str(refused.value).splitlines()
    assert [line.partition(" (")[0].strip() + line.partition(")")[2] for line in lines[:-1]] == [
        "replicas: a-0, a-1 -> a-0, a-1, a-2; may change at any time",
        "rounds: 3 -> 2; a run can only become longer; stop it to end it before",
        "sync_every: 100 -> 7; fixed when the run starts",
        "momentum: 0.5 -> 0.8; `skerry extend --outer-momentum 0.8` changes it",
    ]
    assert lines[-1] == (
        f"what is fixed needs a new run: write e.g. `run: test-run-2`, and `init_from: {store.uri}` to start with the "
        "model of this one"
    )


def test_settings_of_another_chain_are_not_used(store: DirectoryStore) -> None:
    change_run_settings.change(store, settings_of(store), WantedChange(rounds=5), 1, by="a", now="")
    odd = stored(store, 1).model_copy(update={"number": 2, "previous": "1" * 64})
    store.create(keys.settings(2), odd.to_bytes())
    with pytest.raises(Corrupt, match="do not follow"):
        run_record.load_run(store)


@pytest.mark.slow
def test_finished_run_is_extended_and_continued_by_up(path: Path) -> None:
    def up() -> tuple[int, str]:
        with Skerry("up", str(path), "--json") as process:
            return process.end(), process.output

    def closed(output: str) -> int:
        return int(json.loads(output.splitlines()[-1])["view"]["closed"])

    code, output = up()
    assert (code, closed(output)) == (0, 3), output
    result = invoke("extend", path, "--rounds", 5)
    assert "ended: a-0, a-1; start them again with `skerry up`" in result.stdout
    code, output = up()
    assert (code, closed(output)) == (0, 5), output
    code, output = up()
    assert (code, "already finished" in output) == (0, True), output
    assert invoke("destroy", path, "--yes").exit_code == 0
    assert not list((path.parent / "store").rglob("settings"))


# Slots that are added and removed.


def expect(store: DirectoryStore, *slots: str, removes: bool = True) -> tuple[str, ...]:
    return change_run_settings.expect_slots(store, settings_of(store), slots, removes=removes, by="ada", now="")


def test_slots_that_stay_keep_their_numbers(store: DirectoryStore) -> None:
    first = settings_of(store).now.slots
    assert first == ("a-0", "a-1")
    assert expect(store, *first) == first
    assert store.read(keys.settings(1)) is None, "nothing has changed"
    assert expect(store, "b-0", "a-0", "a-1") == ("a-0", "a-1", "b-0")
    assert expect(store, "b-0", "a-1", "c-0") == ("a-1", "b-0", "c-0")
    assert [stored(store, number).slots for number in (1, 2)] == [("a-0", "a-1", "b-0"), ("a-1", "b-0", "c-0")]
    assert stored(store, 1).from_round == 1, "one round is closed"
    assert settings_of(store).now.slots == ("a-1", "b-0", "c-0")


def test_part_of_a_plan_adds_slots_and_removes_none(store: DirectoryStore) -> None:
    assert expect(store, "a-1", "b-0", removes=False) == ("a-0", "a-1", "b-0")
    assert expect(store, "a-1", removes=False) == ("a-0", "a-1", "b-0")


def test_extension_keeps_slots_and_counts_added_rounds_with_them(store: DirectoryStore) -> None:
    settings = settings_of(store)
    first = settings.first.model_copy(update={"work": 6.0})
    store.delete(keys.RUN)
    store.create(keys.RUN, first.to_bytes())
    expect(store, "a-0", "a-1", "b-0")
    assert stored(store, 1).work == 6.0, "the work of the rounds that were planned stays"
    change_run_settings.change(store, settings_of(store), WantedChange(rounds=5), 1, by="ada", now="")
    assert (stored(store, 2).slots, stored(store, 2).work) == (("a-0", "a-1", "b-0"), 12.0)
    assert settings_of(store).now.slots == ("a-0", "a-1", "b-0")
