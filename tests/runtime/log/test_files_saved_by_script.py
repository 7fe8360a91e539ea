"""Files that scripts save: every save is kept, whole or not at all, whatever its size."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.kit.stores import HookedStore

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import files_saved_by_script, keys
from skerry.runtime.log.files_saved_by_script import fetch, list_artifacts, save
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.store import Store


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else open_store((tmp_path / "run").as_uri())


def contents(store: Store, folder: Path) -> list[tuple[str, int, int, str, bytes]]:
    """All saves, with their bytes."""
    read: list[tuple[str, int, int, str, bytes]] = []
    for saved in list_artifacts(store):
        fetch(store, saved, folder / "fetched")
        data = (folder / "fetched").read_bytes()
        assert saved.size_bytes == len(data)
        read.append((saved.slot, saved.round, saved.number, saved.name, data))
    return read


def test_every_save_is_kept_in_order(store: Store, tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_bytes(b"a plot")
    save(store, "a-10", 0, "sample.txt", b"ten")
    save(store, "a-2", 3, "sample.txt", b"first")
    save(store, "a-2", 3, "plot.png", tmp_path / "plot.png")
    save(store, "a-2", 3, "sample.txt", b"second")
    save(store, "a-2", 4, "empty", bytearray())
    save(store, "a-2", 0, "plot.png", str(tmp_path / "plot.png"))
    assert contents(store, tmp_path) == [
        ("a-2", 0, 0, "plot.png", b"a plot"),
        ("a-2", 3, 0, "sample.txt", b"first"),
        ("a-2", 3, 1, "plot.png", b"a plot"),
        ("a-2", 3, 2, "sample.txt", b"second"),
        ("a-2", 4, 0, "empty", b""),
        ("a-10", 0, 0, "sample.txt", b"ten"),
    ]


@pytest.mark.parametrize("size", [20, 21, 39, 40, 41])
def test_large_file_is_stored_in_parts(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(files_saved_by_script, "PART_BYTES", 20)
    monkeypatch.setattr(files_saved_by_script, "_PIECE_BYTES", 7)
    data = bytes(range(size))
    save(store, "a-0", 1, "model.bin", data)
    assert contents(store, tmp_path) == [("a-0", 1, 0, "model.bin", data)]
    stored = [entry.size for entry in store.list(keys.ARTIFACTS)]
    assert stored == [20] * (size // 20) + [size % 20] * (size % 20 > 0)


def test_file_without_all_its_parts_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_saved_by_script, "PART_BYTES", 4)
    store = MemoryStore()
    saved = save(store, "a-0", 1, "model.bin", b"123456789")
    store.delete(keys.artifact("a-0", 1, 0, "model.bin", 2, 3))
    assert list_artifacts(store) == []
    with pytest.raises(Corrupt, match="was deleted"):
        fetch(store, saved, tmp_path / "model.bin")
    assert list(tmp_path.iterdir()) == []
    assert save(store, "a-0", 1, "model.bin", b"12").number == 1, "a number is used once"


def test_ranks_that_save_at_once_get_a_number_each(tmp_path: Path) -> None:
    barrier, waits = threading.Barrier(3), threading.Semaphore(3)

    def meet(verb: str, _: str) -> None:
        if verb == "create" and waits.acquire(blocking=False):
            barrier.wait(timeout=300)

    store = HookedStore(meet)
    bodies = [b"rank 0", b"rank 1", b"rank 2"]
    threads = [threading.Thread(target=save, args=(store, "a-0", 5, "log.txt", body)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [saved.number for saved in list_artifacts(store)] == [0, 1, 2]
    assert sorted(data for *_, data in contents(store, tmp_path)) == bodies


@pytest.mark.parametrize("changed", [b"12345", b"1234567890"])
def test_file_that_changes_while_it_is_saved_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bytes
) -> None:
    monkeypatch.setattr(files_saved_by_script, "PART_BYTES", 4)
    path = tmp_path / "changing"
    path.write_bytes(b"12345678")

    def change(verb: str, _: str) -> None:
        if verb == "list":
            path.write_bytes(changed)

    store = HookedStore(change)
    with pytest.raises(Invalid, match="changed while it was saved"):
        save(store, "a-0", 1, "changing", path)
    store.hook = lambda *_: None
    assert list_artifacts(store) == []


@pytest.mark.parametrize("name", ["", ".hidden", "../x", "a/b", "a b", "é", "x" * 129, "a.00001-of-00002"])
def test_name_is_a_plain_file_name(name: str) -> None:
    store = MemoryStore()
    with pytest.raises(Invalid, match="not a name for a saved file"):
        save(store, "a-0", 1, name, b"")
    assert store.list("") == []


def test_content_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"No such file or directory; to save a text, encode it: text\.encode\(\)"):
        save(MemoryStore(), "a-0", 1, "sample.txt", "Once upon a time")
    with pytest.raises(Invalid, match="Is a directory"):
        save(MemoryStore(), "a-0", 1, "sample.txt", tmp_path)


def test_longest_name_survives_and_foreign_objects_are_left_out(tmp_path: Path) -> None:
    store = MemoryStore()
    for key in ("artifacts/a-0/x", "artifacts/a-0/00000001-0000/a/b", "artifacts/a-0/1-2/a"):
        store.create(key, b"foreign")
    save(store, "a-0", 1, "n" * 128, b"1")
    save(store, "a-0", 1, "model-00001-of-00002.safetensors", b"2")
    assert [(number, data) for _, _, number, _, data in contents(store, tmp_path)] == [(0, b"1"), (1, b"2")]
