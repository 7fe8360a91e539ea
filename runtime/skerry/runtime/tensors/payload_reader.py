"""Reads ranges of payload objects and verifies every block before returning it. Needs no torch.

If the store's profile allows several requests at once, pieces are read ahead into a ring of reused buffers; otherwise
(a local folder) all reads happen in the calling thread. Pieces are always returned in the requested order.
"""

from __future__ import annotations

import mmap
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.errors import Corrupt, Invalid, Unauthorized
from skerry.runtime.store.interface import Span
from skerry.runtime.store.retrying import read_existing
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES
from skerry.runtime.tensors.payload_format import Header, check_header_size, read_header

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from concurrent.futures import Future

    from skerry.runtime.log.records import Part
    from skerry.runtime.store.interface import Store
    from skerry.runtime.tensors.byte_layout import Index

REPEATS: Final = 2
"""Repeated reads repair a damaged transfer; they do not repair an object that is damaged in the store."""
MAX_STREAMS: Final = 16
"""More requests in flight than this were never faster when measured, and each costs a buffer."""


@dataclass(frozen=True)
class Traffic:
    """The cost of reading."""

    requests: int = 0
    downloaded_bytes: int = 0


@dataclass
class RemotePayload:
    """A payload object to read: its key, its record, the expected index and part, and its owner (for messages).

    ahead: its bytes, if they were read before. copy: the store to read it from, instead of the run's.
    """

    key: str
    part: Part
    index: Index | None
    number: int
    owner: str
    header: Header | None = None
    ahead: memoryview | None = None
    copy: Store | None = None


class Request(NamedTuple):
    """Body bytes [start, stop) of one object; start is a multiple of BLOCK_BYTES, stop too or the end of the body.

    The first request of an object with an unknown header starts at 0, and fetches the header as well.
    retained: the result stays valid until the next retained one is requested.
    """

    remote: RemotePayload
    start: int
    stop: int
    retained: bool = False


class Reader:
    """Reads into buffers that are reused in the next round. For one thread at a time; `close` ends its threads."""

    def __init__(self) -> None:
        self._requests = 0
        self._downloaded_bytes = 0
        self._buffers: list[memoryview] = []
        self._pool: BackgroundThreads | None = None

    @property
    def traffic(self) -> Traffic:
        """The total cost so far."""
        return Traffic(self._requests, self._downloaded_bytes)

    @property
    def allocated_bytes(self) -> int:
        """The size of all buffers."""
        return sum(map(len, self._buffers))

    def close(self) -> None:
        """End the threads and drop the buffers; the reader can still be used."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None
        self._buffers.clear()

    def read(self, store: Store, requests: Sequence[Request]) -> Generator[memoryview]:
        """The verified bytes of each request, in order.

        Each view is valid until the next one is requested, that of a retained request until the next retained one is;
        the caller may write into it. Needs two buffers more than requests in flight, however many requests there are.
        Raises Corrupt naming key, owner and block if a block is still wrong after REPEATS more reads, or if the object
        is absent or short; Invalid for a sound object with other content. A caller that stops early must close the
        generator, which waits for the requests in flight.
        """
        for remote in {id(request.remote): request.remote for request in requests}.values():
            check_header_size(remote.part, remote.key)
        spans = [_span_of(request) for request in requests]
        size = max((span.stop - span.start for span in spans), default=0)
        streams = min(store.profile.streams, MAX_STREAMS, len(requests))
        if streams > 1:
            yield from self._read_ahead(store, requests, spans, streams, self._ring(streams + 2, size))
            return
        ring = self._ring(2, size)
        for request, span in zip(requests, spans, strict=True):
            buffer = ring[request.retained]
            yield self._verified(store, request, span, buffer, _fetched(store, request.remote, span, buffer))

    def header(self, store: Store, remote: RemotePayload) -> Header:
        """Read and check only the header of an object, and save it in `remote`. Raises like `read`."""
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
        """While `streams` buffers are being filled, the caller uses the last one and the last retained one."""
        if self._pool is None:
            self._pool = BackgroundThreads(MAX_STREAMS, "skerry-read")
        free, in_use = list(ring), dict[bool, memoryview]()
        in_flight: deque[tuple[memoryview, Future[int]]] = deque()
        submitted = 0
        try:
            for position, (request, span) in enumerate(zip(requests, spans, strict=True)):
                # The views that this request ends: the last one, unless it is retained, and the one that it replaces.
                free.extend(in_use.pop(retained) for retained in {False, request.retained} & in_use.keys())
                while submitted < min(len(requests), position + streams + 1):
                    ahead = requests[submitted].remote, spans[submitted], free.pop()
                    in_flight.append((ahead[-1], self._pool.submit(_fetched, store, *ahead)))
                    submitted += 1
                buffer, fetched = in_flight.popleft()
                in_use[request.retained] = buffer
                yield self._verified(store, request, span, buffer, fetched.result())
        finally:
            for _, future in in_flight:
                future.cancel()
            wait([future for _, future in in_flight])

    def _verified(self, store: Store, request: Request, span: Span, buffer: memoryview, length: int) -> memoryview:
        """The verified body bytes of the request; the first `length` bytes of `span` are in `buffer`."""
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

    def _header(self, store: Store, remote: RemotePayload, buffer: memoryview, length: int) -> Header:
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
                remote.ahead = None
                length = _fetched(store, remote, span, buffer)
            else:
                return remote.header
        raise AssertionError("unreachable: the last repeat returns or raises")

    def _repair(self, store: Store, remote: RemotePayload, number: int, block: memoryview, digest: str) -> None:
        """Read a damaged block again, in place."""
        remote.ahead = None
        start = remote.part.header_bytes + number * BLOCK_BYTES
        damage = f"bytes={len(block)}"
        for _ in range(REPEATS):
            length = _fetched(store, remote, Span(start, start + len(block)), block)
            self._count(length)
            if length < len(block):
                damage = f"truncated to {length} of {len(block)} bytes"
                continue
            if xxhash.xxh3_128_hexdigest(block) == digest:
                return
            damage = f"digest={xxhash.xxh3_128_hexdigest(block)} expected={digest}"
        raise Corrupt(f"payload is damaged: key={remote.key} {remote.owner} block={number} {damage}")

    def _count(self, length: int) -> None:
        self._requests += 1
        self._downloaded_bytes += length

    def _ring(self, count: int, size: int) -> list[memoryview]:
        """The first `count` buffers, each of at least `size` bytes. Untouched pages cost nothing."""
        for position in range(count):
            if position == len(self._buffers):
                self._buffers.append(memoryview(b""))
            if len(self._buffers[position]) < size:
                # A mapping starts at a page, so bodies keep their alignment, which makes vector loads faster.
                self._buffers[position] = memoryview(mmap.mmap(-1, size))
        return self._buffers[:count]


def _span_of(request: Request) -> Span:
    """The bytes of the object to read, including the header if it is not known yet."""
    before = request.remote.part.header_bytes
    bare = request.start > 0 or request.remote.header is not None
    return Span(before + request.start if bare else 0, before + request.stop)


def _fetched(store: Store, remote: RemotePayload, span: Span, buffer: memoryview) -> int:
    """Read `span` into the start of `buffer`. Returns how many bytes the object has of it. Runs in any thread.

    A copy's store that refuses, or is gone, is no fault of this replica: Corrupt, as a copy that is damaged.
    """
    if (ahead := remote.ahead) is not None:
        data = ahead[span.start : span.stop]
        buffer[: len(data)] = data
        return len(data)
    try:
        view = read_existing(remote.copy or store, remote.key, span, buffer[: span.stop - span.start])
    except (Unauthorized, Invalid) as error:
        if remote.copy is None:
            raise
        raise Corrupt(f"no copy of {remote.key} {remote.owner}: {remote.copy.uri} cannot be read: {error}") from error
    if view is None:
        raise Corrupt(f"payload is absent: key={remote.key} {remote.owner}")
    return len(view)
