"""The log's documents: canonical, strict, and refused by name when damaged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.clocks import FakeClock
from tests.support.logs import policy, run_record

from skerry.runtime.errors import Corrupt
from skerry.runtime.records import (
    GENESIS,
    MAX_RECORD_BYTES,
    Commit,
    Contribution,
    Decision,
    Heartbeat,
    Part,
    Run,
    Share,
    digest_of,
)
from skerry.runtime.rounds import Offer
from skerry.runtime.rounds import members as members_of

CONTRIBUTION = Contribution(
    run="a" * 32,
    round=3,
    exchange=0,
    slot="a",
    incarnation=0,
    base=GENESIS,
    index="1" * 32,
    parts=tuple(Part(digest=f"{n:032x}", header_bytes=1, total_bytes=2) for n in range(3)),
    tokens=5,
    inner_steps=6,
    nonce="d" * 32,
)
COMMIT = Commit(run="a" * 32, round=3, exchanges=("b" * 64,), participants=2, work=7.5, previous=GENESIS)


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


@pytest.mark.parametrize(
    "wrong",
    [
        {f"{number:x}": 1 for number in range(100_000)},
        {"x" * 3_500_000: 1},
        {"exchanges": [1] * 100_000},
        {f"{'y' * 1000}{number}": 1 for number in range(900)},
    ],
    ids=["many fields", "a long name", "many values", "many long names"],
)
def test_what_is_told_of_a_damaged_record_is_short(wrong: dict[str, object]) -> None:
    """It goes into an event and a traceback, at every look."""
    with pytest.raises(Corrupt, match="key=commits/x kind=Commit") as caught:
        Commit.parse(json.dumps(wrong).encode(), "commits/x")
    assert len(str(caught.value)) < 1500
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "its text repeats all of it"


def test_the_first_wrong_fields_are_told_by_name_and_the_others_counted() -> None:
    fields = json.loads(COMMIT.to_bytes()) | {f"extra{number}": 1 for number in range(7)}
    with pytest.raises(Corrupt, match=r"extra0: .*; extra4: [^;]*; and 2 more$"):
        Commit.parse(json.dumps(fields).encode(), "commits/x")


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e-320, 1e-46, 9e-31, 1.1e30, 1e39, float("inf"), float("nan")])
def test_a_weight_that_float32_cannot_hold_is_none(weight: float) -> None:
    """It would make NaN of the average, which is decided for everybody."""
    with pytest.raises(ValueError, match="weight"):
        Share(slot="a", contribution="c" * 64, weight=weight)


@pytest.mark.parametrize("field", ["discount", "share"])
@pytest.mark.parametrize("value", [0.0, 1e-46, 2.0**-41, 1.5])
def test_a_fraction_of_nearly_nothing_is_none(field: str, value: float) -> None:
    data = json.dumps(json.loads(CONTRIBUTION.to_bytes()) | {field: value}).encode()
    with pytest.raises(Corrupt, match=field):
        Contribution.parse(data, "contributions/x")


@pytest.mark.parametrize("weighting", ["tokens", "uniform"])
@pytest.mark.parametrize("tokens", [1, 1 << 62])
def test_whatever_contributions_may_say_can_be_proposed(weighting: str, tokens: int) -> None:
    """A proposer that refuses the weight it has made itself would stop every replica in turn."""
    least = {"tokens": tokens, "discount": 2.0**-40, "share": 2.0**-40}
    offers = {
        slot: Offer(contribution=CONTRIBUTION.model_copy(update=changed), digest="c" * 64)
        for slot, changed in (("a", least), ("b", {"tokens": tokens}))
    }
    assert len(members_of(policy(weighting=weighting), offers)) == 2


@pytest.mark.parametrize("ranks", [(), (3, 0), (1, 2), (0, 0, 3), (1, 1, 1)])
def test_the_parts_of_all_ranks_are_the_parts(ranks: tuple[int, ...]) -> None:
    """A rank that brings no tensors has no part."""
    fields = json.loads(CONTRIBUTION.to_bytes()) | {"ranks": ranks}
    parsed = Contribution.parse(json.dumps(fields).encode(), "contributions/x")
    brought = [part for rank in range(max(1, len(ranks))) for part in parsed.of_rank(rank)]
    assert tuple(brought) == CONTRIBUTION.parts


@pytest.mark.parametrize("ranks", [[3], [1, 1], [2, 2], [4, -1], [0, 0], [1.5, 1.5]])
def test_ranks_that_have_other_parts_than_these_are_damage(ranks: list[float]) -> None:
    fields = json.loads(CONTRIBUTION.to_bytes()) | {"ranks": ranks}
    with pytest.raises(Corrupt, match="ranks"):
        Contribution.parse(json.dumps(fields).encode(), "contributions/x")
