"""The conformance suite of `Store`: a test module of an implementation subclasses `StoreConformance`.

It tests the implementation without the retrying wrapper, which would hide errors. `peek` reads what is stored without
the store under test.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import TypeAlias

import pytest
from tests.kit.stores import race

from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.store import Entry, Span, Store
from skerry.runtime.store.probe import probe

Peek: TypeAlias = Callable[[str], bytes | memoryview | None]

# Sorted as plain strings, which differs from the order of a walk through folders and from that of a naive join.
KEYS = ["a-b/x", "a.b", "a/b", "a/b-c", "a/c/d", "a/ca", "a0", "ab/0", "b"]
NOT_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/./b", "a b", "a\n", "ä", "a\\b", "~", "a?"]


class StoreConformanceOfOneWriter:
    """One guarantee of `Store` per test: those that a single writer can see."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def peek(self) -> Peek:
        """Returns what is stored under a key, without the store under test."""
        raise NotImplementedError

    def test_object_is_read_and_listed_as_soon_as_its_write_returned(self, store: Store) -> None:
        for number in range(20):
            assert store.create(f"heartbeats/{number:02d}", b"x" * number)
            assert store.read(f"heartbeats/{number:02d}") == b"x" * number
            assert [entry.size for entry in store.list("heartbeats/")] == list(range(number + 1))

    def test_create_of_an_existing_key_changes_nothing(self, store: Store, peek: Peek) -> None:
        assert store.create("run.json", b"first") is True
        assert store.create("run.json", b"second, longer") is False
        assert peek("run.json") == b"first"

    def test_buffers_of_any_type_become_one_object_in_order(self, store: Store, peek: Peek) -> None:
        numbers = array.array("f", [1.0, 2.0])
        parts = [b"head", numbers, bytearray(), memoryview(bytearray(b"--slice--"))[2:7], b"tail"]
        assert store.create("parts", parts)
        assert peek("parts") == b"head" + numbers.tobytes() + b"slice" + b"tail"

    def test_large_object_of_many_buffers_is_read_whole(self, store: Store) -> None:
        parts = [bytes([number % 251]) * 10_007 for number in range(300)]
        assert store.create("payloads/many", parts)
        assert store.read("payloads/many") == b"".join(parts)

    def test_stored_bytes_do_not_change_with_the_callers_buffer(self, store: Store) -> None:
        buffer = bytearray(b"before")
        store.create("created", buffer)
        store.replace("replaced", buffer)
        buffer[:] = b"after!"
        assert store.read("created") == store.read("replaced") == b"before"

    def test_empty_object_exists(self, store: Store, peek: Peek) -> None:
        assert store.create("empty", b"") is True
        assert store.create("empty", b"") is False
        assert peek("empty") == store.read("empty") == store.read("empty", Span(0, 5)) == b""
        assert [entry.size for entry in store.list("empty")] == [0]

    def test_replace_overwrites_any_object(self, store: Store, peek: Peek) -> None:
        store.replace("heart", b"one")
        store.replace("heart", [b"tw", b"o, longer"])
        assert peek("heart") == b"two, longer"
        store.replace("heart", b"")
        assert store.read("heart") == b""

    def test_absent_object_is_none_and_can_be_deleted(self, store: Store) -> None:
        for span in (None, Span(0, 10), Span(3, 3)):
            assert store.read("nothing", span) is None
        store.delete("nothing")
        store.delete("nothing/below/nothing")
        buffer = bytearray(b"untouched")
        assert store.read("nothing", Span(0, 4), into=memoryview(buffer)) is None
        assert buffer == b"untouched"

    def test_key_of_a_deleted_object_can_be_created(self, store: Store) -> None:
        store.create("payloads/x", b"one")
        store.delete("payloads/x")
        assert store.read("payloads/x") is None
        assert list(store.list("payloads/")) == []
        assert store.create("payloads/x", b"two") is True

    def test_span_past_the_end_returns_the_existing_bytes(self, store: Store) -> None:
        store.create("digits", b"0123456789")
        spans = {(0, 4): b"0123", (4, 10): b"456789", (9, 100): b"9", (8, 1 << 40): b"89"}
        for span, expected in (spans | dict.fromkeys([(10, 20), (5 << 32, 6 << 32), (3, 3)], b"")).items():
            assert store.read("digits", Span(*span)) == expected

    @pytest.mark.parametrize("span", [Span(-1, 3), Span(4, 3), Span(-5, -1)])
    def test_reversed_or_negative_span_is_invalid(self, store: Store, span: Span) -> None:
        store.create("digits", b"0123456789")
        with pytest.raises(Invalid, match="span"):
            store.read("digits", span)

    def test_read_writes_only_its_bytes_into_the_callers_buffer(self, store: Store) -> None:
        store.create("digits", b"0123456789")
        buffer = bytearray(b"." * 16)
        view = store.read("digits", Span(2, 6), into=memoryview(buffer)[4:])
        assert view == b"2345"
        assert buffer == b"....2345........"
        buffer[4:8] = b"seen"
        assert view == b"seen"

    def test_whole_object_is_read_into_a_longer_buffer(self, store: Store) -> None:
        body = bytes(range(256)) * 8192
        store.create("payloads/two", body)
        buffer = bytearray(len(body) + 7)
        assert store.read("payloads/two", into=memoryview(buffer)) == body
        assert buffer[: len(body)] == body

    def test_buffer_must_be_writable_and_hold_the_existing_bytes(self, store: Store) -> None:
        store.create("digits", b"0123456789")
        assert store.read("digits", Span(6, 1 << 40), into=memoryview(bytearray(4))) == b"6789"
        with pytest.raises(Invalid, match="buffer"):
            store.read("digits", into=memoryview(bytearray(9)))
        with pytest.raises(Invalid, match="read-only"):
            store.read("digits", Span(0, 4), into=memoryview(b"0123456789"))

    def test_listing_is_sorted_as_plain_strings_over_all_pages(self, store: Store) -> None:
        for key in reversed(KEYS):
            store.create(key, key.encode())
        entries = list(store.list(""))
        assert all(isinstance(entry, Entry) for entry in entries)
        assert [entry[:2] for entry in entries] == [(key, len(key)) for key in sorted(KEYS)]

    def test_prefix_and_after_match_as_plain_strings(self, store: Store) -> None:
        for key in KEYS:
            store.create(key, b"")
        for prefix in ("a", "a/", "a/b", "a/c", "a-", "a-b", "a-b/", "b", "c", "a/c/d", "0"):
            assert [entry.key for entry in store.list(prefix)] == [key for key in KEYS if key.startswith(prefix)]
        for after in ("", "a", "a-b/x", "a/b", "a/b-c", "a/c", "a/c/d", "a1", "b", "zz"):
            assert [entry.key for entry in store.list("", after)] == [key for key in KEYS if key > after]
            below = [key for key in KEYS if key.startswith("a/") and key > after]
            assert [entry.key for entry in store.list("a/", after)] == below

    def test_malformed_key_is_invalid(self, store: Store) -> None:
        for key in NOT_KEYS:
            for call in (store.read, store.delete, lambda k: store.create(k, b""), lambda k: store.replace(k, b"")):
                with pytest.raises(Invalid, match="key"):
                    call(key)

    def test_unusual_key_is_valid(self, store: Store) -> None:
        unusual = sorted([".hidden", "a/.tmp/x", "...", "b..b", "-", "_", "A/Z.09"])
        for key in unusual:
            assert store.create(key, key.encode())
            assert store.read(key) == key.encode()
        assert [entry.key for entry in store.list("")] == unusual

    def test_probe_accepts_the_store_and_leaves_nothing(self, store: Store) -> None:
        probe(store, SystemClock())
        assert list(store.list("")) == []


class StoreConformance(StoreConformanceOfOneWriter):
    """All guarantees of `Store`."""

    @pytest.mark.parametrize(("writers", "size", "attempts"), [(8, 1024, 25), (4, 8 << 20, 3)], ids=["small", "large"])
    def test_of_racing_creates_exactly_one_wins(
        self, store: Store, peek: Peek, writers: int, size: int, attempts: int
    ) -> None:
        for attempt in range(attempts):
            key = f"decisions/{attempt:08d}.json"
            bodies = [bytes([writer]) * size for writer in range(writers)]
            (winner,) = race([store] * writers, key, bodies)
            assert peek(key) == bodies[winner]
