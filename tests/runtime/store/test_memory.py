from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.runtime.store.conformance import StoreConformance
from tests.support.clocks import FakeClock

from skerry.runtime.store.memory import MemoryStore, memory_store

if TYPE_CHECKING:
    from collections.abc import Callable


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def peek(self, store: MemoryStore) -> Callable[[str], bytes | None]:
        return lambda key: store._objects[key][0] if key in store._objects else None


def test_a_name_is_the_same_store_for_the_whole_process() -> None:
    memory_store("shared-name").create("a", b"1")
    assert memory_store("shared-name").read("a") == b"1"
    assert memory_store("another-name").read("a") is None


def test_the_injected_clock_dates_the_objects() -> None:
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    store.replace("heart", b"1")
    clock.advance(5.0)
    store.replace("later", b"1")
    earlier, later = store.list("")
    assert later.modified - earlier.modified == 5.0
