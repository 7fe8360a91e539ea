"""The store in a folder: killed writers, temporary files, and short reads and writes of the kernel."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.store import Span
from skerry.runtime.store.directory import MAX_BUFFERS, STALE_S, SWEEP_EVERY, TEMPORARY, DirectoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Iterator

# Creates an object, begins another write and kills itself in the middle of it.
WRITER = """
import os, signal, sys
from pathlib import Path
from skerry.runtime.store.directory import DirectoryStore
store = DirectoryStore(Path(sys.argv[1]))
store.create("payloads/0", b"whole")
write = os.writev
def write_half_and_die(file, views):
    write(file, views[:1])
    os.kill(os.getpid(), signal.SIGKILL)
os.writev = write_half_and_die
getattr(store, sys.argv[2])(sys.argv[3], [b"half"] * 2)
"""


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def temporary_files(root: Path) -> list[Path]:
    return list((root / TEMPORARY).iterdir())


@pytest.mark.parametrize(("verb", "key"), [("create", "payloads/1"), ("replace", "payloads/0")])
def test_killed_writer_leaves_no_partial_object(tmp_path: Path, store: DirectoryStore, verb: str, key: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(tmp_path), verb, key]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert [file.read_bytes() for file in temporary_files(tmp_path)] == [b"half"]
    assert [entry.key for entry in store.list("")] == ["payloads/0"]
    assert store.read("payloads/0") == b"whole"
    assert DirectoryStore(tmp_path).create("payloads/1", b"body")
    assert temporary_files(tmp_path) == []


def refuse_lock(*_: object) -> None:
    raise OSError(errno.ENOLCK, "no locks")


@pytest.mark.parametrize("has_locks", [True, False])
def test_temporary_files_of_killed_writers_alone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_locks: bool
) -> None:
    """A writer locks its file. Without locks on the file system, a day must pass."""
    folder = tmp_path / TEMPORARY
    folder.mkdir()
    killed, open_elsewhere = folder / "1-0", folder / "2-0"
    for file, age_s in ((killed, STALE_S + 60), (open_elsewhere, STALE_S - 60)):
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age_s, time.time() - age_s))
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", refuse_lock)
    store = DirectoryStore(tmp_path)
    with open_elsewhere.open() as file:
        if has_locks:
            fcntl.flock(file, fcntl.LOCK_EX)
        store.create("a", b"1")
        assert temporary_files(tmp_path) == [open_elsewhere]
    for number in range(SWEEP_EVERY):
        store.replace("a", str(number).encode())
    assert temporary_files(tmp_path) == ([] if has_locks else [open_elsewhere])


def test_what_cannot_be_swept_does_not_fail_a_write(tmp_path: Path) -> None:
    (tmp_path / TEMPORARY / "folder").mkdir(parents=True)
    assert DirectoryStore(tmp_path).create("a", b"1")
    assert temporary_files(tmp_path) == [tmp_path / TEMPORARY / "folder"]


def test_stores_with_one_process_number_use_different_temporary_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may have the same process number; a sweep must not meet a new file under an old name."""
    names: list[str] = []
    monkeypatch.setattr(os, "link", lambda source, _: names.append(source))
    for number in range(3):
        DirectoryStore(tmp_path).create(str(number), b"1")
    assert len(set(names)) == 3


def test_delete_removes_the_folders_that_it_leaves_empty(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run")
    for key in ("payloads/1/a/x", "payloads/1/b/y", "payloads/2/z"):
        store.create(key, b"1")
    store.delete("payloads/1/a/x")
    store.delete("payloads/2/z")
    folders = sorted(path.name for path in (tmp_path / "run").rglob("*") if path.is_dir())
    assert folders == [TEMPORARY, "1", "b", "payloads"]
    store.delete("payloads/1/b/y")
    assert (tmp_path / "run").exists()
    assert not (tmp_path / "run/payloads").exists()


def test_folder_that_another_process_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, removals = os.link, iter(range(3))

    def remove_and_link(source: str, path: str) -> None:
        if Path(path).parent.exists() and next(removals, None) is not None:
            Path(path).parent.rmdir()
        link(source, path)

    monkeypatch.setattr(os, "link", remove_and_link)
    assert DirectoryStore(tmp_path).create("a/b", b"1")
    assert next(removals, None) is None


def test_folder_that_is_removed_while_it_is_made_is_no_existing_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdir` meets the folder, which is gone when it looks whether it is one."""
    mkdir, races = Path.mkdir, iter(range(3))

    def meet(folder: Path, *arguments: object, **more: object) -> None:
        if folder.name == "a" and next(races, None) is not None:
            raise FileExistsError(errno.EEXIST, "exists", str(folder))
        mkdir(folder, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", meet)
    store = DirectoryStore(tmp_path)
    assert store.create("a/b", b"1")
    assert store.read("a/b") == b"1"


def test_finished_writes_leave_no_temporary_file(tmp_path: Path, store: DirectoryStore) -> None:
    store.create("a", b"1")
    store.create("a", b"2")
    store.replace("a", b"3")
    assert temporary_files(tmp_path) == []


def test_durable_store_syncs_the_object_and_every_folder_it_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    root = tmp_path / "new" / "run"
    store = DirectoryStore(root, durable=True)
    store.create("a/b/c", b"1")
    assert synced[0].parent == root / TEMPORARY
    assert synced[1:6] == [root / "a" / "b", root / "a", root, tmp_path / "new", tmp_path]
    synced.clear()
    store.replace("a/d", b"1")
    assert synced[1:] == [root / "a", root]
    synced.clear()
    DirectoryStore(root).create("a/e", b"1")
    assert synced == []


def test_more_buffers_than_one_writev_accepts_are_all_written(store: DirectoryStore) -> None:
    parts = [bytes([number % 256]) * (number % 5) for number in range(2 * MAX_BUFFERS + 17)]
    store.create("a", parts)
    assert store.read("a") == b"".join(parts)


def test_short_writes_and_reads_of_the_kernel_are_continued(
    tmp_path: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda file, views: writev(file, [views[0][:3]]))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [views[0][:3]], offset))
    store.create("a", [b"0123456789", b"abcdefg"])
    assert (tmp_path / "a").read_bytes() == store.read("a") == b"0123456789abcdefg"
    assert store.read("a", Span(1, 9)) == b"12345678"
    assert store.read("a", Span(1, 99)) == b"123456789abcdefg"


def test_key_cannot_be_the_folder_of_another(store: DirectoryStore) -> None:
    store.create("a/b", b"1")
    for key in ("a", "a/b/c"):
        with pytest.raises(Invalid, match="folder"):
            store.create(key, b"2")
        assert store.read(key) is None


def test_reading_creates_no_folder(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run")
    assert store.read("a") is None
    assert list(store.list("")) == []
    store.delete("a")
    assert not (tmp_path / "run").exists()


def test_names_that_are_no_keys_are_not_listed(tmp_path: Path, store: DirectoryStore) -> None:
    store.create("a", b"1")
    (tmp_path / "a file of another tool").touch()
    assert [entry.key for entry in store.list("")] == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_write_permission_is_unauthorized(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(Unauthorized, match="denies access"):
        DirectoryStore(tmp_path / "run").create("a", b"1")


def test_denial_that_passes_fails_no_write_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a file server that maps users again. Before the first success a denial is final."""
    link, denials = os.link, [errno.EACCES] * 3

    def deny_and_link(source: str, path: str) -> None:
        if denials:
            raise OSError(denials.pop(), "denied")
        link(source, path)

    store = Retrying(DirectoryStore(tmp_path), FakeClock(), stop=threading.Event())
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", deny_and_link)
        with pytest.raises(Unauthorized, match="the file system denies access: create key=a"):
            store.create("a", b"1")
        store.list("")
        assert store.create("a", b"1")
    assert denials == []


def test_write_succeeds_although_temporary_files_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system whose handle has become stale."""

    def fail(_: Path) -> Iterator[Path]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    store = DirectoryStore(tmp_path)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        store.replace("a", b"x")
    assert bytes(store.read("a") or b"") == b"x"
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
