"""Detects that this replica's state differs from the others', and measures by how much.

Receipts show that a state differs, not by how much. Therefore the shared state of one round is kept until a replica
with the right state has written the checkpoint of that round; then the two are compared. With several ranks, rank 0
compares receipts, which cover all shards, and each rank keeps and measures its own shard. Costs nothing while all
agree. Does not heal: `diagnosis` is what the caller heals.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.receipt_comparison import (
    MAX_QUIET,
    WINDOW,
    Agreed,
    AveragesDiffer,
    ReceiptEvidence,
    ReceiptMonitor,
    read_evidence,
    receipts_of,
)
from skerry.runtime.checkpointing.shared_state import part_at
from skerry.runtime.errors import Corrupt, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import CheckpointManifest, Receipt
from skerry.runtime.structured_logging import emit
from skerry.runtime.tensors.state_comparison import StateDifference, compare_states

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.checkpointing.receipt_comparison import Difference, Verdict
    from skerry.runtime.checkpointing.shared_state import Path
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.ranks.interface import Channel

_MAX_PATHS: Final = 3
# A member skips its turn while its last checkpoint is being uploaded, and the pattern of skipped turns repeats.
_MISSES: Final = 2


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """This replica's state differs from that of `right` since round `agreed`: by rounding, or by more.

    round: closed rounds when it was measured. drift: None if it was not measured: an average differs, or no checkpoint
    of `right` was of a round whose state was kept.
    """

    round: int
    agreed: int
    right: tuple[str, ...]
    drift: StateDifference | None
    average: bool = False

    @property
    def is_rounding(self) -> bool:
        """Rounding on unlike hardware explains the difference."""
        return self.drift is not None and self.drift.is_rounding(self.round - 1 - self.agreed)

    def __str__(self) -> str:
        if self.average:
            return f"average differs from {','.join(self.right)} in round {self.round - 1}"
        if self.drift is None:
            return f"state differs from {','.join(self.right)} after {self.round} rounds: not measured"
        return (
            f"state differs from {','.join(self.right)} after {self.round} rounds: "
            f"max_ulp={self.drift.max_ulp:.4g} max_abs={self.drift.max_abs:.4g} "
            f"tensors={','.join(self.drift.tensors[:_MAX_PATHS])}"
        )


@dataclass(frozen=True, kw_only=True)
class _KeptState:
    """This rank's shard of the shared state after `round` closed rounds, to be measured."""

    round: int
    state: Mapping[str, object]
    paths: frozenset[Path]


@dataclass(frozen=True, kw_only=True)
class _Suspicion:
    """A difference of this replica that is not measured yet."""

    agreed: int
    right: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Dispute:
    """Receipts of `round` differ without a majority; those of `agreed` were equal.

    mine: this replica's receipt of `round`, if it was stored. right: the slots that agree with the first member.
    """

    round: int
    agreed: int
    mine: Receipt | None
    right: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _TrustedWriters:
    """Checkpoints of more than `after` and at most `until` rounds are trusted only if one of `right` wrote them."""

    after: int
    until: int
    right: tuple[str, ...]


class _Next(Record):
    """Rank 0's order to all ranks: measure the kept state against this checkpoint, or drop it."""

    manifest: CheckpointManifest | None = None
    drop: bool = False


class _Measured(Record):
    """A StateDifference as JSON for the other ranks: floats as hexadecimal text, which can express infinities."""

    equal: bool
    max_ulp: str = ""
    max_abs: str = ""
    tensors: tuple[str, ...] = ()


class DivergenceCheck:
    """Compares, keeps and measures. `look` is for one background thread, the rest for the training thread."""

    def __init__(self, log: RunLog, slot: str, ranks: Channel) -> None:
        """ranks: the channel of the background thread."""
        self._ranks = ranks
        self._log = log
        self._slot = slot
        self._monitor = ReceiptMonitor(log.store, slot, log.recent)
        self._lock = threading.Lock()
        self._suspicion: _Suspicion | None = None
        self._kept: _KeptState | None = None
        self._diagnosis: Diagnosis | None = None
        self._dispute: _Dispute | None = None
        # A difference that remains after all have recomputed their states is of the hardware.
        self._has_recomputed = self._hardware_differs = False
        self._recomputed_last = False
        self._trusted_writers: list[_TrustedWriters] = []
        self._first_round = 0
        self._recovering = False
        self._drift_reported = False
        self._missed = 0

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The difference to heal from; None if there is none."""
        return self._diagnosis

    def wants(self, author: str | None) -> bool:
        """Returns True if the state should be kept for the checkpoint that `author` writes next. On rank 0."""
        suspicion = self._suspicion
        return suspicion is not None and self._kept is None and author in suspicion.right

    @property
    def suspects(self) -> bool:
        """There is a difference to measure, and no state is kept for that. On rank 0."""
        return self._suspicion is not None and self._kept is None

    def keep(self, round_number: int, state: Mapping[str, object], paths: frozenset[Path]) -> None:
        """Keeps this copy of the state, to measure it against the checkpoint of `round_number` closed rounds.

        paths: the places in that checkpoint which `state` has the values of.
        """
        with self._lock:
            self._kept = _KeptState(round=round_number, state=state, paths=paths)

    def evidence(self, manifest: CheckpointManifest) -> ReceiptEvidence | None:
        """Returns the digests that receipts allow for a checkpoint; None if its writer is outvoted.

        Costs one listing, one read per receipt, and one read of the round's members.
        """
        for writers in self._trusted_writers:
            if writers.after < manifest.round <= writers.until and manifest.writer not in writers.right:
                return None
        try:
            return read_evidence(self._log.store, self._log.run.nonce, manifest)
        except Corrupt:
            return None

    def healed(self, round_number: int) -> None:
        """Records that a checkpoint of `right` was loaded after `round_number` rounds and replaced the state."""
        with self._lock:
            diagnosis, self._diagnosis, self._kept = self._diagnosis, None, None
            if diagnosis is None:
                return
            self._trusted_writers.append(
                _TrustedWriters(after=diagnosis.agreed + 1, until=round_number, right=diagnosis.right)
            )
            self._first_round, self._recomputed_last = round_number, False
            self._recovering = not diagnosis.is_rounding

    @property
    def settled(self) -> int | None:
        """The state after so many rounds is equal on all replicas, as far as receipts are known. On rank 0.

        None if that is no use, because states differ by their hardware.
        """
        return None if self._hardware_differs else self._monitor.settled

    @property
    def undisputed(self) -> int | None:
        """The state after so many rounds was equal; recompute from it. None if no majority is missing. On rank 0."""
        dispute = self._dispute
        return dispute.agreed + 1 if dispute is not None and dispute.round >= self._first_round else None

    def recomputing(self, round_number: int) -> None:
        """Records that an undisputed checkpoint was loaded after `round_number` rounds, and the log is followed."""
        with self._lock:
            dispute, self._kept, self._suspicion = self._dispute, None, None
            if dispute is None:
                return
            self._first_round, self._recomputed_last = round_number, True
            self._has_recomputed = True

    def recomputed(self, number: int, averages: tuple[str, ...], state: str | None) -> None:
        """Compares what checkpoint and log give for a round with this replica's receipt. On rank 0."""
        with self._lock:
            dispute = self._dispute
            if dispute is None or number < dispute.round:
                return
            self._dispute = None
            mine = dispute.mine
            is_wrong = mine is not None and (mine.averages, mine.state) != (averages, state)
            self._recovering |= number == dispute.round and is_wrong
        if number == dispute.round and is_wrong:
            what = f"state after {number + 1} rounds differs from what the log gives for it"
            emit("diverged", {"round": number + 1, "slot": self._slot, "what": what}, level=logging.ERROR)

    def cannot_recompute(self) -> None:
        """Records that no undisputed checkpoint is left: the first member counts as right (decision 0008)."""
        with self._lock:
            dispute, self._dispute = self._dispute, None
            if dispute is not None and self._slot not in dispute.right and self._diagnosis is None:
                self._suspicion = _Suspicion(agreed=dispute.agreed, right=dispute.right)

    def look(self, mine: Receipt, members: Sequence[str], *, last: bool = False) -> None:
        """Compares one more round with the others, and measures a kept state if possible. Every rank must call it.

        last: the run is over, so a state kept after its last round that cannot be measured now never can be; one kept
        before is dropped. Raises the store's errors, on every rank.
        """

        def compare() -> _Next:
            if self._first_round:
                self._monitor.forget(self._first_round, recomputed=self._recomputed_last)
            if mine.round >= self._first_round:
                self._monitor.expect(mine, members, last=last)
            for verdict in self._monitor.look(last=last):
                self._apply(verdict)
            return self._next(closed=mine.round + 1, last=last)

        order = self._ranks.reduce_on_rank0("compare receipts", lambda: None, lambda _: compare(), _Next)
        kept = self._kept
        if order.drop:
            self._drop(kept)
        if order.manifest is not None:
            self._measure(kept, order.manifest)

    def _apply(self, verdict: Verdict) -> None:
        if isinstance(verdict, Agreed):
            with self._lock:
                self._suspicion, self._missed, self._has_recomputed = None, 0, False
                recovered = self._recovering and verdict.round >= self._first_round
                self._recovering &= not recovered
            if recovered:
                emit("healed", {"round": verdict.round, "slot": self._slot})
            return
        average = isinstance(verdict, AveragesDiffer)
        agreed = verdict.round - 1 if self._monitor.agreed is None else self._monitor.agreed
        self._hardware_differs |= self._has_recomputed and not verdict.majority
        recomputes = not (verdict.majority or self._hardware_differs)
        _report_difference(verdict, "average" if average else "state", is_decided=not recomputes)
        if recomputes:
            self._disagree(verdict, agreed)
            return
        if self._slot not in verdict.slots:
            return
        if average:
            right = verdict.right
            self._conclude(Diagnosis(round=verdict.round + 1, agreed=agreed, right=right, drift=None, average=True))
            return
        with self._lock:
            if self._diagnosis is None and verdict.round >= self._first_round:
                self._suspicion = _Suspicion(agreed=agreed, right=verdict.right)

    def _disagree(self, verdict: Difference, agreed: int) -> None:
        receipts = receipts_of(self._log.store, self._log.run.nonce, verdict.round)
        mine = next((receipt for receipt in receipts if receipt.slot == self._slot), None)
        with self._lock:
            if self._diagnosis is None and verdict.round >= self._first_round:
                self._dispute = _Dispute(round=verdict.round, agreed=agreed, mine=mine, right=verdict.right)

    def _next(self, *, closed: int, last: bool) -> _Next:
        """Decides on rank 0 if the kept state can be measured now, later or never."""
        kept, suspicion = self._kept, self._suspicion
        if kept is None:
            return _Next()
        if suspicion is None:
            return _Next(drop=True)
        manifest = self._manifest(kept.round)
        if manifest is not None and manifest.writer in suspicion.right:
            return _Next(manifest=manifest)
        if not last and manifest is None and self._may_still_be_saved(kept.round, suspicion.right, closed - kept.round):
            return _Next()
        if (last and kept.round >= closed) or self._missed >= _MISSES:
            agreed, right = suspicion.agreed, suspicion.right
            self._conclude(Diagnosis(round=closed, agreed=agreed, right=right, drift=None))
        return _Next(drop=True)

    def _may_still_be_saved(self, number: int, right: Sequence[str], waited: int) -> bool:
        """One of `right` may still write the checkpoint of `number` rounds, for which `waited` rounds were waited."""
        if waited < WINDOW:
            return True
        if not self._have_saved(number, right):  # still being uploaded, or its author failed
            return waited < MAX_QUIET
        self._missed += 1  # its author skipped it: try another round
        return False

    def _manifest(self, number: int) -> CheckpointManifest | None:
        """Reads a manifest; None if it does not exist or is damaged, which its loader reports."""
        try:
            return checkpoint.manifest(self._log.store, number)
        except Corrupt:
            return None

    def _have_saved(self, number: int, right: Sequence[str]) -> bool:
        """Returns True if one of `right` completed a later checkpoint; each replica writes its own in order."""
        rounds = checkpoint.complete(self._log.store)
        later = (self._manifest(round_number) for round_number in rounds if round_number > number)
        return any(manifest is not None and manifest.writer in right for manifest in later)

    def _measure(self, kept: _KeptState | None, manifest: CheckpointManifest) -> None:
        """Measures every rank's shard; the largest difference of any rank counts."""
        try:
            measured = self._ranks.reduce_on_rank0(
                "measure", lambda: self._measured(kept, manifest), _furthest, _Measured
            )
        finally:
            self._drop(kept)
        suspicion = self._suspicion
        if suspicion is None:  # only rank 0 has one, and concludes
            return
        if measured.equal:
            with self._lock:
                self._suspicion = None
            return
        drift = StateDifference(
            max_ulp=float.fromhex(measured.max_ulp), max_abs=float.fromhex(measured.max_abs), tensors=measured.tensors
        )
        self._conclude(Diagnosis(round=manifest.round, agreed=suspicion.agreed, right=suspicion.right, drift=drift))

    def _measured(self, kept: _KeptState | None, manifest: CheckpointManifest) -> _Measured:
        rank = self._ranks.rank
        if kept is None or kept.round != manifest.round:
            raise Retryable(f"rank {rank} has kept no state of {manifest.round} rounds")
        loaded = cast("dict[str, object]", checkpoint.load(self._log.store, manifest, rank=rank))
        expected = part_at(loaded, kept.paths)
        if checkpoint.state_digest(kept.state) == checkpoint.state_digest(expected):
            return _Measured(equal=True)
        drift = compare_states(kept.state, expected)
        prefix = "" if self._ranks.size == 1 else f"rank {rank}: "
        return _Measured(
            equal=False,
            max_ulp=drift.max_ulp.hex(),
            max_abs=drift.max_abs.hex(),
            tensors=tuple(f"{prefix}{path}" for path in drift.tensors[:_MAX_PATHS]),
        )

    def _drop(self, kept: _KeptState | None) -> None:
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
            is_known = diagnosis.average or diagnosis.drift is not None  # else it may be rounding
            emit("diverged", fields, level=logging.ERROR if is_known else logging.WARNING)
        elif not self._drift_reported:
            self._drift_reported = True
            emit("rounding_drift", fields, level=logging.WARNING)


def _furthest(all_ranks: Sequence[_Measured]) -> _Measured:
    """Combines the measurements of all ranks into the largest one."""
    unequal = [rank_result for rank_result in all_ranks if not rank_result.equal]
    if not unequal:
        return _Measured(equal=True)
    return _Measured(
        equal=False,
        max_ulp=max(float.fromhex(measured.max_ulp) for measured in unequal).hex(),
        max_abs=max(float.fromhex(measured.max_abs) for measured in unequal).hex(),
        tensors=tuple(path for measured in unequal for path in measured.tensors),
    )


def _report_difference(verdict: Difference, what: str, *, is_decided: bool) -> None:
    """is_decided: it is known which are right; otherwise all are named, because each recomputes its state."""
    slots = verdict.slots if is_decided else sorted((*verdict.slots, *verdict.right), key=keys.slot_order)
    emit(
        "receipts_differ",
        {
            "round": verdict.round,
            "what": what,
            "slots": ",".join(slots),
            "right": ",".join(verdict.right) if is_decided else "",
            "majority": verdict.majority,
        },
        level=logging.WARNING,
    )
