"""Object keys: sorted in round order, parsed back, and safe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.runtime import keys
from skerry.runtime.errors import Invalid
from skerry.runtime.store.probe import FOLDER

SLOTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
ROUNDS = st.integers(0, keys.MAX_ROUND)


@given(ROUNDS, ROUNDS)
def test_keys_sort_in_round_order_as_plain_strings(a: int, b: int) -> None:
    assert (keys.commit(a) < keys.commit(b)) == (a < b)
    assert (keys.decision(a, 0) < keys.decision(b, 0)) == (a < b)


@given(ROUNDS, ROUNDS, SLOTS)
def test_a_listing_since_a_round_begins_with_its_first_key(one: int, first: int, slot: str) -> None:
    for folder, key in (
        (keys.PAYLOADS, keys.payload(one, slot, "0" * 32)),
        (keys.CHECKPOINTS, keys.checkpoint_manifest(one)),
        (keys.private_of(slot), keys.checkpoint_part(one, "0" * 32, keys.private_of(slot))),
    ):
        assert (key > keys.since(folder, first)) == (one >= first)


@given(SLOTS, ROUNDS, st.integers(0, keys.MAX_INCARNATION))
def test_what_is_formatted_is_parsed_back(slot: str, round_number: int, incarnation: int) -> None:
    member, outcome = keys.member(slot, incarnation), keys.outcome(slot, incarnation)
    assert keys.incarnation_of(member) == keys.incarnation_of(outcome) == incarnation
    for key in (
        member,
        outcome,
        keys.heartbeat(slot),
        keys.contribution(round_number, 3, slot),
        keys.receipt(round_number, slot),
    ):
        assert keys.slot_of(key) == slot
    for key in (
        keys.commit(round_number),
        keys.decision(round_number, 9),
        keys.contribution(round_number, 0, slot),
        keys.payload(round_number, slot, "0" * 32),
        keys.receipt(round_number, slot),
        keys.checkpoint_manifest(round_number),
        keys.checkpoint_manifest(round_number, keys.private_of(slot)),
        keys.pin(round_number),
    ):
        assert keys.round_of(key) == round_number


@pytest.mark.parametrize("slot", ["", ".hidden", "a/b", "..", "a b", "é", "x" * 64, "-x", "a\n"])
def test_a_name_that_could_leave_its_folder_is_no_slot(slot: str) -> None:
    with pytest.raises(Invalid):
        keys.heartbeat(slot)


@pytest.mark.parametrize("number", [-1, keys.MAX_ROUND + 1])
def test_a_round_that_would_break_the_order_is_refused(number: int) -> None:
    with pytest.raises(Invalid):
        keys.commit(number)


@pytest.mark.parametrize("key", ["run.json", "commits/1.json", "commits/00000001.json/x", "heartbeats/a/b.json"])
def test_a_strange_key_is_not_guessed_at(key: str) -> None:
    with pytest.raises(Invalid):
        keys.slot_of(key)


@given(st.lists(st.tuples(st.sampled_from(["a", "b-"]), st.integers(0, 200)), unique=True))
def test_slots_with_numbers_sort_by_number(parts: list[tuple[str, int]]) -> None:
    slots = [f"{name}{number}" for name, number in parts]
    assert sorted(slots, key=keys.slot_order) == [f"{name}{number}" for name, number in sorted(parts)]


def test_the_probes_folder_is_the_one_that_keys_names() -> None:
    assert FOLDER == keys.PROBE


STRANGE = [
    "heartbeats/_old.json",
    "heartbeats/r-1 (copy).json",
    "heartbeats/r-1.json.bak",
    "heartbeats/a/b.json",
    "commits/00000001.json.bak",
    "commits/00000001/x",
    "commits/1.json",
    "pins/00000001-why.json",
    "exchanges/00000001.json",
    "contributions/00000001-0000/_x.json",
    "contributions/00000001-0000/a/b.json",
    "contributions/00000001/a.json",
    "receipts/00000001-old/a.json",
    "receipts/00000001/a (1).json",
    "payloads/00000003.backup/a/" + "0" * 32,
    "payloads/00000003.backup/x",
    "payloads/00000003/a/notes.txt",
    "payloads/00000003/a/" + "0" * 32 + ".gz",
    "checkpoints/00000005-keep/manifest.json",
    "checkpoints/00000005/manifest.json.old",
    "checkpoints/00000005/sub/manifest.json",
    "checkpoints/00000005",
    "private/a/00000005.old/manifest.json",
    "private/a/rank1/00000005/notes",
    "private/00000005/manifest.json",
    "members/a/000001.json.bak",
    "members/a/1.json",
    "members/x/a/000001.json",
    "outcomes/_a/000001.json",
    "probe/000001.json",
    "payloads/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661/a/" + "0" * 32,
]


@pytest.mark.parametrize("key", STRANGE)
def test_somebody_elses_object_among_ours_has_no_round_and_nobodys_slot(key: str) -> None:
    """What the collector takes for ours it deletes; what a reader takes for a slot it asks for."""
    for parse in (keys.round_of, keys.slot_of, keys.incarnation_of):
        with pytest.raises(Invalid, match="not a key of this kind"):
            parse(key)


def test_a_key_of_any_length_is_told_in_a_line() -> None:
    with pytest.raises(Invalid) as told:
        keys.round_of("payloads/" + "x" * 5000)
    assert len(str(told.value)) < 300


@given(SLOTS, ROUNDS, st.integers(0, 9))
def test_a_folder_of_checkpoints_is_parsed_whoever_it_is_of(slot: str, number: int, rank: int) -> None:
    for folder in (keys.CHECKPOINTS, keys.private_of(slot, rank), keys.unfinished_of(slot, rank)):
        assert keys.round_of(keys.checkpoint_part(number, "a1" * 16, folder)) == number
        assert keys.round_of(keys.checkpoint_manifest(number, folder)) == number
