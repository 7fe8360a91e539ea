"""Compares every roll-up with the records of its rounds. `read_roll_ups` reads, `check_roll_ups` is pure. Never writes.

Records that were written after a roll-up are not in it, and are no difference. Rounds with records that do not parse
are not compared: these are findings of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.findings import finding
from skerry.infra.observe.history import records_by_round
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import list_roll_ups, read_roll_up
from skerry.runtime.log.recorded_starts import key_of_start
from skerry.runtime.log.roll_up import RollUp
from skerry.runtime.log.summarize_round import RoundRecords

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.runtime.log.summarize_round import RecordedRound
    from skerry.runtime.store import Store


def read_roll_ups(store: Store) -> dict[str, RollUp | str]:
    """The roll-ups of a run by key; for a damaged one why it does not parse. One listing, and a read for each.

    Read them before the records, so that every record that they name is then found. Raises what the store raises.
    """
    read: dict[str, RollUp | str] = {}
    for rounds in list_roll_ups(store):
        key = keys.roll_up(rounds.start, rounds.stop - 1)
        try:
            roll_up = read_roll_up(store, rounds)
        except Corrupt as error:
            read[key] = str(error)
        else:
            if roll_up is not None:  # not deleted since the listing
                read[key] = roll_up
    return read


def check_roll_ups(log: RunRecords, roll_ups: Mapping[str, RollUp | str]) -> Iterator[Finding]:
    """Finds roll-ups that do not parse, and those that differ from what the records of their rounds give."""
    records = records_by_round(log)
    for key, roll_up in roll_ups.items():
        if isinstance(roll_up, str):
            yield finding("damaged-roll-up", key, roll_up, round_number=_first(key), severity="warning")
        elif (difference := _difference(log, records, roll_up)) is not None:
            yield finding("wrong-roll-up", key, difference, round_number=_first(key))


def _first(key: str) -> int | None:
    rounds = keys.roll_up_of(key)
    return None if rounds is None else rounds.start


def _difference(log: RunRecords, records: Mapping[int, RoundRecords], roll_up: RollUp) -> str | None:
    if roll_up.run != log.nonce:
        return f"it belongs to run {roll_up.run}, this prefix to run {log.nonce}"
    last = log.commits.get(keys.commit(roll_up.last))
    if roll_up.last >= log.closed:
        return f"it has round {roll_up.last}, but only {log.closed} rounds are closed"
    if last is not None and last.digest != roll_up.commit:
        return f"it was made of another log: the commit of round {roll_up.last} is {last.digest}, not {roll_up.commit}"
    single = {item.key: item.record for item in (*log.members.values(), *log.outcomes.values())}
    for start in roll_up.starts or ():
        if start != single.get(key := key_of_start(start), start):
            return f"it has another record than {key}"
    unsure = _unsure(log)
    stored = list(roll_up.recorded())
    rebuilt = RollUp.of(
        roll_up.run,
        roll_up.writer,
        roll_up.commit,
        [item.again(records.get(item.history.round, RoundRecords())) for item in stored],
    )
    for item, expected in zip(stored, rebuilt.recorded(), strict=True):
        number = item.history.round
        if number not in unsure and _content(item) != _content(expected):
            return f"round {number} differs from its records: {_slots(item, expected)}"
    return None


def _content(item: RecordedRound) -> RecordedRound:
    """The round without the time of its listing, which another store may have changed."""
    return replace(item, history=replace(item.history, closed_at=None))


def _slots(item: RecordedRound, expected: RecordedRound) -> str:
    mine, other = ({replica.slot: replica for replica in each.history.replicas} for each in (item, expected))
    slots = [
        slot for slot in sorted(mine.keys() | other.keys(), key=keys.slot_order) if mine.get(slot) != other.get(slot)
    ]
    return ", ".join(slots) or "its agreement"


def _unsure(log: RunRecords) -> set[int]:
    """The rounds with a record that does not parse, or does not belong at its key."""
    valid = log.decisions.keys() | log.contributions.keys() | log.receipts.keys()
    folders = (keys.EXCHANGES, keys.CONTRIBUTIONS, keys.RECEIPTS)
    return {keys.round_of(key) for key in log.listed if key.startswith(folders) and key not in valid}
