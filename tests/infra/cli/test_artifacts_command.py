"""`skerry artifacts`: lists saved files and fetches the newest, or another that is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import write_spec
from tests.kit.managers import begin_run
from tests.support.command_line import invoke

from skerry.runtime.log import keys
from skerry.runtime.log.files_saved_by_script import save
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.store import Store


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return write_spec(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store of a run in which two replicas have saved a sample, one of them twice."""
    store = open_store((tmp_path / "store" / "test-run").as_uri())
    begin_run(store, ["a-0", "a-1"])
    for slot, round_number, text in (("a-0", 4, b"old"), ("a-0", 8, b"new"), ("a-1", 8, b"other")):
        save(store, slot, round_number, "sample.txt", text)
    save(store, "a-1", 9, "plot.png", bytes(12345))
    return store


def test_saves_are_listed_by_spec_or_uri(spec: Path, store: Store) -> None:
    expected = [
        "sample.txt of a-0 after 4 rounds, 3 bytes",
        "sample.txt of a-0 after 8 rounds, 3 bytes",
        "sample.txt of a-1 after 8 rounds, 5 bytes",
        "plot.png of a-1 after 9 rounds, 12,345 bytes",
    ]
    assert invoke("artifacts", spec).output.splitlines() == expected
    assert invoke("artifacts", store.uri, "list").output.splitlines() == expected
    assert invoke("artifacts", spec, "--replica", "a-1", "--round", 8).output.splitlines() == expected[2:3]
    listed = json.loads(invoke("artifacts", spec, "--json").output)["artifacts"]
    assert listed[3] == {"slot": "a-1", "round": 9, "number": 0, "name": "plot.png", "size_bytes": 12345}


def test_newest_save_is_fetched(spec: Path, store: Store, tmp_path: Path) -> None:
    assert store.list(keys.ARTIFACTS)
    mine = tmp_path / "mine.txt"
    assert invoke("artifacts", spec, "get", "sample.txt", "--replica", "a-0", "-o", mine).exit_code == 0
    assert mine.read_bytes() == b"new"
    refused = invoke("artifacts", spec, "get", "sample.txt", "--replica", "a-0", "--round", 4, "-o", mine)
    assert (refused.exit_code, mine.read_bytes()) == (2, b"new")
    assert "replace it with --force" in refused.output
    forced = invoke("artifacts", spec, "get", "sample.txt", "--replica", "a-0", "--round", 4, "-o", mine, "--force")
    assert (forced.exit_code, mine.read_bytes()) == (0, b"old")
    result = invoke("artifacts", spec, "get", "plot.png", "-o", tmp_path, "--json")
    assert json.loads(result.output)["files"] == [str(tmp_path / "plot.png")]
    assert (tmp_path / "plot.png").stat().st_size == 12345


def test_run_of_the_folder_needs_no_name(
    spec: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spec.parent)
    assert invoke("artifacts", "list").output == invoke("artifacts", store.uri).output
    assert invoke("artifacts", "get", "plot.png", "-o", tmp_path / "mine.png").exit_code == 0
    assert (tmp_path / "mine.png").stat().st_size == 12345
    assert "name the file to get" in invoke("artifacts", "get").output
    assert "name the file to get" in invoke("artifacts", "get", "plot.png", "more").output


def test_file_of_several_replicas_is_fetched_into_their_folders(spec: Path, store: Store, tmp_path: Path) -> None:
    assert store.list(keys.ARTIFACTS)
    refused = invoke("artifacts", spec, "get", "sample.txt", "-o", tmp_path / "x.txt")
    assert (refused.exit_code, "a-0, a-1 saved it; name one of them with --replica" in refused.output) == (2, True)
    (tmp_path / "out").mkdir()
    assert invoke("artifacts", spec, "get", "sample.txt", "-o", tmp_path / "out").exit_code == 0
    fetched = {path.parent.name: path.read_bytes() for path in (tmp_path / "out").rglob("*.txt")}
    assert fetched == {"a-0": b"new", "a-1": b"other"}


def test_what_cannot_be_fetched_is_named(spec: Path, tmp_path: Path) -> None:
    assert "no run at" in invoke("artifacts", spec).output
    begin_run(open_store((tmp_path / "store" / "test-run").as_uri()), ["a-0"])
    assert invoke("artifacts", spec).output == "nothing was saved\n"
    for words, text in (
        (("get",), "name the file to get"),
        (("list", "sample.txt"), "name the file to get"),
        (("fetch", "sample.txt"), "name the file to get"),
        (("get", "sample.txt"), "nothing was saved as 'sample.txt'; saved were: nothing"),
    ):
        result = invoke("artifacts", spec, *words)
        assert (result.exit_code, text in result.output) == (2, True), result.output


def test_destroy_deletes_saved_files_and_doctor_accepts_them(spec: Path, tmp_path: Path) -> None:
    store = open_store((tmp_path / "store" / "test-run").as_uri())
    begin_run(store, ["a-0", "a-1"])
    before = invoke("doctor", spec, "--deep").output
    save(store, "a-0", 1, "sample.txt", b"text")
    assert invoke("doctor", spec, "--deep").output == before
    assert invoke("destroy", spec, "--yes").exit_code == 0
    assert list(store.list("")) == []
