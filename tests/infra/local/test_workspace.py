from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from skerry.infra.local.workspace import Workspace, remove_empty
from skerry.runtime.errors import Conflict, Corrupt

if TYPE_CHECKING:
    from pathlib import Path


def test_lock_admits_one_holder_and_names_it(tmp_path: Path) -> None:
    first, second = Workspace(tmp_path / "run"), Workspace(tmp_path / "run")
    assert first.lock_holder() is None
    with first.locked():
        assert second.lock_holder() == os.getpid()
        with (
            pytest.raises(Conflict, match=f"'run' is already up on this machine: pid={os.getpid()}; stop it with"),
            second.locked(),
        ):
            pass
    assert second.lock_holder() is None
    with second.locked():
        pass


def test_attempts_and_logs_are_counted_per_slot(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.next_attempt("a-0") == 0
    for slot, attempt in (("a-10", 0), ("a-2", 10), ("a-2", 9)):
        workspace.log_file(slot, attempt).touch()
    assert workspace.next_attempt("a-2") == 11
    assert {slot: [file.name for file in files] for slot, files in workspace.logs().items()} == {
        "a-2": ["a-2.9.log", "a-2.10.log"],
        "a-10": ["a-10.0.log"],
    }
    assert list(workspace.logs()) == ["a-2", "a-10"]


def test_remove_deletes_only_files_of_the_run(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / ".skerry" / "run")
    assert not workspace.remove()
    with workspace.locked():
        workspace.log_file("a-0", 0).touch()
        workspace.code_folder("d").mkdir(parents=True)
        workspace.started("a-0", 0, os.getpid())
        (workspace.folder / "notes.txt").touch()
        (workspace.folder / "processes.42-43.partial").touch()  # as left by a process killed during a write
        assert workspace.remove()
    assert [path.name for path in workspace.folder.iterdir()] == ["notes.txt"]
    (workspace.folder / "notes.txt").unlink()
    with workspace.locked():
        assert workspace.remove()
    assert not (tmp_path / ".skerry").exists()


def test_damaged_process_list_is_corrupt_and_signals_no_process(tmp_path: Path) -> None:
    (tmp_path / "processes.json").write_text('{"processes": [{"pid": 1}]}')
    with pytest.raises(Corrupt, match=r"not a list of processes: .*processes\.json; if none of them runs"):
        Workspace(tmp_path).kill_leftovers()


def test_remove_empty_keeps_files_and_links(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "d").mkdir()
    (tmp_path / "a" / "d" / "file").touch()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a" / "b")
    remove_empty(tmp_path / "a")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "a",
        "a/d",
        "a/d/file",
        "a/link",
    ]
    remove_empty(tmp_path / "nothing")
