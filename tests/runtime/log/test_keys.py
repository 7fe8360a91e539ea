"""Object keys: sorted in round order, parsed back, and strict about foreign names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys

SLOTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
ROUNDS = st.integers(0, keys.MAX_ROUND)
DIGEST = "a1" * 16


@given(ROUNDS, ROUNDS)
def test_keys_sort_in_round_order_as_plain_strings(first: int, second: int) -> None:
    assert (keys.commit(first) < keys.commit(second)) == (first < second)
    assert (keys.decision(first, 0) < keys.decision(second, 0)) == (first < second)


@given(ROUNDS, ROUNDS, SLOTS)
def test_listing_after_a_round_begins_with_its_first_key(number: int, first: int, slot: str) -> None:
    for folder, key in (
        (keys.PAYLOADS, keys.payload(number, slot, DIGEST)),
        (keys.CHECKPOINTS, keys.checkpoint_manifest(number)),
        (keys.private_prefix(slot), keys.checkpoint_part(number, DIGEST, keys.private_prefix(slot))),
    ):
        assert (key > keys.start_after(folder, first)) == (number >= first)


@given(SLOTS, ROUNDS, st.integers(0, keys.MAX_INCARNATION), st.integers(0, 9))
def test_formatted_keys_are_parsed_back(slot: str, round_number: int, incarnation: int, rank: int) -> None:
    member, outcome = keys.member(slot, incarnation), keys.outcome(slot, incarnation)
    assert keys.incarnation_of(member) == keys.incarnation_of(outcome) == incarnation
    of_slot_and_round = [
        keys.contribution(round_number, 3, slot),
        keys.receipt(round_number, slot),
        keys.payload(round_number, slot, DIGEST),
    ]
    for key in (member, outcome, keys.heartbeat(slot), *of_slot_and_round):
        assert keys.slot_of(key) == slot
    for key in (keys.commit(round_number), keys.decision(round_number, 9), keys.pin(round_number), *of_slot_and_round):
        assert keys.round_of(key) == round_number
    for folder in (keys.CHECKPOINTS, keys.private_prefix(slot, rank), keys.unfinished_prefix(slot, rank)):
        assert keys.round_of(keys.checkpoint_part(round_number, DIGEST, folder)) == round_number
        assert keys.round_of(keys.checkpoint_manifest(round_number, folder)) == round_number


@pytest.mark.parametrize("slot", ["", ".hidden", "a/b", "..", "a b", "é", "x" * 64, "-x", "a\n"])
def test_name_that_could_leave_its_folder_is_no_slot(slot: str) -> None:
    with pytest.raises(Invalid):
        keys.heartbeat(slot)


@pytest.mark.parametrize("number", [-1, keys.MAX_ROUND + 1])
def test_round_that_would_break_the_order_is_invalid(number: int) -> None:
    with pytest.raises(Invalid):
        keys.commit(number)


@given(st.lists(st.tuples(st.sampled_from(["a", "b-"]), st.integers(0, 200)), unique=True))
def test_slots_with_numbers_sort_by_number(parts: list[tuple[str, int]]) -> None:
    slots = [f"{name}{number}" for name, number in parts]
    assert sorted(slots, key=keys.slot_order) == [f"{name}{number}" for name, number in sorted(parts)]


FOREIGN = [
    "run.json",
    "heartbeats/_old.json",
    "heartbeats/r-1.json.bak",
    "heartbeats/a/b.json",
    "commits/00000001.json.bak",
    "commits/1.json",
    "pins/00000001-why.json",
    "exchanges/00000001.json",
    "contributions/00000001-0000/_x.json",
    "contributions/00000001/a.json",
    "receipts/00000001-old/a.json",
    "payloads/00000003.backup/a/" + "0" * 32,
    "payloads/00000003/a/notes.txt",
    "payloads/00000003/a/" + "0" * 32 + ".gz",
    "checkpoints/00000005-keep/manifest.json",
    "checkpoints/00000005/sub/manifest.json",
    "checkpoints/00000005",
    "private/a/00000005.old/manifest.json",
    "private/a/rank1/00000005/notes",
    "members/a/000001.json.bak",
    "members/x/a/000001.json",
    "outcomes/_a/000001.json",
    "probe/000001.json",
    "payloads/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661/a/" + "0" * 32,
]


@pytest.mark.parametrize("key", FOREIGN)
def test_foreign_object_has_no_round_slot_or_incarnation(key: str) -> None:
    """The garbage collector deletes by the parsed round, and readers request the parsed slot."""
    for parse in (keys.round_of, keys.slot_of, keys.incarnation_of):
        with pytest.raises(Invalid, match="not a key of this kind"):
            parse(key)


def test_error_quotes_only_the_beginning_of_a_long_key() -> None:
    with pytest.raises(Invalid) as raised:
        keys.round_of("payloads/" + "x" * 5000)
    assert len(str(raised.value)) < 300
