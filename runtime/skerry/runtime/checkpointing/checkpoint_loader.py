"""Loads the newest complete checkpoint that the log and the receipts confirm. On every rank; rank 0 chooses it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.receipt_comparison import ReceiptEvidence, refused
from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
from skerry.runtime.checkpointing.shared_state import is_state, part_at
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import GENESIS, CheckpointManifest, Count, Work
from skerry.runtime.ranks.interface import combine_digests
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from skerry.runtime.checkpointing.local_copies_interface import NearCopies
    from skerry.runtime.checkpointing.shared_state import SharedState, State
    from skerry.runtime.log.log import RunLog, Stored
    from skerry.runtime.log.records import Commit
    from skerry.runtime.ranks.interface import Channel


class _Candidate(Record):
    """A checkpoint to load, the digests that receipts allow, and the work up to its commit; None if none is left.

    passed_over: the rounds of a newer one of which receipts do not say if its state is right; 0 without any.
    """

    manifest: CheckpointManifest | None
    evidence: ReceiptEvidence = ReceiptEvidence()
    work: Work = 0.0
    passed_over: Count = 0


class CheckpointLoader:
    """Loads checkpoints into the state that consumers registered. For the thread that trains."""

    def __init__(
        self,
        log: RunLog,
        slot: str,
        state: SharedState,
        ranks: Channel,
        evidence_of: Callable[[CheckpointManifest], ReceiptEvidence | None],
        near: NearCopies | None = None,
    ) -> None:
        """evidence_of: the digests that receipts allow for a checkpoint; None if it must not be loaded.

        near: where a replica that joins looks first for the bytes, if receipts can confirm them.
        """
        self._near = near
        self._log = log
        self._slot = slot
        self._state = state
        self._ranks = ranks
        self._evidence_of = evidence_of
        self.passed_over = 0
        """The last load passed over a newer checkpoint, of so many rounds: they are followed. The same on all ranks."""

    def load_newest(self, beyond: int, writers: Collection[str] | None, undisputed: int | None) -> LogPosition:
        """Loads the newest checkpoint of more than `beyond` rounds that receipts confirm.

        Skips and reports checkpoints that are damaged or contradict receipts (decision 0012). writers: only load
        checkpoints of these slots. undisputed: only load one of at most so many rounds from which the log can be
        followed. With either, values that replicas need not share stay this replica's own.
        Raises Corrupt if none can be loaded, Diverged if the log contradicts it.
        """
        damage: list[Corrupt] = []
        heals = writers is not None or undisputed is not None
        joins = not heals and beyond < 0
        candidates = self._candidates(beyond, writers, damage, undisputed)
        if joins or undisputed is not None:
            candidates = self._undisputed_first(candidates, disputed=joins)
        while True:
            candidate = self._ranks.broadcast_from_rank0(
                "choose a checkpoint", lambda: next(candidates, _Candidate(manifest=None)), _Candidate
            )
            if candidate.manifest is None:
                cause = damage[0] if damage else None
                uri = self._log.store.uri
                raise Corrupt(
                    f"no checkpoint of {uri} can be loaded: {cause}; `skerry doctor {uri}` says how to go on"
                ) from cause
            self.passed_over = candidate.passed_over
            sources: list[State | None] = [None]
            if self._near is not None and joins and candidate.evidence.states:
                sources.insert(0, self._near_state(self._near, candidate.manifest))
            for source in sources:
                try:
                    return self._load(candidate.manifest, candidate.evidence, candidate.work, source, heals=heals)
                except Corrupt as error:
                    _failed(candidate.manifest.round, error)
                    damage.append(error)

    def _candidates(
        self, beyond: int, writers: Collection[str] | None, damage: list[Corrupt], undisputed: int | None = None
    ) -> Iterator[_Candidate]:
        """Yields checkpoints in the order to try; skipped ones are added to `damage`."""
        tried: set[int] = set()
        # List again when all have failed: garbage collection may have replaced them with newer ones meanwhile.
        while untried := [n for n in checkpoint.complete(self._log.store) if n > beyond and n not in tried]:
            for round_number in untried:
                tried.add(round_number)
                try:
                    manifest = checkpoint.manifest(self._log.store, round_number)
                    if manifest is None or (writers is not None and manifest.writer not in writers):
                        continue
                    if undisputed is not None and not self._leads_on(round_number, undisputed):
                        continue
                    last = self._read_closing_commit(manifest)
                    evidence = self._evidence_of(manifest)
                except Corrupt as error:
                    _failed(round_number, error)
                    damage.append(error)
                    continue
                if evidence is None:
                    damage.append(refused(round_number, f"a majority contradicts its writer {manifest.writer}"))
                else:
                    work = 0.0 if last is None else last.record.work
                    yield _Candidate(manifest=manifest, evidence=evidence, work=work)

    def _undisputed_first(self, candidates: Iterator[_Candidate], *, disputed: bool) -> Iterator[_Candidate]:
        """Yields those last, or not at all, of whose state receipts without a majority report several values.

        One before them from which the log can be followed gives the right state, whichever of those that is.
        """
        later: list[_Candidate] = []
        newest = 0
        for candidate in candidates:
            number = 0 if candidate.manifest is None else candidate.manifest.round
            if len(candidate.evidence.states) > 1:
                later.append(candidate)
                newest = max(newest, number)
            elif not later or self._leads_on(number, number):
                yield candidate.model_copy(update={"passed_over": newest})
        yield from later if disputed else ()

    def _read_closing_commit(self, manifest: CheckpointManifest) -> Stored[Commit] | None:
        """The commit that a checkpoint follows; None for checkpoint 0. Raises Corrupt unless it is of this log."""
        last = self._log.check_backed(manifest.round)
        if (manifest.run, manifest.commit) != (self._log.run.nonce, GENESIS if last is None else last.digest):
            raise Corrupt(
                f"checkpoint {keys.checkpoint_manifest(manifest.round)} belongs to another log: run={manifest.run} "
                f"commit={manifest.commit[:12]}"
            )
        return last

    def _leads_on(self, round_number: int, undisputed: int) -> bool:
        """Returns True if the log can be followed from this checkpoint; payloads are deleted oldest first."""
        return round_number <= undisputed and bool(self._log.store.list(keys.payloads_prefix(round_number)))

    @staticmethod
    def _near_state(near: NearCopies, manifest: CheckpointManifest) -> State | None:
        """This rank's copy of the checkpoint's round, of the same log; None if this rank must read the bucket."""
        copy = near.load("checkpoints", manifest.round)
        if copy is None or copy.commit != manifest.commit or not is_state(copy.state):
            return None
        return copy.state

    def _load(
        self,
        manifest: CheckpointManifest,
        evidence: ReceiptEvidence,
        work: float,
        near: State | None,
        *,
        heals: bool,
    ) -> LogPosition:
        where = f"checkpoint {keys.checkpoint_manifest(manifest.round)}"
        rank, size = self._ranks.rank, self._ranks.size
        state: State = {}

        def read() -> str | None:
            nonlocal state
            if (saved := len(manifest.shards) or 1) != size:
                raise Invalid(
                    f"{where} was saved by {saved} ranks, this replica has world_size={size}; "
                    f"all replicas of a run need the same number of ranks: start this one with {saved}"
                )
            loaded = checkpoint.load(self._log.store, manifest, rank=rank) if near is None else near
            if not is_state(loaded):
                raise Corrupt(f"{where} does not hold the state of a replica: {type(loaded).__name__}")
            state = loaded
            if not evidence.states:
                return None
            return checkpoint.state_digest(part_at(state, self._state.paths(evidence.scope)))

        def compare(all_ranks: Sequence[str | None]) -> None:
            if digests := [digest for digest in all_ranks if digest is not None]:
                evidence.check(manifest.round, combine_digests(digests))

        self._ranks.reduce_on_rank0("load a checkpoint", read, compare)
        self._ranks.reduce_on_rank0("fit a checkpoint", lambda: self._state.check(state, where), lambda _: None)
        self._state.restore(self._state.with_own(state) if heals else state)
        if rank == 0:
            fields = {"round": manifest.round, "slot": self._slot, "writer": manifest.writer}
            emit("checkpoint_loaded", fields)
        return _position_of(manifest, work)


def _position_of(manifest: CheckpointManifest, work: float) -> LogPosition:
    return LogPosition(
        round=manifest.round,
        previous=manifest.commit,
        members=manifest.members,
        batches=manifest.batches,
        work=work,
    )


def _failed(round_number: int, error: Exception) -> None:
    emit("checkpoint_failed", {"round": round_number, "error": str(error)}, level=logging.WARNING, error=error)
