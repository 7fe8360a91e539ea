"""`skerry doctor URI1 URI2` names the round and the record where two logs part."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.infra.observe.damaged_log import LAST, OTHER, ROUNDS, SLOTS, Log
from tests.support.command_line import invoke

from skerry.infra.observe.doctor.compare_logs import LogComparison, compare_logs
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Pair:
    """A run, and a copy of it that a test changes."""

    def __init__(self, folder: Path) -> None:
        self.run = Log(folder / "run")
        shutil.copytree(folder / "run", folder / "copy")
        self.copy = Log.__new__(Log)
        self.copy.store = DirectoryStore(folder / "copy")

    def compare(self) -> LogComparison:
        return compare_logs(self.run.store, self.copy.store)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def close_otherwise(log: Log, number: int) -> None:
    """A decision without the last slot, and its commit, in the place of the stored ones."""
    decided = keys.decision(number, 0)
    members = json.loads(bytes(log.read(decided)))["members"][:-1]
    log.change(decided, members=members, proposer=SLOTS[0])
    log.change(keys.commit(number), exchanges=[log.digest(decided)], participants=2, work=14.0)


def contribute_otherwise(log: Log, number: int) -> None:
    """Another contribution of the second slot, the decision that names it, and its commit."""
    key, decided = keys.contribution(number, 0, SLOTS[1]), keys.decision(number, 0)
    log.change(key, tokens=77)
    members = json.loads(bytes(log.read(decided)))["members"]
    members[1]["contribution"] = log.digest(key)
    log.change(decided, members=members)
    log.change(keys.commit(number), exchanges=[log.digest(decided)])


def test_copies_are_equal_or_older(pair: Pair) -> None:
    comparison = pair.compare()
    assert (comparison.ok, comparison.relation, comparison.common) == (True, "equal", ROUNDS)
    pair.copy.store.delete(keys.commit(LAST))
    older, newer = pair.compare(), compare_logs(pair.copy.store, pair.run.store)
    assert (older.ok, older.relation, newer.relation) == (True, "newer", "older")
    assert (older.rounds, older.common, older.round) == ((ROUNDS, LAST), LAST, None)
    assert f"{pair.copy.store.uri} is an older copy: its 4 rounds are the first of the 5 rounds of" in older.text


@pytest.mark.parametrize(
    ("change", "key", "field"),
    [
        (close_otherwise, keys.decision(LAST, 0), "members"),
        (contribute_otherwise, keys.contribution(LAST, 0, SLOTS[1]), "tokens"),
        (lambda log, number: log.change(keys.commit(number), work=99.0), keys.commit(LAST), "work"),
        (lambda log, number: log.change(keys.commit(number - 1), work=9.0), keys.commit(LAST - 1), "is damaged in"),
        (lambda log, number: log.delete(keys.commit(number - 2)), keys.commit(LAST - 2), "is missing in"),
    ],
)
def test_first_record_that_differs_is_named(
    pair: Pair, change: Callable[[Log, int], None], key: str, field: str
) -> None:
    change(pair.copy, LAST)
    comparison = pair.compare()
    assert (comparison.ok, comparison.round, comparison.key) == (False, keys.round_of(key), key)
    assert comparison.common == comparison.round
    assert field in comparison.text
    assert comparison.relation == ("parted" if keys.round_of(key) == LAST else "damaged")
    if comparison.relation == "damaged":
        assert pair.copy.store.uri in comparison.text


def test_copies_that_lack_the_same_record_are_not_equal(pair: Pair) -> None:
    for log in (pair.run, pair.copy):
        log.store.delete(keys.commit(LAST - 2))
    comparison = pair.compare()
    assert (comparison.ok, comparison.relation, comparison.key) == (False, "damaged", keys.commit(LAST - 2))


def test_record_that_cannot_be_read_is_where_logs_part(pair: Pair) -> None:
    contribute_otherwise(pair.copy, LAST)
    pair.run.store.replace(keys.decision(LAST, 0), b"{}")
    comparison = pair.compare()
    assert comparison.key == keys.decision(LAST, 0)
    assert f"is damaged in {pair.run.store.uri}" in comparison.text


def test_runs_without_a_common_parent_are_not_compared(pair: Pair) -> None:
    pair.copy.change(keys.RUN, nonce="e" * 32)
    comparison = pair.compare()
    assert (comparison.ok, comparison.relation, comparison.common) == (False, "other-run", 0)
    assert f"nonces {pair.run.nonce} and {'e' * 32}" in comparison.text


def test_forks_of_one_run_both_go_on(pair: Pair) -> None:
    parent = {"uri": "s3://lost/run", "run": "d" * 32, "round": 3, "commit": OTHER}
    pair.run.change(keys.RUN, parent=parent)
    pair.copy.change(keys.RUN, nonce="e" * 32, parent=parent)
    comparison = pair.compare()
    assert (comparison.ok, comparison.relation, comparison.common) == (False, "restored", 3)


def test_command_has_the_exit_codes_of_doctor(pair: Pair, tmp_path: Path) -> None:
    names = pair.run.store.uri, f"{pair.copy.store.uri}/"
    same = invoke("doctor", *names)
    assert (same.exit_code, same.output) == (0, "both are of one run and have the same 5 rounds\n")
    close_otherwise(pair.copy, LAST)
    parted = invoke("doctor", *names, "--json")
    document = json.loads(parted.output)
    assert (parted.exit_code, document["relation"], document["round"]) == (1, "parted", LAST)
    missing = invoke("doctor", names[0], (tmp_path / "nothing").as_uri())
    assert (missing.exit_code, "no run at" in missing.output) == (2, True)
    with pytest.raises(Invalid, match="no run at"):
        compare_logs(DirectoryStore(tmp_path / "nothing"), pair.run.store)
