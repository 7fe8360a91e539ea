"""Do all replicas hold the same after a round? Their receipts are compared, and whoever differs is named.

`compare`, `is_outvoted` and `evidence_of` judge, purely; `Alarm` reads receipts, a little at a time. Never acts, needs
no torch. A judgement follows from a round's members and their receipts, whenever it is made (decision 0008): one that
receipts still missing could turn round is not made. So all replicas come to the same one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from skerry.runtime import keys
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.records import Receipt, Record, Scope, Xxh128

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from skerry.runtime.store import Store

V = TypeVar("V", bound="Hashable")

WINDOW: Final = 3
"""Rounds that a receipt is waited for: it is written in the background, behind a checkpoint that may take a while."""
MAX_READS: Final = 64
"""Receipts that one look reads; what is left is read by the next one."""
QUIET: Final = 7
"""Rounds after a difference in which none is told: it takes a few to be measured and healed. Doubled, up to MAX_QUIET,
as long as differences come back, as they do between unlike hardware."""
MAX_QUIET: Final = 63
PATIENCE: Final = 7
"""Rounds in a row that are left without a judgement for want of receipts. Then those that are there have to do: their
writer may be gone for good, or upload for a long time."""

_TOLD: Final = 3


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """All receipts of the round that can be compared, those of `slots`, are equal. One alone says nothing."""

    round: int
    slots: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AveragesDiffer:
    """`slots` hold another average than `right` do. The average is the same bits on all hardware: they are wrong.

    majority: most of the round's members say so; else somebody had to count as right.
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


def compare(mine: Receipt, others: Collection[Receipt], members: Iterable[str]) -> Verdict | None:
    """The judgement on one round, as far as receipts have the scope and the commit of `mine`. Only `members` vote.

    What more than half of them hold is right; without such a majority, what the first of them in slot order holds.
    None: it depends on members' receipts that are not among `others`.
    """
    found = {mine.slot: mine} | {
        other.slot: other
        for other in others
        if (other.round, other.scope, other.commit) == (mine.round, mine.scope, mine.commit)
    }
    slots = sorted(found, key=keys.slot_order)
    apart = {other.slot for other in others} - found.keys()
    voters = sorted(set(members) - apart, key=keys.slot_order)
    averages = {slot: found[slot].averages for slot in slots}
    if len(set(averages.values())) > 1:
        if (split := _split(averages, voters)) is None:
            return None
        wrong, right, majority = split
        return AveragesDiffer(round=mine.round, slots=wrong, right=right, majority=majority)
    states = {slot: found[slot].state for slot in slots}
    if len(set(states.values())) > 1:
        if (split := _split(states, voters)) is None:
            return None
        wrong, right, majority = split
        return StatesDiffer(round=mine.round, slots=wrong, right=right, majority=majority)
    return Agreed(round=mine.round, slots=tuple(slots))


def is_outvoted(slot: str, receipts: Sequence[Receipt]) -> bool:
    """Whether more than half of the receipts of a round differ from the one of `slot`, all in the same way."""
    mine = next((receipt for receipt in receipts if receipt.slot == slot), None)
    if mine is None:
        return False
    verdict = compare(mine, receipts, [receipt.slot for receipt in receipts])
    return isinstance(verdict, (AveragesDiffer, StatesDiffer)) and verdict.majority and slot in verdict.slots


class Evidence(Record):
    """What receipts tell of the shared state after a round. scope: which part of it they cover.

    states: digests of which a checkpoint of it must have one: of what most of the round's members hold, or, where they
    agree on nothing, of what anybody holds. Empty: nobody tells.
    """

    scope: Scope = "average"
    states: tuple[Xxh128, ...] = ()

    def check(self, round_number: int, state: str) -> None:
        """Raises Corrupt if a checkpoint of so many rounds, whose shared state has this digest, must not be loaded."""
        if self.states and state not in self.states:
            raise refused(round_number, f"state={state} receipts={','.join(self.states[:_TOLD])}")


def evidence_of(receipts: Iterable[Receipt], members: Collection[str], commit: str) -> Evidence:
    """What the receipts of a round tell of the state that stands on `commit`. Most is more than half of those who tell.

    members: whose receipts count as votes. A round has one scope: what its members' receipts have.
    """
    told = [one for one in receipts if one.commit == commit and one.state is not None]
    votes: Counter[tuple[Scope, str | None]] = Counter((one.scope, one.state) for one in told if one.slot in members)
    if not votes:
        return Evidence()
    ((scope, state), count), *_ = votes.most_common(1)
    states = {state} if 2 * count > votes.total() else {one.state for one in told if one.scope == scope}
    return Evidence(scope=scope, states=tuple(sorted(one for one in states if one is not None)))


def refused(round_number: int, why: str) -> Corrupt:
    """The error of a checkpoint of so many rounds that is not what receipts say."""
    return Corrupt(
        f"checkpoint {keys.checkpoint_manifest(round_number)} is not the state that the receipts of its round tell of: "
        f"{why}; it was replaced, or its writer was wrong. If no other is left, restore an older version of its "
        f"objects, or delete {keys.receipts_of(round_number - 1)} to take it as it is"
    )


def receipts_of(store: Store, run: str, round_number: int) -> list[Receipt]:
    """Every receipt of a round that can be read. One listing, one read each."""
    found = (_read(store, run, key) for _, key in _listed(store, round_number))
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

    def judge(self, *, patient: bool) -> Verdict | None:
        """None: it depends on receipts that are missing. patient: wait for them; else nobody who is missing votes."""
        unusable = {slot for slot, receipt in self.found.items() if receipt is None}
        voters = self.members - unusable
        return compare(self.mine, self.others, voters if patient else voters & {*self.found, self.mine.slot})


class Alarm:
    """Judges the rounds of one replica in their order, each once its members' receipts are there, or it is old.

    A round that cannot be judged when it is old is given up: whoever differs still does in the next one.
    For one thread. Costs one listing a round and one read per receipt as long as the others keep up, at most
    WINDOW listings and MAX_READS reads. Holds at most WINDOW + 1 rounds, whatever raises.
    """

    def __init__(self, store: Store, slot: str) -> None:
        self._store = store
        self._slot = slot
        self._open: dict[int, _OpenRound] = {}
        self._quiet = QUIET
        self._quiet_until = 0
        self._agreed_rounds = 0
        self._given_up = 0
        self.agreed: int | None = None
        """The last round in which all were equal; before there was one, the one before the first that was expected."""

    def expect(self, mine: Receipt, members: Iterable[str]) -> None:
        """A round has my receipt: compare it with its members'."""
        if self.agreed is None:
            self.agreed = mine.round - 1
        self._open = {number: one for number, one in self._open.items() if mine.round - number <= WINDOW}
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
            if not self._open[number].complete and newest - number < WINDOW:
                break
            verdict = self._judge(self._open.pop(number))
            if verdict is not None and self._is_news(verdict):
                news.append(verdict)
        return news

    def _gather(self, newest: int) -> None:
        """Read what is new of the open rounds, but for the newest: others are writing their receipts just now."""
        reads = MAX_READS
        for number in sorted(self._open.keys() - {newest})[:WINDOW]:
            one = self._open[number]
            if one.complete:
                continue
            for slot, key in _listed(self._store, number):
                if reads and slot != self._slot and slot not in one.found:
                    one.found[slot] = _read(self._store, one.mine.run, key)
                    reads -= 1

    def _judge(self, one: _OpenRound) -> Verdict | None:
        """None: it depends on receipts that are missing; the next round will do."""
        verdict = one.judge(patient=True)
        self._given_up = 0 if verdict is not None else self._given_up + 1
        return verdict if self._given_up <= PATIENCE else one.judge(patient=False)

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


def _split(held: Mapping[str, V], voters: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], bool] | None:
    """Who is wrong, who is right, and whether a majority says so. held, voters: in slot order.

    None: a voter who is not in `held` can turn it round.
    """
    votes = Counter(held[slot] for slot in voters if slot in held)
    value, count = next(iter(votes.most_common(1)), (None, 0))
    majority = count > 1 and 2 * count > len(voters)  # one alone is none
    if not majority:
        first = next(iter(voters or held))
        if first not in held:
            return None
        value = held[first]
        rival = max((count for other, count in votes.items() if other != value), default=0)
        if 2 * (rival + len(voters) - votes.total()) > len(voters):
            return None
    wrong = tuple(slot for slot in held if held[slot] != value)
    return wrong, tuple(slot for slot in held if held[slot] == value), majority


def _listed(store: Store, round_number: int) -> list[tuple[str, str]]:
    """Slot and key of every receipt of a round; an object whose name is none of ours is passed over. One listing."""
    listed: list[tuple[str, str]] = []
    for entry in store.list(keys.receipts_of(round_number)):
        try:
            listed.append((keys.slot_of(entry.key), entry.key))
        except Invalid:
            continue
    return listed


def _read(store: Store, run: str, key: str) -> Receipt | None:
    """The receipt; None if it is damaged, another run's or a copy: who stands on the log will find that out."""
    data = store.read(key)
    try:
        receipt = None if data is None else Receipt.parse(data, key)
    except Corrupt:
        return None
    if receipt is None or receipt.run != run:
        return None
    return receipt if (receipt.round, receipt.slot) == (keys.round_of(key), keys.slot_of(key)) else None
