"""Finds the newest round from which a copy of a run can go on: a pure look at one store, which is never written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.checkpointing.receipt_comparison import read_evidence
from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, read_record_bytes, read_run
from skerry.runtime.log.read_rounds import find_closed
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS, CheckpointManifest, Commit, Contribution, Decision
from skerry.runtime.mirrors.mirror import complete_checkpoints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.records import Part
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A whole older run in a copy: `round` closed rounds. checkpoint: the one that a replica loads, at most `round`.

    commit: digest of the last commit, GENESIS for none. logged: closed rounds with a commit there, of which those after
    `round` are lost. skipped: newer checkpoints and rounds that cannot be used, and records that are left out, with the
    reason.
    """

    run: Run
    round: int
    checkpoint: int
    commit: str
    logged: int
    skipped: tuple[str, ...] = ()


def find_cut(store: Store, at: int | None = None, newest: int | None = None, *, needs_proof: bool | None = None) -> Cut:
    """The newest whole cut of the run in `store`, or the one of `at` closed rounds. newest: checkpoint to use.

    needs_proof: rounds that fewer than `min_replicas` have closed are left out, and a checkpoint after one, as replicas
    do (decision 0050). None: unless `at` names the round. A checkpoint whose writer is outvoted is never used.
    Costs a few listings, a checkpoint's manifest, and the records of its last round and of those after it. Lengths are
    compared, and the digests of records; the bytes of tensors are not read. Raises Invalid, with what there is, if
    there is none.
    """
    run = read_run(store)
    if run is None:
        raise Invalid(f"no run at {store.uri}; name the URI of a mirror, as its `skerry replicate` did")
    logged = find_closed(store, 0)
    if at is not None and at > logged:
        raise Invalid(f"--at {at}: the copy at {store.uri} has {logged} rounds")
    needs_proof = at is None if needs_proof is None else needs_proof
    skipped: list[str] = []
    for checkpoint in sorted(complete_checkpoints(store), reverse=True):
        if checkpoint > (logged if at is None else at) or (newest is not None and checkpoint > newest):
            continue
        try:
            commit = _checked_checkpoint(store, run, checkpoint, needs_proof=needs_proof)
        except (Corrupt, Diverged) as error:
            skipped.append(str(error))
            continue
        number = checkpoint
        try:
            while number < (logged if at is None else at):
                closed = _followed(store, run, number, commit, needs_proof=needs_proof)
                if closed is None:
                    break
                number, commit = number + 1, closed
        except Corrupt as error:
            skipped.append(str(error))
        if at is None or number == at:
            return Cut(
                run=run, round=number, checkpoint=checkpoint, commit=commit, logged=logged, skipped=tuple(skipped)
            )
        skipped.append(f"round {number} is not all there")
    why = f": {'; '.join(skipped)}" if skipped else ""
    wanted = "" if at is None else f" of {at} rounds"
    raise Invalid(f"nothing{wanted} at {store.uri} can be restored; it has {logged} rounds{why}")


def _checked_checkpoint(store: Store, run: Run, number: int, *, needs_proof: bool) -> str:
    """The digest of the commit that it follows.

    Raises Corrupt if it is not whole, does not belong to this log, or is none that a replica would load.
    """
    key = keys.checkpoint_manifest(number)
    manifest = CheckpointManifest.parse(_bytes(store, key), key)
    commit = GENESIS if number == 0 else digest_of(_bytes(store, keys.commit(number - 1)))
    if (manifest.run, manifest.round, manifest.commit) != (run.nonce, number, commit):
        raise Corrupt(f"{key} belongs to another log")
    if missing := _missing(store, [(keys.checkpoint_part(number, part.digest), part) for part in manifest.parts]):
        raise Corrupt(f"{missing} is missing or has another length")
    if needs_proof:
        try:
            RunLog(store, run).check_backed(number)
        except Corrupt as error:
            raise Corrupt(f"{error}, and `--at` with a round from {number} on uses it") from error
    read_evidence(store, run.nonce, manifest)
    return commit


def _followed(store: Store, run: Run, number: int, previous: str, *, needs_proof: bool) -> str | None:
    """The digest of a round's commit if all is there that a replica needs to follow the round; None otherwise.

    Raises Corrupt for a damaged record, and for a round that too few replicas have closed.
    """
    key = keys.commit(number)
    data = _bytes(store, key)
    commit = Commit.parse(data, key)
    if (commit.run, commit.previous) != (run.nonce, previous):
        return None
    parts: list[tuple[str, Part]] = []
    for exchange, digest in enumerate(commit.exchanges):
        decided = read_record_bytes(store, keys.decision(number, exchange))
        if decided is None or digest_of(decided) != digest:
            return None
        decision = Decision.parse(decided, keys.decision(number, exchange))
        if needs_proof and not decision.has_quorum(run.min_replicas):
            raise Corrupt(
                f"round {number} was closed by fewer than min_replicas={run.min_replicas} replicas; if that is right, "
                f"name a round after it (--at {number + 1})"
            )
        for share in decision.members:
            at = keys.contribution(number, exchange, share.slot)
            contributed = read_record_bytes(store, at)
            if contributed is None or digest_of(contributed) != share.contribution:
                return None
            named = Contribution.parse(contributed, at).parts
            parts += [(keys.payload(number, share.slot, part.digest), part) for part in named]
    return None if _missing(store, parts) else digest_of(data)


def _missing(store: Store, parts: Sequence[tuple[str, Part]]) -> str | None:
    """The first key that is not stored in full length."""
    folders = {key.rpartition("/")[0] + "/" for key, _ in parts}
    sizes = {entry.key: entry.size for folder in folders for entry in store.list(folder)}
    return next((key for key, part in parts if sizes.get(key) != part.total_bytes), None)


def _bytes(store: Store, key: str) -> memoryview:
    data = read_record_bytes(store, key)
    if data is None:
        raise Corrupt(f"{key} is missing")
    return data
