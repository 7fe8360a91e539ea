"""Do all replicas hold the same after a round? Their receipts are compared, and whoever differs is named.

`compare` and `is_outvoted` judge, purely; `Alarm` reads receipts, a little at a time. Never acts, needs no torch.
A judgement follows from the log alone, so all replicas come to the same one, each when it has read enough.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from skerry.runtime import keys
from skerry.runtime.errors import Corrupt
from skerry.runtime.records import CheckpointManifest, Receipt

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from skerry.runtime.store import Store

V = TypeVar("V", bound="Hashable")

WINDOW: Final = 3
"""Rounds that a receipt is waited for: it is written in the background, behind a checkpoint that may take a while."""
MAX_READS: Final = 64
"""Receipts that one look reads; what is left is read by the next one."""
QUIET: Final = 7
"""Rounds after a difference in which none is told: it takes a few to be measured and healed. Doubled, up to MAX_QUIET,
as long as differences come back, as they do between unlike hardware. Odd, so that of two replicas that write their
checkpoints in turn each is the author at some time."""
MAX_QUIET: Final = 63


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """All receipts of the round that can be compared, those of `slots`, are equal. One alone says nothing."""

    round: int
    slots: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AveragesDiffer:
    """`slots` hold another average than `right` do. The average is the same bits on all hardware: they are wrong.

    majority: most of the round's receipts say so; else somebody had to count as right.
    """

    round: int
    slots: tuple[str, ...]
    right: tuple[str, ...]
    majority: bool


@dataclass(frozen=True, kw_only=True)
class StatesDiffer:
    """`slots` hold the right average and another state than `right` do: by rounding, or by more."""

    round: int
    slots: tuple[str, ...]
    right: tuple[str, ...]
    majority: bool


Difference: TypeAlias = AveragesDiffer | StatesDiffer
Verdict: TypeAlias = Agreed | Difference


def compare(mine: Receipt, others: Iterable[Receipt], author: str | None) -> Verdict:
    """The judgement on one round, as far as receipts have the scope and the commit of `mine`.

    More than half of the receipts are right; without such a majority the one of `author` is, who wrote the round's
    checkpoint; without an author among them, the first in slot order.
    """
    found = {mine.slot: mine} | {
        other.slot: other
        for other in others
        if (other.round, other.scope, other.commit) == (mine.round, mine.scope, mine.commit)
    }
    slots = sorted(found, key=keys.slot_order)
    averages = {slot: found[slot].averages for slot in slots}
    if len(set(averages.values())) > 1:
        wrong, right, majority = _split(averages, author)
        return AveragesDiffer(round=mine.round, slots=wrong, right=right, majority=majority)
    states = {slot: found[slot].state for slot in slots}
    if len(set(states.values())) > 1:
        wrong, right, majority = _split(states, author)
        return StatesDiffer(round=mine.round, slots=wrong, right=right, majority=majority)
    return Agreed(round=mine.round, slots=tuple(slots))


def is_outvoted(slot: str, receipts: Sequence[Receipt]) -> bool:
    """Whether more than half of the receipts of a round differ from the one of `slot`, all in the same way."""
    mine = next((receipt for receipt in receipts if receipt.slot == slot), None)
    if mine is None:
        return False
    verdict = compare(mine, receipts, author=slot)
    return not isinstance(verdict, Agreed) and slot in verdict.slots


def receipts_of(store: Store, run: str, round_number: int) -> list[Receipt]:
    """Every receipt of a round that can be read. One listing, one read each."""
    entries = store.list(keys.receipts_of(round_number))
    found = (_read(store, run, entry.key) for entry in entries)
    return [receipt for receipt in found if receipt is not None]


@dataclass
class _OpenRound:
    """A round that is not judged yet. found: what its receipts say; None for one that cannot be used."""

    mine: Receipt
    members: frozenset[str]
    found: dict[str, Receipt | None] = field(default_factory=dict[str, "Receipt | None"])

    @property
    def complete(self) -> bool:
        """All members' receipts are here."""
        return self.members <= self.found.keys() | {self.mine.slot}

    @property
    def others(self) -> list[Receipt]:
        """The other slots' receipts that can be used."""
        return [receipt for receipt in self.found.values() if receipt is not None]


class Alarm:
    """Judges the rounds of one replica in their order, each once its members' receipts are there, or it is old.

    For one thread. Costs one listing a round and one read per receipt as long as the others keep up, at most
    WINDOW listings and MAX_READS reads.
    """

    def __init__(self, store: Store, slot: str) -> None:
        self._store = store
        self._slot = slot
        self._open: dict[int, _OpenRound] = {}
        self._quiet = QUIET
        self._quiet_until = 0
        self._agreed_rounds = 0
        self.agreed: int | None = None
        """The last round in which all were equal; before there was one, the one before the first that was expected."""

    def expect(self, mine: Receipt, members: Iterable[str]) -> None:
        """A round has my receipt: compare it with its members'."""
        if self.agreed is None:
            self.agreed = mine.round - 1
        self._open[mine.round] = _OpenRound(mine, frozenset(members))

    def forget(self, before: int) -> None:
        """What I held before round `before` is gone: judge nothing of it, and count the round before it as equal."""
        self._open = {number: one for number, one in self._open.items() if number >= before}
        if self.agreed is None or self.agreed < before - 1:
            self.agreed = before - 1

    def look(self) -> list[Verdict]:
        """What is news: rounds in which all are equal, and differences, unless one was told a short while ago.

        Raises what the store raises; a damaged receipt is left out.
        """
        if not self._open:
            return []
        newest = max(self._open)
        self._gather(newest)
        news: list[Verdict] = []
        for number in sorted(self._open):
            verdict = self._judge(self._open[number], overdue=newest - number >= WINDOW)
            if verdict is None:
                break
            del self._open[number]
            if self._is_news(verdict):
                news.append(verdict)
        return news

    def _gather(self, newest: int) -> None:
        """Read what is new of the open rounds, but for the newest: others are writing their receipts just now."""
        reads = MAX_READS
        for number in sorted(self._open.keys() - {newest})[:WINDOW]:
            one = self._open[number]
            if one.complete:
                continue
            for entry in self._store.list(keys.receipts_of(number)):
                slot = keys.slot_of(entry.key)
                if reads and slot != self._slot and slot not in one.found:
                    one.found[slot] = _read(self._store, one.mine.run, entry.key)
                    reads -= 1

    def _judge(self, one: _OpenRound, *, overdue: bool) -> Verdict | None:
        """None: not yet."""
        if not one.complete and not overdue:
            return None
        verdict = compare(one.mine, one.others, None)
        if isinstance(verdict, Agreed) or verdict.majority:
            return verdict
        # All must take the same side: so everybody waits for the round's checkpoint, if one is coming.
        author = self._author(one.mine.round + 1)
        if author is None and not overdue:
            return None
        return compare(one.mine, one.others, author)

    def _author(self, round_number: int) -> str | None:
        key = keys.checkpoint_manifest(round_number)
        data = self._store.read(key)
        try:
            return None if data is None else CheckpointManifest.parse(data, key).writer
        except Corrupt:
            return None

    def _is_news(self, verdict: Verdict) -> bool:
        if isinstance(verdict, Agreed):
            if len(verdict.slots) < 2:
                return False
            self.agreed = verdict.round
            self._agreed_rounds += 1
            if self._agreed_rounds >= self._quiet:
                self._quiet = QUIET
            return True
        self._agreed_rounds = 0
        if verdict.round < self._quiet_until:
            return False
        self._quiet_until = verdict.round + self._quiet
        self._quiet = min(2 * self._quiet + 1, MAX_QUIET)
        return True


def _split(held: Mapping[str, V], author: str | None) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Who is wrong, who is right, and whether a majority says so. held: in slot order."""
    ((value, count),) = Counter(held.values()).most_common(1)
    majority = 2 * count > len(held)
    if not majority:
        value = held[author] if author is not None and author in held else next(iter(held.values()))
    wrong = tuple(slot for slot in held if held[slot] != value)
    return wrong, tuple(slot for slot in held if held[slot] == value), majority


def _read(store: Store, run: str, key: str) -> Receipt | None:
    """The receipt; None if it is damaged or another run's: who stands on the log will find that out."""
    data = store.read(key)
    try:
        receipt = None if data is None else Receipt.parse(data, key)
    except Corrupt:
        return None
    return receipt if receipt is not None and receipt.run == run else None
