"""Checks of contributions before a proposal: how many headers are read, and that each shows other tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.protocol import contribution
from tests.runtime.tensors.payloads import BusyStore, index_for, publish

from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.contribution_readability import find_fault

if TYPE_CHECKING:
    from skerry.runtime.log.records import Contribution
    from skerry.runtime.tensors.byte_layout import Index


@pytest.fixture
def index() -> Index:
    return replace(index_for([torch.zeros(2_000_000)]), layout=2)


def published(store: BusyStore, index: Index, **changes: object) -> Contribution:
    """A contribution of "a" to round 0."""
    (spec,) = index.tensors
    return contribution("a", round=0, parts=publish(store, "a", [torch.ones(spec.shape)], index).parts, **changes)


@pytest.mark.parametrize(("most", "reads"), [(None, 31), (40, 31), (16, 16), (4, 4), (1, 1)])
def test_at_most_so_many_headers_are_read(index: Index, most: int | None, reads: int) -> None:
    store = BusyStore()
    record = published(store, index)
    before = store.reads
    assert len(record.parts) == 31
    assert find_fault(store, record, record.parts, index, most=most) is None
    assert store.reads - before == reads


def test_rounds_take_turns_with_the_headers(index: Index) -> None:
    seen = list[str]()
    store = BusyStore(spoil=lambda _number, key, _span, _view: seen.append(key))
    record = published(store, index)
    for number in range(4):
        for part in record.parts:
            data = MemoryStore.read(store, keys.payload(0, "a", part.digest))
            store.create(keys.payload(number, "a", part.digest), data or b"")
        later = record.model_copy(update={"round": number})
        assert find_fault(store, later, record.parts, index, most=8) is None
    assert sorted(key.rpartition("/")[2] for key in seen) == sorted(part.digest for part in record.parts)


def test_each_header_shows_other_tensors(index: Index) -> None:
    store = BusyStore()
    record = published(store, index)
    other = replace(index, tensors=(replace(index.tensors[0], name="other"),))
    for number in range(5):
        moved = record.model_copy(update={"round": number})
        for part in record.parts:
            store.create(
                keys.payload(number, "a", part.digest),
                MemoryStore.read(store, keys.payload(0, "a", part.digest)) or b"",
            )
        assert "another tensor" in (find_fault(store, moved, record.parts, other, most=1) or "")
