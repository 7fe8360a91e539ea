"""The store in memory: the conformance suite, shared names and the injected clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.runtime.store.conformance import StoreConformance
from tests.support.clocks import FakeClock

from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from tests.runtime.store.conformance import Peek


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def peek(self, store: MemoryStore) -> Peek:
        def look(key: str) -> bytes | None:
            body = store.read(key)
            return None if body is None else bytes(body)

        return look


def test_injected_clock_sets_the_modification_times() -> None:
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    store.replace("heart", b"1")
    clock.advance(5.0)
    store.replace("later", b"1")
    earlier, later = store.list("")
    assert later.modified - earlier.modified == 5.0
