"""The log's documents: canonical, strict, and refused by name when damaged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.clocks import FakeClock
from tests.support.logs import run_record

from skerry.runtime.errors import Corrupt
from skerry.runtime.records import GENESIS, MAX_RECORD_BYTES, Commit, Decision, Heartbeat, Run, Share, digest_of

COMMIT = Commit(run="a" * 32, round=3, exchanges=("b" * 64,), participants=2, previous=GENESIS)


def test_bytes_are_canonical_so_that_the_winner_of_a_race_does_not_matter() -> None:
    again = Commit.parse(COMMIT.to_bytes(), "commits/00000003.json")
    assert again == COMMIT
    assert again.to_bytes() == COMMIT.to_bytes()
    assert digest_of(COMMIT.to_bytes()) == digest_of(again.to_bytes())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"round": -1}, "round"),
        ({"round": "3"}, "round"),
        ({"round": 3.0}, "round"),
        ({"run": "short"}, "run"),
        ({"exchanges": ["x"]}, "exchanges.0"),
        ({"surprise": 1}, "surprise"),
        ({"previous": None}, "previous"),
    ],
)
def test_a_wrong_field_is_named_with_its_key(change: dict[str, object], field: str) -> None:
    data = json.dumps(json.loads(COMMIT.to_bytes()) | change).encode()
    with pytest.raises(Corrupt, match=field) as caught:
        Commit.parse(data, "commits/00000003.json")
    assert "key=commits/00000003.json" in str(caught.value)


def test_another_protocol_version_is_refused() -> None:
    data = run_record(FakeClock()).to_bytes().replace(b'"protocol":1', b'"protocol":2')
    with pytest.raises(Corrupt, match="protocol"):
        Run.parse(data, "run.json")


def test_a_decision_without_members_or_with_a_weight_of_zero_is_no_decision() -> None:
    share = Share(slot="a", contribution="c" * 64, weight=1.0)
    good = Decision(
        run="a" * 32,
        round=0,
        exchange=0,
        base=GENESIS,
        index="1" * 32,
        reduction="all_gather",
        members=(share,),
        proposer="a",
        nonce="d" * 32,
    )
    fields = json.loads(good.to_bytes())
    for members in ([], [{**fields["members"][0], "weight": 0.0}]):
        with pytest.raises(Corrupt, match="members"):
            Decision.parse(json.dumps(fields | {"members": members}).encode(), "exchanges/x")


def test_a_huge_record_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(Corrupt, match="too large"):
        Commit.parse(b"[" * (MAX_RECORD_BYTES + 1), "commits/x")


@given(st.binary(max_size=200))
def test_garbage_is_corrupt_and_never_another_error(data: bytes) -> None:
    for kind in (Commit, Run, Heartbeat, Decision):
        with pytest.raises(Corrupt):
            kind.parse(data, "somewhere")


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_flipped_byte_changes_the_digest_or_is_refused(position: int, value: int) -> None:
    data = bytearray(COMMIT.to_bytes())
    position %= len(data)
    if data[position] == value:
        return
    data[position] = value
    assert digest_of(bytes(data)) != digest_of(COMMIT.to_bytes())
