"""Objects that are read before the decision: what is used of them, and that damage never is."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tests.runtime.tensors.payloads import BusyStore, flipping, index_for, publish

from skerry.runtime.log import keys
from skerry.runtime.tensors import prefetch
from skerry.runtime.tensors.prefetch import Prefetch
from skerry.runtime.tensors.reduce import Source, average
from skerry.runtime.tensors.sum_by_pieces import Workspace

if TYPE_CHECKING:
    import pytest

    from skerry.runtime.store.interface import Span
    from skerry.runtime.store.memory import MemoryStore


class WatchedStore(BusyStore):
    """Shows when a read has begun: an object whose read has not begun is not waited for."""

    def __init__(self) -> None:
        super().__init__(streams=2)
        self.begun = threading.Semaphore(0)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self.begun.release()
        return super().read(key, span, into)

    def wait_for_reads(self, count: int) -> None:
        assert all(self.begun.acquire(timeout=300) for _ in range(count))


def members(store: MemoryStore) -> tuple[list[Source], list[torch.Tensor]]:
    """Two contributions in the store, and the tensors of their average."""
    tensors = [torch.arange(300_000, dtype=torch.float32)]
    index = replace(index_for(tensors), layout=2)
    sources = [replace(publish(store, slot, tensors, index), local=None) for slot in ("a", "b")]
    return sources, tensors


def test_average_reads_nothing_that_was_prefetched() -> None:
    store = WatchedStore()
    sources, tensors = members(store)
    ahead = Prefetch(store)
    for source in sources:
        ahead.offer(0, source.slot, source.parts)
        store.wait_for_reads(len(source.parts))
    outputs = [torch.zeros_like(tensor) for tensor in tensors]
    with closing(Workspace()) as workspace:
        workspace.ahead = ahead.finish()
        assert len(workspace.ahead) == sum(len(source.parts) for source in sources)
        before = store.reads
        average(store, sources, replace(index_for(tensors), layout=2), outputs, workspace=workspace)
    assert store.reads == before
    assert torch.equal(outputs[0], tensors[0])


def test_damage_in_what_was_prefetched_is_read_again() -> None:
    store = WatchedStore()
    sources, tensors = members(store)
    store.spoil = flipping(sources[0].parts[0].header_bytes + 5, keys.payload(0, "a", sources[0].parts[0].digest))
    ahead = Prefetch(store)
    ahead.offer(0, "a", sources[0].parts)
    store.wait_for_reads(len(sources[0].parts))
    data = ahead.finish()
    store.spoil = None
    outputs = [torch.zeros_like(tensor) for tensor in tensors]
    with closing(Workspace()) as workspace:
        workspace.ahead = data
        average(store, sources, replace(index_for(tensors), layout=2), outputs, workspace=workspace)
    assert torch.equal(outputs[0], tensors[0])


def test_prefetch_holds_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WatchedStore()
    sources, _ = members(store)
    monkeypatch.setattr(prefetch, "LIMIT_BYTES", sum(part.total_bytes for part in sources[0].parts))
    ahead = Prefetch(store)
    ahead.offer(0, "a", sources[0].parts)
    store.wait_for_reads(len(sources[0].parts))
    ahead.offer(0, "b", sources[1].parts)
    assert set(ahead.finish()) == {keys.payload(0, "a", part.digest) for part in sources[0].parts}


def test_prefetch_reads_at_most_the_recorded_size() -> None:
    store = WatchedStore()
    sources, _ = members(store)
    (part, *_) = sources[0].parts
    ahead = Prefetch(store)
    ahead.offer(0, "a", [part.model_copy(update={"total_bytes": part.total_bytes - 1})])
    store.wait_for_reads(1)
    assert [len(data) for data in ahead.finish().values()] == [part.total_bytes - 1]


def test_absent_object_is_left_to_the_average() -> None:
    store = WatchedStore()
    sources, _ = members(store)
    ahead = Prefetch(store)
    ahead.offer(1, "a", sources[0].parts)
    store.wait_for_reads(1)
    assert ahead.finish() == {}
