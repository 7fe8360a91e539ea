"""Writes a replica's receipt after each round, and in rotation the round's checkpoint; loads checkpoints.

State is captured when it is stable (the caller decides when) and written in the background. The run continues without
either: a failure is reported, and nothing is retried. After a checkpoint its writer collects garbage. Loading takes the
newest complete checkpoint that the log and the receipts confirm.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeGuard, cast

import torch

from skerry.runtime.background_threads import BackgroundThreads
from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.divergence import DivergenceCheck
from skerry.runtime.checkpointing.log_position import LogPosition, RoundFacts, is_due
from skerry.runtime.checkpointing.receipt_comparison import ReceiptEvidence, refused
from skerry.runtime.errors import Corrupt, Diverged, Invalid, Retryable
from skerry.runtime.events import emit
from skerry.runtime.log import keys
from skerry.runtime.log.records import CheckpointManifest, Count, Receipt, Record, Scope, Work, Xxh128
from skerry.runtime.ranks.interface import combine_digests
from skerry.runtime.tensors.dtensor import collect_meshes, pack_shards, tensors_behind, unpack_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from skerry.runtime.checkpointing.garbage_collector import GarbageCollector
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.protocol.membership import Presence
    from skerry.runtime.ranks.interface import Channel, Group
    from skerry.runtime.store import Store

State: TypeAlias = "Mapping[str, object]"
Load: TypeAlias = "Callable[[object], None]"
"""A function that a consumer registered: it loads a piece of shared state."""
_Failure: TypeAlias = Literal["receipt_failed", "checkpoint_failed", "garbage_collection_failed"]

FRAGMENT = "StreamingDiLoCoFragment_"
"""Key prefix of the state that torchft's DiLoCo registers: global parameters and outer optimizer of a fragment."""


class SharedState:
    """The shared state, as consumers registered it by key."""

    def __init__(self, parameters_of: Callable[[Load], list[torch.Tensor]] = tensors_behind) -> None:
        """parameters_of: the parameters that a load function loads into; shards are restored on their meshes."""
        self._parameters_of = parameters_of
        self._loads: dict[str, Load] = {}
        self._saves: dict[str, Callable[[], object]] = {}

    def __bool__(self) -> bool:
        return bool(self._saves)

    def register(self, key: str, load: Load, save: Callable[[], object]) -> None:
        """Raises Invalid if the key is taken."""
        if key in self._saves:
            raise Invalid(f"state is registered twice under {key!r}")
        self._loads[key] = load
        self._saves[key] = save

    @property
    def fragment_loads(self) -> list[Load]:
        """The functions that load DiLoCo's fragments, in order."""
        return [load for key, load in self._loads.items() if key.startswith(FRAGMENT)]

    @property
    def fragments(self) -> int:
        """Number of fragments that DiLoCo registered; round r exchanges fragment r modulo this."""
        return sum(key.startswith(FRAGMENT) for key in self._saves)

    def values(self) -> dict[str, object]:
        """Returns the live state by key, as consumers registered it."""
        return {key: save() for key, save in self._saves.items()}

    def capture(self, scope: Scope = "registered") -> dict[str, object]:
        """Returns references to the live state (all of it, or DiLoCo's fragments); copy it before training continues.

        A sharded tensor is represented by this rank's shard.
        """
        return {key: pack_shards(self._saves[key]()) for key in self._saves if _covers(scope, key)}

    def check(self, state: State, where: str) -> None:
        """Raises Diverged if `state` is of another model or another script."""
        if missing := sorted(self._loads.keys() - state.keys()):
            raise Diverged(
                f"{where} lacks the state registered as {', '.join(missing)}; was it written by another script?"
            )
        for key, mine in self.capture().items():
            _check_same_model(mine, state[key], f"{where}: {key}")

    def restore(self, state: State) -> None:
        """Loads every registered key from a checked state."""
        for key, load in self._loads.items():
            load(
                unpack_shards(
                    state[key],
                    lambda: collect_meshes(
                        list(self.values().values()), *map(self._parameters_of, self._loads.values())
                    ),
                )
            )


def synchronize_device() -> None:
    """Waits for device copies: DiLoCo copies its parameters to host memory asynchronously."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class _Snapshot(Record):
    """Digest and counters of a round's state, of one rank or of all. saves: a copy for a checkpoint exists.

    keeps: every rank must keep a copy, to measure a difference.
    """

    digest: Xxh128 | None
    saves: bool
    keeps: bool
    uploaded_bytes: Count
    downloaded_bytes: Count
    requests: Count


class _Candidate(Record):
    """A checkpoint to load, the digests that receipts allow, and the work up to its commit; None if none is left."""

    manifest: CheckpointManifest | None
    evidence: ReceiptEvidence = ReceiptEvidence()
    work: Work = 0.0


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
    ) -> None:
        """pool: where receipts and checkpoints are written, one at a time; None makes a thread."""
        self._log = log
        self._presence = presence
        self._state = state
        self._nonce = nonce
        self._collector = collector
        self._train = group.channel("train")
        self._background = group.channel("record")
        self._pool = pool or BackgroundThreads(1, "recorder")
        self._checkpoint: Future[None] | None = None
        self._divergence = DivergenceCheck(log, presence.slot, self._background)
        self._recorded = 0

    def record(self, position: LogPosition, facts: RoundFacts, scope: Scope, checkpoint_every: int | None) -> None:
        """Writes the receipt of the round just closed, and its checkpoint in turn. Call while state is stable.

        checkpoint_every: in rounds; None means not now. A state that cannot be stored is reported, not raised.
        """
        if position.round <= self._recorded:
            return  # healed, and follows rounds that it recorded before
        synchronize_device()
        snapshot: object = None

        def capture() -> _Snapshot:
            nonlocal snapshot
            digest = None if scope == "average" else checkpoint.state_digest(self._state.capture(scope))
            saves = self._my_turn(position, checkpoint_every)
            snapshot = checkpoint.snapshot(self._state.capture()) if saves else None
            return _Snapshot(
                digest=digest,
                saves=saves,
                keeps=digest is not None and self._divergence.wants(self._author(position, checkpoint_every)),
                uploaded_bytes=facts.uploaded_bytes,
                downloaded_bytes=facts.downloaded_bytes,
                requests=facts.requests,
            )

        try:
            whole = self._train.reduce_on_rank0("record", capture, _sum, _Snapshot)
        except Invalid as error:
            _failed("checkpoint_failed", position.round, error)
            return
        if whole.keeps:
            self._divergence.keep(position.round, cast("State", checkpoint.snapshot(self._state.capture(scope))))
        self._recorded = position.round
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
        )
        if self._train.rank == 0:
            self._collector.note_closed(position.round)
            self._pool.submit(self._write_receipt, receipt)
        if whole.saves:
            self._checkpoint = self._pool.submit(self._write_checkpoint, position, snapshot)
        if checkpoint_every is not None:  # while it follows, only the state at the head is compared
            self._pool.submit(self._check, receipt, position.members)

    def save_now(self, position: LogPosition) -> None:
        """Writes a checkpoint of the current state, in the caller's thread. Raises the store's errors."""
        synchronize_device()
        self._save(position, self._state.capture(), self._train)

    def checkpoints(self) -> list[int]:
        """Returns the rounds with a complete checkpoint, newest first, as listed by rank 0."""
        store = self._log.store
        return list(self._train.broadcast_from_rank0("list", lambda: tuple(checkpoint.complete(store))))

    def load_newest(self, beyond: int = -1, writers: Collection[str] | None = None) -> LogPosition:
        """Loads the newest checkpoint of more than `beyond` rounds that receipts confirm.

        Skips and reports checkpoints that are damaged or contradict receipts (decision 0012). writers: only load
        checkpoints of these slots. Raises Corrupt if none can be loaded, Diverged if the log contradicts it.
        """
        damage: list[Corrupt] = []
        candidates = self._candidates(beyond, writers, damage)
        while True:
            candidate = self._train.broadcast_from_rank0(
                "choose a checkpoint", lambda: next(candidates, _Candidate(manifest=None)), _Candidate
            )
            if candidate.manifest is None:
                cause = damage[0] if damage else None
                raise Corrupt(f"no checkpoint of {self._log.store.uri} can be loaded: {cause}") from cause
            try:
                return self._load(candidate.manifest, candidate.evidence, candidate.work)
            except Corrupt as error:
                _failed("checkpoint_failed", candidate.manifest.round, error)
                damage.append(error)

    def heal(self) -> LogPosition | None:
        """Loads the newest checkpoint of the replicas with the right state, if this replica differs.

        Returns None if there is nothing to heal, or no such checkpoint yet. Raises Diverged if the log contradicts it.
        """
        diagnosis = self._divergence.diagnosis
        right = self._train.broadcast_from_rank0("heal", lambda: () if diagnosis is None else tuple(diagnosis.right))
        if not right:
            return None
        try:
            position = self.load_newest(writers=right)
        except (Corrupt, Retryable) as error:
            _failed("checkpoint_failed", self._recorded, error)
            return None
        self._divergence.healed(self._recorded)
        return position

    def _candidates(self, beyond: int, writers: Collection[str] | None, damage: list[Corrupt]) -> Iterator[_Candidate]:
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
                    evidence = self._divergence.evidence(manifest)
                    last = self._log.read_last_commit(round_number)
                except Corrupt as error:
                    _failed("checkpoint_failed", round_number, error)
                    damage.append(error)
                    continue
                if evidence is None:
                    damage.append(refused(round_number, f"a majority contradicts its writer {manifest.writer}"))
                else:
                    work = 0.0 if last is None else last.record.work
                    yield _Candidate(manifest=manifest, evidence=evidence, work=work)

    def _load(self, manifest: CheckpointManifest, evidence: ReceiptEvidence, work: float) -> LogPosition:
        where = f"checkpoint {keys.checkpoint_manifest(manifest.round)}"
        rank, size = self._train.rank, self._train.size
        state: State = {}

        def read() -> str | None:
            nonlocal state
            if rank == 0 and (
                manifest.run != self._log.run.nonce or manifest.commit != self._log.read_previous_digest(manifest.round)
            ):
                raise Diverged(f"{where} belongs to another log: run={manifest.run} commit={manifest.commit[:12]}")
            if (saved := len(manifest.shards) or 1) != size:
                raise Invalid(
                    f"{where} was saved by {saved} ranks, this replica has world_size={size}; "
                    f"all replicas of a run need the same number of ranks: start this one with {saved}"
                )
            loaded = checkpoint.load(self._log.store, manifest, rank=rank)
            if not _is_state(loaded):
                raise Corrupt(f"{where} does not hold the state of a replica: {type(loaded).__name__}")
            state = loaded
            if not evidence.states:
                return None
            covered = {key: value for key, value in state.items() if _covers(evidence.scope, key)}
            return checkpoint.state_digest(covered)

        def compare(all_ranks: Sequence[str | None]) -> None:
            if digests := [digest for digest in all_ranks if digest is not None]:
                evidence.check(manifest.round, combine_digests(digests))

        self._train.reduce_on_rank0("load a checkpoint", read, compare)
        self._train.reduce_on_rank0("fit a checkpoint", lambda: self._state.check(state, where), lambda _: None)
        self._state.restore(state)
        if rank == 0:
            fields = {"round": manifest.round, "slot": self._presence.slot, "writer": manifest.writer}
            emit("checkpoint_loaded", fields)
        return _position_of(manifest, work)

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
        """True if no difference is known: only then may others load this replica's state. On rank 0."""
        return self._divergence.diagnosis is None

    @property
    def quarantine(self) -> str | None:
        """The reason why this replica must not contribute: it diverged by more than rounding. None if it may."""
        diagnosis = self._divergence.diagnosis
        return None if diagnosis is None or diagnosis.is_rounding else f"this replica diverged: {diagnosis}"

    def close(self, *, wait: bool) -> None:
        """Stops the background thread. wait: first write everything that was submitted."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _author(self, position: LogPosition, checkpoint_every: int | None) -> str | None:
        """Returns the member that writes this round's checkpoint, in rotation; None if none is due."""
        if checkpoint_every is None or not self._state or not position.members:
            return None
        if not is_due(position, checkpoint_every, self._log.run):
            return None
        return position.members[(position.round // checkpoint_every) % len(position.members)]

    def _my_turn(self, position: LogPosition, checkpoint_every: int | None) -> bool:
        if self._author(position, checkpoint_every) != self._presence.slot or not self.is_sound:
            return False
        if self._log.run.is_over(position.round, position.work) and self._checkpoint is not None:
            self._checkpoint.exception()  # the last checkpoint of a run is never skipped
        # Memory is bounded to one snapshot: a member that still uploads its last checkpoint skips this one.
        return not self.is_saving

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint of this replica is being written."""
        return self._checkpoint is not None and not self._checkpoint.done()

    def _write_receipt(self, receipt: Receipt) -> None:
        try:
            stored = self._log.create(keys.receipt(receipt.round, receipt.slot), receipt).record
            if stored.averages != receipt.averages or (stored.state, stored.scope) != (receipt.state, receipt.scope):
                raise Diverged(  # noqa: TRY301  one handler for every failure
                    f"an earlier incarnation wrote a different receipt: round={receipt.round} slot={receipt.slot}"
                )
        except Exception as error:  # noqa: BLE001  a thread's entry: training goes on without a receipt
            _failed("receipt_failed", receipt.round, error)

    def _check(self, receipt: Receipt, members: tuple[str, ...]) -> None:
        try:
            self._divergence.look(receipt, members)
        except Exception as error:  # noqa: BLE001  a thread's entry: the next comparison covers this round too
            _failed("receipt_failed", receipt.round, error)

    def _write_checkpoint(self, position: LogPosition, snapshot: object) -> None:
        try:
            saved = self._save(position, cast("dict[str, object]", snapshot), self._background)
        except Exception as error:  # noqa: BLE001  a thread's entry: another member writes the next checkpoint
            _failed("checkpoint_failed", position.round, error)
        else:
            if saved and self._background.rank == 0:
                self._collect(position.round, self._collector)

    @staticmethod
    def _collect(round_number: int, collector: GarbageCollector) -> None:
        try:
            collector.collect()
        except Exception as error:  # noqa: BLE001  a thread's entry: the next collection deletes the rest
            _failed("garbage_collection_failed", round_number, error)

    def _save(self, position: LogPosition, state: dict[str, object], ranks: Channel) -> bool:
        saved = checkpoint.save(
            self._log.store,
            run=self._log.run.nonce,
            round_number=position.round,
            commit=position.previous,
            members=position.members,
            batches=position.batches,
            writer=self._presence.slot,
            nonce=self._nonce(),
            state=state,
            ranks=ranks,
        )
        if saved and ranks.rank == 0:  # otherwise another replica wrote the same state first
            emit("checkpoint_saved", {"round": position.round, "slot": self._presence.slot})
        return saved


def _sum(all_ranks: Sequence[_Snapshot]) -> _Snapshot:
    """Combines all ranks. A checkpoint needs every rank's shard."""
    digests = [rank_result.digest for rank_result in all_ranks if rank_result.digest is not None]
    return _Snapshot(
        digest=combine_digests(digests) if digests else None,
        saves=all(rank_result.saves for rank_result in all_ranks),
        keeps=any(rank_result.keeps for rank_result in all_ranks),
        uploaded_bytes=sum(rank_result.uploaded_bytes for rank_result in all_ranks),
        downloaded_bytes=sum(rank_result.downloaded_bytes for rank_result in all_ranks),
        requests=sum(rank_result.requests for rank_result in all_ranks),
    )


def _covers(scope: Scope, key: str) -> bool:
    """Returns True if receipts of this scope cover the state under `key`."""
    return scope == "registered" or key.startswith(FRAGMENT)


def _is_state(loaded: object) -> TypeGuard[State]:
    return isinstance(loaded, dict) and all(isinstance(key, str) for key in cast("dict[object, object]", loaded))


def _position_of(manifest: CheckpointManifest, work: float) -> LogPosition:
    return LogPosition(
        round=manifest.round,
        previous=manifest.commit,
        members=manifest.members,
        batches=manifest.batches,
        work=work,
    )


def _failed(name: _Failure, round_number: int, error: Exception) -> None:
    emit(name, {"round": round_number, "error": str(error)}, level=logging.WARNING, error=error)


def _check_same_model(own: object, loaded: object, where: str) -> None:
    """Raises Diverged if tensors under one path differ in shape or dtype. Either optimizer state may be missing."""
    if isinstance(own, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if own.shape != loaded.shape or own.dtype != loaded.dtype:
            raise Diverged(
                f"{where} is {loaded.dtype} {tuple(loaded.shape)}, this model has {own.dtype} {tuple(own.shape)}; "
                "do all replicas run the same model?"
            )
    elif isinstance(own, dict) and isinstance(loaded, dict):
        own_items, loaded_items = cast("dict[object, object]", own), cast("dict[object, object]", loaded)
        tensors = {key for key, value in own_items.items() if isinstance(value, torch.Tensor)}
        if absent := sorted(str(key) for key in tensors - loaded_items.keys()):
            raise Diverged(f"{where} lacks {', '.join(absent)}; do all replicas run the same model?")
        for key in (key for key in own_items if key in loaded_items):
            _check_same_model(own_items[key], loaded_items[key], f"{where}.{key}")
