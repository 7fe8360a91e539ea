"""Writes a replica's receipt after each round, and in rotation the round's checkpoint; loads checkpoints.

State is captured when it is stable (the caller decides when) and written in the background. The run continues without
either: a failure is reported, and nothing is retried. With each checkpoint its writer collects garbage, and the others
what is their own.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.background_receipt_comparison import ReceiptComparisons
from skerry.runtime.checkpointing.checkpoint_loader import CheckpointLoader
from skerry.runtime.checkpointing.checkpoint_writer import CheckpointWriter
from skerry.runtime.checkpointing.divergence import DivergenceCheck
from skerry.runtime.checkpointing.model_from_checkpoint import with_model
from skerry.runtime.checkpointing.replica_position_in_log import LogPosition, RoundFacts, is_due
from skerry.runtime.checkpointing.shared_state import synchronize_device
from skerry.runtime.checkpointing.warm_start import read_initial_model
from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.errors import Corrupt, Diverged, Invalid, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import MAX_REASON, Count, Receipt, Scope, Telemetry, Xxh128
from skerry.runtime.ranks.interface import combine_digests
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Executor, Future

    from skerry.runtime.checkpointing.garbage_collector import GarbageCollector
    from skerry.runtime.checkpointing.local_copies_interface import NearCopies
    from skerry.runtime.checkpointing.receipt_comparison import ReceiptEvidence
    from skerry.runtime.checkpointing.shared_state import SharedState
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.log.records import CheckpointManifest
    from skerry.runtime.log.run_record import InitialModel
    from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
    from skerry.runtime.ranks.interface import Group
    from skerry.runtime.store import Store

_Failure: TypeAlias = Literal["receipt_failed", "unit_check_failed", "checkpoint_failed", "garbage_collection_failed"]


class _Snapshot(Record):
    """Digest and counters of a round's state, of one rank or of all. saves: a copy for a checkpoint exists.

    near: it is also for a copy on the machine. keeps: every rank must keep a copy, to measure a difference.
    """

    digest: Xxh128 | None
    saves: bool
    near: bool
    keeps: bool
    uploaded_bytes: Count
    downloaded_bytes: Count
    requests: Count
    telemetry: Telemetry | None


class Recorder:
    """Writes receipts and checkpoints of one replica in the background, one at a time.

    Each rank saves and loads its own shard; rank 0 writes the records and chooses the checkpoint to load.
    """

    def __init__(
        self,
        log: RunLog,
        presence: Presence,
        state: SharedState,
        nonce: Callable[[], str],
        collector: GarbageCollector,
        group: Group,
        pool: Executor | None = None,
        near: NearCopies | None = None,
    ) -> None:
        """pool: where records are written, one at a time; None makes a thread. near: also save in these copies."""
        self._log = log
        self._presence = presence
        self._state = state
        self._collector = collector
        self._train = group.channel("train")
        self._background = group.channel("record")
        self._checkpoints = CheckpointWriter(log, presence.slot, nonce)
        self._pool = pool or BackgroundThreads(1, "recorder")
        self.saving: Future[None] | None = None  # the checkpoint that this replica has written last
        self._last_turn: tuple[int, Xxh128 | None] = (-1, None)  # -1 if not its turn; digest if saved
        self._divergence = DivergenceCheck(log, presence.slot, self._background)
        self.near = near
        self.near_round = -1  # the last round of which `near` was given a copy; the same on all ranks
        self._loader = CheckpointLoader(log, presence.slot, state, self._train, self._evidence_of, near)
        self._recorded = 0
        self._reported: Xxh128 | None = None  # the digest of the state in the last receipt
        self._comparisons = ReceiptComparisons(self._divergence, state, self._train, self._pool)
        self.is_recomputing = False
        """It follows rounds that it has recorded before, to find out if its state was right."""
        self.follows_to = 0
        """Up to so many closed rounds the log gives the right state, and a newer checkpoint may not have it."""

    def record(self, position: LogPosition, facts: RoundFacts, scope: Scope, checkpoint_every: int | None) -> None:
        """Writes the receipt of the round just closed, and its checkpoint in turn. Call while state is stable.

        checkpoint_every: in rounds; None means not now. A state that cannot be stored is reported, not raised.
        """
        synchronize_device()
        if position.round <= self._recorded:
            self._record_again(position, facts, scope)
            return
        snapshot: object = None

        def capture() -> _Snapshot:
            nonlocal snapshot
            digest = None if scope == "average" else checkpoint.state_digest(self._state.compared(scope))
            saves = self._my_turn(position, checkpoint_every)
            near = self._may_save_near(position, checkpoint_every)
            snapshot = checkpoint.snapshot(self._state.for_checkpoint()) if saves or near else None
            return _Snapshot(
                digest=digest,
                saves=saves,
                near=near,
                keeps=digest is not None and self._divergence.wants(self._author(position, checkpoint_every)),
                uploaded_bytes=facts.uploaded_bytes,
                downloaded_bytes=facts.downloaded_bytes,
                requests=facts.requests,
                telemetry=None if facts.contributed else facts.telemetry,
            )

        try:
            whole = self._train.reduce_on_rank0("record", capture, _sum, _Snapshot)
        except Invalid as error:
            _failed("checkpoint_failed", position.round, error)
            return
        if whole.keeps:
            self._comparisons.keep(position.round, scope)
        self._recorded, self._reported = position.round, whole.digest
        receipt = Receipt(
            run=self._log.run.nonce,
            round=position.round - 1,
            slot=self._presence.slot,
            incarnation=self._presence.incarnation,
            commit=position.previous,
            averages=facts.averages,
            state=whole.digest,
            scope=scope,
            contributed=facts.contributed,
            uploaded_bytes=whole.uploaded_bytes,
            downloaded_bytes=whole.downloaded_bytes,
            requests=whole.requests,
            seconds=facts.seconds,
            norm=facts.norm,
            telemetry=whole.telemetry,
            abstained=None if facts.contributed or facts.abstained is None else facts.abstained[:MAX_REASON],
        )
        if self._train.rank == 0:
            self._collector.note_closed(position.round)
        self._pool.submit(self._write_receipt, receipt, facts.checks)
        is_author = self._author(position, checkpoint_every) == self._presence.slot
        self._last_turn = position.round if is_author else -1, whole.digest if whole.saves else None
        if whole.saves:
            self.saving = self._pool.submit(self._write_checkpoint, position, snapshot)
        elif self._train.rank == 0 and checkpoint_every is not None:
            turn = position.round // checkpoint_every if self._author(position, checkpoint_every) else None
            self._pool.submit(self._collect, position.round, partial(self._collector.collect_own, position, turn))
        if whole.near and self.near is not None:
            self.near_round = position.round
            self.near.save("checkpoints", position.round, position.previous, snapshot)
        if checkpoint_every is not None:  # while it follows, only the state at the head is compared
            self._comparisons.submit(receipt, position.members)

    def _evidence_of(self, manifest: CheckpointManifest) -> ReceiptEvidence | None:
        return self._divergence.evidence(manifest)

    def save_now(self, position: LogPosition) -> None:
        """Writes a checkpoint of the current state, in the caller's thread. Raises the store's errors."""
        synchronize_device()
        self._last_turn = position.round, self._reported
        self._checkpoints.write(position, self._state.for_checkpoint(), self._train)

    def start_from(self, initial: InitialModel) -> None:
        """Loads the model of another run into the registered state. What is not of the model stays as it is.

        Raises Invalid, with their names, if this script's model has other tensors, Corrupt for damage.
        """

        def load() -> None:
            model = read_initial_model(self._log.store, initial)
            own = self._state.for_checkpoint()
            try:
                state = with_model(own, self._state.last_positions(), model, self._train.rank, self._train.size)
            except Invalid as error:
                raise Invalid(
                    f"this script has another model than {initial.uri}, from which the run starts (init_from): {error}"
                ) from error
            self._state.restore(state)

        self._train.reduce_on_rank0("start from another run", load, lambda _: None)
        if self._train.rank == 0:
            fields = {"round": initial.round, "slot": self._presence.slot, "uri": initial.uri}
            emit("initial_model_loaded", fields)

    def checkpoints(self) -> list[int]:
        """Returns the rounds with a complete checkpoint, newest first, as listed by rank 0."""
        return list(self._train.broadcast_from_rank0("list", lambda: tuple(self.complete(self._log.store))))

    def load_newest(
        self, beyond: int = -1, writers: Collection[str] | None = None, *, undisputed: int | None = None
    ) -> LogPosition:
        """Loads the newest checkpoint of more than `beyond` rounds that receipts confirm; see `CheckpointLoader`."""
        self.is_recomputing = False
        loaded = self._loader.load_newest(beyond, writers, undisputed)
        self.follows_to = self._loader.passed_over
        return loaded

    def heal(self, position: LogPosition) -> LogPosition | None:
        """Loads the newest checkpoint of the replicas with the right state, if this replica differs.

        If it is not known which are right, loads the newest undisputed checkpoint, to follow the log from there.
        Returns None if there is nothing to heal, or no such checkpoint yet. Raises Diverged if the log contradicts it.
        At the end of the run, first waits until it is known.
        """
        if self._log.run.is_over(position.round, position.work):
            self._comparisons.finish(position)
        diagnosis = self._divergence.diagnosis
        right, undisputed = self._train.broadcast_from_rank0(
            "heal", lambda: (() if diagnosis is None else tuple(diagnosis.right), self._divergence.undisputed)
        )
        if undisputed is not None:
            return self._recompute(undisputed, position)
        if not right:
            return None
        try:
            loaded = self.load_newest(writers=right)
        except (Corrupt, Retryable) as error:
            _failed("checkpoint_failed", self._recorded, error)
            return None
        self._divergence.healed(self._recorded)
        return loaded

    def _recompute(self, undisputed: int, position: LogPosition) -> LogPosition | None:
        try:
            loaded = self.load_newest(undisputed=undisputed)
        except Retryable as error:  # tried again at the next boundary
            _failed("checkpoint_failed", self._recorded, error)
            return None
        except Corrupt as error:
            _failed("checkpoint_failed", self._recorded, error)
            self._divergence.cannot_recompute()
            return self.heal(position)
        self._divergence.recomputing(self._recorded)
        self.is_recomputing, self.follows_to = True, self._recorded
        return loaded

    def _record_again(self, position: LogPosition, facts: RoundFacts, scope: Scope) -> None:
        """Compares what is followed a second time, after a heal, with the receipt of the first time.

        At the end of the run, if it was its turn or it has written the last checkpoint for others, writes that of this
        state, unless it is known to be of this state.
        """
        turn, saved = self._last_turn
        is_last = position.round == turn and self._log.run.is_over(position.round, position.work)
        if not (self.is_recomputing or is_last):
            return
        self.is_recomputing = self.is_recomputing and position.round < self._recorded
        try:
            digest = self._comparisons.compare_recomputed(position, facts, scope)
            if not is_last or (digest is not None and digest == saved):
                return
            self._last_turn = position.round, digest
            snapshot = self._checkpoints.copy(self._state, self._train)
        except Invalid as error:
            _failed("checkpoint_failed", position.round, error)
            return
        if digest is None or digest != self._reported:
            self._checkpoints.healed = position.round
        self.saving = self._pool.submit(self._write_checkpoint, position, snapshot)

    @staticmethod
    def complete(store: Store) -> list[int]:
        """The rounds that have a complete checkpoint in `store`, newest first, as this rank sees them. One listing."""
        return checkpoint.complete(store)

    @property
    def has_state(self) -> bool:
        """State was registered: there is something to save and to load."""
        return bool(self._state)

    @property
    def is_sound(self) -> bool:
        """True if no difference is known, so that others may load this replica's state. On rank 0."""
        return self._divergence.diagnosis is None

    @property
    def quarantine(self) -> str | None:
        """The reason why this replica must not contribute: it diverged by more than rounding. None if it may."""
        diagnosis = self._divergence.diagnosis
        return None if diagnosis is None or diagnosis.is_rounding else f"this replica diverged: {diagnosis}"

    def close(self, *, wait: bool) -> None:
        """Stops the background thread. wait: first write everything that was submitted."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)
        if self.near is not None:
            self.near.close(wait=False)  # a peer that is gone must not hold up a stop; an older copy will do

    def _author(self, position: LogPosition, checkpoint_every: int | None) -> str | None:
        """Returns the member that writes this round's checkpoint, in rotation; None if none is due."""
        if checkpoint_every is None or not self._state or not position.members:
            return None
        if not is_due(position, checkpoint_every, self._log):
            return None
        return position.members[(position.round // checkpoint_every) % len(position.members)]

    def _my_turn(self, position: LogPosition, checkpoint_every: int | None) -> bool:
        if self._author(position, checkpoint_every) != self._presence.slot or not self.is_sound:
            return False
        if self._log.is_end(position.round, position.work) and self.saving is not None:
            self.saving.exception()  # the last checkpoint of a run is never skipped
        # Memory is bounded to one snapshot: a member that still uploads its last checkpoint skips this one.
        return not self.is_saving

    def _may_save_near(self, position: LogPosition, checkpoint_every: int | None) -> bool:
        """A copy on the machine is due, and the last one is written: memory is bounded to one snapshot for each."""
        if self.near is None or not self._state or self.near.is_saving("checkpoints"):
            return False
        return is_due(position, checkpoint_every, self._log)

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint of this replica is being written."""
        return self.saving is not None and not self.saving.done()

    def _write_receipt(self, receipt: Receipt, checks: Sequence[Callable[[], str | None]]) -> None:
        try:
            receipt = _checked(receipt, checks)
            if self._train.rank:
                return  # rank 0 writes it
            stored = self._log.create(keys.receipt(receipt.round, receipt.slot), receipt).record
            if stored.averages != receipt.averages or (stored.state, stored.scope) != (receipt.state, receipt.scope):
                self._checkpoints.healed = receipt.round + 1
                raise Diverged(  # noqa: TRY301  one handler for every failure
                    f"an earlier incarnation wrote a different receipt: round={receipt.round} slot={receipt.slot}"
                )
        except Exception as error:  # noqa: BLE001  a thread's entry: training goes on without a receipt
            _failed("receipt_failed", receipt.round, error)

    def _write_checkpoint(self, position: LogPosition, snapshot: object) -> None:
        try:
            saved = self._checkpoints.write(position, snapshot, self._background)
        except Exception as error:  # noqa: BLE001  a thread's entry: another member writes the next checkpoint
            _failed("checkpoint_failed", position.round, error)
        else:
            if saved and self._background.rank == 0:
                self._collect(position.round, self._collector.collect)

    def _collect(self, round_number: int, collect: Callable[[int | None], object]) -> None:
        try:
            collect(self._divergence.settled)
        except Exception as error:  # noqa: BLE001  a thread's entry: the next collection deletes the rest
            _failed("garbage_collection_failed", round_number, error)


def _sum(all_ranks: Sequence[_Snapshot]) -> _Snapshot:
    """Combines all ranks. A checkpoint needs every rank's shard."""
    digests = [rank_result.digest for rank_result in all_ranks if rank_result.digest is not None]
    return _Snapshot(
        digest=combine_digests(digests) if digests else None,
        saves=all(rank_result.saves for rank_result in all_ranks),
        near=all(rank_result.near for rank_result in all_ranks),
        keeps=any(rank_result.keeps for rank_result in all_ranks),
        uploaded_bytes=sum(rank_result.uploaded_bytes for rank_result in all_ranks),
        downloaded_bytes=sum(rank_result.downloaded_bytes for rank_result in all_ranks),
        requests=sum(rank_result.requests for rank_result in all_ranks),
        telemetry=Telemetry.of_ranks([rank_result.telemetry for rank_result in all_ranks]),
    )


def _checked(receipt: Receipt, checks: Sequence[Callable[[], str | None]]) -> Receipt:
    """The receipt, with what the checks dispute. A check that fails disputes nothing."""
    wrong = list[str]()
    for check in checks:
        try:
            fault = check()
        except Exception as error:  # noqa: BLE001  it is not known if the average is right
            _failed("unit_check_failed", receipt.round, error)
        else:
            wrong += [] if fault is None else [fault]
    return receipt.model_copy(update={"disputed": "; ".join(wrong)[:MAX_REASON]}) if wrong else receipt


def _failed(name: _Failure, round_number: int, error: Exception) -> None:
    emit(name, {"round": round_number, "error": str(error)}, level=logging.WARNING, error=error)
