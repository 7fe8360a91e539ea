"""`skerry doctor` rebuilds every roll-up from the records of its rounds and compares."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.kit.records import receipt
from tests.kit.stores import damage

from skerry.infra.observe.doctor.examine import examine_store
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import RoundListing
from skerry.runtime.log.recorded_starts import read_starts_since
from skerry.runtime.log.roll_up import RollUp
from skerry.runtime.log.summarize_round import RecordedRound

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.infra.observe.doctor.findings import Finding

KEY = keys.roll_up(0, 3)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Six rounds of two replicas, with receipts; the first four are rolled up."""
    fleet = Fleet(tmp_path / "run")
    for number in range(6):
        fleet.train(number, *SLOTS, share=0.5 if number == 2 else 1.0)
        for slot in SLOTS[: 1 if number == 3 else 2]:
            write_receipt(fleet, slot, number)
    fleet.store.create(KEY, rebuilt(fleet).to_stored())
    return fleet


def write_receipt(fleet: Fleet, slot: str, number: int) -> None:
    record = receipt(slot, number, run=fleet.nonce, commit=fleet.replicas["a-0"].commits[number].digest)
    assert fleet.store.create(keys.receipt(number, slot), record.to_bytes())


def rebuilt(fleet: Fleet) -> RollUp:
    singles = list(RoundListing(fleet.store, fleet.nonce, range(4)).read())
    rounds = [RecordedRound.of(single.number, single.closed_at, single.records) for single in singles]
    starts = read_starts_since(fleet.store, fleet.nonce, 0.0)
    assert len(starts) == len(SLOTS)
    return RollUp.of(fleet.nonce, "a-0", singles[-1].commit or "", rounds, starts)


def findings(fleet: Fleet) -> list[Finding]:
    """The findings about roll-ups."""
    return [item for item in examine_store(fleet.store).findings if item.key.startswith(keys.ROLL_UPS)]


def change(fleet: Fleet, **fields: object) -> None:
    document = json.loads(gzip.decompress(fleet.store.read(KEY) or b""))
    fleet.store.replace(KEY, gzip.compress(json.dumps(document | fields).encode()))


def other_host(fleet: Fleet) -> dict[str, object]:
    return json.loads(bytes(fleet.store.read(keys.member("a-0", 0)) or b"")) | {"host": "elsewhere"}


def change_replicas(fleet: Fleet, column: str, row: int, value: object) -> None:
    document: dict[str, Any] = json.loads(gzip.decompress(fleet.store.read(KEY) or b""))
    document["replicas"][column][row] = value
    fleet.store.replace(KEY, gzip.compress(json.dumps(document).encode()))


def test_roll_up_that_equals_its_records_is_no_finding(fleet: Fleet) -> None:
    assert findings(fleet) == []


def test_records_that_came_later_are_no_difference(fleet: Fleet) -> None:
    write_receipt(fleet, "a-1", 3)
    assert findings(fleet) == []
    assert rebuilt(fleet).to_stored() != fleet.store.read(KEY)


def test_bucket_that_was_copied_has_other_times(fleet: Fleet) -> None:
    for number in range(4):
        fleet.store.replace(keys.commit(number), bytes(fleet.store.read(keys.commit(number)) or b""))
    assert findings(fleet) == []


WRONG: dict[str, tuple[Callable[[Fleet], object], str]] = {
    "share": (lambda fleet: change_replicas(fleet, "share", 4, 0.75), "round 2 differs from its records: a-0"),
    "part": (lambda fleet: change_replicas(fleet, "part", 3, "late"), "round 1 differs from its records: a-1"),
    "bytes": (lambda fleet: change_replicas(fleet, "uploaded_bytes", 0, 7), "round 0 differs from its records: a-0"),
    "receipt that is gone": (
        lambda fleet: fleet.store.delete(keys.receipt(1, "a-1")),
        "round 1 differs from its records: a-1",
    ),
    "commit": (lambda fleet: change(fleet, commit="f" * 64), "the commit of round 3 is "),
    "start": (lambda fleet: change(fleet, starts=[other_host(fleet)]), f"another record than {keys.member('a-0', 0)}"),
    "run": (lambda fleet: change(fleet, run="f" * 32, starts=[]), f"it belongs to run {'f' * 32}, this prefix to run "),
}


@pytest.mark.parametrize("name", WRONG)
def test_roll_up_that_differs_is_an_error(fleet: Fleet, name: str) -> None:
    damage_it, text = WRONG[name]
    damage_it(fleet)
    (finding,) = findings(fleet)
    assert (finding.kind, finding.severity, finding.key, finding.round) == ("wrong-roll-up", "error", KEY, 0)
    assert text in finding.text


def test_roll_up_of_rounds_that_are_not_closed_is_an_error(fleet: Fleet) -> None:
    stored = RollUp.parse_stored(fleet.store.read(KEY) or b"", KEY)
    later = [replace(item, history=replace(item.history, round=item.history.round + 4)) for item in stored.recorded()]
    fleet.store.create(keys.roll_up(4, 7), RollUp.of(stored.run, "a-0", stored.commit, later).to_stored())
    (finding,) = findings(fleet)
    assert (finding.kind, finding.text) == ("wrong-roll-up", "it has round 7, but only 6 rounds are closed")


def test_damaged_roll_up_is_a_warning(fleet: Fleet) -> None:
    damage(fleet.store, KEY, 40)
    (finding,) = findings(fleet)
    assert (finding.kind, finding.severity) == ("damaged-roll-up", "warning")


def test_round_with_a_damaged_record_is_not_compared(fleet: Fleet) -> None:
    damage(fleet.store, keys.contribution(1, 0, "a-1"), 0)
    assert findings(fleet) == []
    assert "unreadable" in {item.kind for item in examine_store(fleet.store).findings}
