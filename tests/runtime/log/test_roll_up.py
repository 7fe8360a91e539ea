"""The stored form of a roll-up: what it gives back, and what is refused."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.records import member, outcome
from tests.kit.rounds import NONCE, WrittenRun

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys, roll_up
from skerry.runtime.log.read_rounds import RoundListing
from skerry.runtime.log.records import Telemetry
from skerry.runtime.log.roll_up import RollUp
from skerry.runtime.log.summarize_round import RecordedRound, ReplicaRound, RoundHistory
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable


KEY = keys.roll_up(0, 3)


def recorded() -> list[RecordedRound]:
    """Four rounds: of all, with a cut and a late replica, without one, and with a receipt that is missing."""
    run = WrittenRun(MemoryStore(), "a-2", "a-10", "b-0")
    run.close()
    run.close(shares={"a-2": 0.35}, late=["b-0"])
    run.close(away=["a-2"])
    run.close(without_receipt=["a-10"])
    singles = RoundListing(run.store, NONCE, range(4)).read()
    return [RecordedRound.of(single.number, 1.7e9 + single.number, single.records) for single in singles]


ROUNDS = recorded()
ROLL_UP = RollUp.of(NONCE, "a-2", "c" * 64, ROUNDS)
STORED = ROLL_UP.to_stored()


def test_roll_up_gives_its_rounds_back_with_six_digits() -> None:
    again = RollUp.parse_stored(STORED, KEY)
    assert again == ROLL_UP
    rounds = list(again.recorded())
    assert [item.receipts for item in rounds] == [item.receipts for item in ROUNDS]
    assert [item.contributions for item in rounds] == [dict(item.contributions) for item in ROUNDS]
    assert RollUp.of(NONCE, "a-2", "c" * 64, rounds) == ROLL_UP, "rounding a rounded number changes nothing"
    assert [replica.part for replica in rounds[1].history.replicas] == ["cut", "trained", "late"]
    for item, before in zip(rounds, ROUNDS, strict=True):
        assert (item.history.closed_at, item.history.averages_equal) == (before.history.closed_at, True)
        for replica, original in zip(item.history.replicas, before.history.replicas, strict=True):
            assert (replica.slot, replica.share, replica.uploaded_bytes) == (
                original.slot,
                original.share,
                original.uploaded_bytes,
            )
            assert replica.telemetry is not None
            assert original.telemetry is not None
            assert replica.telemetry.loss == pytest.approx(original.telemetry.loss, rel=5e-6)
            assert replica.telemetry.metrics == pytest.approx(original.telemetry.metrics, rel=5e-6)
            assert replica.seconds == pytest.approx(original.seconds, rel=5e-6)


def test_roll_up_has_starts_and_an_old_one_has_none() -> None:
    assert "starts" not in json.loads(gzip.decompress(STORED)), "the bytes are those of an older version"
    starts = (member("a-2", run=NONCE), outcome("a-2", run=NONCE))
    stored = RollUp.of(NONCE, "a-2", "c" * 64, ROUNDS, starts).to_stored()
    assert RollUp.parse_stored(stored, KEY).starts == starts


@pytest.mark.parametrize(
    "wrong", [{"run": "f" * 32}, {"slot": "a/2"}, {"incarnation": keys.MAX_INCARNATION + 1}, {"incarnation": -1}]
)
def test_start_of_another_run_or_without_a_key_is_corrupt(wrong: dict[str, object]) -> None:
    start = json.loads(member("a-2", run=NONCE).to_bytes()) | wrong
    with pytest.raises(Corrupt, match="rollups/00000000-00000003"):
        RollUp.parse_stored(changed(lambda document: document.update(starts=[start])), KEY)


def test_names_that_change_with_every_round_are_refused() -> None:
    """Columns that are almost empty would take gigabytes in the replica that writes them."""
    telemetry = [
        Telemetry(metrics={f"loss of step {step} {number}": 1.0 for number in range(32)}) for step in range(400)
    ]
    rounds = [
        RecordedRound(
            history=RoundHistory(
                round=number,
                closed_at=None,
                replicas=(ReplicaRound(slot="a-0", part="trained", telemetry=item),),
                averages_equal=None,
                state_equal=None,
            ),
            contributions={},
            receipts=frozenset(),
        )
        for number, item in enumerate(telemetry)
    ]
    with pytest.raises(Invalid, match="too many names for a roll-up: names=12800 replicas=400"):
        RollUp.of(NONCE, "a-0", "c" * 64, rounds)


def test_equal_roll_ups_have_equal_bytes() -> None:
    assert RollUp.of(NONCE, "a-2", "c" * 64, recorded()).to_stored() == STORED


def test_roll_up_of_64_replicas_is_small() -> None:
    run = WrittenRun(MemoryStore(), *(f"a-{number}" for number in range(64)))
    run.close(10)
    listing = RoundListing(run.store, NONCE, range(10))
    rounds = [RecordedRound.of(single.number, 0.0, single.records) for single in listing.read()]
    assert len(RollUp.of(NONCE, "a-0", "c" * 64, rounds).to_stored()) < 40_000


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The stored bytes after a change of the document."""
    document = json.loads(gzip.decompress(STORED))
    change(document)
    return gzip.compress(json.dumps(document).encode())


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda document: document.update(format=2),
    lambda document: document.update(surprise=1),
    lambda document: document.update(last=4),
    lambda document: document.update(first=1),
    lambda document: document.update(first=9),
    lambda document: document.update(slots=["a-10", "a-2", "b-0"]),
    lambda document: document.update(slots=["a-2", "a-10"]),
    lambda document: document["rounds"]["closed_at"].pop(),
    lambda document: document["rounds"].update(replicas=[3, 3, 3, 2]),
    lambda document: document["replicas"]["loss"].pop(),
    lambda document: document["replicas"]["loss"].__setitem__(0, "low"),
    lambda document: document["replicas"]["slot"].__setitem__(0, 1),
    lambda document: document["replicas"]["part"].__setitem__(0, "stolen"),
    lambda document: document["replicas"]["share"].__setitem__(0, 1.5),
    lambda document: document["replicas"]["steps"].__setitem__(0, None),
    lambda document: document["replicas"]["incarnation"].__setitem__(0, -1),
    lambda document: document["replicas"]["seconds"].update(upload=[1.0]),
    lambda document: document["replicas"]["metrics"].update(
        {f"m{number}": document["replicas"]["metrics"]["accuracy"] for number in range(40)}
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_document_that_does_not_fit_is_corrupt(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(Corrupt, match="rollups/00000000-00000003"):
        RollUp.parse_stored(changed(change), KEY)


@given(st.binary(max_size=200) | st.integers(1, len(STORED) - 1).map(lambda end: STORED[:end]))
def test_other_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        RollUp.parse_stored(data, KEY)


def test_bytes_behind_the_end_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="followed by other bytes"):
        RollUp.parse_stored(STORED + b"x", KEY)


def test_small_object_that_unpacks_to_a_large_one_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_up, "_MAX_PLAIN_BYTES", 1 << 20)
    with pytest.raises(Corrupt, match="too large"):
        RollUp.parse_stored(gzip.compress(b" " * (2 << 20)), KEY)
    monkeypatch.setattr(roll_up, "MAX_BYTES", 100)
    with pytest.raises(Corrupt, match="roll-up too large"):
        RollUp.parse_stored(STORED, KEY)


@pytest.mark.parametrize("key", ["rollups/00000000-00000004.json.gz", "rollups/00000000-00000003.json", "runs"])
def test_roll_up_under_another_key_is_corrupt(key: str) -> None:
    with pytest.raises(Corrupt, match="roll-up of other rounds"):
        RollUp.parse_stored(STORED, key)


def test_records_that_were_written_later_are_left_out_when_it_is_rebuilt() -> None:
    run = WrittenRun(MemoryStore(), "a", "b")
    run.close(away=["b"])
    before = RecordedRound.of(0, 5.0, next(RoundListing(run.store, NONCE, range(1)).read()).records)
    run.contribute("b", 0)
    run.receipt("b", 0)
    records = next(RoundListing(run.store, NONCE, range(1)).read()).records
    assert RecordedRound.of(0, 5.0, records) != before
    assert before.again(records) == before
