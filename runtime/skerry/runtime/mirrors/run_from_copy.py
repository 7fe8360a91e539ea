"""Makes a run of its own from a copy: the same rounds under another nonce, so that two stores never have one run.

When a lost bucket comes back, its replicas go on with the old nonce. The records of the new run are those of the copy
with the new nonce and the digests that follow from it; tensors are the same objects under the same names. Every digest
that a record names is compared first, because the new ones would make damage sound. What no digest names and a run can
do without (receipts, starts and outcomes of replicas, private states) is left out where it is damaged, and so is packed
code. run.json is created last: until then there is no run, and a repeat of the same call completes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import xxhash

from skerry.runtime.errors import Conflict, Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import read_elsewhere
from skerry.runtime.log.log import read_record_bytes, read_run
from skerry.runtime.log.record_parsing import Record, digest_of
from skerry.runtime.log.records import (
    GENESIS,
    CheckpointManifest,
    Commit,
    Contribution,
    Decision,
    Member,
    Outcome,
    Receipt,
)
from skerry.runtime.log.run_record import Parent, Settings
from skerry.runtime.mirrors.mirror import is_damaged_code
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.parallel import run_parallel
from skerry.runtime.tensors.payload_format import check_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.log.records import Part
    from skerry.runtime.log.run_record import Elsewhere, MirrorSettings, Run
    from skerry.runtime.mirrors.restorable import Cut
    from skerry.runtime.store import Store
    from skerry.runtime.store.interface import Data, Profile

R = TypeVar("R", bound=Record)


def fork(
    source: Store,
    cut: Cut,
    target: Store,
    created: str,
    on_round: Callable[[int], None] | None = None,
    mirrors: Sequence[MirrorSettings] | None = None,
) -> Run:
    """Creates the run in `target` that continues `cut`, and returns it. created: the time, for people.

    on_round: called with the number of rounds that are copied. mirrors: of the new run; None puts them
    beside the parent's. Every byte of a tensor is verified. Raises Corrupt for
    damage, before run.json exists, and Conflict if another attempt has left other objects in `target`.
    """
    return _Fork(source, cut, target).make(created, on_round or (lambda _: None), mirrors)


def check_fork(source: Store, cut: Cut, on_round: Callable[[int], None] | None = None) -> tuple[str, ...]:
    """Read and verify all that a fork of `cut` reads, and write nothing; what it leaves out, with the reason.

    on_round: called with the number of rounds that are whole. Raises Corrupt for damage.
    """
    attempt = _Fork(source, cut, _Discarding(source.profile))
    attempt.make(cut.run.created, on_round or (lambda _: None), ())
    return tuple(attempt.left_out)


class _Discarding(MemoryStore):
    """Keeps run.json alone. profile: of the store that is read, for as many requests at once."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._profile = profile

    @property
    def profile(self) -> Profile:
        return self._profile

    def create(self, key: str, data: Data) -> bool:
        # Two parts with the same bytes have one key, so a second create of it is no conflict.
        return super().create(key, data) if key == keys.RUN else True


class _Fork:
    """One attempt. left_out: damaged records that the new run does without, with the reason."""

    def __init__(self, source: Store, cut: Cut, target: Store) -> None:
        self._source, self._cut, self._target = source, cut, target
        # The same for a repeat, so that it completes what an earlier attempt has left.
        self._nonce = xxhash.xxh3_128_hexdigest(f"{cut.run.nonce} {cut.round} {cut.commit} {target.uri}".encode())
        self._settings: dict[str | None, str | None] = {None: None}
        # The digests of the commits in the source and in the target, after so many rounds.
        self._old, self._commits = [GENESIS], [GENESIS]
        self.left_out: list[str] = []

    def make(self, created: str, on_round: Callable[[int], None], mirrors: Sequence[MirrorSettings] | None) -> Run:
        cut, target = self._cut, self._target
        mark = self._mark()
        parent = Parent(
            uri=mark.uri if mark is not None and mark.why == "mirror" else self._source.uri,
            run=cut.run.nonce,
            round=cut.round,
            commit=cut.commit,
        )
        run = cut.run.model_copy(
            update={
                "nonce": self._nonce,
                "name": target.uri.rstrip("/").rpartition("/")[2],
                "parent": parent,
                "store": target.uri,
                "created": created,
                "failover": None,
                "mirrors": self._mirrors() if mirrors is None else tuple(mirrors) or None,
            }
        )
        if (existing := read_run(target)) is not None:
            if existing.nonce == self._nonce:
                return existing
            raise Conflict(f"{target.uri} has run {existing.name} already; name an empty prefix with --to")
        self._copy_code()
        self._copy([(entry.key, None) for entry in self._source.list(keys.ARTIFACTS)])
        self._copy_initial()
        for folder, kind in ((keys.MEMBERS, Member), (keys.OUTCOMES, Outcome)):
            listed = self._sound(kind, [entry.key for entry in self._source.list(folder)])
            self._put_all([*listed], [*listed.values()], run=self._nonce)
        self._rewrite_settings()
        for number in range(cut.round):
            self._rewrite_round(number)
            on_round(number + 1)
        if self._old[-1] != cut.commit:
            raise Corrupt(f"{self._source.uri}/{keys.commit(cut.round - 1)} is not the commit of the cut; {self._mend}")
        self._rewrite_manifest(cut.checkpoint, keys.CHECKPOINTS)
        self._rewrite_private()
        target.create(keys.RUN, run.to_bytes())
        existing = read_run(target)
        if existing is None or existing.nonce != self._nonce:
            raise Conflict(f"{target.uri} was given another run at the same time; name an empty prefix with --to")
        return existing

    @property
    def _mend(self) -> str:
        return f"`skerry doctor {self._source.uri} --repair --from COPY` mends it, or restore from another mirror"

    def _mirrors(self) -> tuple[MirrorSettings, ...] | None:
        """Beside those of the original, which hold other records. The copy itself is none: it may be where this is."""
        others = [mirror for mirror in self._cut.run.mirrors or () if mirror.uri.rstrip("/") != self._source.uri]
        new = [mirror.model_copy(update={"uri": f"{mirror.uri.rstrip('/')}-{self._nonce[:8]}"}) for mirror in others]
        return tuple(new) or None

    def _mark(self) -> Elsewhere | None:
        try:
            return read_elsewhere(self._source)
        except Corrupt as error:  # it is for people
            self.left_out.append(str(error))
            return None

    def _copy_code(self) -> None:
        """Leaves out what is damaged: `up` and `apply` upload it where it is absent, and replace nothing."""
        listed = [entry.key for entry in self._source.list(keys.CODE)]

        def copy(index: int) -> None:
            key = listed[index]
            data = self._source.read(key)
            if data is None or is_damaged_code(key, data):
                self.left_out.append(f"{key} is damaged; `skerry up` and `skerry apply` upload it again")
            else:
                self._create(key, data)

        run_parallel(self._target, len(listed), copy)

    def _copy_initial(self) -> None:
        if (initial := self._cut.run.init_from) is not None:
            key = keys.checkpoint_manifest(initial.round, keys.INITIAL)
            parts = self._read(CheckpointManifest, key, initial.manifest).parts
            self._copy([(keys.checkpoint_part(initial.round, part.digest, keys.INITIAL), part) for part in parts])
            self._copy([(key, None)])

    def _rewrite_settings(self) -> None:
        previous, before, number = GENESIS, GENESIS, 1
        while (data := read_record_bytes(self._source, key := keys.settings(number))) is not None:
            try:
                old = Settings.parse(data, key)
            except Corrupt as error:  # a decision that names it makes no run
                self.left_out.append(str(error))
                break
            if (old.run, old.number, old.previous) != (self._cut.run.nonce, number, before):
                self.left_out.append(f"{key} does not follow the settings before it, or is of another run")
                break
            if old.from_round > self._cut.round:
                break  # no decision of the cut names it
            new = self._put(key, old, run=self._nonce, previous=previous)
            before = digest_of(data)
            self._settings[before] = previous = new
            number += 1

    def _rewrite_round(self, number: int) -> None:
        base, key = self._commits[-1], keys.commit(number)
        data = self._bytes(key)
        commit = Commit.parse(data, key)
        if (commit.run, commit.previous) != (self._cut.run.nonce, self._old[-1]):
            raise Corrupt(f"{self._source.uri}/{key} does not follow the commit before it; {self._mend}")
        decisions: list[str] = []
        parts: list[tuple[str, Part | None]] = []
        for exchange, digest in enumerate(commit.exchanges):
            decided = keys.decision(number, exchange)
            decision = self._read(Decision, decided, digest)
            at = [keys.contribution(number, exchange, share.slot) for share in decision.members]
            named = [share.contribution for share in decision.members]
            old = run_parallel(
                self._source,
                len(at),
                lambda index, at=at, named=named: self._read(Contribution, at[index], named[index]),
            )
            new = self._put_all(at, old, run=self._nonce, base=base)
            members = tuple(
                share.model_copy(update={"contribution": digest})
                for share, digest in zip(decision.members, new, strict=True)
            )
            parts += [(keys.payload(number, each.slot, part.digest), part) for each in old for part in each.parts]
            if decision.settings not in self._settings:
                raise Corrupt(f"{self._source.uri}/{decided} names settings that are not there: {decision.settings}")
            changed = {"members": members, "base": base, "settings": self._settings[decision.settings]}
            decisions.append(self._put(decided, decision, run=self._nonce, **changed))
        if number >= self._cut.checkpoint:
            self._copy(parts)
        chain = {"exchanges": tuple(decisions), "previous": base}
        self._commits.append(self._put(key, commit, run=self._nonce, **chain))
        self._old.append(digest_of(data))
        receipts = self._sound(Receipt, [entry.key for entry in self._source.list(keys.receipts_prefix(number))])
        for other in [at for at, receipt in receipts.items() if receipt.commit != self._old[-1]]:
            self.left_out.append(f"{other} is of another commit")  # with the new one it would become a vote
            del receipts[other]
        self._put_all([*receipts], [*receipts.values()], run=self._nonce, commit=self._commits[-1])

    def _rewrite_private(self) -> None:
        ending = f"{self._cut.checkpoint:08d}{keys.MANIFEST}"
        for entry in self._source.list(keys.PRIVATE):
            if entry.key.endswith(f"/{ending}"):
                try:
                    self._rewrite_manifest(self._cut.checkpoint, entry.key.removesuffix(ending))
                except Corrupt as error:
                    self.left_out.append(f"private state {entry.key}: {error}")

    def _rewrite_manifest(self, number: int, folder: str) -> None:
        key = keys.checkpoint_manifest(number, folder)
        manifest = self._read(CheckpointManifest, key)
        if (manifest.run, manifest.round, manifest.commit) != (self._cut.run.nonce, number, self._old[number]):
            raise Corrupt(f"{self._source.uri}/{key} belongs to another log; {self._mend}")
        self._copy([(keys.checkpoint_part(number, part.digest, folder), part) for part in manifest.parts])
        self._put(key, manifest, run=self._nonce, commit=self._commits[number])

    def _copy(self, objects: Sequence[tuple[str, Part | None]]) -> None:
        """Copies objects as they are; those that are parts are verified first, and a whole one is in memory."""

        def copy(index: int) -> None:
            key, part = objects[index]
            data = self._source.read(key)
            if data is None:
                raise Corrupt(f"{self._source.uri}/{key} is missing; {self._mend}")
            if part is not None:
                check_whole(data, part, key)
            self._create(key, data)

        run_parallel(self._target, len(objects), copy)

    def _put_all(self, at: Sequence[str], records: Sequence[R], **changes: object) -> list[str]:
        return run_parallel(self._target, len(at), lambda index: self._put(at[index], records[index], **changes))

    def _put(self, key: str, record: Record, **changes: object) -> str:
        """Creates the changed record, and returns its digest."""
        changed = record.model_copy(update=changes)
        data = (changed.sealed() if isinstance(changed, CheckpointManifest) else changed).to_bytes()
        self._create(key, data)
        return digest_of(data)

    def _create(self, key: str, data: bytes | memoryview) -> None:
        if not self._target.create(key, data) and bytes(self._target.read(key) or b"") != data:
            raise Conflict(
                f"{self._target.uri}/{key} is of another attempt; name an empty prefix with --to, or delete this one"
            )

    def _sound(self, kind: type[R], listed: Sequence[str]) -> dict[str, R]:
        """The records at these keys that parse and are of this run; the others are left out."""

        def read(index: int) -> R | str:
            key = listed[index]
            try:
                record = self._read(kind, key)
            except Corrupt as error:
                return str(error)
            run = getattr(record, "run", None)
            return record if run == self._cut.run.nonce else f"{key} is of another run: run={run}"

        records = run_parallel(self._source, len(listed), read)
        self.left_out += [record for record in records if isinstance(record, str)]
        return {key: record for key, record in zip(listed, records, strict=True) if not isinstance(record, str)}

    def _read(self, kind: type[R], key: str, digest: str | None = None) -> R:
        """digest: that another record names."""
        data = self._bytes(key)
        if digest is not None and digest_of(data) != digest:
            raise Corrupt(
                f"{self._source.uri}/{key} is damaged: digest={digest_of(data)} expected={digest}; {self._mend}"
            )
        return kind.parse(data, key)

    def _bytes(self, key: str) -> memoryview:
        data = read_record_bytes(self._source, key)
        if data is None:
            raise Corrupt(f"{self._source.uri}/{key} is missing; {self._mend}")
        return data
