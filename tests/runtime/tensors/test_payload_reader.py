"""Reader over a store that damages, shortens or delays its results."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch
from tests.runtime.tensors.payloads import BusyStore, flipping, index_for, publish

from skerry.runtime.errors import Corrupt, Invalid, Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES
from skerry.runtime.tensors.payload_reader import Reader, RemotePayload, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store.interface import Span

PIECE = 2 * BLOCK_BYTES


@pytest.fixture(params=[1, 4], ids=["inline", "read ahead"])
def streams(request: pytest.FixtureRequest) -> int:
    return request.param


def publish_payload(store: BusyStore, elements: int = 1_500_000) -> tuple[RemotePayload, list[Request], bytes]:
    """Store a contribution. Returns its object, the requests for all of it, and the expected bytes."""
    tensors = [torch.randn(elements, generator=torch.Generator().manual_seed(1))]
    index = index_for(tensors)
    source = publish(store, "a", tensors, index)
    part = source.parts[0]
    remote = RemotePayload(keys.payload(0, "a", part.digest), part, index, 0, "slot=a")
    body = index.parts[0].body_bytes
    requests = [Request(remote, start, min(start + PIECE, body)) for start in range(0, body, PIECE)]
    return remote, requests, bytes(tensors[0].numpy().tobytes())


def read_all(store: BusyStore, requests: Sequence[Request], reader: Reader | None = None) -> bytes:
    reader = reader or Reader()
    try:
        with closing(reader.read(store, requests)) as bodies:
            return b"".join(map(bytes, bodies))
    finally:
        reader.close()


def test_pieces_are_verified_and_in_order(streams: int) -> None:
    store = BusyStore(streams=streams)
    remote, requests, expected = publish_payload(store)
    reader = Reader()
    assert read_all(store, requests, reader) == expected
    assert store.reads == reader.traffic.requests == len(requests), "the header is read with the first piece"
    assert reader.traffic.downloaded_bytes == remote.part.total_bytes


def test_buffers_are_reused_in_the_next_round(streams: int) -> None:
    store = BusyStore(streams=streams)
    remote, requests, _ = publish_payload(store)
    reader = Reader()
    allocated: list[int] = []
    for _ in range(2):
        for _ in reader.read(store, requests):
            pass
        allocated.append(reader.allocated_bytes)
    buffers = 2 if streams == 1 else min(streams, len(requests)) + 2
    assert allocated == [buffers * (remote.part.header_bytes + PIECE)] * 2
    reader.close()


def test_retained_piece_stays_valid_until_the_next_retained_piece(streams: int) -> None:
    store = BusyStore(streams=streams)
    _, requests, _ = publish_payload(store, 9 * PIECE // 4)
    requests = [request._replace(retained=position % 3 == 1) for position, request in enumerate(requests)]
    assert sum(request.retained for request in requests) == 3
    retained: tuple[memoryview, bytes] | None = None
    for request, view in zip(requests, Reader().read(store, requests), strict=True):
        if request.retained:
            retained = view, bytes(view)
        elif retained is not None:
            assert bytes(retained[0]) == retained[1]


def test_header_and_block_damaged_in_transfer_are_read_again_alone(streams: int) -> None:
    spans = []

    def spoil(_number: int, _key: str, span: Span | None, view: memoryview) -> None:
        spans.append(span)
        if len(view) > BLOCK_BYTES + 100:
            view[BLOCK_BYTES + 99 if span.start > 0 else 30] ^= 1

    store = BusyStore(streams=streams, spoil=spoil)
    remote, requests, expected = publish_payload(store)
    assert read_all(store, requests) == expected
    repairs = [span for span in spans if span.stop - span.start == BLOCK_BYTES]
    assert [(span.start - remote.part.header_bytes) // BLOCK_BYTES for span in repairs] == [3]


@pytest.mark.parametrize("position", [0, 40, -1])
def test_damaged_object_is_corrupt_naming_key_slot_and_block(streams: int, position: int) -> None:
    store = BusyStore(streams=streams)
    remote, requests, _ = publish_payload(store)
    store.spoil = flipping(position % remote.part.total_bytes)
    message = r"slot=a block=5" if position == -1 else "header is damaged"
    with pytest.raises(Corrupt, match=message) as error:
        read_all(store, requests)
    assert remote.key in str(error.value)


def test_piece_with_a_damaged_block_is_not_returned(streams: int) -> None:
    store = BusyStore(streams=streams)
    remote, requests, expected = publish_payload(store)
    store.spoil = flipping(remote.part.header_bytes + 3 * BLOCK_BYTES)
    reader, got = Reader(), list[bytes]()
    with pytest.raises(Corrupt, match="block=3"):
        got.extend(map(bytes, reader.read(store, requests)))
    assert b"".join(got) == expected[:PIECE]
    reader.close()


@pytest.mark.parametrize("missing", [1, 100, BLOCK_BYTES + 5])
def test_truncated_object_is_corrupt(streams: int, missing: int) -> None:
    def spoil(_number: int, _key: str, span: Span | None, view: memoryview) -> int:
        return max(0, min(len(view), remote.part.total_bytes - missing - span.start))

    store = BusyStore(streams=streams, spoil=spoil)
    remote, requests, _ = publish_payload(store)
    with pytest.raises(Corrupt, match="truncated"):
        read_all(store, requests)


def test_absent_object_is_corrupt_naming_key_and_slot(streams: int) -> None:
    store = BusyStore(streams=streams)
    remote, requests, _ = publish_payload(store)
    store.delete(remote.key)
    with pytest.raises(Corrupt, match=f"absent: key={remote.key} slot=a"):
        read_all(store, requests)


def test_store_error_is_raised_after_requests_in_flight_ended() -> None:
    def spoil(number: int, _key: str, _span: Span | None, _view: memoryview) -> None:
        if number == 2:
            raise Retryable("the store is away")

    store = BusyStore(streams=4, spoil=spoil)
    _, requests, _ = publish_payload(store)
    reader = Reader()
    bodies = reader.read(store, requests)
    with pytest.raises(Retryable, match="away"):
        list(bodies)
    reads = store.reads
    reader.close()
    assert store.reads == reads


@pytest.mark.parametrize("kind", [Unauthorized, Invalid])
def test_refusal_by_the_store_of_a_copy_is_damage(streams: int, kind: type[Exception]) -> None:
    def refuse(*_: object) -> None:
        raise kind("no")

    store, refusing = BusyStore(streams=streams), BusyStore(streams=streams, spoil=refuse)
    remote, requests, _ = publish_payload(store)
    publish_payload(refusing)
    with pytest.raises(kind, match=r"^no$"):
        read_all(refusing, requests)
    remote.copy = refusing
    with pytest.raises(Corrupt, match=rf"no copy of {remote.key} slot=a: {refusing.uri} cannot be read: no"):
        read_all(store, requests)


def test_close_waits_for_requests_in_flight() -> None:
    gate, entered = threading.Event(), threading.Event()

    def spoil(_number: int, _key: str, span: Span | None, _view: memoryview) -> None:
        if span is not None and span.start > 0:
            entered.set()
            gate.wait(300)

    store = BusyStore(streams=4, spoil=spoil)
    _, requests, _ = publish_payload(store)
    reader = Reader()
    bodies = reader.read(store, requests)
    next(bodies)
    assert entered.wait(300)
    closing_thread = threading.Thread(target=bodies.close)
    closing_thread.start()
    closing_thread.join(0.1)
    assert closing_thread.is_alive(), "a read still writes into a buffer"
    gate.set()
    closing_thread.join(300)
    assert not closing_thread.is_alive()
    reader.close()


def test_impossible_header_size_is_refused_before_any_read(streams: int) -> None:
    store = BusyStore(streams=streams)
    remote, requests, _ = publish_payload(store)
    remote.part = remote.part.model_copy(update={"header_bytes": 1 << 40})
    reader = Reader()
    with pytest.raises(Corrupt, match="bad size of header"):
        read_all(store, requests, reader)
    assert store.reads == 0


def test_first_request_must_include_the_header() -> None:
    store = BusyStore()
    _, requests, _ = publish_payload(store)
    with pytest.raises(Invalid, match="must start at 0"):
        read_all(store, requests[1:])


def test_header_read_alone_is_not_read_again() -> None:
    store = BusyStore()
    remote, requests, expected = publish_payload(store)
    reader = Reader()
    header = reader.header(store, remote)
    assert header is remote.header
    assert reader.traffic.downloaded_bytes == remote.part.header_bytes
    assert read_all(store, requests, reader) == expected
    assert reader.traffic.downloaded_bytes == remote.part.total_bytes
