"""The checkpoint of another run from which a new run starts: finds it, verifies it, copies it into the new run.

Decision 0027 of the runtime. The copy is complete before run.json names it, so replicas never ask the other run: it may
go on, delete the checkpoint, or be destroyed. Writes below `initial/` of the new run only.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.runtime.checkpointing.receipt_comparison import read_evidence
from skerry.runtime.errors import Conflict, Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import list_closed
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS, CheckpointManifest, Commit
from skerry.runtime.log.run_record import InitialModel, Run
from skerry.runtime.tensors.payload_format import check_whole, index_from_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.records import Part
    from skerry.runtime.store import Store
    from skerry.runtime.tensors.payload_format import Header

# A part has 64 MiB, and is whole in memory.
_STREAMS: Final = 4
_LISTED: Final = 8


@dataclass(frozen=True, kw_only=True)
class Source:
    """A complete checkpoint of another run. initial: what run.json says of it. data: the bytes of its manifest."""

    store: Store
    initial: InitialModel
    manifest: CheckpointManifest
    data: bytes

    @property
    def size_bytes(self) -> int:
        """The size of its objects without the manifest."""
        return sum(part.total_bytes for part in self.manifest.parts)

    def __str__(self) -> str:
        return f"{self.initial.uri}@{self.initial.round}"

    def copy_to(self, store: Store) -> None:
        """Verify every byte, then copy all objects into a new run, the manifest last. A repeat completes a copy.

        Raises Corrupt, before anything is written, if the checkpoint is damaged, Conflict if an earlier attempt left
        another checkpoint there.
        """
        self._verify()
        with ThreadPoolExecutor(max(1, min(_STREAMS, store.profile.streams))) as pool:
            for _ in pool.map(functools.partial(self._copy, store), self.manifest.parts):
                pass
        key = keys.checkpoint_manifest(self.initial.round, keys.INITIAL)
        if not store.create(key, self.data) and bytes(store.read(key) or b"") != self.data:
            raise Conflict(
                f"an earlier attempt left the copy of another checkpoint at {store.uri}/{key}; delete it and run the "
                "same command again"
            )

    def _verify(self) -> None:
        shards = self.manifest.shards or (self.manifest,)
        with ThreadPoolExecutor(max(1, min(_STREAMS, self.store.profile.streams))) as pool:
            for shard in shards:
                headers = list(pool.map(self._header, shard.parts))
                index = index_from_headers(headers, [self._key(part) for part in shard.parts])
                if index.digest != shard.index:
                    raise Corrupt(
                        f"the parts of the checkpoint of {self} differ from its manifest: index={shard.index} "
                        f"actual={index.digest}"
                    )

    def _header(self, part: Part) -> Header:
        return self._read(part)[0]

    def _copy(self, store: Store, part: Part) -> None:
        store.create(keys.checkpoint_part(self.initial.round, part.digest, keys.INITIAL), self._read(part)[1])

    def _key(self, part: Part) -> str:
        return keys.checkpoint_part(self.initial.round, part.digest)

    def _read(self, part: Part) -> tuple[Header, memoryview]:
        """The verified header and the whole bytes of a part."""
        key = self._key(part)
        data = self.store.read(key)
        if data is None:
            raise Corrupt(
                f"{self.store.uri}/{key} was deleted while it was read: a run that goes on deletes old checkpoints; "
                f"keep it with `skerry pin {self.initial.uri} {self.initial.round}`, or name a later round"
            )
        try:
            return check_whole(data, part, key), data
        except Corrupt as error:
            raise Corrupt(f"{error}; see `skerry doctor --deep {self.initial.uri}`") from error


def find_source(store: Store, uri: str, wanted: int | None) -> Source:
    """The checkpoint of `wanted` rounds of the run at `uri`; None takes the last one of a finished run.

    Reads records and listings, not the tensors. Raises Invalid, with the rounds that there are, if there is no such run
    or checkpoint; Corrupt if the log or the receipts contradict it, or a part is missing.
    """
    run = _run_at(store, uri)
    rounds = _rounds_with_checkpoint(store)
    if not rounds:
        raise Invalid(f"no checkpoint at {uri} yet: a replica writes the first one when it starts")
    number = _last_round(store, uri, run, rounds) if wanted is None else wanted
    if number not in rounds:
        raise Invalid(f"no checkpoint of {number} rounds at {uri}; there are: {_shown(rounds)}")
    key = keys.checkpoint_manifest(number)
    data = bytes(store.read(key) or b"")
    manifest = CheckpointManifest.parse(data, key)
    previous = GENESIS if number == 0 else digest_of(store.read(keys.commit(number - 1)) or b"")
    if (manifest.run, manifest.round, manifest.commit) != (run.nonce, number, previous):
        raise Corrupt(f"{store.uri}/{key} belongs to another log: run={manifest.run} commit={manifest.commit[:12]}")
    sizes = {entry.key: entry.size for entry in store.list(key.removesuffix(keys.MANIFEST))}
    for part in manifest.parts:
        if (size := sizes.get(at := keys.checkpoint_part(number, part.digest))) != part.total_bytes:
            raise Corrupt(
                f"the checkpoint of {number} rounds is incomplete: {store.uri}/{at} has bytes={size or 0} "
                f"expected={part.total_bytes}; other checkpoints: {_shown([n for n in rounds if n != number])}"
            )
    evidence = read_evidence(store, run.nonce, manifest)
    states = evidence.states if evidence.scope == "fragments" else ()
    initial = InitialModel(uri=uri, run=run.nonce, round=number, manifest=digest_of(data), states=states)
    return Source(store=store, initial=initial, manifest=manifest, data=data)


def _run_at(store: Store, uri: str) -> Run:
    data = store.read(keys.RUN)
    if data is None:
        raise Invalid(f"no run at {uri}; name the URI of a run's own prefix, as `skerry runs STORE` lists them")
    return RunSettings(first=Run.parse(data, keys.RUN)).read_newer(store).now


def _rounds_with_checkpoint(store: Store) -> list[int]:
    """Newest first."""
    rounds: list[int] = []
    for entry in reversed(store.list(keys.CHECKPOINTS)):
        with suppress(Invalid):  # a foreign object
            number = keys.round_of(entry.key)
            rounds += [number] if entry.key == keys.checkpoint_manifest(number) else []
    return rounds


def _last_round(store: Store, uri: str, run: Run, rounds: Sequence[int]) -> int:
    """The last round of a finished run. Raises Invalid if it is not finished, or has no checkpoint of that round."""
    commits = list_closed(store, 0)
    closed, last = len(commits), commits[-1].key if commits else None
    work = 0.0 if last is None else Commit.parse(store.read(last) or b"", last).work
    remedy = f"name a round with a checkpoint: init_from: {uri}@{rounds[0]}; there are: {_shown(rounds)}"
    if not run.is_over(closed, work):
        goal = "it has no end" if run.rounds is None else f"{closed} of {run.rounds} rounds are closed"
        raise Invalid(f"run {run.name} is not finished ({goal}), so its last checkpoint is not the result; {remedy}")
    if closed not in rounds:
        raise Invalid(f"run {run.name} has no checkpoint of its last round, {closed}; {remedy}")
    return closed


def _shown(rounds: Sequence[int]) -> str:
    more = ", ..." if len(rounds) > _LISTED else ""
    return (", ".join(map(str, rounds[:_LISTED])) + more) or "none"
