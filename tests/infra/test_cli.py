"""The command line, in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import ROOT, environment, write_spec
from typer.testing import CliRunner

from skerry.infra import cli, destroy, preflight, up
from skerry.infra.errors import SpecInvalid
from skerry.runtime import keys
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Conflict
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

CLOCK = SystemClock()


def skerry(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_the_cli_imports_no_torch_and_no_cloud_sdk() -> None:
    script = (
        "import sys, skerry.infra.cli\n"
        "heavy = {'torch', 'torchft', 'numpy', 'boto3', 'botocore', 'google', 'fsspec', 's3fs', 'obstore'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_init_writes_a_sample_once(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    assert skerry("init", path).exit_code == 0
    path.write_text("mine")
    again = skerry("init", path)
    assert (again.exit_code, path.read_text()) == (2, "mine")
    assert "exists and was left alone" in again.output
    assert skerry("init", tmp_path / "no" / "x.yaml").exit_code == 2


def test_the_sample_lacks_nothing_but_a_script(tmp_path: Path) -> None:
    path = tmp_path / "skerry.yaml"
    skerry("init", path)
    wrong = skerry("validate", path)
    assert wrong.exit_code == 2
    assert wrong.output.splitlines() == [
        f"{path}:7:9: code.path: no such folder: {tmp_path / 'train'}; write the folder that holds the training code"
    ]
    (tmp_path / "train").mkdir()
    assert "train.py is not among the 0 files" in skerry("validate", path).output
    (tmp_path / "train" / "train.py").touch()
    right = skerry("validate", path, "--json")
    assert right.exit_code == 0
    assert json.loads(right.output)["ok"] is True
    assert tree(tmp_path) == ["skerry.yaml", "train", "train/train.py"]


def test_the_quickstarts_spec_is_valid() -> None:
    ran = skerry("validate", ROOT / "infra" / "examples" / "quickstart.yaml")
    assert (ran.exit_code, "4 replicas" in ran.output) == (0, True), ran.output


BAD = """\
run: bad
store: file:///proc/no/store
code: {path: ./nowhere, command: [python, train.py]}
outer: {rounds: 3, sync_evry: 10}
faults: {grace: 60}
replicas:
  - {name: a, count: 0, target: {kind: local}}
  - {name: a, count: 1, target: {kind: local}}
"""


@pytest.mark.parametrize("command", ["validate", "up"])
def test_a_bad_spec_is_refused_with_every_problem_and_nothing_is_created(tmp_path: Path, command: str) -> None:
    path = tmp_path / "skerry.yaml"
    path.write_text(BAD)
    ran = skerry(command, path, "--json")
    assert ran.exit_code == 2
    *lines, last = ran.output.splitlines()
    assert [line.removeprefix(f"{path}:") for line in lines] == [
        (
            "2:8: store: cannot be used: [Errno 2] No such file or directory: '/proc/no'; "
            "write a place you may write to, e.g. store: file://.skerry/store"
        ),
        f"3:14: code.path: no such folder: {tmp_path / 'nowhere'}; write the folder that holds the training code",
        "4:20: outer.sync_evry: unknown field; did you mean sync_every?",
        "5:17: faults.grace: has no unit (60s are seconds, 60m minutes, 60h hours); got 60; write e.g. grace: 60s",
        "7:22: replicas[0].count: must be at least 1; got 0; write e.g. count: 4",
        "8:12: replicas[1].name: 'a' is already the name of replicas[0]; write another, e.g. name: a-1",
    ]
    assert json.loads(last) == {"ok": False, "problems": lines}
    assert tree(tmp_path) == ["skerry.yaml"]


def test_bad_usage_is_exit_code_2(tmp_path: Path) -> None:
    assert skerry("nonsense").exit_code == 2
    assert skerry("validate", tmp_path / "no.yaml").exit_code == 2
    assert skerry("validate", write_spec(tmp_path), "--set", "rounds").exit_code == 2


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("python, missing.py", "missing.py is not among the 1 files"),
        ("./run.sh", "./run.sh is not among the 1 files"),
        ("no-such-program-anywhere", "no such program on this machine: no-such-program-anywhere"),
        ("python, -u, missing.py", "missing.py is not among"),
    ],
)
def test_a_command_that_cannot_run_is_found_before_it_is_tried(tmp_path: Path, command: str, problem: str) -> None:
    ran = skerry("validate", write_spec(tmp_path, command=command))
    assert (ran.exit_code, problem in ran.output) == (2, True), ran.output


@pytest.mark.parametrize(
    "command", ["python, -m, torch", "python, -u, train.py", "sh, -c, echo", "python3, ./train.py"]
)
def test_a_command_that_can_run_is_let_through(tmp_path: Path, command: str) -> None:
    ran = skerry("validate", write_spec(tmp_path, command=command))
    assert ran.exit_code == 0, ran.output


def test_validate_leaves_no_trace_in_a_store_that_exists(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    assert skerry("validate", write_spec(tmp_path)).exit_code == 0
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_status_and_logs_of_a_run_that_was_never_started_say_so(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    status = skerry("status", spec)
    assert (status.exit_code, "no run at file://" in status.output) == (1, True)
    logs = skerry("logs", spec)
    assert (logs.exit_code, "no logs on this machine" in logs.output) == (1, True)
    assert "nothing to destroy" in skerry("destroy", spec, "--yes").output
    assert tree(tmp_path) == ["skerry.yaml"]


def test_destroy_deletes_the_runs_keys_and_nothing_else(tmp_path: Path) -> None:
    spec = preflight.load(write_spec(tmp_path), (), CLOCK)
    store = open_store(spec.run_uri, clock=CLOCK)
    run, continued = up.fix_run(store, spec, CLOCK)
    assert not continued
    assert up.fix_run(store, spec, CLOCK) == (run, True)
    store.create(keys.code("d"), b"code")
    store.create("run.json.backup", b"mine")
    store.create("thesis/chapter-1", b"mine")
    assert destroy.survey(spec, CLOCK).objects == 2

    removed = skerry("destroy", spec.path, "--yes", "--json")

    assert (removed.exit_code, json.loads(removed.output)["objects"]) == (0, 2)
    assert [entry.key for entry in store.list("")] == ["run.json.backup", "thesis/chapter-1"]
    assert skerry("destroy", spec.path, "--yes").exit_code == 0
    assert [entry.key for entry in store.list("")] == ["run.json.backup", "thesis/chapter-1"]


def test_a_folder_without_a_run_loses_nothing_to_destroy(tmp_path: Path) -> None:
    precious = tmp_path / "store" / "test-run" / "code" / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    assert skerry("destroy", write_spec(tmp_path), "--yes").exit_code == 0
    assert precious.exists()


def test_a_run_of_another_spec_is_a_conflict_that_names_the_fields(tmp_path: Path) -> None:
    path = write_spec(tmp_path)
    spec = preflight.load(path, (), CLOCK)
    store = open_store(spec.run_uri, clock=CLOCK)
    up.fix_run(store, spec, CLOCK)
    with pytest.raises(Conflict, match=r"outer_lr, codec differ; change `run:`"):
        up.fix_run(store, preflight.load(path, ["outer.lr=0.1", "outer.codec=bf16"], CLOCK), CLOCK)


def test_a_store_below_a_file_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with pytest.raises(SpecInvalid, match=r"skerry.yaml:2:8: store: cannot be used: .*File exists"):
        preflight.load(write_spec(tmp_path), (), CLOCK)
