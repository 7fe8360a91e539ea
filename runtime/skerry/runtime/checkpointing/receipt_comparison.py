"""Compares the receipts of a round and names the replicas that differ.

`compare`, `is_outvoted` and `evidence_of` are pure; `ReceiptMonitor` reads receipts, a few at a time. Needs no torch.
No verdict is given while a missing receipt could still change it (decision 0008), so all replicas reach the same one.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import Decision, Receipt, Scope, Xxh128

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from skerry.runtime.log.recent_records_cache import RecentRecords
    from skerry.runtime.log.records import CheckpointManifest
    from skerry.runtime.store import Store

V = TypeVar("V", bound="Hashable")

WINDOW: Final = 3
"""Rounds to wait for a receipt: it is written in the background, possibly after a slow checkpoint."""
LARGE: Final = 8
"""From twice as many members on, only every second round is compared, every third from three times as many, and so on:
each replica would otherwise read as many receipts in every round as there are members."""
MAX_READS: Final = 64
"""Receipts that one call of `look` reads; the next call reads the rest."""
QUIET: Final = 7
"""Rounds after a difference in which no other is reported, because measuring and healing take a few rounds. Doubled up
to MAX_QUIET while differences return, as they do between unlike hardware."""
MAX_QUIET: Final = 63
PATIENCE: Final = 7
"""Consecutive rounds without a verdict because receipts are missing. After that the existing receipts decide: the
writer of a missing one may have failed, or may upload for a long time."""

_MAX_LISTED: Final = 3


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """All comparable receipts of the round, those of `slots`, are equal. A single receipt proves nothing."""

    round: int
    slots: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AveragesDiffer:
    """`slots` have another average than `right`. The average has the same bits on all hardware, so `slots` are wrong.

    majority: more than half of the round's members agree with `right`; otherwise the first member counts as right.
    """

    round: int
    slots: tuple[str, ...]
    right: tuple[str, ...]
    majority: bool


@dataclass(frozen=True, kw_only=True)
class StatesDiffer:
    """`slots` have the same average as `right` but another state: by rounding, or by divergence."""

    round: int
    slots: tuple[str, ...]
    right: tuple[str, ...]
    majority: bool


Difference: TypeAlias = AveragesDiffer | StatesDiffer
Verdict: TypeAlias = Agreed | Difference


def compare(mine: Receipt, others: Collection[Receipt], members: Iterable[str]) -> Verdict | None:
    """Compares the receipts of one round that have the scope and the commit of `mine`. Only `members` vote.

    The value of more than half of them is right; without a majority, the value of the first member in slot order.
    Returns None if the result depends on members' receipts that are not among `others`.
    """
    comparable = {mine.slot: mine} | {
        other.slot: other
        for other in others
        if (other.round, other.scope, other.commit) == (mine.round, mine.scope, mine.commit)
    }
    slots = sorted(comparable, key=keys.slot_order)
    incomparable = {other.slot for other in others} - comparable.keys()
    voters = sorted(set(members) - incomparable, key=keys.slot_order)
    averages = {slot: comparable[slot].averages for slot in slots}
    if len(set(averages.values())) > 1:
        if (split := _split(averages, voters)) is None:
            return None
        wrong, right, majority = split
        return AveragesDiffer(round=mine.round, slots=wrong, right=right, majority=majority)
    states = {slot: comparable[slot].state for slot in slots}
    if len(set(states.values())) > 1:
        if (split := _split(states, voters)) is None:
            return None
        wrong, right, majority = split
        return StatesDiffer(round=mine.round, slots=wrong, right=right, majority=majority)
    return Agreed(round=mine.round, slots=tuple(slots))


def is_outvoted(slot: str, receipts: Sequence[Receipt]) -> bool:
    """Returns True if more than half of the receipts of a round agree on something else than the receipt of `slot`."""
    mine = next((receipt for receipt in receipts if receipt.slot == slot), None)
    if mine is None:
        return False
    verdict = compare(mine, receipts, [receipt.slot for receipt in receipts])
    return isinstance(verdict, (AveragesDiffer, StatesDiffer)) and verdict.majority and slot in verdict.slots


class ReceiptEvidence(Record):
    """Digests of the shared state after a round, from receipts. scope: the part of the state that they cover.

    states: a checkpoint of the round must have one of these digests: the majority's, or without a majority any reported
    one. Empty if no receipt reports a state.
    """

    scope: Scope = "average"
    states: tuple[Xxh128, ...] = ()

    def check(self, round_number: int, state: str) -> None:
        """Raises Corrupt if receipts contradict a checkpoint of `round_number` rounds whose state has this digest."""
        if self.states and state not in self.states:
            raise refused(round_number, f"state={state} receipts={','.join(self.states[:_MAX_LISTED])}")


def evidence_of(receipts: Iterable[Receipt], members: Collection[str], commit: str) -> ReceiptEvidence:
    """Collects what the receipts of a round report about the state after `commit`.

    members: the slots that vote; a majority is more than half of the members that report a state. A round has one
    scope: the one in its members' receipts.
    """
    reporting = [receipt for receipt in receipts if receipt.commit == commit and receipt.state is not None]
    votes: Counter[tuple[Scope, str | None]] = Counter(
        (receipt.scope, receipt.state) for receipt in reporting if receipt.slot in members
    )
    if not votes:
        return ReceiptEvidence()
    ((scope, state), count), *_ = votes.most_common(1)
    states = (
        {state} if 2 * count > votes.total() else {receipt.state for receipt in reporting if receipt.scope == scope}
    )
    return ReceiptEvidence(scope=scope, states=tuple(sorted(state for state in states if state is not None)))


def read_evidence(store: Store, run: str, manifest: CheckpointManifest) -> ReceiptEvidence:
    """The digests that receipts allow for a checkpoint. Raises Corrupt if a majority contradicts its writer.

    run: the nonce. Costs one listing, one read per receipt, and one read of the round's members.
    """
    if manifest.round == 0:
        return ReceiptEvidence()
    receipts = receipts_of(store, run, manifest.round - 1)
    members = voters_of(store, manifest.round - 1, receipts)
    # A writer that had healed reported the state that it replaced.
    voters = members - {manifest.writer} if manifest.healed else members | {manifest.writer}
    considered = [receipt for receipt in receipts if receipt.slot in voters]
    if is_outvoted(manifest.writer, considered):
        raise refused(manifest.round, f"a majority contradicts its writer {manifest.writer}")
    return evidence_of(considered, members, manifest.commit)


def refused(round_number: int, why: str) -> Corrupt:
    """Returns the error for a checkpoint that contradicts the receipts of its round."""
    return Corrupt(
        f"checkpoint {keys.checkpoint_manifest(round_number)} contradicts the receipts of its round: "
        f"{why}; it was replaced, or its writer had diverged. If no other checkpoint is left, restore an older version "
        f"of its objects, or delete {keys.receipts_prefix(round_number - 1)} to accept it as it is"
    )


def voters_of(store: Store, round_number: int, receipts: Iterable[Receipt]) -> set[str]:
    """Returns the members of a round, by its decision; if that is missing or damaged, all slots with receipts.

    The members that a checkpoint names prove nothing: its writer may have chosen them.
    """
    key = keys.decision(round_number, 0)
    data = store.read(key)
    if data is not None:
        with suppress(Corrupt):  # its readers report it
            return {share.slot for share in Decision.parse(data, key).members}
    return {receipt.slot for receipt in receipts}


def receipts_of(store: Store, run: str, round_number: int) -> list[Receipt]:
    """Reads every valid receipt of a round. Costs one listing and one read per receipt."""
    receipts = (_read(store, run, key) for _, key in _listed(store, round_number))
    return [receipt for receipt in receipts if receipt is not None]


@dataclass
class _OpenRound:
    """A round without a verdict yet. receipts: those read so far, by slot; None for one that cannot be used."""

    mine: Receipt
    members: frozenset[str]
    receipts: dict[str, Receipt | None] = field(default_factory=dict[str, "Receipt | None"])

    @property
    def complete(self) -> bool:
        """All members' receipts were read."""
        return self.members <= self.receipts.keys() | {self.mine.slot}

    @property
    def others(self) -> list[Receipt]:
        """The usable receipts of other slots."""
        return [receipt for receipt in self.receipts.values() if receipt is not None]

    def judge(self, *, patient: bool) -> Verdict | None:
        """Returns None if missing receipts could change the verdict. patient: wait for them; else they do not vote."""
        unusable = {slot for slot, receipt in self.receipts.items() if receipt is None}
        voters = self.members - unusable
        return compare(self.mine, self.others, voters if patient else voters & {*self.receipts, self.mine.slot})


class ReceiptMonitor:
    """Gives a verdict on each round of one replica, in order, when its receipts are complete or the round is old.

    An old round without a verdict is skipped: a replica that differs still differs in the next round.
    For one thread. Costs one listing a compared round and one read per receipt while the others keep up, at most WINDOW
    listings and MAX_READS reads. Holds at most WINDOW + 1 rounds.
    """

    def __init__(self, store: Store, slot: str, recent: RecentRecords | None = None) -> None:
        """recent: where the receipts that it reads are kept."""
        self._store = store
        self._recent = recent
        self._slot = slot
        self._open: dict[int, _OpenRound] = {}
        self._newest = -1
        self._quiet = QUIET
        self._quiet_until = 0
        self._agreed_rounds = 0
        self._skipped = 0
        self.agreed: int | None = None
        """The last round in which all were equal; before any, the round before the first expected one."""
        self.settled: int | None = None
        """The newest number of closed rounds after which the receipts of all members were equal, if only of one."""

    def expect(self, mine: Receipt, members: Iterable[str], *, last: bool = False) -> None:
        """Adds a round for which this replica wrote its receipt, unless the round is one that none compares.

        last: the last of the run, which all compare; it may have been added before.
        """
        self._newest = mine.round
        if self.agreed is None:
            self.agreed = mine.round - 1
            self.settled = mine.round
        self._open = {number: open_round for number, open_round in self._open.items() if mine.round - number <= WINDOW}
        slots = frozenset(members)
        # A wrong state stays wrong until it is compared. A wrong average is only in its own round.
        if last or mine.scope == "average" or mine.round % max(1, len(slots) // LARGE) == 0:
            self._open.setdefault(mine.round, _OpenRound(mine, slots))

    def forget(self, before: int, *, recomputed: bool = False) -> None:
        """Drops all rounds before `before`, and counts the round before it as equal: the state was replaced.

        recomputed: it was recomputed from the log. Others may still differ, and be recomputing theirs, for some rounds.
        """
        self._open = {number: open_round for number, open_round in self._open.items() if number >= before}
        if recomputed:
            self._quiet_until = max(self._quiet_until, before + QUIET)
        elif self.agreed is None or self.agreed < before - 1:
            self.agreed = before - 1

    def look(self, *, last: bool = False) -> list[Verdict]:
        """Returns new verdicts: equal rounds, and differences unless one was reported a few rounds ago.

        last: no other round follows, so none is waited for. Raises the store's errors; a damaged receipt is left out.
        """
        newest = self._newest
        self._read_receipts(self._open.keys() if last else self._open.keys() - {newest})
        verdicts: list[Verdict] = []
        for number in sorted(self._open):
            if not (last or self._open[number].complete) and newest - number < WINDOW:
                break
            open_round = self._open.pop(number)
            verdict = self._judge(open_round)
            if isinstance(verdict, Agreed) and open_round.complete:
                self.settled = number + 1
            if verdict is not None and self._is_news(verdict):
                verdicts.append(verdict)
        return verdicts

    def _read_receipts(self, rounds: AbstractSet[int]) -> None:
        """Reads new receipts of these open rounds. For the newest, others are still writing them."""
        reads = MAX_READS
        for number in sorted(rounds):
            open_round = self._open[number]
            if open_round.complete:
                continue
            for slot, key in _listed(self._store, number):
                if reads and slot != self._slot and slot not in open_round.receipts:
                    open_round.receipts[slot] = _read(self._store, open_round.mine.run, key, self._recent)
                    reads -= 1

    def _judge(self, open_round: _OpenRound) -> Verdict | None:
        """Returns None if missing receipts could change the verdict."""
        verdict = open_round.judge(patient=True)
        self._skipped = 0 if verdict is not None else self._skipped + 1
        return verdict if self._skipped <= PATIENCE else open_round.judge(patient=False)

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


def _split(values: Mapping[str, V], voters: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], bool] | None:
    """Returns the slots with a wrong value, those with the right one, and if a majority agrees. Both in slot order.

    Returns None if a voter without a value could change the result.
    """
    votes = Counter(values[slot] for slot in voters if slot in values)
    value, count = next(iter(votes.most_common(1)), (None, 0))
    majority = count > 1 and 2 * count > len(voters)  # a single vote is no majority
    if not majority:
        first = next(iter(voters or values))
        if first not in values:
            return None
        value = values[first]
        rival = max((count for other, count in votes.items() if other != value), default=0)
        if 2 * (rival + len(voters) - votes.total()) > len(voters):
            return None
    wrong = tuple(slot for slot in values if values[slot] != value)
    return wrong, tuple(slot for slot in values if values[slot] == value), majority


def _listed(store: Store, round_number: int) -> list[tuple[str, str]]:
    """Returns slot and key of every receipt of a round and skips foreign objects. Costs one listing."""
    listed: list[tuple[str, str]] = []
    for entry in store.list(keys.receipts_prefix(round_number)):
        try:
            listed.append((keys.slot_of(entry.key), entry.key))
        except Invalid:
            continue
    return listed


def _read(store: Store, run: str, key: str, recent: RecentRecords | None = None) -> Receipt | None:
    """Reads one receipt. Returns None if it is damaged, of another run, or a copy of another object."""
    data = store.read(key)
    try:
        receipt = None if data is None else Receipt.parse(data, key)
    except Corrupt:
        return None
    if receipt is None or receipt.run != run:
        return None
    if data is not None and recent is not None:
        recent.keep(key, data)
    return receipt if (receipt.round, receipt.slot) == (keys.round_of(key), keys.slot_of(key)) else None
