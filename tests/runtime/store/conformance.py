"""What every store must pass. A test module of an engine subclasses `StoreConformance` and gives it fresh stores.

The engine itself is tested, not the retrying wrapper, so that nothing is hidden. `peek` looks behind its back.
"""

from __future__ import annotations

import array
import threading
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING

import pytest

from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.store import Entry, Span
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.s3server import S3Server

    from skerry.runtime.store import Store

WRITERS = 8
# Names that a bucket takes and that no key can be.
FOREIGN = ["r-1 (copy).json", "r-1.json~", "ä.json", "a+b.json", "sub folder/r-1.json"]
# Sorted as plain strings, which is neither the order of a walk through folders nor that of a naive join.
KEYS = ["a-b/x", "a.b", "a/b", "a/b-c", "a/c/d", "a/ca", "a0", "ab/0", "b"]


def put(server: S3Server, key: str) -> None:
    """Make an object in `bucket` as another tool would."""
    url = f"{server.endpoint}/bucket/{urllib.parse.quote(key)}"
    with urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method="PUT")) as answer:  # noqa: S310
        assert answer.status == 200


def race(store: Store, key: str, bodies: list[bytes]) -> list[int]:
    """The writers, by number, to whom `create` said True; all start at once."""
    start = threading.Barrier(len(bodies))
    won: list[int] = []
    failed: list[BaseException] = []

    def write(number: int) -> None:
        start.wait()
        try:
            if store.create(key, bodies[number]):
                won.append(number)
        except BaseException as error:  # noqa: BLE001  a thread's entry: the error is raised by the test
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return won


class StoreConformance:
    """One promise of `Store` per test. `races_large` is False only where the server, not the store, cannot hold it."""

    races_large = True

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def peek(self) -> Callable[[str], bytes | None]:
        """What is stored under a key, seen without the store under test."""
        raise NotImplementedError

    def test_of_racing_small_creates_one_wins_and_its_bytes_stay(
        self, store: Store, peek: Callable[[str], bytes | None]
    ) -> None:
        for attempt in range(25):
            key = f"decisions/{attempt:08d}.json"
            bodies = [bytes([writer]) * 1024 for writer in range(WRITERS)]
            (winner,) = race(store, key, bodies)
            assert peek(key) == bodies[winner]

    def test_of_racing_large_creates_one_wins_and_its_bytes_stay(
        self, store: Store, peek: Callable[[str], bytes | None]
    ) -> None:
        if not self.races_large:
            pytest.skip("moto looks and writes without a lock: two of 8 MB bodies can both be told that they won")
        bodies = [bytes([writer]) * (8 << 20) for writer in range(4)]
        for attempt in range(3):
            key = f"payloads/{attempt}"
            (winner,) = race(store, key, bodies)
            assert peek(key) == bodies[winner]

    def test_an_object_is_read_and_listed_as_soon_as_its_write_returned(self, store: Store) -> None:
        for number in range(20):
            assert store.create(f"heartbeats/{number:02d}", b"x" * number)
            assert store.read(f"heartbeats/{number:02d}") == b"x" * number
            assert [entry.size for entry in store.list("heartbeats/")] == list(range(number + 1))

    def test_a_create_of_an_existing_key_loses_and_changes_nothing(
        self, store: Store, peek: Callable[[str], bytes | None]
    ) -> None:
        assert store.create("run.json", b"first") is True
        assert store.create("run.json", b"second, longer") is False
        assert peek("run.json") == b"first"

    def test_several_buffers_of_any_type_become_one_object_in_order(
        self, store: Store, peek: Callable[[str], bytes | None]
    ) -> None:
        numbers = array.array("f", [1.0, 2.0])
        base = bytearray(b"--slice--")
        parts = [b"head", numbers, bytearray(), memoryview(base)[2:7], b"tail"]
        assert store.create("parts", parts)
        assert peek("parts") == b"head" + numbers.tobytes() + b"slice" + b"tail"

    def test_a_large_object_of_many_buffers_comes_back_whole(self, store: Store) -> None:
        parts = [bytes([number % 251]) * 10_007 for number in range(300)]
        assert store.create("payloads/many", parts)
        assert store.read("payloads/many") == b"".join(parts)

    def test_what_was_written_does_not_change_with_the_callers_buffer(self, store: Store) -> None:
        buffer = bytearray(b"before")
        store.create("kept", buffer)
        store.replace("heart", buffer)
        buffer[:] = b"after!"
        assert store.read("kept") == b"before"
        assert store.read("heart") == b"before"

    def test_an_empty_object_exists(self, store: Store, peek: Callable[[str], bytes | None]) -> None:
        assert store.create("empty", b"") is True
        assert store.create("empty", b"") is False
        assert peek("empty") == b""
        assert store.read("empty") == b""
        assert store.read("empty", Span(0, 5)) == b""
        assert [entry.size for entry in store.list("empty")] == [0]

    def test_replace_writes_whatever_was_there(self, store: Store, peek: Callable[[str], bytes | None]) -> None:
        store.replace("heart", b"one")
        store.replace("heart", [b"tw", b"o, longer"])
        assert peek("heart") == b"two, longer"
        store.replace("heart", b"")
        assert store.read("heart") == b""

    def test_an_absent_object_is_none_and_its_deletion_a_success(self, store: Store) -> None:
        assert store.read("nothing") is None
        assert store.read("nothing", Span(0, 10)) is None
        assert store.read("nothing", Span(3, 3)) is None
        store.delete("nothing")
        store.delete("nothing/below/nothing")

    def test_a_deleted_object_is_gone_and_its_key_can_be_created(self, store: Store) -> None:
        store.create("payloads/x", b"one")
        store.delete("payloads/x")
        assert store.read("payloads/x") is None
        assert list(store.list("payloads/")) == []
        assert store.create("payloads/x", b"two") is True

    def test_a_span_gives_its_bytes_and_past_the_end_what_is_there(self, store: Store) -> None:
        store.create("digits", b"0123456789")
        assert store.read("digits", Span(0, 4)) == b"0123"
        assert store.read("digits", Span(4, 10)) == b"456789"
        assert store.read("digits", Span(9, 100)) == b"9"
        assert store.read("digits", Span(8, 1 << 40)) == b"89"
        assert store.read("digits", Span(10, 20)) == b""
        assert store.read("digits", Span(5 << 32, 6 << 32)) == b""
        assert store.read("digits", Span(3, 3)) == b""

    @pytest.mark.parametrize("span", [Span(-1, 3), Span(4, 3), Span(-5, -1)])
    def test_a_span_that_runs_backwards_is_refused(self, store: Store, span: Span) -> None:
        store.create("digits", b"0123456789")
        with pytest.raises(Invalid, match="span"):
            store.read("digits", span)

    def test_bytes_land_in_the_callers_buffer_and_nowhere_else_in_it(self, store: Store) -> None:
        store.create("digits", b"0123456789")
        buffer = bytearray(b"." * 16)
        view = store.read("digits", Span(2, 6), into=memoryview(buffer)[4:])
        assert view == b"2345"
        assert buffer == b"....2345........"
        buffer[4:8] = b"seen"
        assert view == b"seen"

    def test_a_whole_object_lands_in_a_longer_buffer(self, store: Store) -> None:
        body = bytes(range(256)) * 8192
        store.create("payloads/two", body)
        buffer = bytearray(len(body) + 7)
        view = store.read("payloads/two", into=memoryview(buffer))
        assert view == body
        assert buffer[: len(body)] == body

    def test_a_span_longer_than_the_buffer_is_read_if_the_object_is_not(self, store: Store) -> None:
        store.create("digits", b"0123456789")
        view = store.read("digits", Span(6, 1 << 40), into=memoryview(bytearray(4)))
        assert view == b"6789"

    def test_a_buffer_that_is_too_small_or_read_only_is_refused(self, store: Store) -> None:
        store.create("digits", b"0123456789")
        with pytest.raises(Invalid, match="buffer"):
            store.read("digits", into=memoryview(bytearray(9)))
        with pytest.raises(Invalid, match="read-only"):
            store.read("digits", Span(0, 4), into=memoryview(b"0123456789"))

    def test_an_absent_object_leaves_the_buffer_alone(self, store: Store) -> None:
        buffer = bytearray(b"untouched")
        assert store.read("nothing", Span(0, 4), into=memoryview(buffer)) is None
        assert buffer == b"untouched"

    def test_a_listing_is_sorted_as_plain_strings_over_all_pages(self, store: Store) -> None:
        for key in reversed(KEYS):
            store.create(key, key.encode())
        found = list(store.list(""))
        assert [entry.key for entry in found] == KEYS == sorted(KEYS)
        assert [entry.size for entry in found] == [len(key) for key in KEYS]
        assert all(isinstance(entry, Entry) for entry in found)

    def test_a_prefix_matches_as_a_plain_string(self, store: Store) -> None:
        for key in KEYS:
            store.create(key, b"")
        for prefix in ("a", "a/", "a/b", "a/c", "a-", "a-b", "a-b/", "b", "c", "a/c/d", "0"):
            assert [entry.key for entry in store.list(prefix)] == [key for key in KEYS if key.startswith(prefix)]

    def test_after_leaves_out_that_key_and_those_before(self, store: Store) -> None:
        for key in KEYS:
            store.create(key, b"")
        for after in ("", "a", "a-b/x", "a/b", "a/b-c", "a/c", "a/c/d", "a1", "b", "zz"):
            assert [entry.key for entry in store.list("", after)] == [key for key in KEYS if key > after]
            below = [key for key in KEYS if key.startswith("a/") and key > after]
            assert [entry.key for entry in store.list("a/", after)] == below

    def test_a_key_that_could_escape_or_be_spelled_twice_is_refused(self, store: Store) -> None:
        for key in (
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "../a",
            "a/..",
            "a/./b",
            "a b",
            "a\n",
            "ä",
            "a\\b",
            "~",
            "a?",
        ):
            with pytest.raises(Invalid, match="key"):
                store.create(key, b"")
            with pytest.raises(Invalid, match="key"):
                store.replace(key, b"")
            with pytest.raises(Invalid, match="key"):
                store.read(key)
            with pytest.raises(Invalid, match="key"):
                store.delete(key)

    def test_an_odd_key_is_an_ordinary_one(self, store: Store) -> None:
        odd = sorted([".hidden", "a/.tmp/x", "...", "b..b", "-", "_", "A/Z.09"])
        for key in odd:
            assert store.create(key, key.encode())
            assert store.read(key) == key.encode()
        assert [entry.key for entry in store.list("")] == odd

    def test_the_start_up_probe_accepts_the_store_and_leaves_nothing(self, store: Store) -> None:
        probe(store, SystemClock())
        assert list(store.list("")) == []
