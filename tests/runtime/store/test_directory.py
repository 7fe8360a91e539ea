from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.runtime.store.conformance import StoreConformance

from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.store import Span
from skerry.runtime.store.directory import MAX_BUFFERS, STALE_S, TEMPORARY, DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 64 << 20
# Writes one object after the other until it is killed.
WRITER = f"""
import itertools, sys
from pathlib import Path
from skerry.runtime.store.directory import DirectoryStore
store = DirectoryStore(Path(sys.argv[1]))
parts = [bytes([number]) * (1 << 20) for number in range({SIZE >> 20})]
for number in itertools.count():
    store.create(f"payloads/{{number}}", parts)
    store.delete(f"payloads/{{number - 1}}") if number else None
"""


class TestDirectoryStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> DirectoryStore:
        return DirectoryStore(tmp_path / "run")

    @pytest.fixture
    def peek(self, tmp_path: Path) -> Callable[[str], bytes | None]:
        def look(key: str) -> bytes | None:
            path = tmp_path / "run" / key
            return path.read_bytes() if path.exists() else None

        return look


def _temporaries(root: Path) -> list[Path]:
    return list((root / TEMPORARY).iterdir()) if (root / TEMPORARY).exists() else []


def _kill_in_mid_write(root: Path) -> bool:
    """Start a writer and SIGKILL it once a temporary file has some bytes but not all; whether that file is left."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(root)], env=environment)
    deadline = time.monotonic() + 30
    try:
        while not any(0 < size < SIZE for size in _sizes(root)):
            assert time.monotonic() < deadline, "the writer never began"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    return any(0 < size < SIZE for size in _sizes(root))


def _sizes(root: Path) -> list[int]:
    sizes: list[int] = []
    for file in _temporaries(root):
        with suppress(FileNotFoundError):
            sizes.append(file.stat().st_size)
    return sizes


def test_a_killed_writer_leaves_nothing_visible(tmp_path: Path) -> None:
    roots = (tmp_path / str(attempt) for attempt in range(10))
    # A writer that finishes before the kill leaves nothing to look at: the next one is tried.
    root = next((root for root in roots if _kill_in_mid_write(root)), None)
    assert root is not None, "the writer always finished before the kill"
    store = DirectoryStore(root)
    found = store.list("")
    assert all(entry.key.startswith("payloads/") and entry.size == SIZE for entry in found)
    for entry in found:
        assert store.read(entry.key, Span(SIZE - 2, SIZE)) == bytes([(SIZE >> 20) - 1]) * 2
    assert store.create("payloads/next", b"goes on")


def test_what_a_killed_writer_left_is_swept_once_it_is_stale(tmp_path: Path) -> None:
    folder = tmp_path / TEMPORARY
    folder.mkdir()
    stale, recent = folder / "1-0", folder / "2-0"
    for file, age in ((stale, STALE_S + 60), (recent, STALE_S - 60)):
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age, time.time() - age))
    DirectoryStore(tmp_path).create("a", b"1")
    assert _temporaries(tmp_path) == [recent]


def test_a_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create("a", b"1")
    store.create("a", b"2")
    store.replace("a", b"3")
    assert _temporaries(tmp_path) == []


def test_a_durable_store_syncs_the_object_and_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def note(file: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{file}").readlink()))

    monkeypatch.setattr(os, "fsync", note)
    DirectoryStore(tmp_path, durable=True).create("a/b", b"1")
    assert synced == [str(tmp_path / TEMPORARY / f"{os.getpid()}-0"), str(tmp_path / "a")]
    DirectoryStore(tmp_path).create("a/c", b"1")
    assert len(synced) == 2


def test_more_buffers_than_one_writev_takes_are_all_written(tmp_path: Path) -> None:
    parts = [bytes([number % 256]) * (number % 5) for number in range(2 * MAX_BUFFERS + 17)]
    store = DirectoryStore(tmp_path)
    store.create("a", parts)
    assert store.read("a") == b"".join(parts)


def test_a_write_that_the_kernel_cuts_short_is_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def short(file: int, views: list[memoryview]) -> int:
        return real(file, [views[0][:3]])

    monkeypatch.setattr(os, "writev", short)
    store = DirectoryStore(tmp_path)
    store.create("a", [b"0123456789", b"abcdefg"])
    assert store.read("a") == b"0123456789abcdefg"


def test_a_read_that_the_kernel_cuts_short_is_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    store.create("a", b"0123456789")
    real = os.preadv

    def short(file: int, views: list[memoryview], offset: int) -> int:
        return real(file, [views[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert store.read("a", Span(1, 9)) == b"12345678"
    assert store.read("a", Span(1, 99)) == b"123456789"


def test_a_writer_never_takes_the_temporary_file_of_another(tmp_path: Path) -> None:
    (tmp_path / TEMPORARY).mkdir()
    taken = tmp_path / TEMPORARY / f"{os.getpid()}-0"
    taken.write_bytes(b"another container has the same process number")
    assert DirectoryStore(tmp_path).create("a", b"mine")
    assert taken.read_bytes() == b"another container has the same process number"


def test_a_key_cannot_be_the_folder_of_another(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create("a/b", b"1")
    with pytest.raises(Invalid, match="folder"):
        store.create("a", b"2")
    with pytest.raises(Invalid, match="folder"):
        store.create("a/b/c", b"2")
    assert store.read("a") is None
    assert store.read("a/b/c") is None


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run")
    assert store.read("a") is None
    assert list(store.list("")) == []
    store.delete("a")
    assert not (tmp_path / "run").exists()


def test_files_that_no_key_can_name_are_not_listed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create("a", b"1")
    (tmp_path / "a file of somebody else").touch()
    assert [entry.key for entry in store.list("")] == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_must_not_be_written_is_unauthorized(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(Unauthorized, match="refuses"):
        DirectoryStore(tmp_path / "run").create("a", b"1")


def test_a_name_that_was_renamed_away_is_left_to_whoever_takes_it_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, another = DirectoryStore(tmp_path), DirectoryStore(tmp_path)  # one process number, as in two containers
    taken: list[Path] = []
    monkeypatch.setattr(mine, "_settle", lambda _: taken.append(Path(another._write_temporary([memoryview(b"b")]))))
    mine.replace("a", b"a")
    assert taken[0].read_bytes() == b"b"
    assert taken[0].name == f"{os.getpid()}-0"
