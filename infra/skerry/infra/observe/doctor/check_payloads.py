"""Reads and verifies every payload and every part of every checkpoint, private ones included. Never writes.

Compares each block with the digest in its header, and each header with its record. Reads in pieces through reused
buffers, so memory is bounded by the store's preferred bytes in flight. Objects that were deleted before they are read
are left to `check_stored_objects`, because a live run deletes payloads that are no longer needed.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.doctor import check_stored_objects
from skerry.infra.observe.doctor.findings import PayloadAmount, finding
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import CheckpointManifest
from skerry.runtime.store import Span
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES
from skerry.runtime.tensors.payload_format import check_header_size, index_from_headers
from skerry.runtime.tensors.payload_reader import Reader, RemotePayload, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.observe.doctor.findings import Finding, Kind, Severity
    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.runtime.store import Store

_ONE_BYTE: Final = Span(0, 1)


@dataclass(frozen=True, kw_only=True)
class _TensorList:
    """One list of tensors in parts, contributed or saved by one rank and referenced by the record at key `record`.

    index: the expected index digest; None if the record has none. listed: the stored objects and their sizes.
    """

    kind: Kind
    severity: Severity
    round: int
    slot: str
    record: str
    index: str | None
    remotes: Sequence[RemotePayload]
    listed: Mapping[str, int]

    @property
    def present(self) -> list[RemotePayload]:
        """The parts that are stored."""
        return [remote for remote in self.remotes if remote.key in self.listed]


def check_payloads(
    store: Store, log: RunRecords, on_progress: Callable[[PayloadAmount, PayloadAmount], None]
) -> tuple[PayloadAmount, list[Finding]]:
    """The amount read, and the first damage of each object.

    on_progress: called with the amount read and the whole amount, at the start and after each object.
    Raises what the store raises.
    """
    findings: list[Finding] = []
    lists = [*_payloads(log), *_checkpoints(log), *_private_checkpoints(store, log, findings)]
    remotes = [remote for tensors in lists for remote in tensors.present]
    whole = PayloadAmount(objects=len(remotes), size_bytes=sum(remote.part.total_bytes for remote in remotes))
    done = PayloadAmount(objects=0, size_bytes=0)
    on_progress(done, whole)
    errors = _read(store, remotes)
    for tensors in lists:
        sound = 0
        for remote, error in zip(tensors.present, errors, strict=False):
            done = PayloadAmount(objects=done.objects + 1, size_bytes=done.size_bytes + remote.part.total_bytes)
            on_progress(done, whole)
            if error is None:
                sound += 1
            elif store.read(remote.key, _ONE_BYTE) is not None:
                findings.append(_damage(tensors, remote.key, str(error)))
        if sound == len(tensors.remotes):
            findings += _wrong_index(tensors)
        for remote in tensors.remotes:
            remote.header = None  # a run may have more of them than fit
    return done, findings


def _read(store: Store, remotes: Sequence[RemotePayload]) -> Iterator[Corrupt | Invalid | None]:
    """The error of each object in order, None if it is valid. Reads ahead; restarts after a damaged object."""
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


def _objects(store: Store, reader: Reader, remotes: Sequence[RemotePayload], chunk: int) -> Iterator[RemotePayload]:
    """Each object once it is verified. Raises Corrupt or Invalid for the first damaged one."""
    requests = [request for remote in remotes for request in _pieces(remote, chunk)]
    with closing(reader.read(store, requests)) as pieces:
        for request, _ in zip(requests, pieces, strict=True):
            if request.stop == _body_bytes(request.remote):
                yield request.remote


def _pieces(remote: RemotePayload, chunk: int) -> Iterator[Request]:
    size = _body_bytes(remote)
    for start in range(0, max(size, 1), chunk):
        yield Request(remote, start, min(start + chunk, size))


def _body_bytes(remote: RemotePayload) -> int:
    return remote.part.total_bytes - remote.part.header_bytes


def _bad_size(remote: RemotePayload) -> Corrupt | None:
    """An error if the record's sizes are impossible; such an object is not read."""
    try:
        check_header_size(remote.part, remote.key)
    except Corrupt as error:
        return error
    if _body_bytes(remote) < 0:
        return Corrupt(f"impossible size of part: key={remote.key} total_bytes={remote.part.total_bytes}")
    return None


def _wrong_index(tensors: _TensorList) -> Iterator[Finding]:
    """Finds valid parts that together are not the list of tensors of their record."""
    headers = [remote.header for remote in tensors.remotes if remote.header is not None]
    names = [remote.key for remote in tensors.remotes]
    if not headers:
        return
    try:
        digest = index_from_headers(headers, names).digest
    except Corrupt as error:
        yield _damage(tensors, names[0], str(error))
        return
    if tensors.index not in {None, digest}:
        yield _damage(
            tensors, names[0], f"its tensors are not those of {tensors.record}: index={digest} expected={tensors.index}"
        )


def _damage(tensors: _TensorList, key: str, text: str) -> Finding:
    return finding(tensors.kind, key, text, round_number=tensors.round, slot=tensors.slot, severity=tensors.severity)


def _payloads(log: RunRecords) -> Iterator[_TensorList]:
    """The payloads of contributions. Damage of one that a checkpoint covers is only a warning."""
    for record, contribution, severity in check_stored_objects.contributions_by_severity(log):
        owner = f"slot={contribution.slot}"
        for rank in range(max(1, len(contribution.ranks))):
            yield _TensorList(
                kind="damaged-payload",
                severity=severity or "warning",
                round=contribution.round,
                slot=contribution.slot,
                record=record,
                # With several ranks, the record has the combined digest of theirs.
                index=None if contribution.ranks else contribution.index,
                remotes=[
                    RemotePayload(
                        keys.payload(contribution.round, contribution.slot, part.digest), part, None, number, owner
                    )
                    for number, part in enumerate(contribution.parts_of_rank(rank))
                ],
                listed=log.payloads,
            )


def _checkpoints(log: RunRecords) -> Iterator[_TensorList]:
    for record, manifest in log.manifests.items():
        yield from _saved("damaged-checkpoint", "error", record, manifest.record, keys.CHECKPOINTS, log.parts)


def _private_checkpoints(store: Store, log: RunRecords, findings: list[Finding]) -> Iterator[_TensorList]:
    """The private checkpoints of replicas; an unreadable manifest is added to `findings`."""
    listed = {entry.key: entry.size for folder in (keys.PRIVATE, keys.UNFINISHED) for entry in store.list(folder)}
    for key in listed:
        if not key.endswith(keys.MANIFEST) or (data := store.read(key)) is None:
            continue
        slot = key.split("/")[1]
        try:
            manifest = CheckpointManifest.parse(data, key)
        except Corrupt as error:
            findings.append(finding("damaged-private", key, str(error), slot=slot, severity="warning"))
            continue
        folder = key.removesuffix(keys.checkpoint_manifest(manifest.round, ""))
        if manifest.run == log.nonce and folder != key:
            yield from _saved("damaged-private", "warning", key, manifest, folder, listed)


def _saved(
    kind: Kind, severity: Severity, record: str, manifest: CheckpointManifest, folder: str, listed: Mapping[str, int]
) -> Iterator[_TensorList]:
    """Each shard of a checkpoint."""
    owner = f"checkpoint={manifest.round}"
    for shard in manifest.shards or (manifest,):
        yield _TensorList(
            kind=kind,
            severity=severity,
            round=manifest.round,
            slot=manifest.writer,
            record=record,
            index=shard.index,
            remotes=[
                RemotePayload(keys.checkpoint_part(manifest.round, part.digest, folder), part, None, number, owner)
                for number, part in enumerate(shard.parts)
            ],
            listed=listed,
        )
