"""Reads the closed rounds of a run: from roll-ups where they exist, from single records elsewhere. Never writes.

Used by all readers of a run's history and by the replica that writes a roll-up, so that both read the same. A roll-up
that is damaged or of another run counts as missing.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import MAX_RECORD_BYTES, digest_of
from skerry.runtime.log.recorded_starts import StartRecord, key_of_start
from skerry.runtime.log.records import Commit, Contribution, Decision, Receipt
from skerry.runtime.log.roll_up import MAX_BYTES, RollUp
from skerry.runtime.log.summarize_round import RoundRecords, summarize_round
from skerry.runtime.store.interface import Span
from skerry.runtime.store.parallel import run_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping, Sequence

    from skerry.runtime.log.recent_records_cache import RecentRecords
    from skerry.runtime.log.summarize_round import RoundHistory
    from skerry.runtime.store import Entry, Store

_Kind: TypeAlias = type[Commit | Decision | Contribution | Receipt]

_FOLDERS: Final[Mapping[str, _Kind]] = {
    keys.COMMITS: Commit,
    keys.EXCHANGES: Decision,
    keys.CONTRIBUTIONS: Contribution,
    keys.RECEIPTS: Receipt,
}
# One byte more than allowed: a longer object is refused by its length and never read whole.
_RECORD_SPAN: Final = Span(0, MAX_RECORD_BYTES + 1)
_ROLL_UP_SPAN: Final = Span(0, MAX_BYTES + 1)
# Keys of so many rounds have a common prefix.
_HUNDRED: Final = 100
# Roll-ups that are read at the same time; each takes some megabytes.
_AT_ONCE: Final = 16


@dataclass(kw_only=True)
class SingleRound:
    """The records of one round. closed_at: of its commit, by the store's clock. commit: the digest of the commit.

    damaged: keys of records that do not parse, or do not belong at their key.
    """

    number: int
    closed_at: float | None = None
    commit: str | None = None
    exchanges: int = 0
    decisions: list[Decision] = field(default_factory=list[Decision])
    contributions: list[Contribution] = field(default_factory=list[Contribution])
    receipts: list[Receipt] = field(default_factory=list[Receipt])
    damaged: list[str] = field(default_factory=list[str])

    @property
    def records(self) -> RoundRecords:
        """The records that a summary is made of."""
        return RoundRecords(decisions=self.decisions, contributions=self.contributions, receipts=self.receipts)

    @property
    def is_complete(self) -> bool:
        """True if the round is closed and all records that others reference are here; receipts are not referenced."""
        present = {(contribution.exchange, contribution.slot) for contribution in self.contributions}
        members = {(decision.exchange, share.slot) for decision in self.decisions for share in decision.members}
        decided = self.commit is not None and 0 < len(self.decisions) == self.exchanges
        return decided and not self.damaged and members <= present


class RoundListing:
    """The listed keys of the records of some rounds, and their times. Four listings for each hundred rounds."""

    def __init__(self, store: Store, run: str, rounds: range) -> None:
        """run: its nonce; records of others are damaged ones."""
        self._store = store
        self._run = run
        self.rounds = rounds
        self._entries: dict[str, Entry] = {}
        for folder in _FOLDERS:
            self._list(folder)

    @property
    def receipts(self) -> defaultdict[int, set[str]]:
        """The slots with a receipt, by round."""
        return self._slots(keys.RECEIPTS)

    @property
    def contributors(self) -> defaultdict[int, set[str]]:
        """The slots with a contribution, by round."""
        return self._slots(keys.CONTRIBUTIONS)

    def list_receipts(self) -> None:
        """List the receipts again."""
        self._list(keys.RECEIPTS)

    def read(self, recent: RecentRecords | None = None) -> Iterator[SingleRound]:
        """The rounds with any record, in order. recent: records that need not be read again."""
        by_round: defaultdict[int, list[str]] = defaultdict(list)
        for key in sorted(self._entries):
            by_round[keys.round_of(key)].append(key)
        for first in range(self.rounds.start, self.rounds.stop, _HUNDRED):
            # Bounds the memory for the bodies of records.
            numbers = [number for number in range(first, min(first + _HUNDRED, self.rounds.stop)) if number in by_round]
            bodies = self._bodies([key for number in numbers for key in by_round[number]], recent)
            for number in numbers:
                single = SingleRound(number=number)
                for key in by_round[number]:
                    self._take(single, key, bodies[key])
                yield single

    def _slots(self, folder: str) -> defaultdict[int, set[str]]:
        slots: defaultdict[int, set[str]] = defaultdict(set)
        for key in self._entries:
            if key.startswith(folder):
                slots[keys.round_of(key)].add(keys.slot_of(key))
        return slots

    def _list(self, folder: str) -> None:
        for number in range(self.rounds.start // _HUNDRED, (self.rounds.stop - 1) // _HUNDRED + 1):
            for entry in self._store.list(keys.hundred(folder, number * _HUNDRED)):
                with suppress(Invalid):  # a foreign object
                    if keys.round_of(entry.key) in self.rounds:
                        self._entries[entry.key] = entry

    def _bodies(self, listed: Sequence[str], recent: RecentRecords | None) -> dict[str, bytes | memoryview | None]:
        known = {} if recent is None else {key: body for key in listed if (body := recent.get(key)) is not None}
        missing = [key for key in listed if key not in known]
        read = run_parallel(self._store, len(missing), lambda index: self._store.read(missing[index], _RECORD_SPAN))
        return {**known, **dict(zip(missing, read, strict=True))}

    def _take(self, single: SingleRound, key: str, data: bytes | memoryview | None) -> None:
        if data is None:  # deleted since the listing
            return
        kind = next(kind for folder, kind in _FOLDERS.items() if key.startswith(folder))
        try:
            record = kind.parse(data, key)
        except Corrupt:
            single.damaged.append(key)
            return
        if record.run != self._run or _key_of(record) != key:
            single.damaged.append(key)
            return
        match record:
            case Commit():
                single.closed_at = self._entries[key].modified or None
                single.commit, single.exchanges = digest_of(data), len(record.exchanges)
            case Decision():
                single.decisions.append(record)
            case Contribution():
                single.contributions.append(record)
            case Receipt():
                single.receipts.append(record)


def read_closed_rounds(
    store: Store, run: str, starts: MutableMapping[str, StartRecord] | None = None
) -> Iterator[RoundHistory]:
    """The closed rounds with a readable decision, in order, each with the replicas that have any record of it.

    run: the nonce. starts: gets the starts and ends in roll-ups, by key. Costs one request for each roll-up, one for
    each record of the rounds that are in none, and some listings. Raises what the store raises.
    """
    # Listed before the commits, so that its rounds are among them. Any replica may store one of rounds to come.
    listed = list_roll_ups(store)
    begin, closed = 0, find_closed(store, 0)
    for roll_up in _covering(store, run, [rounds for rounds in listed if rounds.stop <= closed]):
        if begin < roll_up.first:
            yield from _single_rounds(store, run, range(begin, roll_up.first))
        yield from (item for item in roll_up.histories() if item.round >= begin)
        if starts is not None:
            starts.update((key_of_start(record), record) for record in roll_up.starts or ())
        begin = roll_up.last + 1
    if begin < closed:
        yield from _single_rounds(store, run, range(begin, closed))


def find_closed(store: Store, known: int) -> int:
    """The number of rounds that are closed without a gap. known: as many are, at least. One listing."""
    return known + len(list_closed(store, known))


def list_closed(store: Store, known: int) -> list[Entry]:
    """The commits from round `known` on, up to a gap: later ones are stray, or a record is lost. One listing."""
    entries = store.list(keys.COMMITS, after=keys.commit(known - 1) if known else None)
    closed: list[Entry] = []
    for entry in entries:
        with suppress(Invalid):  # a foreign object
            if keys.round_of(entry.key) != known + len(closed):
                break
            closed.append(entry)
    return closed


def list_roll_ups(store: Store, begin: int = 0) -> list[range]:
    """The rounds of the stored roll-ups that begin with round `begin` or later, in order. One listing."""
    after = f"{keys.ROLL_UPS}{begin:08d}" if begin else None
    listed = [keys.roll_up_of(entry.key) for entry in store.list(keys.ROLL_UPS, after=after)]
    return [rounds for rounds in listed if rounds is not None]


def read_roll_up(store: Store, rounds: range) -> RollUp | None:
    """The stored roll-up of these rounds, of any run; None if it is absent. Raises Corrupt if it is damaged."""
    key = keys.roll_up(rounds.start, rounds.stop - 1)
    data = store.read(key, _ROLL_UP_SPAN)
    return None if data is None else RollUp.parse_stored(data, key)


def cover(listed: Sequence[range], begin: int = 0) -> list[range]:
    """Roll-ups that together have all rounds from `begin` on that any of them has, as few as possible, in order."""
    chosen: list[range] = []
    while ahead := [rounds for rounds in listed if rounds.stop > begin]:
        first = max(begin, min(rounds.start for rounds in ahead))
        best = max((rounds for rounds in ahead if rounds.start <= first), key=lambda rounds: rounds.stop)
        chosen.append(best)
        begin = best.stop
    return chosen


def count_single_rounds(store: Store, closed: int) -> int:
    """The number of the first `closed` rounds that are in no roll-up. One listing."""
    end = count = 0
    for rounds in cover([rounds for rounds in list_roll_ups(store) if rounds.stop <= closed]):
        count += max(0, rounds.start - end)
        end = rounds.stop
    return count + closed - end


def _covering(store: Store, run: str, listed: Sequence[range]) -> Iterator[RollUp]:
    """The roll-ups of `cover` in order, without those that cannot be used; these are replaced by others if possible."""
    end, usable = 0, list(listed)
    while ahead := cover(usable, end)[:_AT_ONCE]:
        for rounds, roll_up in zip(ahead, _read_all(store, run, ahead), strict=True):
            if roll_up is None:
                usable.remove(rounds)
                break
            yield roll_up
            end = rounds.stop


def _read_all(store: Store, run: str, wanted: Sequence[range]) -> list[RollUp | None]:
    return run_parallel(store, len(wanted), lambda index: _readable(store, run, wanted[index]))


def _readable(store: Store, run: str, rounds: range) -> RollUp | None:
    try:
        roll_up = read_roll_up(store, rounds)
    except Corrupt:
        return None
    return roll_up if roll_up is not None and roll_up.run == run else None


def _single_rounds(store: Store, run: str, rounds: range) -> Iterator[RoundHistory]:
    for first in range(rounds.start, rounds.stop, _HUNDRED):
        for single in RoundListing(store, run, range(first, min(first + _HUNDRED, rounds.stop))).read():
            if single.decisions:
                yield summarize_round(single.number, single.closed_at, single.records)


def _key_of(record: Commit | Decision | Contribution | Receipt) -> str | None:
    """The key at which a record belongs; None if it has no valid one."""
    with suppress(Invalid):
        match record:
            case Commit():
                return keys.commit(record.round)
            case Decision():
                return keys.decision(record.round, record.exchange)
            case Contribution():
                return keys.contribution(record.round, record.exchange, record.slot)
            case Receipt():
                return keys.receipt(record.round, record.slot)
    return None
