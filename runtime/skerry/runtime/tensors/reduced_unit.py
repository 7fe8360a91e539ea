"""The format of a reduced unit: one piece of an average, as the member that owns it publishes it.

    magic, version, unit, units, bytes of the body    8 + 4 x 8 bytes, little-endian
    decision                                          32 bytes: the sha256 of the record that it follows from
    digest                                            16 bytes: xxh3-128 of everything else
    body                                              the results of the piece, slice by slice

It lies among the payloads of the member's slot, under a key that every reader knows before it exists. Needs no torch;
does no I/O.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

MAGIC: Final = b"skerryU\n"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<8sQQQQ32s")
_DIGEST_BYTES: Final = 16
HEAD_BYTES: Final = _FIELDS.size + _DIGEST_BYTES
"""Before the body."""


class UnitName(NamedTuple):
    """A unit of an average. decision: sha256 in hex. rank: of the replica whose tensors these are."""

    round: int
    exchange: int
    decision: str
    rank: int
    unit: int
    units: int

    def key(self, slot: str) -> str:
        """The key under which the replica of this slot publishes the unit."""
        return keys.reduced_unit(self.round, self.exchange, slot, self.rank, self.unit)


def seal(name: UnitName, body: Sequence[Buffer]) -> list[Buffer]:
    """The object's bytes, for `Store.create`."""
    size = sum(memoryview(data).nbytes for data in body)
    fields = _FIELDS.pack(MAGIC, VERSION, name.unit, name.units, size, bytes.fromhex(name.decision))
    return [fields, _digest(fields, body), *body]


def unseal(name: UnitName, data: memoryview, key: str) -> memoryview:
    """The body. Raises Corrupt, naming the key, for anything but the whole unit of this name."""
    body = data[HEAD_BYTES:]
    fields = _FIELDS.pack(MAGIC, VERSION, name.unit, name.units, len(body), bytes.fromhex(name.decision))
    if bytes(data[: _FIELDS.size]) != fields:
        raise Corrupt(f"not this reduced unit, or damaged: key={key} unit={name.unit} bytes={len(data)}")
    if bytes(data[_FIELDS.size : HEAD_BYTES]) != _digest(fields, [body]):
        raise Corrupt(f"reduced unit is damaged: key={key} unit={name.unit}")
    return body


def _digest(fields: bytes, body: Sequence[Buffer]) -> bytes:
    digest = xxhash.xxh3_128(fields)
    for data in body:
        digest.update(data)
    return digest.digest()
