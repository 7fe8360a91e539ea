"""Finds out whether this replica holds what the others hold, and if not, how far it is off and who is right.

Receipts say that a state differs, not by how much. So the shared state of one round is kept until somebody who is right
has written the checkpoint of that round; then the two are measured. Of several ranks, rank 0 compares receipts, which
fold all shards, and each rank keeps and measures its own. Costs nothing while all agree. Never heals: `diagnosis` tells
what there is to heal.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from skerry.runtime import checkpoint
from skerry.runtime.alarm import (
    MAX_QUIET,
    WINDOW,
    Agreed,
    Alarm,
    AveragesDiffer,
    Evidence,
    evidence_of,
    is_outvoted,
    receipts_of,
)
from skerry.runtime.drift import Drift, measure
from skerry.runtime.errors import Corrupt, Retryable
from skerry.runtime.events import emit
from skerry.runtime.ranks import Nothing
from skerry.runtime.records import CheckpointManifest, Receipt, Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.alarm import Difference, Verdict
    from skerry.runtime.journal import Journal
    from skerry.runtime.ranks import Ranks

_PATHS_TOLD: Final = 3
# A member leaves its turn out while its last checkpoint is on its way, and which turns those are repeats itself.
_MISSES: Final = 2


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """This replica holds something else than `right` since after round `agreed`: by rounding, or by more.

    round: closed rounds when it was measured. drift: None if it was not: of an average, which nothing explains, or of a
    state because the checkpoints of the right ones were never those of the rounds that were kept.
    """

    round: int
    agreed: int
    right: tuple[str, ...]
    drift: Drift | None
    average: bool = False

    @property
    def is_rounding(self) -> bool:
        """Unlike hardware explains it."""
        return self.drift is not None and self.drift.is_rounding(self.round - 1 - self.agreed)

    def __str__(self) -> str:
        if self.average:
            return f"another average than {','.join(self.right)} in round {self.round - 1}"
        if self.drift is None:
            return f"another state than {','.join(self.right)} after {self.round} rounds: not measured"
        return (
            f"another state than {','.join(self.right)} after {self.round} rounds: "
            f"max_ulp={self.drift.max_ulp:.4g} max_abs={self.drift.max_abs:.4g} "
            f"tensors={','.join(self.drift.tensors[:_PATHS_TOLD])}"
        )


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """My shard of the shared state with `round` rounds closed, which is to be measured."""

    round: int
    state: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class _Suspicion:
    """A difference of mine that is not measured yet."""

    agreed: int
    right: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Doubt:
    """Checkpoints with more than `after` and at most `until` closed rounds are trusted if one of `right` wrote them."""

    after: int
    until: int
    right: tuple[str, ...]


class _Next(Record):
    """What rank 0 wants all ranks to do with what they keep: measure it against this checkpoint, or drop it."""

    manifest: CheckpointManifest | None = None
    drop: bool = False


class _Measured(Record):
    """A Drift on its way to the other ranks: floats by their hexadecimal text, which has infinities."""

    equal: bool
    max_ulp: str = ""
    max_abs: str = ""
    tensors: tuple[str, ...] = ()


class SelfCheck:
    """`look` belongs to one background thread, all else to the thread that trains."""

    def __init__(self, journal: Journal, slot: str, ranks: Ranks) -> None:
        """ranks: the line of the background thread."""
        self._ranks = ranks
        self._journal = journal
        self._slot = slot
        self._alarm = Alarm(journal.store, slot)
        self._lock = threading.Lock()
        self._suspicion: _Suspicion | None = None
        self._kept: _Kept | None = None
        self._diagnosis: Diagnosis | None = None
        self._doubts: list[_Doubt] = []
        self._first_round = 0
        self._recovering = False
        self._drift_told = False
        self._missed = 0

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What there is to heal."""
        return self._diagnosis

    def wants(self, author: str | None) -> bool:
        """Whether to `keep` the state of the round whose checkpoint `author` is about to write. On rank 0."""
        suspicion = self._suspicion
        return suspicion is not None and self._kept is None and author in suspicion.right

    def keep(self, round_number: int, state: Mapping[str, object]) -> None:
        """Measure this state, a copy, against the checkpoint of `round_number` closed rounds once that is there."""
        with self._lock:
            self._kept = _Kept(round=round_number, state=state)

    def evidence(self, manifest: CheckpointManifest) -> Evidence | None:
        """What the state of a checkpoint must be, as far as receipts tell; None: its writer was wrong, and knew it not.

        One listing, one read per receipt, and one of the round's members.
        """
        for doubt in self._doubts:
            if doubt.after < manifest.round <= doubt.until and manifest.writer not in doubt.right:
                return None
        if manifest.round == 0:
            return Evidence()
        number = manifest.round - 1
        receipts = receipts_of(self._journal.store, self._journal.run.nonce, number)
        members = self._members(number) or {one.slot for one in receipts}
        heard = [one for one in receipts if one.slot in {*members, manifest.writer}]
        return None if is_outvoted(manifest.writer, heard) else evidence_of(heard, members, manifest.commit)

    def healed(self, round_number: int) -> None:
        """A checkpoint of the right ones was loaded after `round_number` rounds; what I held until then is gone."""
        with self._lock:
            diagnosis, self._diagnosis, self._kept = self._diagnosis, None, None
            if diagnosis is None:
                return
            self._doubts.append(_Doubt(after=diagnosis.agreed + 1, until=round_number, right=diagnosis.right))
            self._first_round = round_number
            self._recovering = not diagnosis.is_rounding

    def look(self, mine: Receipt, members: Sequence[str]) -> None:
        """Compare one more round with the others, and measure what is to be measured. Every rank must call it.

        Raises what the store raises, on every rank.
        """

        def compare() -> _Next:
            if self._first_round:
                self._alarm.forget(self._first_round)
            if mine.round >= self._first_round:
                self._alarm.expect(mine, members)
            for verdict in self._alarm.look():
                self._hear(verdict)
            return self._next(closed=mine.round + 1)

        found = self._ranks.consult("compare receipts", Nothing, lambda _: compare(), _Next)
        kept = self._kept
        if found.drop:
            self._drop(kept)
        if found.manifest is not None:
            self._measure(kept, found.manifest)

    def _hear(self, verdict: Verdict) -> None:
        if isinstance(verdict, Agreed):
            with self._lock:
                self._suspicion, self._missed = None, 0
                recovered = self._recovering and verdict.round >= self._first_round
                self._recovering &= not recovered
            if recovered:
                emit("healed", {"round": verdict.round, "slot": self._slot})
            return
        average = isinstance(verdict, AveragesDiffer)
        _tell_difference(verdict, "average" if average else "state")
        if self._slot not in verdict.slots:
            return
        agreed = verdict.round - 1 if self._alarm.agreed is None else self._alarm.agreed
        if average:
            right = verdict.right
            self._conclude(Diagnosis(round=verdict.round + 1, agreed=agreed, right=right, drift=None, average=True))
            return
        with self._lock:
            if self._diagnosis is None and verdict.round >= self._first_round:
                self._suspicion = _Suspicion(agreed=agreed, right=verdict.right)

    def _next(self, *, closed: int) -> _Next:
        """On rank 0: whether what is kept can be measured now, or never."""
        kept, suspicion = self._kept, self._suspicion
        if kept is None:
            return _Next()
        if suspicion is None:
            return _Next(drop=True)
        manifest = self._manifest(kept.round)
        if manifest is not None:
            return _Next(manifest=manifest) if manifest.writer in suspicion.right else _Next(drop=True)
        waited = closed - kept.round
        if waited < WINDOW:
            return _Next()
        if not self._have_saved(kept.round, suspicion.right):  # it is on its way, or its author is gone
            return _Next(drop=waited >= MAX_QUIET)
        self._missed += 1  # its author left it out: another round will do
        if self._missed >= _MISSES:
            agreed, right = suspicion.agreed, suspicion.right
            self._conclude(Diagnosis(round=closed, agreed=agreed, right=right, drift=None))
        return _Next(drop=True)

    def _members(self, number: int) -> set[str]:
        """Whose receipts count; none if the round's decision is damaged: whoever needs it tells."""
        try:
            decision = self._journal.decision(number, 0)
        except Corrupt:
            return set()
        return set() if decision is None else {share.slot for share in decision.record.members}

    def _manifest(self, number: int) -> CheckpointManifest | None:
        """None, too, if it is damaged: whoever loads it tells."""
        try:
            return checkpoint.manifest(self._journal.store, number)
        except Corrupt:
            return None

    def _have_saved(self, number: int, right: Sequence[str]) -> bool:
        """One of `right` has completed a later checkpoint: each writes its own in their order. One listing."""
        later = (self._manifest(one) for one in checkpoint.complete(self._journal.store) if one > number)
        return any(manifest is not None and manifest.writer in right for manifest in later)

    def _measure(self, kept: _Kept | None, manifest: CheckpointManifest) -> None:
        """Every rank its shard; the replica is as far off as the rank that is furthest off."""
        try:
            found = self._ranks.consult("measure", lambda: self._measured(kept, manifest), _furthest, _Measured)
        finally:
            self._drop(kept)
        suspicion = self._suspicion
        if suspicion is None:  # further ranks have none: rank 0 concludes
            return
        if found.equal:
            with self._lock:
                self._suspicion = None
            return
        drift = Drift(max_ulp=float.fromhex(found.max_ulp), max_abs=float.fromhex(found.max_abs), tensors=found.tensors)
        self._conclude(Diagnosis(round=manifest.round, agreed=suspicion.agreed, right=suspicion.right, drift=drift))

    def _measured(self, kept: _Kept | None, manifest: CheckpointManifest) -> _Measured:
        rank = self._ranks.rank
        if kept is None or kept.round != manifest.round:
            raise Retryable(f"rank {rank} has kept no state of {manifest.round} rounds")
        loaded = cast("dict[str, object]", checkpoint.load(self._journal.store, manifest, rank=rank))
        theirs = {key: loaded[key] for key in kept.state if key in loaded}
        if checkpoint.state_digest(kept.state) == checkpoint.state_digest(theirs):
            return _Measured(equal=True)
        drift = measure(kept.state, theirs)
        where = "" if self._ranks.size == 1 else f"rank {rank}: "
        return _Measured(
            equal=False,
            max_ulp=drift.max_ulp.hex(),
            max_abs=drift.max_abs.hex(),
            tensors=tuple(f"{where}{path}" for path in drift.tensors[:_PATHS_TOLD]),
        )

    def _drop(self, kept: _Kept | None) -> None:
        with self._lock:
            if self._kept is kept:
                self._kept = None

    def _conclude(self, diagnosis: Diagnosis) -> None:
        with self._lock:
            self._suspicion, self._missed = None, 0
            if self._diagnosis is not None or diagnosis.round <= self._first_round:
                return
            self._diagnosis = diagnosis
        fields = {"round": diagnosis.round, "slot": self._slot, "what": str(diagnosis)}
        if not diagnosis.is_rounding:
            emit("diverged", fields, level=logging.ERROR)
        elif not self._drift_told:
            self._drift_told = True
            emit("drifted", fields, level=logging.WARNING)


def _furthest(all_ranks: Sequence[_Measured]) -> _Measured:
    """What all ranks have measured, as one."""
    apart = [one for one in all_ranks if not one.equal]
    if not apart:
        return _Measured(equal=True)
    return _Measured(
        equal=False,
        max_ulp=max(float.fromhex(one.max_ulp) for one in apart).hex(),
        max_abs=max(float.fromhex(one.max_abs) for one in apart).hex(),
        tensors=tuple(path for one in apart for path in one.tensors),
    )


def _tell_difference(verdict: Difference, what: str) -> None:
    emit(
        "receipts_differ",
        {
            "round": verdict.round,
            "what": what,
            "slots": ",".join(verdict.slots),
            "right": ",".join(verdict.right),
            "majority": verdict.majority,
        },
        level=logging.WARNING,
    )
