"""Fetches ranges of payload objects and verifies every block before anybody sees it. Needs no torch.

Where a store likes several requests at once, pieces are read ahead into a ring of kept buffers; where it does not
(a local folder), everything happens in the calling thread. Either way pieces come out in the order asked for.
"""

from __future__ import annotations

import mmap
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from skerry.runtime.codec.container import Header, check_header_size, read_header
from skerry.runtime.codec.layout import BLOCK_BYTES
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.store.interface import Span

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from skerry.runtime.codec.layout import Index
    from skerry.runtime.records import Part
    from skerry.runtime.store.interface import Store

REPEATS: Final = 2
"""A damaged transfer is cured by one more read; an object damaged at rest never is."""
MAX_STREAMS: Final = 16
"""More requests in flight than this filled no link that was measured, and each costs a buffer."""


@dataclass(frozen=True)
class Traffic:
    """What reading has cost."""

    requests: int = 0
    downloaded_bytes: int = 0


@dataclass
class Remote:
    """One payload object to read: its key, its record, what it should hold, and whose it is (for messages)."""

    key: str
    part: Part
    index: Index | None
    number: int
    whose: str
    header: Header | None = None


class Request(NamedTuple):
    """Body bytes [start, stop) of one object; start is a multiple of BLOCK_BYTES, stop too or the end of the body.

    The first request of an object whose header is not known yet starts at 0, and fetches the header as well.
    kept: what was read stays until the next kept request is asked for.
    """

    remote: Remote
    start: int
    stop: int
    kept: bool = False


class Reader:
    """Reads through buffers that are kept for the next round. For one thread at a time; `close` ends its threads."""

    def __init__(self) -> None:
        self._requests = 0
        self._downloaded_bytes = 0
        self._buffers: list[memoryview] = []
        self._pool: ThreadPoolExecutor | None = None

    @property
    def traffic(self) -> Traffic:
        """What reading has cost up to now."""
        return Traffic(self._requests, self._downloaded_bytes)

    def close(self) -> None:
        """End the threads and forget the buffers; the reader can still be used."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None
        self._buffers.clear()

    def read(self, store: Store, requests: Sequence[Request]) -> Generator[memoryview]:
        """The verified bytes of each request in order. Each view is good until the next one is asked for, that of a
        `kept` request until the next kept one is; the caller may write into it.

        Raises Corrupt naming key, whose and block when a block is still wrong after REPEATS more reads, or the object
        is absent or short; Invalid for a sound object that holds something else. Whoever leaves early closes the
        generator: that waits for what is still in flight.
        """
        for remote in {id(one.remote): one.remote for one in requests}.values():
            check_header_size(remote.part, remote.key)
        spans = [_span_of(one) for one in requests]
        size = max((span.stop - span.start for span in spans), default=0)
        streams = min(store.profile.streams, MAX_STREAMS, len(requests))
        if streams > 1:
            yield from self._read_ahead(store, requests, spans, streams, self._ring(streams + _stay(requests), size))
            return
        ring = self._ring(2, size)
        for request, span in zip(requests, spans, strict=True):
            buffer = ring[request.kept]
            yield self._verified(store, request, span, buffer, _fetched(store, request.remote, span, buffer))

    def header(self, store: Store, remote: Remote) -> Header:
        """Only the header of an object, checked and kept in `remote`. Raises like `read`."""
        check_header_size(remote.part, remote.key)
        span = Span(0, remote.part.header_bytes)
        buffer = self._ring(1, span.stop)[0]
        return self._header(store, remote, buffer, _fetched(store, remote, span, buffer))

    def _read_ahead(
        self,
        store: Store,
        requests: Sequence[Request],
        spans: Sequence[Span],
        streams: int,
        ring: Sequence[memoryview],
    ) -> Generator[memoryview]:
        """While `streams` buffers are being filled the others are the caller's."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="skerry-read")
        flying: deque[Future[int]] = deque()
        asked = 0
        try:
            for position, (request, span) in enumerate(zip(requests, spans, strict=True)):
                while asked < min(len(requests), position + streams + 1):
                    ahead = requests[asked].remote, spans[asked], ring[asked % len(ring)]
                    flying.append(self._pool.submit(_fetched, store, *ahead))
                    asked += 1
                yield self._verified(store, request, span, ring[position % len(ring)], flying.popleft().result())
        finally:
            for future in flying:
                future.cancel()
            wait(flying)

    def _verified(self, store: Store, request: Request, span: Span, buffer: memoryview, length: int) -> memoryview:
        """The body bytes of the request, of which `length` bytes of `span` have landed in `buffer`."""
        remote, skip = request.remote, 0
        if span.start == 0:
            header = self._header(store, remote, buffer, length)
            skip = remote.part.header_bytes
        else:
            self._count(length)
            header = remote.header
            if header is None:
                raise Invalid(f"the first request of an object must start at 0: key={remote.key} start={request.start}")
        size = request.stop - request.start
        for begin in range(0, size, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, size)
            block, digest = buffer[skip + begin : skip + end], header.blocks[(request.start + begin) // BLOCK_BYTES]
            if skip + end > length or xxhash.xxh3_128_hexdigest(block) != digest:
                self._repair(store, remote, (request.start + begin) // BLOCK_BYTES, block, digest)
        return buffer[skip : skip + size]

    def _header(self, store: Store, remote: Remote, buffer: memoryview, length: int) -> Header:
        span = Span(0, remote.part.header_bytes)
        for repeat in range(REPEATS + 1):
            self._count(length)
            try:
                remote.header = read_header(
                    buffer[: min(length, span.stop)], remote.part, remote.key, index=remote.index, number=remote.number
                )
            except Corrupt:
                if repeat == REPEATS:
                    raise
                length = _fetched(store, remote, span, buffer)
            else:
                return remote.header
        raise AssertionError("unreachable: the last repeat returns or raises")

    def _repair(self, store: Store, remote: Remote, number: int, block: memoryview, digest: str) -> None:
        """Read one bad block again, in place."""
        start = remote.part.header_bytes + number * BLOCK_BYTES
        found = f"bytes={len(block)}"
        for _ in range(REPEATS):
            length = _fetched(store, remote, Span(start, start + len(block)), block)
            self._count(length)
            if length < len(block):
                found = f"truncated to {length} of {len(block)} bytes"
                continue
            if xxhash.xxh3_128_hexdigest(block) == digest:
                return
            found = f"digest={xxhash.xxh3_128_hexdigest(block)} expected={digest}"
        raise Corrupt(f"payload is damaged: key={remote.key} {remote.whose} block={number} {found}")

    def _count(self, length: int) -> None:
        self._requests += 1
        self._downloaded_bytes += length

    def _ring(self, count: int, size: int) -> list[memoryview]:
        """The first `count` kept buffers, each with room for `size` bytes. Untouched pages cost nothing."""
        for position in range(count):
            if position == len(self._buffers):
                self._buffers.append(memoryview(b""))
            if len(self._buffers[position]) < size:
                # A mapping starts at a page: bodies keep their alignment, which vector loads like.
                self._buffers[position] = memoryview(mmap.mmap(-1, size))
        return self._buffers[:count]


def _span_of(request: Request) -> Span:
    """Bytes of the object: with the header if the request is the first of an object whose header is not known."""
    before = request.remote.part.header_bytes
    bare = request.start > 0 or request.remote.header is not None
    return Span(before + request.start if bare else 0, before + request.stop)


def _stay(requests: Sequence[Request]) -> int:
    """For how many requests a view must stay at most."""
    kept = [position for position, one in enumerate(requests) if one.kept]
    ends = [*kept[1:], len(requests)]
    return max((end - position for position, end in zip(kept, ends, strict=False)), default=1)


def _fetched(store: Store, remote: Remote, span: Span, buffer: memoryview) -> int:
    """How many bytes of `span` the object has; they are now at the start of `buffer`. Runs in any thread."""
    view = store.read(remote.key, span, buffer[: span.stop - span.start])
    if view is None:
        raise Corrupt(f"payload is absent: key={remote.key} {remote.whose}")
    return len(view)
