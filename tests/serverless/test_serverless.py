"""Serverless training in real processes: the snippets of the page, the entry point, and what an import loads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load
from tests.kit.managers import commits, contributions
from tests.support.s3server import S3Server

import skerry.serverless
from skerry.infra import executors
from skerry.infra.executors import Ending
from skerry.runtime.log import files_saved_by_script
from skerry.runtime.store import open_store
from skerry.serverless import replica_entrypoint

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs/serverless.md"
BUCKET = "s3://bucket/runs/42/"


def snippets() -> list[str]:
    return [part.partition("\n```")[0] for part in PAGE.read_text().split("```python\n")[1:]]


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The prefix of a job that this process and its replicas can open; the current folder is a new one."""
    monkeypatch.chdir(tmp_path)
    if request.param == "file":
        yield f"{tmp_path.as_uri()}/runs/42/"
        return
    with S3Server() as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }.items():
            monkeypatch.setenv(name, value)
        yield BUCKET


def run(text: str) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    exec(compile(text, PAGE.name, "exec"), variables)  # noqa: S102  our own text
    return variables


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_first_snippet_trains_four_replicas(place: str) -> None:
    first = snippets()[0]
    assert len([line for line in first.splitlines() if line]) <= 12
    variables = run(first.replace(BUCKET, place))
    handles = variables["handles"]
    with executors.LocalProcessExecutor(run=place) as executor:
        logs = ["\n".join(executor.logs(handle)) for handle in handles]
    assert variables["endings"] == [Ending(exit_code=0)] * 4, logs
    assert [(handle.rank, handle.backend) for handle in handles] == [(rank, "local") for rank in range(4)]
    losses = [[float(line.rpartition(" ")[2]) for line in log.splitlines() if line.startswith("round")] for log in logs]
    assert [len(own) for own in losses] == [10] * 4
    assert all(own[-1] < own[0] / 10 for own in losses)
    store = open_store(place)
    assert len(commits(store)) == 11  # the weights of rank 0, then ten rounds
    assert len(contributions(store)) == 4 * 11


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_second_snippet_drives_diloco(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_RUN", place.rstrip("/"))
    monkeypatch.setenv("SKERRY_SLOT", "replica-0")
    monkeypatch.setenv("SKERRY_INDEX", "0")
    monkeypatch.setenv("SKERRY_REPLICAS", "1")
    variables = run(snippets()[1].replace(BUCKET, place))
    assert variables["manager"].current_step() == 5
    assert variables["rendezvous"].round_id == 5


@pytest.fixture
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def model_of(uri: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, torch.Tensor]:
    monkeypatch.setenv("RANK_HERE", "0")
    words = ["--rendezvous", uri, "--rank_env", "RANK_HERE", "--world_size", "1", "--sync_every", "2", *options]
    replica_entrypoint.main(words)
    store = open_store(uri)
    artifact = files_saved_by_script.list_artifacts(store)[-1]
    target = Path(f"{artifact.number}.safetensors")
    files_saved_by_script.fetch(store, artifact, target)
    return load(target.read_bytes())


@pytest.mark.usefixtures("_signals")
def test_replica_that_starts_again_trains_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    partial = model_of(f"{tmp_path.as_uri()}/a", monkeypatch, "--rounds", "2")
    again = model_of(f"{tmp_path.as_uri()}/a", monkeypatch, "--rounds", "4")
    whole = model_of(f"{tmp_path.as_uri()}/b", monkeypatch, "--rounds", "4")
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    assert not torch.equal(partial["weight"], whole["weight"])


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["--rank_env", "NO_SUCH_RANK"], 20, "no rank: NO_SUCH_RANK=''"),
        (["--world_size", "1", "--task", "math:no_such"], 20, "no task 'math:no_such'"),
        (["--world_size", "2", "--timeout_s", "0.2"], 10, "contributed=rank-0"),
    ],
)
def test_failed_replica_ends_by_the_contract(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    error: str,
) -> None:
    monkeypatch.setenv("SKERRY_INDEX", "0")
    with pytest.raises(SystemExit) as ended:
        replica_entrypoint.main(["--rendezvous", str(tmp_path), *words])
    assert ended.value.code == code
    assert error in capsys.readouterr().err


LAUNCHER = """
from skerry.serverless import BatchExecutor, LocalProcessExecutor, ObjectStoreAllReduce, ReplicaHandle
LocalProcessExecutor(run=ObjectStoreAllReduce('s3://bucket/runs/42').uri)
"""
LOADED = """
import json, sys
{words}
names = {{"torch", "torchft", "boto3", "docker", "sagemaker", "skerry.infra", "skerry.runtime.allreduce"}}
print(json.dumps(sorted(names & set(sys.modules))))
"""


@pytest.mark.parametrize(
    ("words", "loaded"),
    [
        ("import skerry.serverless", []),
        (LAUNCHER, ["skerry.infra", "skerry.runtime.allreduce"]),
    ],
)
def test_names_are_imported_when_they_are_used(words: str, loaded: list[str]) -> None:
    command = [sys.executable, "-c", LOADED.format(words=words)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == loaded


def test_every_executor_is_exported() -> None:
    names = dir(skerry.serverless)
    assert {*executors.__all__, "ObjectStoreAllReduce", "MockManager"} == set(names)
    assert all(getattr(skerry.serverless, name).__name__ == name for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'ModalExecutr'"):
        _ = skerry.serverless.ModalExecutr  # type: ignore[attr-defined]
