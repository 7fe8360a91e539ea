"""Copies a run to another store, round by round, so that a copy that ends anywhere is still an older run.

An object is created after all that it names: payloads, contributions, decisions, the commit, receipts; the parts of a
checkpoint, then its manifest. Records are compared with the digests that name them, and tensors with their own, so
damage is never copied; the rest is, and then the damage is reported. A repeat goes on where the copy ends; several
writers at once create the same objects.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.checkpointing.receipt_comparison import read_evidence
from skerry.runtime.errors import Conflict, Corrupt, Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import read_elsewhere
from skerry.runtime.log.log import RunLog, read_record_bytes, read_run
from skerry.runtime.log.read_rounds import find_closed
from skerry.runtime.log.recent_records_cache import RecentRecords
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS, CheckpointManifest, Commit, Contribution, Decision
from skerry.runtime.log.run_record import Elsewhere, Run
from skerry.runtime.mirrors.ballots import has_votes
from skerry.runtime.store.parallel import run_parallel
from skerry.runtime.tensors.payload_format import check_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.errors import SkerryError
    from skerry.runtime.log.records import Part
    from skerry.runtime.store import Store

KEPT: Final = 2
"""Complete checkpoints that stay in a mirror: the newest may be damaged there."""
# Receipts of the newest rounds may come late.
_LATE: Final = 4
# The others of `_copy_folders` hold small records.
_CHARGED: Final = (keys.CODE, keys.ARTIFACTS)
# In the run, or in its mirror: what it concerns is left out, and all else is copied.
_DAMAGE: Final = (Corrupt, Conflict, Diverged)


@dataclass(frozen=True, kw_only=True)
class MirrorOptions:
    """every: one checkpoint in so many rounds. payloads: what rounds after the last checkpoint need is copied, too.

    private: the state that each replica alone has is copied with a checkpoint. Raises Invalid for every < 1.
    """

    every: int = 1
    payloads: bool = True
    private: bool = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise Invalid(f"a mirror copies a checkpoint every so many rounds, at least 1: every={self.every}")


@dataclass(frozen=True, kw_only=True)
class MirrorProgress:
    """The state of a mirror. rounds: closed in the run; copied: of these, with their records in the mirror.

    checkpoint: the newest complete one in the mirror, None without any. objects, bytes: copied by this `Mirror`.
    """

    rounds: int
    copied: int
    checkpoint: int | None
    objects: int
    bytes: int


class Mirror:
    """A copy of one run in another store. For one thread."""

    def __init__(
        self,
        source: Store,
        target: Store,
        clock: Clock,
        options: MirrorOptions | None = None,
        *,
        by: str = "skerry",
        recent: RecentRecords | None = None,
        charge: Callable[[int], None] | None = None,
    ) -> None:
        """by: the operator or the slot that copies, for people. recent: records of rounds that need not be read.

        charge: called with the bytes of tensors and files that are about to be copied; what it raises ends the copy.
        Called with a negative number for those that were not sent.
        Raises Invalid if the source has no run or is a mirror, or if the target is the source, or has a run that is
        not its mirror.
        """
        self.options = options or MirrorOptions()
        self._source, self._target = source, target
        self.run = _checked_run(source, target, clock, by)
        self._log = RunLog(source, self.run)
        self._recent = recent or RecentRecords()
        self._charge = charge
        self._rounds = self._copied = 0
        self._previous = GENESIS
        self._checkpoints: set[int] = set()
        # Rounds whose payloads are damaged, until a newer checkpoint makes up for them.
        self._damaged: dict[int, SkerryError] = {}
        self._problems: list[SkerryError] = []
        # Rounds whose payloads are not all in the mirror: only a newer checkpoint leads past them.
        self._gaps: set[int] = set()
        self._objects = self._bytes = 0

    @property
    def progress(self) -> MirrorProgress:
        """The progress of the last `catch_up`, also if it has raised an error."""
        return MirrorProgress(
            rounds=self._rounds,
            copied=self._copied,
            checkpoint=max(self._checkpoints, default=None),
            objects=self._objects,
            bytes=self._bytes,
        )

    def catch_up(self) -> MirrorProgress:
        """Copies what is new. What is damaged in the run, or is another object in the mirror, is left out.

        Then, when all else is copied, raises the first Corrupt, Conflict or Diverged of what was left out. Raises the
        errors of both stores, too, and Conflict at once if the mirror has another log; the next call goes on.
        """
        self._problems = []
        self._look_at_mirror()
        self._look_at_run()
        # After the look at the head, so that all starts are there that its contributions name.
        self._copy_folders(keys.CODE, keys.SETTINGS, keys.MEMBERS)
        if self._is_done(self._copy_initial):
            self._copy_all([keys.RUN], [])  # which names that model
        receipts = range(max(0, self._copied - _LATE), self._copied)
        while self._copied < self._rounds and self._is_done(self._copy_round):
            pass
        for number in receipts:
            self._copy_receipts(number)
        self._is_done(self._copy_newest_checkpoint)
        if self.options.private and self._checkpoints:
            self._copy_private()
        self._is_done(self._delete_old)
        self._copy_folders(keys.OUTCOMES, keys.ARTIFACTS)
        newest = max(self._checkpoints, default=-1)
        self._damaged = {number: error for number, error in self._damaged.items() if number >= newest}
        self._gaps = {number for number in self._gaps if number >= newest}
        for error in (*self._problems, *self._damaged.values()):
            raise error
        return self.progress

    def _is_done(self, copy: Callable[[], object]) -> bool:
        """False if damage ended `copy`, which is reported at the end."""
        try:
            copy()
        except _DAMAGE as error:
            self._problems.append(error)
            return False
        return True

    def copy_members(self) -> None:
        """Copies the starts of replicas that are new."""
        self._copy_folders(keys.MEMBERS)

    def _look_at_mirror(self) -> None:
        """Others may have copied more since the last look. Rounds that the mirror has lost are copied again."""
        copied = find_closed(self._target, self._copied)
        if copied > self._copied:
            key = keys.commit(copied - 1)
            previous = self._log.read_previous_digest(copied)
            if _digest(self._target, key) != previous:
                raise Conflict(_differs(self._source, self._target, key))
            self._copied, self._previous = copied, previous
        self._checkpoints = complete_checkpoints(self._target)

    def _look_at_run(self) -> None:
        try:
            self._rounds = self._log.find_head(self._copied)
        except Diverged as error:  # it has lost a record: those before it may not be in the mirror yet
            self._rounds = find_closed(self._source, self._copied)
            self._problems.append(error)

    def _copy_folders(self, *folders: str) -> None:
        for folder in folders:
            here = {entry.key for entry in self._target.list(folder)}
            missing = [entry for entry in self._source.list(folder) if entry.key not in here]
            with self._charged(sum(entry.size for entry in missing) if folder in _CHARGED else 0) as sent:
                # Parts are created before the manifest that names them.
                for manifests in (False, True):
                    chosen = [entry.key for entry in missing if entry.key.endswith(keys.MANIFEST) == manifests]
                    self._copy_all(chosen, sent)

    def _copy_initial(self) -> None:
        """Copies the model that the run started from, without which no replica starts."""
        if (initial := self.run.init_from) is None:
            return
        key = keys.checkpoint_manifest(initial.round, keys.INITIAL)
        if key not in {entry.key for entry in self._target.list(keys.INITIAL)}:
            data = self._need(key, initial.manifest)
            parts = CheckpointManifest.parse(data, key).parts
            at = [keys.checkpoint_part(initial.round, part.digest, keys.INITIAL) for part in parts]
            self._copy_parts(list(zip(at, parts, strict=True)), lambda: False)
            self._put(key, data)

    def _copy_round(self) -> None:
        number = self._copied
        key = keys.commit(number)
        data = self._need(key)
        commit = Commit.parse(data, key)
        if commit.run != self.run.nonce or commit.previous != self._previous:
            raise Diverged(f"{self._source.uri}/{key} does not follow the commit before it; see `skerry doctor`")
        decisions: list[tuple[str, bytes]] = []
        contributions: list[tuple[str, bytes]] = []
        parts: list[tuple[str, Part]] = []
        for exchange, digest in enumerate(commit.exchanges):
            decided = keys.decision(number, exchange)
            body = self._need(decided, digest)
            decisions.append((decided, body))
            for share in Decision.parse(body, decided).members:
                at = keys.contribution(number, exchange, share.slot)
                contributed = self._need(at, share.contribution)
                contributions.append((at, contributed))
                named = Contribution.parse(contributed, at).parts
                parts += [(keys.payload(number, share.slot, part.digest), part) for part in named]
        if self.options.payloads:
            try:
                if not self._copy_parts(parts, lambda: True):
                    self._gaps.add(number)
            except (Corrupt, Conflict) as error:
                self._damaged[number] = error
                self._gaps.add(number)
        for records in (contributions, decisions):
            run_parallel(self._target, len(records), lambda index, records=records: self._put(*records[index]))
        self._put(key, data)
        self._copied, self._previous = number + 1, digest_of(data)
        self._copy_receipts(number)

    def _copy_receipts(self, number: int) -> None:
        folder = keys.receipts_prefix(number)
        here = {entry.key for entry in self._target.list(folder)}
        missing = [entry.key for entry in self._source.list(folder) if entry.key not in here]
        if missing:
            self._copy_folders(keys.MEMBERS)  # a receipt may be of a process that started after the last look
        self._copy_all(missing, [])

    def _copy_newest_checkpoint(self) -> None:
        """Copies the newest checkpoint if one is due; an older one if that is damaged."""
        stored = complete_checkpoints(self._source)
        listed = sorted((number for number in stored if number <= self._copied), reverse=True)
        if not listed:
            return
        newest, last = listed[0], max(self._checkpoints, default=-1)
        closed = self._log.read_last_commit(self._copied)
        is_last = newest == self._copied and self.run.is_over(newest, 0.0 if closed is None else closed.record.work)
        every = self.options.every
        is_due = newest // every > last // every or (is_last and newest > last)
        if not is_due and not any(number < newest for number in self._gaps):
            return
        for number in listed:
            if number <= last:
                return
            try:
                # One that is gone was deleted because there is a newer one.
                if self._copy_checkpoint(number, keys.CHECKPOINTS):
                    self._checkpoints.add(number)
                    return
            except _DAMAGE as error:
                self._problems.append(error)

    def _copy_private(self) -> None:
        """Copies the private states that belong to a checkpoint of the mirror. They may come after it."""
        here = {entry.key for entry in self._target.list(keys.PRIVATE)}
        for entry in self._source.list(keys.PRIVATE):
            if entry.key.endswith(keys.MANIFEST) and entry.key not in here:
                number = keys.round_of(entry.key)
                if number in self._checkpoints:
                    folder = entry.key.removesuffix(f"{number:08d}{keys.MANIFEST}")
                    self._is_done(functools.partial(self._copy_checkpoint, number, folder))

    def _copy_checkpoint(self, number: int, folder: str) -> bool:
        """Returns False if it was deleted in the source meanwhile."""
        key = keys.checkpoint_manifest(number, folder)
        data = read_record_bytes(self._source, key)
        if data is None:
            return False
        manifest = CheckpointManifest.parse(data, key)
        named = self.run.nonce, number, self._log.read_previous_digest(number)
        if (manifest.run, manifest.round, manifest.commit) != named:
            raise Corrupt(f"{self._source.uri}/{key} belongs to another log: run={manifest.run}; see `skerry doctor`")
        if folder == keys.CHECKPOINTS:
            read_evidence(self._source, self.run.nonce, manifest)  # no replica loads what it refuses
        parts = [(keys.checkpoint_part(number, part.digest, folder), part) for part in manifest.parts]
        if not self._copy_parts(parts, lambda: read_record_bytes(self._source, key) is None):
            return False
        self._put(key, bytes(data))
        return True

    def _copy_parts(self, parts: Sequence[tuple[str, Part]], may_be_gone: Callable[[], bool]) -> bool:
        """Copies what is missing, every byte verified; a whole part is in memory.

        may_be_gone: asked when a part is gone. Returns False if it may be, and raises Corrupt otherwise.
        """
        folders = {key.rpartition("/")[0] + "/" for key, _ in parts}
        here = {entry.key: entry.size for folder in folders for entry in self._target.list(folder)}
        missing = [(key, part) for key, part in parts if here.get(key) != part.total_bytes]

        def copy(index: int) -> bool:
            key, part = missing[index]
            data = self._source.read(key)
            if data is None:
                if may_be_gone():
                    return False
                raise Corrupt(f"{self._source.uri}/{key} is missing, which a record names; see `skerry doctor`")
            check_whole(data, part, key)
            sent.append(len(data))
            self._put(key, data)
            return True

        with self._charged(sum(part.total_bytes for _, part in missing)) as sent:
            return all(run_parallel(self._target, len(missing), copy))

    @contextmanager
    def _charged(self, size: int) -> Generator[list[int]]:
        """Counts bytes before they are copied, and gives those back that were not sent, which the block lists."""
        sent: list[int] = []
        if size and self._charge is not None:
            self._charge(size)
        try:
            yield sent
        finally:
            if size > sum(sent) and self._charge is not None:
                self._charge(sum(sent) - size)

    def _delete_old(self) -> None:
        """Deletes what the newest checkpoints of the mirror do not need: older ones, manifests first, and payloads."""
        if len(self._checkpoints) <= KEPT or (self.run.failover is not None and has_votes(self._target)):
            return
        kept = sorted(self._checkpoints)[-KEPT:]
        old: list[str] = []
        for folder in (keys.CHECKPOINTS, keys.PRIVATE, keys.PAYLOADS):
            old += [key for number, key in _by_round(self._target, folder) if number < kept[0]]
        for manifests in (True, False):
            chosen = [key for key in old if key.endswith(keys.MANIFEST) == manifests]
            run_parallel(self._target, len(chosen), lambda index, chosen=chosen: self._target.delete(chosen[index]))
        self._checkpoints = set(kept)

    def _copy_all(self, chosen: Sequence[str], sent: list[int]) -> None:
        def copy(key: str) -> None:
            data = self._source.read(key)
            if data is not None and is_damaged_code(key, data):
                self._problems.append(Corrupt(f"{self._source.uri}/{key} is damaged: digest={digest_of(data)}"))
            elif data is not None:
                sent.append(len(data))
                self._put(key, bytes(data))

        run_parallel(self._target, len(chosen), lambda index: copy(chosen[index]))

    def _need(self, key: str, digest: str | None = None) -> bytes:
        data = self._recent.get(key)
        if data is None or (digest is not None and digest_of(data) != digest):
            data = read_record_bytes(self._source, key)
        if data is None:
            raise Corrupt(f"{self._source.uri}/{key} is missing, which another record names; see `skerry doctor`")
        if digest is not None and digest_of(data) != digest:
            raise Corrupt(f"{self._source.uri}/{key} is damaged: digest={digest_of(data)} expected={digest}")
        return bytes(data)

    def _put(self, key: str, data: bytes | memoryview) -> None:
        if self._target.create(key, data):
            self._objects += 1
            self._bytes += len(data)
        elif bytes(self._target.read(key) or b"") != data:
            raise Conflict(_differs(self._source, self._target, key))


def _checked_run(source: Store, target: Store, clock: Clock, by: str) -> Run:
    run = read_run(source)
    if run is None:
        raise Invalid(f"no run at {source.uri}; name the URI of a run's own prefix, as `skerry runs STORE` lists them")
    if target.uri.rstrip("/") == source.uri.rstrip("/"):
        raise Invalid(f"a run is no mirror of itself: {source.uri}; name another store")
    if (mark := read_elsewhere(source)) is not None and mark.why == "mirror":
        raise Invalid(f"{source.uri} is a mirror of {mark.uri}; copy that run, or restore it from here first")
    mark = read_elsewhere(target)
    if mark is None:
        if (other := read_run(target)) is not None:
            raise Invalid(f"{target.uri} has run {other.name} already, and is no mirror; name an empty prefix")
        if target.list(keys.COMMITS):
            raise Invalid(f"{target.uri} has rounds of another run, and is no mirror; name an empty prefix")
        mark = Elsewhere(why="mirror", uri=source.uri, run=run.nonce, round=0, by=by, created=clock.utc_text())
        if not target.create(keys.ELSEWHERE, mark.to_bytes()):
            mark = read_elsewhere(target) or mark
    if mark.why != "mirror" or mark.run != run.nonce:
        raise Invalid(f"{target.uri} belongs to another run, {mark.uri}; name an empty prefix for each mirror")
    return run


def is_damaged_code(key: str, data: memoryview) -> bool:
    """True for a packed code folder that does not have the digest in its key."""
    digest = keys.digest_of_code(key)
    return digest is not None and digest != digest_of(data)


def complete_checkpoints(store: Store) -> set[int]:
    """The rounds with a checkpoint whose manifest is stored. One listing."""
    return {number for number, key in _by_round(store, keys.CHECKPOINTS) if key.endswith(keys.MANIFEST)}


def _by_round(store: Store, folder: str) -> Iterator[tuple[int, str]]:
    for entry in store.list(folder):
        try:
            number = keys.round_of(entry.key)
        except Invalid:  # a foreign object
            continue
        yield number, entry.key


def _digest(store: Store, key: str) -> str:
    data = read_record_bytes(store, key)
    if data is None:
        raise Corrupt(f"{store.uri}/{key} disappeared; delete the mirror and make it again")
    return digest_of(data)


def _differs(source: Store, target: Store, key: str) -> str:
    return (
        f"{target.uri}/{key} differs from {source.uri}/{key}: see `skerry doctor {source.uri} {target.uri}`; mend the "
        f"mirror with `skerry doctor {target.uri} --repair`, or delete it and make it again"
    )
