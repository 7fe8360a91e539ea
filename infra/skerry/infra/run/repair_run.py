"""Mends what `skerry doctor` finds damaged or missing, from other copies of the run.

Records first, because they name the others; then tensors. An object without a name in a record (run.json, receipts,
starts of replicas, manifests) is never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra.observe.doctor.named_objects import bad_objects, parts_of, tensor_objects
from skerry.infra.observe.doctor.read_log import read_log
from skerry.infra.observe.doctor.valid_records import valid_records
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import Conflict, Corrupt, Invalid, SkerryError, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import read_elsewhere
from skerry.runtime.log.records import CheckpointManifest
from skerry.runtime.log.run_record import Run
from skerry.runtime.mirrors.repair_from_copies import Copies, mend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from skerry.infra.observe.doctor.findings import Examination
    from skerry.runtime.mirrors.repair_from_copies import Mended, NamedObject
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class Repair:
    """The result of a repair. problems: what could not be mended, and why. log: the findings that are left."""

    ok: bool
    mended: tuple[Mended, ...]
    problems: tuple[str, ...]
    log: Examination


def known_copies(store: Store) -> list[str]:
    """The URIs of other copies of the run: its mirrors, its original if this is one, where it was restored from or to.

    Its mirrors are known only if run.json is whole.
    """
    run, mark = _run(store), read_elsewhere(store)
    uris = [] if mark is None else [mark.uri]
    if run is not None:
        uris += [mirror.uri for mirror in run.mirrors or ()]
        uris += [uri for uri in (run.store, None if run.parent is None else run.parent.uri) if uri is not None]
    here = store.uri.rstrip("/")
    return [uri for uri in dict.fromkeys(uri.rstrip("/") for uri in uris) if uri != here]


def repair(store: Store, places: Sequence[Store], examine: Callable[[], Examination]) -> Repair:
    """Mend records and lengths, then what `examine` finds damaged beyond that. places: other copies, in order.

    Raises Invalid without another copy, and what the store raises, except a refusal to write.
    """
    if not places:
        raise Invalid(f"no other copy of the run at {store.uri} is known; name one with --from URI")
    pass_ = _Repairing(store, Copies(places))
    run = _run(store)
    # Such a mirror has records and checkpoints only.
    without_payloads = any(
        mirror.uri.rstrip("/") == store.uri.rstrip("/") and not mirror.each_round
        for mirror in (() if run is None else run.mirrors or ())
    )
    while pass_.mend_all(_bad_now(store, without_payloads=without_payloads)):
        pass
    examination = examine()
    damaged = {finding.key for finding in examination.findings if finding.kind.startswith("damaged")}
    if damaged and pass_.mend_all(wanted for wanted in _tensors(store) if wanted.key in damaged):
        examination = examine()
    return Repair(
        ok=examination.ok and not pass_.refused,
        mended=tuple(pass_.mended),
        problems=tuple(pass_.problems),
        log=examination,
    )


class _Repairing:
    """One repair. Each object is tried once. refused: the store did not take a copy, or did not keep it."""

    def __init__(self, store: Store, copies: Copies) -> None:
        self.mended: list[Mended] = []
        self.problems: list[str] = []
        self.refused = False
        self._store, self._copies = store, copies
        self._tried: set[NamedObject] = set()

    def mend_all(self, wanted: Iterable[NamedObject]) -> bool:
        """True if anything was mended, which may reveal more."""
        before = len(self.mended)
        for item in wanted:
            if item in self._tried:
                continue
            self._tried.add(item)
            try:
                done = mend(self._store, item, self._copies, overwrites=True)
            except Unauthorized as error:
                self.refused = True
                self.problems.append(f"{item.key}: the store refuses to replace it: {in_short(error)}")
            except SkerryError as error:
                self.refused = self.refused or isinstance(error, Conflict)
                self.problems.append(str(error))
            else:
                self.mended += [] if done is None else [done]
        return len(self.mended) > before


def _run(store: Store) -> Run | None:
    data = store.read(keys.RUN)
    try:
        return None if data is None else Run.parse(data, keys.RUN)
    except Corrupt:
        return None


def _bad_now(store: Store, *, without_payloads: bool) -> list[NamedObject]:
    """The objects that are bad in two readings, because in the first a payload may be deleted meanwhile."""
    if not (bad := _bad_in_log(store, without_payloads=without_payloads)):
        return []
    again = set(_bad_in_log(store, without_payloads=without_payloads))
    return [wanted for wanted in bad if wanted in again]


def _bad_in_log(store: Store, *, without_payloads: bool) -> list[NamedObject]:
    stored = read_log(store)
    return [
        wanted
        for wanted in bad_objects(stored, valid_records(stored))
        if not (without_payloads and wanted.key.startswith(keys.PAYLOADS) and wanted.key not in stored.payloads)
    ]


def _tensors(store: Store) -> Iterator[NamedObject]:
    """Payloads, parts of checkpoints, and of what each replica alone has."""
    valid = valid_records(read_log(store))
    yield from tensor_objects(valid).values()
    for folder in (keys.PRIVATE, keys.UNFINISHED):
        for entry in store.list(folder):
            if not entry.key.endswith(keys.MANIFEST) or (data := store.read(entry.key)) is None:
                continue
            try:
                manifest = CheckpointManifest.parse(data, entry.key)
            except Corrupt:
                continue
            if manifest.run == valid.nonce:
                yield from parts_of(manifest, entry.key.removesuffix(keys.checkpoint_manifest(manifest.round, "")))
