from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import write_spec

from skerry.infra import preflight
from skerry.infra.errors import SpecInvalid
from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path

CLOCK = SystemClock()


def complaints(spec: Path, *overrides: str) -> list[str]:
    try:
        preflight.load(spec, overrides, CLOCK)
    except SpecInvalid as error:
        return [f"{problem.path}: {problem.text}" for problem in error.problems]
    return []


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    for name in ("train.py", "run.sh", "runs.sh"):
        (folder / name).touch()
    (folder / "runs.sh").chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("python, missing.py", "missing.py is not among the 3 files"),
        ("python3.11, missing.py", "is not among the 3 files"),
        ("python, -X, dev, missing.py", "missing.py is not among"),
        ("python, -u, missing.py", "missing.py is not among"),
        ("python, /no/such.py", "no such file on this machine: /no/such.py"),
        ("bash, nope.sh", "nope.sh is not among"),
        ("./nope.sh", "./nope.sh is not among the 3 files"),
        ("./run.sh", "./run.sh is not executable; write [python, run.sh], or `chmod +x` it"),
        ("no-such-program-anywhere", "no such program on this machine: no-such-program-anywhere"),
    ],
)
def test_a_command_that_cannot_run_is_found_before_it_is_tried(
    tmp_path: Path, code: Path, command: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None if name.startswith("no-") else name)
    [found] = complaints(write_spec(tmp_path, code=code, command=command))
    assert found.startswith("code.command: ")
    assert problem in found


@pytest.mark.parametrize(
    "command",
    [
        "python, -m, torch",
        "python, -mtorch",
        "python, -u, train.py",
        "python, -X, dev, train.py",
        "python, -W, ignore, train.py",
        "python, --check-hash-based-pycs, never, train.py",
        "python3, ./train.py",
        "sh, -c, echo",
        "sh, run.sh",
        "./runs.sh",
    ],
)
def test_a_command_that_can_run_is_let_through(tmp_path: Path, code: Path, command: str) -> None:
    assert complaints(write_spec(tmp_path, code=code, command=command)) == []


def test_nothing_is_left_in_a_store_that_exists_and_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "store" / "other").mkdir(parents=True)
    spec = write_spec(tmp_path)
    before = tree(tmp_path)
    assert complaints(spec) == []
    assert tree(tmp_path) == before
    (tmp_path / "store" / "test-run" / "probe").mkdir(parents=True)
    before = tree(tmp_path)
    assert complaints(spec) == []
    assert tree(tmp_path) == before


def test_a_store_below_a_file_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    [found] = complaints(write_spec(tmp_path))
    assert found.startswith("store: cannot be used: ")
    assert "File exists" in found


def test_the_store_is_checked_even_if_the_run_has_no_proper_name(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    spec = write_spec(tmp_path, run="..")
    assert [found.split(":")[0] for found in complaints(spec)] == ["run", "store"]
    spec.write_text(spec.read_text().replace("run: ..\n", ""))
    assert [found.split(":")[0] for found in complaints(spec)] == ["run", "store"]


def test_an_engines_own_error_is_a_problem_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ArithmeticError("no account\n\nDebug source: ...")

    monkeypatch.setattr(preflight, "open_store", broken)
    [found] = complaints(write_spec(tmp_path))
    assert found.startswith("store: cannot be used: no account; write a place")


def test_the_store_is_probed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preflight, "open_store", interrupted)
    [found] = complaints(write_spec(tmp_path, code=tmp_path / "nowhere"))
    assert "no such folder" in found


def test_a_work_folder_that_cannot_be_made_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(tmp_path)
    (tmp_path / ".skerry").touch()
    [found] = complaints(spec)
    assert found.endswith(f"but {tmp_path / '.skerry'} is not a folder; move it away")
    (tmp_path / ".skerry").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or not mode & os.W_OK)
    [found] = complaints(spec)
    assert f"{tmp_path} cannot be written" in found


@pytest.mark.parametrize("store", ["file://.skerry", "file://.skerry/test-run/x", "file://{}/.skerry", "file://l"])
def test_a_store_in_the_work_folder_is_refused_however_it_is_written(tmp_path: Path, store: str) -> None:
    (tmp_path / ".skerry" / "test-run").mkdir(parents=True)
    (tmp_path / "l").symlink_to(tmp_path / ".skerry")
    [found] = complaints(write_spec(tmp_path), f"store={store.format(tmp_path)}")
    assert "lies in .skerry/test-run, the work folder of the run itself" in found


def test_a_store_among_the_code_is_refused_unless_it_is_ignored(tmp_path: Path, code: Path) -> None:
    spec = write_spec(tmp_path, code=code)
    [found] = complaints(spec, "store=file://code/deep/store")
    assert f"lies in the code folder {code}, and each `up` would pack it" in found
    assert complaints(spec, "store=file://code/.skerry/store") == []
    (code / ".skerryignore").write_text("deep/\n")
    assert complaints(spec, "store=file://code/deep/store") == []


def test_an_ignore_file_that_is_no_text_is_a_problem_of_the_code(tmp_path: Path, code: Path) -> None:
    (code / ".skerryignore").write_bytes(b"\xff")
    [found] = complaints(write_spec(tmp_path, code=code))
    assert found.startswith("code.path: .skerryignore cannot be read")
