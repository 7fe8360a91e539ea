"""What a replica leaves behind after a round: its receipt, and in rotation the round's checkpoint.

Taken when the state is stable (the caller says when), written in the background. Neither is needed for the run to go
on: a failure is told and forgotten. Whoever has written a checkpoint deletes what it made superfluous (`garbage`).
Also brings state back: the newest complete checkpoint, checked against the log.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeGuard, cast

import torch

from skerry.runtime import checkpoint, keys
from skerry.runtime.alarm import Evidence, refused
from skerry.runtime.errors import Corrupt, Diverged, Invalid, Retryable
from skerry.runtime.events import emit
from skerry.runtime.ranks import Nothing, fold
from skerry.runtime.records import CheckpointManifest, Count, Receipt, Record, Scope, Work, Xxh128
from skerry.runtime.selfcheck import SelfCheck
from skerry.runtime.sharded import apart, meshes_of, tensors_behind, together

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from skerry.runtime.garbage import Collector
    from skerry.runtime.journal import Journal
    from skerry.runtime.membership import Presence
    from skerry.runtime.ranks import Group, Ranks
    from skerry.runtime.records import Run

State: TypeAlias = "Mapping[str, object]"
_Failure: TypeAlias = Literal["receipt_failed", "checkpoint_failed", "garbage_failed"]

FRAGMENT = "StreamingDiLoCoFragment_"
"""The prefix under which torchft's DiLoCo registers what it shares: global parameters and outer optimizer."""


class SharedState:
    """The state that consumers registered, by key."""

    def __init__(self) -> None:
        self._loads: dict[str, Callable[[object], None]] = {}
        self._saves: dict[str, Callable[[], object]] = {}

    def __bool__(self) -> bool:
        return bool(self._saves)

    def register(self, key: str, load: Callable[[object], None], save: Callable[[], object]) -> None:
        """Raises Invalid if the key is taken."""
        if key in self._saves:
            raise Invalid(f"state is registered twice under {key!r}")
        self._loads[key] = load
        self._saves[key] = save

    @property
    def loads(self) -> list[Callable[[object], None]]:
        """What was registered to bring state back."""
        return list(self._loads.values())

    @property
    def has_fragments(self) -> bool:
        """DiLoCo registered its fragments."""
        return self.fragments > 0

    @property
    def fragments(self) -> int:
        """How many fragments DiLoCo registered; round r exchanges fragment r modulo this."""
        return sum(key.startswith(FRAGMENT) for key in self._saves)

    def capture(self, scope: Scope = "registered") -> dict[str, object]:
        """References to the live state (all of it, or DiLoCo's fragments): use before training goes on.

        Of a sharded tensor it is this rank's shard.
        """
        return {key: apart(self._saves[key]()) for key in self._saves if _covers(scope, key)}

    def check(self, state: State, where: str) -> None:
        """Raises Diverged if `state` is another model's, or was registered by another script."""
        if missing := sorted(self._loads.keys() - state.keys()):
            raise Diverged(f"{where} lacks the state registered as {', '.join(missing)}; is it of another script?")
        for key, mine in self.capture().items():
            _check_same_model(mine, state[key], f"{where}: {key}")

    def restore(self, state: State) -> None:
        """Load every registered key from a state that was checked."""
        for key, load in self._loads.items():
            load(together(state[key], lambda: meshes_of(self._live(), *map(tensors_behind, self._loads.values()))))

    def _live(self) -> list[object]:
        return [save() for save in self._saves.values()]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a replica stands between rounds: `round` rounds are closed, `previous` is the digest of the last commit.

    work: what that commit tells of all rounds so far.
    """

    round: int
    previous: str
    members: tuple[str, ...]
    batches: int
    work: float


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """What is known of the round that was just closed, for its receipt."""

    averages: tuple[str, ...]
    contributed: bool
    uploaded_bytes: int
    downloaded_bytes: int
    requests: int
    seconds: dict[str, float]
    norm: float | None = None


def is_due(standing: Standing, checkpoint_every: int | None, run: Run) -> bool:
    """State is saved after this round. The last round of a run always is; None means not now."""
    if checkpoint_every is None:
        return False
    return standing.round % checkpoint_every == 0 or run.is_over(standing.round, standing.work)


def settle() -> None:
    """DiLoCo copies its parameters to host memory without waiting: what is read now must have arrived."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class _Taken(Record):
    """What one rank took of a round's state, or all together. saves: a copy for a checkpoint, too.

    keeps: rank 0 wants every rank to keep a copy, to be measured.
    """

    digest: Xxh128 | None
    saves: bool
    keeps: bool
    uploaded_bytes: Count
    downloaded_bytes: Count
    requests: Count


class _Rounds(Record):
    """The rounds of some checkpoints."""

    rounds: tuple[Count, ...]


class _Right(Record):
    """Who holds the right state, if this replica does not."""

    slots: tuple[str, ...]


class _Found(Record):
    """A checkpoint to load, what receipts tell of it, and the work that its commit tells of; None: there is none."""

    manifest: CheckpointManifest | None
    evidence: Evidence = Evidence()
    work: Work = 0.0


class _Held(Record):
    """What a checkpoint holds of one rank's shared state; None where nobody tells what it should be."""

    digest: Xxh128 | None


class Recorder:
    """Writes receipts and checkpoints of one replica in the background, one at a time.

    Each rank saves and loads its own shard; rank 0 makes the records, and chooses what to load.
    """

    def __init__(
        self,
        journal: Journal,
        presence: Presence,
        state: SharedState,
        nonce: Callable[[], str],
        collector: Collector,
        group: Group,
    ) -> None:
        self._journal = journal
        self._presence = presence
        self._state = state
        self._nonce = nonce
        self._collector = collector
        self._train = group.line("train")
        self._background = group.line("record")
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._checkpoint: Future[None] | None = None
        self._selfcheck = SelfCheck(journal, presence.slot, self._background)
        self._recorded = 0

    def record(self, standing: Standing, facts: RoundFacts, scope: Scope, checkpoint_every: int | None) -> None:
        """Receipt of the round just closed, and its checkpoint if it is my turn. Call while state is stable.

        checkpoint_every: in rounds; None means not now. Never raises because of the state: that is told instead.
        """
        if standing.round <= self._recorded:
            return  # healed, and following what it had recorded already
        settle()
        snapshot: object = None

        def take() -> _Taken:
            nonlocal snapshot
            digest = None if scope == "average" else checkpoint.state_digest(self._state.capture(scope))
            saves = self._my_turn(standing, checkpoint_every)
            snapshot = checkpoint.snapshot(self._state.capture()) if saves else None
            return _Taken(
                digest=digest,
                saves=saves,
                keeps=digest is not None and self._selfcheck.wants(self._author(standing, checkpoint_every)),
                uploaded_bytes=facts.uploaded_bytes,
                downloaded_bytes=facts.downloaded_bytes,
                requests=facts.requests,
            )

        try:
            taken = self._train.consult("record", take, _sum, _Taken)
        except Invalid as error:
            _failed("checkpoint_failed", standing.round, error)
            return
        if taken.keeps:
            self._selfcheck.keep(standing.round, cast("State", checkpoint.snapshot(self._state.capture(scope))))
        self._recorded = standing.round
        receipt = Receipt(
            run=self._journal.run.nonce,
            round=standing.round - 1,
            slot=self._presence.slot,
            incarnation=self._presence.incarnation,
            commit=standing.previous,
            averages=facts.averages,
            state=taken.digest,
            scope=scope,
            contributed=facts.contributed,
            uploaded_bytes=taken.uploaded_bytes,
            downloaded_bytes=taken.downloaded_bytes,
            requests=taken.requests,
            seconds=facts.seconds,
            norm=facts.norm,
        )
        if self._train.rank == 0:
            self._pool.submit(self._write_receipt, receipt)
        if taken.saves:
            self._checkpoint = self._pool.submit(self._write_checkpoint, standing, snapshot)
        if checkpoint_every is not None:  # else it follows, and the state it comes to is compared at the head
            self._pool.submit(self._check, receipt, standing.members)

    def save_now(self, standing: Standing) -> None:
        """Write a checkpoint of the state as it is, in the caller's thread. Raises what the store raises."""
        settle()
        self._save(standing, self._state.capture(), self._train)

    def checkpoints(self) -> list[int]:
        """The rounds that have a complete checkpoint, newest first, as rank 0 sees them."""
        store = self._journal.store
        return list(
            self._train.first("list", lambda: _Rounds(rounds=tuple(checkpoint.complete(store))), _Rounds).rounds
        )

    def load_newest(self, beyond: int = -1, writers: Collection[str] | None = None) -> Standing:
        """Load the newest checkpoint of more than `beyond` rounds that is what receipts say; others are passed over.

        What is damaged, or holds another state than they say, is told (decision 0012). writers: only theirs.
        Raises Corrupt if there is none to load, Diverged if the log says otherwise.
        """
        damage: list[Corrupt] = []
        choices = self._choices(beyond, writers, damage)
        while True:
            choice = self._train.first("choose a checkpoint", lambda: next(choices, _Found(manifest=None)), _Found)
            if choice.manifest is None:
                cause = damage[0] if damage else None
                raise Corrupt(f"no checkpoint of {self._journal.store.uri} can be loaded: {cause}") from cause
            try:
                return self._load(choice.manifest, choice.evidence, choice.work)
            except Corrupt as error:
                _failed("checkpoint_failed", choice.manifest.round, error)
                damage.append(error)

    def heal(self) -> Standing | None:
        """If this replica holds something else than the others: load the newest checkpoint of those who are right.

        None: there is nothing to heal, or nothing to heal from yet. Raises Diverged if the log says otherwise.
        """
        diagnosis = self._selfcheck.diagnosis
        mine = () if diagnosis is None else diagnosis.right
        right = self._train.first("heal", lambda: _Right(slots=mine), _Right).slots
        if not right:
            return None
        try:
            standing = self.load_newest(writers=right)
        except (Corrupt, Retryable) as error:
            _failed("checkpoint_failed", self._recorded, error)
            return None
        self._selfcheck.healed(self._recorded)
        return standing

    def _choices(self, beyond: int, writers: Collection[str] | None, damage: list[Corrupt]) -> Iterator[_Found]:
        """Checkpoints in the order in which to try them; what is passed over goes to `damage`; damage is told."""
        tried: set[int] = set()
        # Listed again when all have failed: while one was being read, it may have made way for newer ones.
        while there := [n for n in checkpoint.complete(self._journal.store) if n > beyond and n not in tried]:
            for round_number in there:
                tried.add(round_number)
                try:
                    manifest = checkpoint.manifest(self._journal.store, round_number)
                    if manifest is None or (writers is not None and manifest.writer not in writers):
                        continue
                    evidence = self._selfcheck.evidence(manifest)
                    last = self._journal.last_commit(round_number)
                except Corrupt as error:
                    _failed("checkpoint_failed", round_number, error)
                    damage.append(error)
                    continue
                if evidence is None:
                    damage.append(refused(round_number, f"its writer {manifest.writer} is outvoted"))
                else:
                    work = 0.0 if last is None else last.record.work
                    yield _Found(manifest=manifest, evidence=evidence, work=work)

    def _load(self, manifest: CheckpointManifest, evidence: Evidence, work: float) -> Standing:
        where = f"checkpoint {keys.checkpoint_manifest(manifest.round)}"
        rank, size = self._train.rank, self._train.size
        state: State = {}

        def read() -> _Held:
            nonlocal state
            if rank == 0 and (
                manifest.run != self._journal.run.nonce or manifest.commit != self._journal.previous(manifest.round)
            ):
                raise Diverged(f"{where} is not of this log: run={manifest.run} commit={manifest.commit[:12]}")
            if (saved := len(manifest.shards) or 1) != size:
                raise Invalid(
                    f"{where} is of a replica of {saved} ranks, this one has {size}: world_size={size}; "
                    f"all replicas of a run need the same number of ranks, so start this one with {saved}"
                )
            loaded = checkpoint.load(self._journal.store, manifest, rank=rank)
            if not _is_state(loaded):
                raise Corrupt(f"{where} holds no state of a replica: {type(loaded).__name__}")
            state = loaded
            if not evidence.states:
                return _Held(digest=None)
            covered = {key: one for key, one in state.items() if _covers(evidence.scope, key)}
            return _Held(digest=checkpoint.state_digest(covered))

        def compare(all_ranks: Sequence[_Held]) -> Nothing:
            if digests := [one.digest for one in all_ranks if one.digest is not None]:
                evidence.check(manifest.round, fold(digests))
            return Nothing()

        def fit() -> Nothing:
            self._state.check(state, where)
            return Nothing()

        self._train.consult("load a checkpoint", read, compare, Nothing)
        self._train.consult("fit a checkpoint", fit, lambda _: Nothing(), Nothing)
        self._state.restore(state)
        if rank == 0:
            fields = {"round": manifest.round, "slot": self._presence.slot, "writer": manifest.writer}
            emit("checkpoint_loaded", fields)
        return _standing(manifest, work)

    @property
    def is_sound(self) -> bool:
        """Nothing is known to be wrong with what this replica holds: else it must not lead others. On rank 0."""
        return self._selfcheck.diagnosis is None

    @property
    def quarantine(self) -> str | None:
        """Why this replica must not contribute: it holds something else than the others, by more than rounding."""
        diagnosis = self._selfcheck.diagnosis
        return None if diagnosis is None or diagnosis.is_rounding else f"this replica diverged: {diagnosis}"

    def close(self, *, wait: bool) -> None:
        """Stop; wait: until everything submitted is written."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _author(self, standing: Standing, checkpoint_every: int | None) -> str | None:
        """Whose turn this round's checkpoint is: one member per checkpoint, in rotation. None: there is none."""
        if checkpoint_every is None or not self._state or not standing.members:
            return None
        if not is_due(standing, checkpoint_every, self._journal.run):
            return None
        return standing.members[(standing.round // checkpoint_every) % len(standing.members)]

    def _my_turn(self, standing: Standing, checkpoint_every: int | None) -> bool:
        if self._author(standing, checkpoint_every) != self._presence.slot or not self.is_sound:
            return False
        if self._journal.run.is_over(standing.round, standing.work) and self._checkpoint is not None:
            wait([self._checkpoint])  # the last one of a run is not left out
        # Memory is bounded to one snapshot: a member whose last checkpoint is still on its way leaves this one out.
        return not self.is_saving

    @property
    def is_saving(self) -> bool:
        """A checkpoint of this replica is on its way."""
        return self._checkpoint is not None and not self._checkpoint.done()

    def _write_receipt(self, receipt: Receipt) -> None:
        try:
            stands = self._journal.create(keys.receipt(receipt.round, receipt.slot), receipt).record
            if stands.averages != receipt.averages or (stands.state, stands.scope) != (receipt.state, receipt.scope):
                raise Diverged(  # noqa: TRY301  one funnel for all that can go wrong here
                    f"an earlier incarnation left another receipt: round={receipt.round} slot={receipt.slot}"
                )
        except Exception as error:  # noqa: BLE001  a thread's entry: training goes on without a receipt
            _failed("receipt_failed", receipt.round, error)

    def _check(self, receipt: Receipt, members: tuple[str, ...]) -> None:
        try:
            self._selfcheck.look(receipt, members)
        except Exception as error:  # noqa: BLE001  a thread's entry: the next look takes up what this one left
            _failed("receipt_failed", receipt.round, error)

    def _write_checkpoint(self, standing: Standing, snapshot: object) -> None:
        try:
            saved = self._save(standing, cast("dict[str, object]", snapshot), self._background)
        except Exception as error:  # noqa: BLE001  a thread's entry: another member writes the next checkpoint
            _failed("checkpoint_failed", standing.round, error)
        else:
            if saved and self._background.rank == 0:
                self._collect(standing.round, self._collector)

    @staticmethod
    def _collect(round_number: int, collector: Collector) -> None:
        try:
            collector.collect()
        except Exception as error:  # noqa: BLE001  a thread's entry: the next collection takes up what this one left
            _failed("garbage_failed", round_number, error)

    def _save(self, standing: Standing, state: dict[str, object], ranks: Ranks) -> bool:
        saved = checkpoint.save(
            self._journal.store,
            run=self._journal.run.nonce,
            round_number=standing.round,
            commit=standing.previous,
            members=standing.members,
            batches=standing.batches,
            writer=self._presence.slot,
            nonce=self._nonce(),
            state=state,
            ranks=ranks,
        )
        if saved and ranks.rank == 0:  # else another replica was first, with the same state
            emit("checkpoint_saved", {"round": standing.round, "slot": self._presence.slot})
        return saved


def _sum(all_ranks: Sequence[_Taken]) -> _Taken:
    """A round's state as a whole. A checkpoint of it needs every rank's shard."""
    digests = [one.digest for one in all_ranks if one.digest is not None]
    return _Taken(
        digest=fold(digests) if digests else None,
        saves=all(one.saves for one in all_ranks),
        keeps=any(one.keeps for one in all_ranks),
        uploaded_bytes=sum(one.uploaded_bytes for one in all_ranks),
        downloaded_bytes=sum(one.downloaded_bytes for one in all_ranks),
        requests=sum(one.requests for one in all_ranks),
    )


def _covers(scope: Scope, key: str) -> bool:
    """Whether what is registered under `key` is within the state that a receipt of this scope has the digest of."""
    return scope == "registered" or key.startswith(FRAGMENT)


def _is_state(loaded: object) -> TypeGuard[State]:
    return isinstance(loaded, dict) and all(isinstance(key, str) for key in cast("dict[object, object]", loaded))


def _standing(manifest: CheckpointManifest, work: float) -> Standing:
    return Standing(
        round=manifest.round,
        previous=manifest.commit,
        members=manifest.members,
        batches=manifest.batches,
        work=work,
    )


def _failed(name: _Failure, round_number: int, error: Exception) -> None:
    emit(name, {"round": round_number, "error": str(error)}, level=logging.WARNING, error=error)


def _check_same_model(mine: object, theirs: object, where: str) -> None:
    """Tensors under one path must have the same shape and dtype. Optimizer state may be missing on one side."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise Diverged(
                f"{where} is {theirs.dtype} {tuple(theirs.shape)}, this model has {mine.dtype} {tuple(mine.shape)}; "
                "do all replicas run the same model?"
            )
    elif isinstance(mine, dict) and isinstance(theirs, dict):
        ours, others = cast("dict[object, object]", mine), cast("dict[object, object]", theirs)
        tensors = {key for key, value in ours.items() if isinstance(value, torch.Tensor)}
        if absent := sorted(str(key) for key in tensors - others.keys()):
            raise Diverged(f"{where} lacks {', '.join(absent)}; do all replicas run the same model?")
        for key in (key for key in ours if key in others):
            _check_same_model(ours[key], others[key], f"{where}.{key}")
