"""`skerry report` of a run in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.infra.runs import environment, write_spec
from tests.support.command_line import invoke

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A run of eight rounds, which are closed; a-1 is missing in the last five."""
    fleet = Fleet(tmp_path / "run")
    for number in range(8):
        fleet.train(number, *(SLOTS if number < 3 else SLOTS[:1]))
    for slot in SLOTS:
        fleet.end(slot)
    return fleet


def test_page_is_written_and_its_answers_are_printed(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    result = invoke("report", fleet.store.uri, "-o", path)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "test: finished: 8 rounds"
    assert "  Which replicas were missing, when and why? 5 of 16 contributions missing" in lines
    assert lines[-1].endswith("open it in a browser")
    text = path.read_text()
    assert "missing in 5 of 8 rounds (3-7)" in text
    assert "missing-in-rounds" in text, "doctor's finding"
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["run.html"], "no temporary file is left"


def test_json_has_the_facts_of_the_page(fleet: Fleet, tmp_path: Path) -> None:
    result = invoke("report", fleet.store.uri, "-o", tmp_path / "run.html", "--json")
    written = json.loads(result.stdout)
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 1)
    assert written["output"] == str(tmp_path / "run.html")
    facts = written["facts"]
    assert (facts["state"], facts["closed"], facts["contributions"], facts["possible"]) == ("finished", 8, 11, 16)
    assert [part["mark"] for part in facts["replicas"][1]["stretches"]] == ["trained", "absent"]
    assert facts["findings"]


def test_run_that_stopped_early_is_not_called_finished(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "run")
    for number in range(3):
        fleet.train(number, *SLOTS)
    for slot in SLOTS:
        fleet.end(slot, status="failed", exit_code=20, reason="disk full")
    result = invoke("report", fleet.store.uri, "-o", tmp_path / "run.html")
    assert result.output.startswith("test: stopped, not finished: 3 of 8 rounds"), result.output


def test_run_without_a_closed_round_has_a_page_and_no_export(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "run")
    for slot in SLOTS:
        fleet.end(slot)
    result = invoke("report", fleet.store.uri, "-o", tmp_path / "run.html")
    assert (result.exit_code, "no round is closed yet" in result.output) == (0, True), result.output
    result = invoke("report", fleet.store.uri, "-o", tmp_path / "run.csv", "--export", "csv")
    assert (result.exit_code, "there is nothing to export" in result.output) == (1, True), result.output


@pytest.mark.parametrize("form", ["csv", "json"])
def test_export_names_its_file_and_rows(fleet: Fleet, tmp_path: Path, form: str) -> None:
    path = tmp_path / f"run.{form}"
    result = invoke("report", fleet.store.uri, "--export", form, "-o", path)
    assert (result.exit_code, result.output) == (0, f"{path}: 16 rows\n")
    again = invoke("report", fleet.store.uri, "--export", form, "-o", path, "--json")
    assert json.loads(again.stdout) == {"output": str(path), "rows": 16, "facts": None}


def test_export_for_tensorboard_needs_its_extra(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("report", fleet.store.uri, "--export", "tensorboard", "-o", tmp_path / "tb")
    assert (result.exit_code, (tmp_path / "tb" / "mean").is_dir()) == (0, True), result.output
    for name in [name for name in sys.modules if name.startswith("tensorboardX")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    result = invoke("report", fleet.store.uri, "--export", "tensorboard", "-o", tmp_path / "tb")
    assert (result.exit_code, "pip install 'skerry[tensorboard]'" in result.output) == (2, True), result.output


def test_wrong_size_of_the_model_is_refused_before_the_page_is_written(fleet: Fleet, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    result = invoke("report", fleet.store.uri, "-o", page, "--parameters", "large")
    assert (result.exit_code, "not a number of parameters: 'large'" in result.output) == (2, True), result.output
    assert not page.exists()


def test_files_are_utf8_whatever_the_locale(fleet: Fleet, tmp_path: Path) -> None:
    fleet.replicas["a-1"] = fleet.start("a-1")
    fleet.end("a-1", 1, status="failed", exit_code=10, reason="r\u00e9seau")
    ascii_only = environment() | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", "from skerry.infra.cli.app import main; main()", "report", fleet.store.uri, "-o"]
    subprocess.run([*command, str(tmp_path / "run.html")], env=ascii_only, check=True, capture_output=True)
    assert "r\u00e9seau" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_file_of_another_kind_is_never_replaced(fleet: Fleet, tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    before = spec.read_text()
    result = invoke("report", fleet.store.uri, "-o", spec)
    assert (result.exit_code, "does not end with .html" in result.output) == (2, True), result.output
    assert invoke("report", fleet.store.uri, "--export", "tensorboard", "-o", spec).exit_code == 2
    assert spec.read_text() == before


def test_missing_run_and_folder_are_named(fleet: Fleet, tmp_path: Path) -> None:
    result = invoke("report", write_spec(tmp_path), "-o", tmp_path / "run.html")
    assert (result.exit_code, "no run at file://" in result.output) == (1, True), result.output
    result = invoke("report", fleet.store.uri, "-o", tmp_path / "no" / "run.html")
    assert (result.exit_code, "no such folder" in result.output) == (2, True), result.output
