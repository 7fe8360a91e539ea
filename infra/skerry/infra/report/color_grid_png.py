"""Encodes a grid of coloured cells as a PNG in a data URI. Pure."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_BITS: Final = 8
_INDEXED: Final = 3


def png_uri(rows: Sequence[bytes], colours: Sequence[str]) -> str:
    """An image with a pixel for each byte. A byte is the index of its colour: "#rrggbb", or "" for transparent.

    rows: of equal lengths, at least one. Source: PNG specification, third edition, sections 5, 9 and 11.
    """
    palette = b"".join(bytes.fromhex(colour.removeprefix("#") or "000000") for colour in colours)
    opacity = bytes(0xFF if colour else 0 for colour in colours)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), _BITS, _INDEXED, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"tRNS", opacity), (b"IDAT", pixels), (b"IEND", b""))
    data = _SIGNATURE + b"".join(_chunk(kind, body) for kind, body in chunks)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
