"""Checkpoints and receipts of a simulated run: what `skerry.runtime.recording` does, with a text for a state."""
# Takes the place of what measures two states.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import xxhash

from skerry.runtime import checkpoint, keys
from skerry.runtime.alarm import Evidence
from skerry.runtime.errors import Corrupt, Diverged
from skerry.runtime.ranks import Alone
from skerry.runtime.recording import Standing, is_due
from skerry.runtime.records import GENESIS, CheckpointManifest, Part, Receipt
from skerry.runtime.selfcheck import SelfCheck, _Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from skerry.runtime.clock import Clock
    from skerry.runtime.journal import Journal
    from skerry.runtime.membership import Presence
    from skerry.runtime.selfcheck import _Kept
    from skerry.runtime.store.interface import Store

_INDEX = "1" * 32


class Shelf:
    """Where one incarnation saves and loads. A checkpoint is complete or invisible: parts first, manifest last."""

    def __init__(self, journal: Journal, presence: Presence, clock: Clock) -> None:
        self.store: Store = journal.store
        self._journal = journal
        self._presence = presence
        self._clock = clock

    def rounds(self, store: Store | None = None) -> list[int]:
        """That have a checkpoint, newest first. store: to be asked instead, with less patience."""
        return checkpoint.complete(store or self.store)

    def is_my_turn(self, standing: Standing) -> bool:
        """This round is saved, and by this slot: one member for each checkpoint, in rotation."""
        return self.author(standing) == self._presence.slot

    def author(self, standing: Standing) -> str | None:
        """Whose turn this round's checkpoint is; None: it is not saved."""
        run = self._journal.run
        if not standing.members or not is_due(standing, run.checkpoint_every, run):
            return None
        return standing.members[(standing.round // run.checkpoint_every) % len(standing.members)]

    def save(self, standing: Standing, state: str) -> bool:
        """False: another was first, with the same state."""
        body = state.encode()
        pieces = (body[:20], body[20:])
        parts = [
            Part(digest=xxhash.xxh3_128_hexdigest(piece), header_bytes=0, total_bytes=len(piece)) for piece in pieces
        ]
        manifest = CheckpointManifest(
            run=self._journal.run.nonce,
            round=standing.round,
            commit=standing.previous,
            members=standing.members,
            batches=standing.batches,
            index=_INDEX,
            parts=tuple(parts),
            tree="",
            writer=self._presence.slot,
            nonce=self._clock.nonce(),
        )
        for part, piece in zip(parts, pieces, strict=True):
            self.store.create(keys.checkpoint_part(standing.round, part.digest), piece)
        return self.store.create(keys.checkpoint_manifest(standing.round), manifest.to_bytes())

    def load_newest(
        self,
        beyond: int = -1,
        *,
        writers: Collection[str] | None = None,
        evidence: Callable[[CheckpointManifest], Evidence | None] | None = None,
    ) -> tuple[Standing, str] | None:
        """The newest that can be read of more than `beyond` rounds. writers: only theirs. evidence: of what it is."""
        tried: set[int] = set()
        # Listed again when all have failed: while one was being read, it may have made way for newer ones.
        while there := [number for number in self.rounds() if number > beyond and number not in tried]:
            for number in there:
                tried.add(number)
                try:
                    manifest = checkpoint.manifest(self.store, number)
                    if manifest is None or (writers is not None and manifest.writer not in writers):
                        continue
                    told = Evidence() if evidence is None else evidence(manifest)
                    if told is not None:
                        standing, state = self.load(manifest)
                        told.check(number, digest_of(state))
                        return standing, state
                except Corrupt:
                    continue
        return None

    def load(self, manifest: CheckpointManifest) -> tuple[Standing, str]:
        """What one checkpoint holds."""
        number = manifest.round
        last = self._journal.last_commit(number)
        if manifest.commit != (GENESIS if last is None else last.digest):
            raise Diverged(f"checkpoint {number} is not of this log")
        state = b"".join(self._part(keys.checkpoint_part(number, part.digest), part) for part in manifest.parts)
        standing = Standing(
            round=number,
            previous=manifest.commit,
            members=manifest.members,
            batches=manifest.batches,
            work=0.0 if last is None else last.record.work,
        )
        return standing, state.decode()

    def _part(self, key: str, part: Part) -> bytes:
        body = self.store.read(key)
        if body is None or xxhash.xxh3_128_hexdigest(body) != part.digest:
            raise Corrupt(f"part of a checkpoint is missing or damaged: key={key}")
        return bytes(body)

    def write_receipt(self, standing: Standing, state: str) -> Receipt:
        """Of the round that was just closed."""
        receipt = Receipt(
            run=self._journal.run.nonce,
            round=standing.round - 1,
            slot=self._presence.slot,
            incarnation=self._presence.incarnation,
            commit=standing.previous,
            averages=(),
            state=digest_of(state),
            scope="registered",
            contributed=self._presence.slot in standing.members,
            uploaded_bytes=0,
            downloaded_bytes=0,
            requests=0,
            seconds={},
        )
        self._journal.create(keys.receipt(receipt.round, receipt.slot), receipt)
        return receipt


def digest_of(state: str) -> str:
    """What a receipt tells of a state."""
    return xxhash.xxh3_128_hexdigest(state.encode())


class ShelfCheck(SelfCheck):
    """The real one, with the real votes; what it measures is a text, which is the same or altogether another."""

    def __init__(self, journal: Journal, slot: str, shelf: Shelf) -> None:
        super().__init__(journal, slot, Alone())
        self._shelf = shelf

    def _measured(self, kept: _Kept | None, manifest: CheckpointManifest) -> _Measured:
        assert kept is not None
        _, theirs = self._shelf.load(manifest)
        if kept.state["state"] == theirs:
            return _Measured(equal=True)
        return _Measured(equal=False, max_ulp=math.inf.hex(), max_abs=math.inf.hex(), tensors=("state",))
