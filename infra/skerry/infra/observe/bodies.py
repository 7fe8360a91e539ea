"""Reads what records only name: every payload, and every part of every checkpoint, private ones too. Never writes.

Each block is compared with the digest in its header, each header with its record. Read in pieces through buffers that
are kept, so memory is bounded by what the store likes to have in flight, whatever the size of the run. What is gone by
the time it is read is left to `holdings`: in a run that goes on payloads are deleted when nobody needs them.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.observe import holdings
from skerry.infra.observe.findings import Bodies, finding
from skerry.runtime import keys
from skerry.runtime.codec.container import check_header_size, index_of
from skerry.runtime.codec.layout import BLOCK_BYTES
from skerry.runtime.codec.reading import Reader, Remote, Request
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.records import CheckpointManifest
from skerry.runtime.store import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.observe.case import Case
    from skerry.infra.observe.findings import Finding, Kind, Severity
    from skerry.runtime.store import Store

_ONE_BYTE: Final = Span(0, 1)


@dataclass(frozen=True, kw_only=True)
class _Body:
    """One list of tensors in parts: what one rank has contributed or saved, as `record` (a key) names it.

    index: of these tensors; None if it is not told. there: the objects that a listing shows.
    """

    kind: Kind
    severity: Severity
    round: int
    slot: str
    record: str
    index: str | None
    remotes: Sequence[Remote]
    there: Mapping[str, int]

    @property
    def present(self) -> list[Remote]:
        """The parts that there are."""
        return [remote for remote in self.remotes if remote.key in self.there]


def read_all(store: Store, case: Case, on_progress: Callable[[Bodies, Bodies], None]) -> tuple[Bodies, list[Finding]]:
    """What was read of all that records name, and what is damaged of it; of each object the first damage.

    on_progress: what has been read and what there is to read, told at the beginning and after each object.
    Raises what the store raises.
    """
    found: list[Finding] = []
    bodies = [*_payloads(case), *_checkpoints(case), *_own(store, case, found)]
    remotes = [remote for body in bodies for remote in body.present]
    whole = Bodies(objects=len(remotes), size_bytes=sum(remote.part.total_bytes for remote in remotes))
    done = Bodies(objects=0, size_bytes=0)
    on_progress(done, whole)
    errors = _read(store, remotes)
    for body in bodies:
        sound = 0
        for remote, error in zip(body.present, errors, strict=False):
            done = Bodies(objects=done.objects + 1, size_bytes=done.size_bytes + remote.part.total_bytes)
            on_progress(done, whole)
            if error is None:
                sound += 1
            elif store.read(remote.key, _ONE_BYTE) is not None:
                found.append(_damage(body, remote.key, str(error)))
        if sound == len(body.remotes):
            found += _contradictions(body)
        for remote in body.remotes:
            remote.header = None  # a run may have more of them than fit
    return done, found


def _read(store: Store, remotes: Sequence[Remote]) -> Iterator[Corrupt | Invalid | None]:
    """For each object in order what is wrong with it. Reads ahead; begins again behind what is damaged."""
    chunk = max(1, store.profile.piece_bytes // BLOCK_BYTES) * BLOCK_BYTES
    reader = Reader()
    try:
        position = 0
        while position < len(remotes):
            readable = next((n for n in range(position, len(remotes)) if _bad_size(remotes[n])), len(remotes))
            if readable == position:
                yield _bad_size(remotes[position])
                position += 1
                continue
            try:
                for _ in _objects(store, reader, remotes[position:readable], chunk):
                    position += 1
                    yield None
            except (Corrupt, Invalid) as error:
                position += 1
                yield error
    finally:
        reader.close()


def _objects(store: Store, reader: Reader, remotes: Sequence[Remote], chunk: int) -> Iterator[Remote]:
    """Each object once all of it is verified. Raises Corrupt and Invalid for the first that is not."""
    requests = [request for remote in remotes for request in _pieces(remote, chunk)]
    with closing(reader.read(store, requests)) as pieces:
        for request, _ in zip(requests, pieces, strict=True):
            if request.stop == _body_bytes(request.remote):
                yield request.remote


def _pieces(remote: Remote, chunk: int) -> Iterator[Request]:
    size = _body_bytes(remote)
    for start in range(0, max(size, 1), chunk):
        yield Request(remote, start, min(start + chunk, size))


def _body_bytes(remote: Remote) -> int:
    return remote.part.total_bytes - remote.part.header_bytes


def _bad_size(remote: Remote) -> Corrupt | None:
    """What is wrong with the sizes that the record gives: no object can have them, nothing is read."""
    try:
        check_header_size(remote.part, remote.key)
    except Corrupt as error:
        return error
    if _body_bytes(remote) < 0:
        return Corrupt(f"bad size of part: key={remote.key} total_bytes={remote.part.total_bytes}")
    return None


def _contradictions(body: _Body) -> Iterator[Finding]:
    """Sound parts that are not, together, the list of tensors that their record says."""
    headers = [remote.header for remote in body.remotes if remote.header is not None]
    names = [remote.key for remote in body.remotes]
    if not headers:
        return
    try:
        digest = index_of(headers, names).digest
    except Corrupt as error:
        yield _damage(body, names[0], str(error))
        return
    if body.index not in {None, digest}:
        yield _damage(body, names[0], f"its tensors are not those of {body.record}: index={digest} named={body.index}")


def _damage(body: _Body, key: str, text: str) -> Finding:
    return finding(body.kind, key, text, round_number=body.round, slot=body.slot, severity=body.severity)


def _payloads(case: Case) -> Iterator[_Body]:
    """Those of contributions. What is in a checkpoint already is read again only if that one cannot be."""
    for record, offer, severity in holdings.offers(case):
        whose = f"slot={offer.slot}"
        for rank in range(max(1, len(offer.ranks))):
            yield _Body(
                kind="damaged-payload",
                severity=severity or "warning",
                round=offer.round,
                slot=offer.slot,
                record=record,
                # Of several ranks it is the fold of theirs.
                index=None if offer.ranks else offer.index,
                remotes=[
                    Remote(keys.payload(offer.round, offer.slot, part.digest), part, None, number, whose)
                    for number, part in enumerate(offer.of_rank(rank))
                ],
                there=case.evidence.payloads,
            )


def _checkpoints(case: Case) -> Iterator[_Body]:
    for record, one in case.manifests.items():
        yield from _saved("damaged-checkpoint", "error", record, one.record, keys.CHECKPOINTS, case.evidence.parts)


def _own(store: Store, case: Case, found: list[Finding]) -> Iterator[_Body]:
    """What replicas keep for themselves; a manifest that cannot be read is added to `found`."""
    listed = {entry.key: entry.size for folder in (keys.PRIVATE, keys.UNFINISHED) for entry in store.list(folder)}
    for key in listed:
        if not key.endswith(keys.MANIFEST) or (data := store.read(key)) is None:
            continue
        slot = key.split("/")[1]
        try:
            manifest = CheckpointManifest.parse(data, key)
        except Corrupt as error:
            found.append(finding("damaged-private", key, str(error), slot=slot, severity="warning"))
            continue
        folder = key.removesuffix(keys.checkpoint_manifest(manifest.round, ""))
        if manifest.run == case.nonce and folder != key:
            yield from _saved("damaged-private", "warning", key, manifest, folder, listed)


def _saved(
    kind: Kind, severity: Severity, record: str, manifest: CheckpointManifest, folder: str, there: Mapping[str, int]
) -> Iterator[_Body]:
    """Each shard of a checkpoint."""
    whose = f"checkpoint={manifest.round}"
    for shard in manifest.shards or (manifest,):
        yield _Body(
            kind=kind,
            severity=severity,
            round=manifest.round,
            slot=manifest.writer,
            record=record,
            index=shard.index,
            remotes=[
                Remote(keys.checkpoint_part(manifest.round, part.digest, folder), part, None, number, whose)
                for number, part in enumerate(shard.parts)
            ],
            there=there,
        )
