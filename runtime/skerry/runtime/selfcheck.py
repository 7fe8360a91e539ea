"""Finds out whether this replica holds what the others hold, and if not, how far it is off and who is right.

Receipts say that a state differs, not by how much. So the shared state of one round is kept until somebody who is right
has written the checkpoint of that round; then the two are measured. Costs nothing while all agree. Never heals:
`diagnosis` tells what there is to heal.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from skerry.runtime import checkpoint
from skerry.runtime.alarm import WINDOW, Agreed, Alarm, AveragesDiffer, is_outvoted, receipts_of
from skerry.runtime.drift import Drift, measure
from skerry.runtime.errors import Corrupt
from skerry.runtime.events import emit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.alarm import Difference, Verdict
    from skerry.runtime.journal import Journal
    from skerry.runtime.records import CheckpointManifest, Receipt

_PATHS_TOLD: Final = 3


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """This replica holds something else than `right` since after round `agreed`: by rounding, or by more.

    round: closed rounds when it was measured. drift: None if it is an average that differs, which nothing explains.
    """

    round: int
    agreed: int
    right: tuple[str, ...]
    drift: Drift | None

    @property
    def is_rounding(self) -> bool:
        """Unlike hardware explains it."""
        return self.drift is not None and self.drift.is_rounding(self.round - 1 - self.agreed)

    def __str__(self) -> str:
        if self.drift is None:
            return f"another average than {','.join(self.right)} in round {self.round - 1}"
        return (
            f"another state than {','.join(self.right)} after {self.round} rounds: "
            f"max_ulp={self.drift.max_ulp:.4g} max_abs={self.drift.max_abs:.4g} "
            f"tensors={','.join(self.drift.tensors[:_PATHS_TOLD])}"
        )


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """My shared state with `round` rounds closed, and what is to be found out about it."""

    round: int
    state: Mapping[str, object]
    agreed: int
    right: tuple[str, ...]


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


class SelfCheck:
    """`look` belongs to one background thread, all else to the thread that trains."""

    def __init__(self, journal: Journal, slot: str) -> None:
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

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What there is to heal."""
        return self._diagnosis

    def wants(self, author: str | None) -> bool:
        """Whether to `keep` the state of the round whose checkpoint `author` is about to write."""
        suspicion = self._suspicion
        return suspicion is not None and self._kept is None and author in suspicion.right

    def keep(self, round_number: int, state: Mapping[str, object]) -> None:
        """Measure this state, a copy, against the checkpoint of `round_number` closed rounds once that is there."""
        with self._lock:
            if self._suspicion is not None:
                agreed, right = self._suspicion.agreed, self._suspicion.right
                self._kept = _Kept(round=round_number, state=state, agreed=agreed, right=right)

    def trusts(self, manifest: CheckpointManifest) -> bool:
        """Whether a checkpoint's state is right as far as the receipts tell. One listing, one read per receipt."""
        for doubt in self._doubts:
            if doubt.after < manifest.round <= doubt.until and manifest.writer not in doubt.right:
                return False
        if manifest.round == 0:
            return True
        receipts = receipts_of(self._journal.store, self._journal.run.nonce, manifest.round - 1)
        return not is_outvoted(manifest.writer, receipts)

    def healed(self, round_number: int) -> None:
        """A checkpoint of the right ones was loaded after `round_number` rounds; what I held until then is gone."""
        with self._lock:
            diagnosis, self._diagnosis = self._diagnosis, None
            if diagnosis is None:
                return
            self._doubts.append(_Doubt(after=diagnosis.agreed + 1, until=round_number, right=diagnosis.right))
            self._first_round = round_number
            self._recovering = not diagnosis.is_rounding

    def look(self, mine: Receipt, members: Sequence[str]) -> None:
        """Compare one more round with the others, and measure what is to be measured. Raises what the store raises."""
        if self._first_round:
            self._alarm.forget(self._first_round)
        if mine.round >= self._first_round:
            self._alarm.expect(mine, members)
        for verdict in self._alarm.look():
            self._hear(verdict)
        if (kept := self._kept) is not None:
            self._try_to_measure(kept, closed=mine.round + 1)

    def _hear(self, verdict: Verdict) -> None:
        if isinstance(verdict, Agreed):
            with self._lock:
                self._suspicion = self._kept = None
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
            self._conclude(Diagnosis(round=verdict.round + 1, agreed=agreed, right=verdict.right, drift=None))
            return
        with self._lock:
            if self._diagnosis is None and verdict.round >= self._first_round:
                self._suspicion, self._kept = _Suspicion(agreed=agreed, right=verdict.right), None

    def _try_to_measure(self, kept: _Kept, *, closed: int) -> None:
        manifest = checkpoint.manifest(self._journal.store, kept.round)
        if manifest is None:
            if closed - kept.round >= WINDOW:  # its author left it out, or is gone: another round will do
                self._drop(kept)
            return
        if manifest.writer not in kept.right:
            self._drop(kept)
            return
        try:
            loaded = cast("dict[str, object]", checkpoint.load(self._journal.store, manifest))
        except Corrupt:
            self._drop(kept)
            raise
        theirs = {key: loaded[key] for key in kept.state if key in loaded}
        if checkpoint.state_digest(kept.state) == checkpoint.state_digest(theirs):
            with self._lock:
                self._suspicion = self._kept = None
            return
        drift = measure(kept.state, theirs)
        self._conclude(Diagnosis(round=kept.round, agreed=kept.agreed, right=kept.right, drift=drift))

    def _drop(self, kept: _Kept) -> None:
        with self._lock:
            if self._kept is kept:
                self._kept = None

    def _conclude(self, diagnosis: Diagnosis) -> None:
        with self._lock:
            self._suspicion = self._kept = None
            if self._diagnosis is not None or diagnosis.round <= self._first_round:
                return
            self._diagnosis = diagnosis
        fields = {"round": diagnosis.round, "slot": self._slot, "what": str(diagnosis)}
        if not diagnosis.is_rounding:
            emit("diverged", fields, level=logging.ERROR)
        elif not self._drift_told:
            self._drift_told = True
            emit("drifted", fields, level=logging.WARNING)


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
