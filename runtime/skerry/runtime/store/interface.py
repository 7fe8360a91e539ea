"""The Store seam: five verbs and what each promises. Does no I/O.

One conditional primitive, `create`, on write-once keys. No compare-and-swap: several real stores do not offer it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from typing_extensions import Buffer

# One buffer, or several written one after the other as one object (so that tensors are never packed first).
# Iteration is over `buffers_of(data)`; a bytes object is one buffer, never a sequence of ints.
Data: TypeAlias = Buffer | Sequence[Buffer]


class Span(NamedTuple):
    """Bytes [start, stop) of an object."""

    start: int
    stop: int


class Entry(NamedTuple):
    """One line of a listing. `modified` is seconds since the epoch by the STORE's clock (0.0 where it has none)."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a store likes, measured per engine; callers size their work by it. No promise depends on it.

    piece_bytes: a good size for one ranged read. streams: requests in flight that fill the link.
    poll_first, poll_cap: seconds between looks at a key that somebody else will create.
    rewrite: seconds between two writes of one key, where the store refuses more.
    """

    piece_bytes: int
    streams: int
    poll_first: float
    poll_cap: float
    rewrite: float = 0.0


class Store(Protocol):
    """Objects under keys, relative to the URI that was opened. Thread-safe. Never caches.

    Keys are non-empty `/`-separated names of [A-Za-z0-9._-] without empty, `.` or `..` parts; anything else is Invalid.
    Every verb may raise Retryable (503, time-out, reset), Unauthorized (403) or Invalid (no such bucket).
    An object is visible whole or not at all, and right after the write that made it returned (read and list).
    """

    @property
    def uri(self) -> str:
        """What `open_store` was given, without secrets; for messages."""
        ...

    @property
    def profile(self) -> Profile:
        """How to size requests for this engine."""
        ...

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """The object's bytes, or those of `span`; None if there is no such object.

        A span that reaches past the end gives what is there, possibly nothing: the caller checks the length.
        into: a writable, contiguous byte buffer, at least as long as what is read, that the bytes land in; the
        result is then a view of it. Never returns a body shorter than the store announced (Retryable instead).
        """
        ...

    def create(self, key: str, data: Data) -> bool:
        """Make the object if the key is absent, atomically: of any number of racing calls one gets True.

        False: the key existed. Raises Ambiguous if it may have happened (reset after commit, time-out).
        A plain engine's False may be a lie (its own retry met its own success, a 409): only
        `skerry.runtime.store.retrying` resolves that, by reading back; everyone but tests uses it through that.
        """
        ...

    def replace(self, key: str, data: Data) -> None:
        """Write the object, whatever was there; the last writer wins. For heartbeats only."""
        ...

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """All objects whose key starts with `prefix` (plain string match), sorted by key, all pages.

        after: only keys greater than this one. A prefix that matches nothing gives an empty sequence.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove the object; an absent one is success."""
        ...


def buffers_of(data: Data) -> list[memoryview]:
    """Byte views of `data` in order, without a copy. Raises Invalid (BufferError) for non-contiguous memory."""
    parts = (
        list(data) if isinstance(data, Sequence) and not isinstance(data, (bytes, bytearray, memoryview)) else [data]
    )
    return [view.cast("B") if view.nbytes else memoryview(b"") for view in map(memoryview, parts)]


def size_of(data: Data) -> int:
    """How many bytes `data` is when written."""
    return sum(view.nbytes for view in buffers_of(data))
