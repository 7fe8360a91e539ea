from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import failing
from tests.infra.runs import write_spec
from tests.support.command_line import invoke

from skerry.infra import targets
from skerry.infra.run import check_machine_and_store
from skerry.infra.spec_and_store_errors import SpecInvalid
from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path

CLOCK = SystemClock()
STORE_EXAMPLE = "name a writable store, e.g. store: file://.skerry/store"


def problems(spec: Path, *overrides: str) -> list[str]:
    try:
        check_machine_and_store.load(spec, targets.kinds(), overrides, CLOCK)
    except SpecInvalid as error:
        return [f"{problem.path}: {problem.text}" for problem in error.problems]
    return []


def test_missing_torch_is_reported_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "torch" in name else find_spec(name))
    spec = write_spec(tmp_path)
    up = invoke("up", spec)
    assert up.exit_code == 2
    assert up.output == (
        f"{spec}:5:12: code.command: runs here with {sys.executable}, which lacks torch, torchft; install the extra of "
        "the runtime: pip install 'skerry[runtime]'\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["skerry.yaml"], "nothing was started"
    assert invoke("validate", spec).exit_code == 0, "the spec itself is right"
    assert problems(spec, "code.command=[bash, train.py]") == [], "another interpreter"


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
def test_preflight_reports_commands_that_cannot_run(
    tmp_path: Path, code: Path, command: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_machine_and_store.shutil, "which", lambda name: None if name.startswith("no-") else name)
    [actual] = problems(write_spec(tmp_path, code=code, command=command))
    assert actual.startswith("code.command: ")
    assert problem in actual


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
def test_preflight_accepts_commands_that_can_run(tmp_path: Path, code: Path, command: str) -> None:
    assert problems(write_spec(tmp_path, code=code, command=command)) == []


def test_preflight_leaves_the_store_unchanged(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    for name in ("other/object", "test-run/members/a/0.json"):
        (tmp_path / "store" / name).parent.mkdir(parents=True)
        (tmp_path / "store" / name).touch()
        before = sorted(tmp_path.rglob("*"))
        assert problems(spec) == []
        assert sorted(tmp_path.rglob("*")) == before


def test_store_below_a_file_is_reported_with_other_problems(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    spec = write_spec(tmp_path)
    [problem] = problems(spec)
    assert problem.startswith("store: is unusable: ")
    assert f"{tmp_path / 'store'} is not a folder" in problem
    write_spec(tmp_path, run="..")
    assert [problem.split(":")[0] for problem in problems(spec)] == ["run", "store"]
    spec.write_text(spec.read_text().replace("run: ..\n", ""))
    assert [problem.split(":")[0] for problem in problems(spec)] == ["run", "store"]


def test_client_error_is_a_problem_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        check_machine_and_store, "open_store", failing(ArithmeticError("no account\n\nDebug source: ..."))
    )
    [problem] = problems(write_spec(tmp_path))
    assert problem.startswith("store: is unusable: no account; name a writable")


def test_store_is_probed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_machine_and_store, "open_store", failing(KeyboardInterrupt()))
    [problem] = problems(write_spec(tmp_path, code=tmp_path / "nowhere"))
    assert "no such folder" in problem


def test_unwritable_work_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(tmp_path)
    (tmp_path / ".skerry").touch()
    [problem] = problems(spec)
    assert problem.endswith(f"but {tmp_path / '.skerry'} is not a folder; move it away")
    (tmp_path / ".skerry").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or not mode & os.W_OK)
    problem, of_the_store = problems(spec)
    assert of_the_store.startswith("store: is unusable: ")
    assert f"{tmp_path} is not writable" in problem


@pytest.mark.parametrize("store", ["file://.skerry", "file://.skerry/test-run/x", "file://{}/.skerry", "file://l"])
def test_store_in_the_work_folder_is_rejected(tmp_path: Path, store: str) -> None:
    (tmp_path / ".skerry" / "test-run").mkdir(parents=True)
    (tmp_path / "l").symlink_to(tmp_path / ".skerry")
    [problem] = problems(write_spec(tmp_path), f"store={store.format(tmp_path)}")
    assert "is in .skerry/test-run, the work folder of the run itself" in problem


def test_store_in_the_code_folder_is_rejected_unless_ignored(tmp_path: Path, code: Path) -> None:
    spec = write_spec(tmp_path, code=code)
    [problem] = problems(spec, "store=file://code/deep/store")
    assert f"is in the code folder {code}, where nothing ignores it" in problem
    assert problems(spec, "store=file://code/.skerry/store") == []
    (code / ".gitignore").write_text("deep/\n")
    assert problems(spec, "store=file://code/deep/store") == []
    (code / ".gitignore").unlink()
    (code / ".skerryignore").write_text("deep/\n")
    assert problems(spec, "store=file://code/deep/store") == []


def test_unreachable_paths_are_reported_with_other_problems(tmp_path: Path, code: Path) -> None:
    long = "x" * 300
    spec = write_spec(tmp_path, code=code, command="python, missing.py")
    store, command = problems(spec, f"store=file://{long}/store")
    assert "missing.py is not among" in command
    assert store.endswith(f"{long}/store cannot be reached: File name too long; {STORE_EXAMPLE}")
    place, *_ = problems(spec, f"code.path={long}")
    assert place.startswith("code.path: ")
    assert "File name too long" in place
    assert "File name too long" in problems(spec, f"code.command=[python,/{long}]")[0]


def test_binary_ignore_file_is_a_problem_of_the_code(tmp_path: Path, code: Path) -> None:
    (code / ".skerryignore").write_bytes(b"\xff")
    [problem] = problems(write_spec(tmp_path, code=code))
    assert problem.startswith("code.path: .skerryignore is unreadable")
