"""Files that a script saved beside the log of its run: samples, plots, evaluations. Never read by a replica.

A save is written once, under a number of its own, and never replaced or collected. A file of more than PART_BYTES is
stored in several objects, so that it is never in memory as a whole; without one of them it does not exist.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.output_file import replacing
from skerry.runtime.store import Span

if TYPE_CHECKING:
    from skerry.runtime.store import Entry, Store

PART_BYTES: Final = 64 << 20
"""Memory that a save needs. A single request carries so much in every store."""
_PIECE_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One saved file. round: rounds that were closed then. number: order of the saves of a slot in a round."""

    slot: str
    round: int
    number: int
    name: str
    size_bytes: int


def save(store: Store, slot: str, round_number: int, name: str, content: bytes | str | os.PathLike[str]) -> Artifact:
    """Stores bytes, or the file at a path, as the newest save of `name`. Returns when it is stored.

    Raises Invalid for a name that is no plain file name, and for a file that cannot be read or changes meanwhile, and
    the store's errors.
    """
    with _opened(content) as file:
        size = file.seek(0, os.SEEK_END)
        count = max(1, -(-size // PART_BYTES))
        number = _next_number(store, slot, round_number)
        while not _write(store, file, size, _keys(slot, round_number, number, name, count)):
            number += 1  # another rank of this replica was first
    return Artifact(slot=slot, round=round_number, number=number, name=name, size_bytes=size)


def list_artifacts(store: Store) -> list[Artifact]:
    """Returns every complete save: by slot in slot order, oldest first. Costs one listing."""
    artifacts = [
        Artifact(slot=slot, round=round_number, number=number, name=name, size_bytes=sum(part.size for part in parts))
        for (slot, round_number, number, name), parts in _complete(store, keys.ARTIFACTS).items()
    ]
    return sorted(artifacts, key=lambda saved: (keys.slot_order(saved.slot), saved.round, saved.number, saved.name))


def fetch(store: Store, artifact: Artifact, path: Path) -> None:
    """Writes a saved file to `path`, whole or not at all; replaces an existing one. Raises Corrupt if it is gone."""
    identity = (artifact.slot, artifact.round, artifact.number, artifact.name)
    parts = _complete(store, keys.artifacts_prefix(artifact.slot, artifact.round)).get(identity)
    if parts is None:
        raise Corrupt(f"{artifact.name} of {artifact.slot} was deleted: round={artifact.round}")
    with replacing(path) as temporary, temporary.open("wb") as file:
        for part in parts:
            for start in range(0, part.size, _PIECE_BYTES):
                span = Span(start, min(start + _PIECE_BYTES, part.size))
                data = store.read(part.key, span)
                if data is None or data.nbytes != span.stop - span.start:
                    raise Corrupt(f"object changed while it was read: key={part.key}")
                file.write(data)


def _next_number(store: Store, slot: str, round_number: int) -> int:
    listed = store.list(keys.artifacts_prefix(slot, round_number))
    return max((place.number + 1 for entry in listed if (place := keys.artifact_of(entry.key)) is not None), default=0)


def _keys(slot: str, round_number: int, number: int, name: str, parts: int) -> list[str]:
    return [keys.artifact(slot, round_number, number, name, part, parts) for part in range(parts)]


def _complete(store: Store, prefix: str) -> dict[tuple[str, int, int, str], list[Entry]]:
    """The objects of each save below a prefix, if all of them exist, in order."""
    listed: dict[tuple[str, int, int, str], dict[int, Entry]] = {}
    counts: dict[tuple[str, int, int, str], int] = {}
    for entry in store.list(prefix):
        place = keys.artifact_of(entry.key)
        if place is not None:
            identity = (place.slot, place.round, place.number, place.name)
            listed.setdefault(identity, {})[place.part] = entry
            counts[identity] = place.parts
    return {
        identity: [parts[number] for number in range(counts[identity])]
        for identity, parts in listed.items()
        if parts.keys() == set(range(counts[identity]))
    }


def _opened(content: bytes | str | os.PathLike[str]) -> BinaryIO:
    if isinstance(content, (bytes, bytearray, memoryview)):
        return io.BytesIO(content)
    try:
        return Path(content).open("rb")
    except OSError as error:
        hint = "; to save a text, encode it: text.encode()" if isinstance(content, str) else ""
        raise Invalid(f"cannot save {str(content)[:200]!r}: {error.strerror}{hint}") from error


def _write(store: Store, file: BinaryIO, size: int, parts: list[str]) -> bool:
    """Creates the parts of a file of this size. Returns False if one exists."""
    file.seek(0)
    for number, key in enumerate(parts):
        rest = size - number * PART_BYTES
        # A byte more than the last part has shows that the file grew.
        data = file.read(PART_BYTES if rest > PART_BYTES else rest + 1)
        if len(data) != min(PART_BYTES, rest):
            raise Invalid(f"the file changed while it was saved: key={key}")
        if not store.create(key, data):
            return False
    return True
