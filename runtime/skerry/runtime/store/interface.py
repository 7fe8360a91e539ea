"""The `Store` protocol: five verbs and the guarantees of each. Does no I/O.

The only conditional operation is `create` on write-once keys. Compare-and-swap is missing, because several stores do
not have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from typing_extensions import Buffer

# One buffer, or several that are written one after the other as one object, so that tensors are never packed first.
# Iterate over `buffers_of(data)`: a bytes object is one buffer, never a sequence of ints.
Data: TypeAlias = Buffer | Sequence[Buffer]


class Span(NamedTuple):
    """Bytes [start, stop) of an object."""

    start: int
    stop: int


class Entry(NamedTuple):
    """One line of a listing. `modified`: seconds since the epoch by the STORE's clock (0.0 if it has none)."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured performance figures of a store, by which callers size their requests. No guarantee depends on them.

    piece_bytes: a good size for one ranged read. streams: requests in flight that fill the link. poll_first, poll_cap:
    seconds between reads of a key that another replica will create. rewrite: minimum seconds between two writes of one
    key, if the store limits them. absence_s: for so many seconds it may say that an existing object is absent.
    is_local: no link lies between; a byte costs as much as in memory.
    """

    piece_bytes: int
    streams: int
    poll_first: float
    poll_cap: float
    rewrite: float = 0.0
    absence_s: float = 0.0
    is_local: bool = False


class Store(Protocol):
    """Objects under keys, relative to the URI that was opened. Thread-safe. Never caches.

    Keys are non-empty `/`-separated names of [A-Za-z0-9._-] without empty, `.` or `..` parts; anything else is Invalid.
    Every verb may raise Retryable (503, time-out, reset), Unauthorized (403) or Invalid (no such bucket).
    An object is visible whole or not at all, and is read and listed as soon as its write has returned.
    """

    @property
    def uri(self) -> str:
        """The URI of this store, without secrets; for messages."""
        ...

    @property
    def profile(self) -> Profile:
        """Recommended sizes of requests to this store."""
        ...

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """The object's bytes, or those of `span`; None if it does not exist.

        A span that reaches past the end returns fewer bytes, possibly none: the caller checks the length. into: a
        writable, contiguous byte buffer, at least as long as the result, which is then a view of it. Never returns a
        body shorter than the store announced (Retryable instead).
        """
        ...

    def create(self, key: str, data: Data) -> bool:
        """Writes the object if the key is absent, atomically: of any number of racing calls exactly one returns True.

        False: the key existed. Raises Ambiguous if the write may have happened (reset after commit, time-out).
        An unwrapped store's False may be wrong (a client's own repeat met its own success, a 409). Only
        `skerry.runtime.store.retrying` resolves that, by reading back; outside tests, use stores through it.
        """
        ...

    def replace(self, key: str, data: Data) -> None:
        """Writes the object unconditionally; the last writer wins. For heartbeats only."""
        ...

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """All objects with a key that starts with `prefix` (plain string match), sorted by key, all pages.

        after: only keys greater than this one. A prefix without a match returns an empty sequence.
        """
        ...

    def delete(self, key: str) -> None:
        """Deletes the object; succeeds if it is absent."""
        ...


@runtime_checkable
class FolderStore(Protocol):
    """A store that can name its folders without listing the objects in them. For `open.list_folders`."""

    def folders(self) -> Sequence[str]:
        """The first names of keys with more than one, sorted. Raises as Store.list."""
        ...


def buffers_of(data: Data) -> list[memoryview]:
    """Byte views of `data` in order, without a copy. Raises Invalid (BufferError) for non-contiguous memory."""
    parts = (
        list(data) if isinstance(data, Sequence) and not isinstance(data, (bytes, bytearray, memoryview)) else [data]
    )
    return [view.cast("B") if view.nbytes else memoryview(b"") for view in map(memoryview, parts)]


def size_of(data: Data) -> int:
    """The number of bytes of `data` when written."""
    return sum(view.nbytes for view in buffers_of(data))
