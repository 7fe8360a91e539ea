"""Entry points and their arguments, and what executors take from them."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from skerry.infra import executors
from skerry.infra.executors import LocalProcessExecutor
from skerry.infra.executors.entrypoint_to_command import read_entrypoint
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.executors.options import RunOptions
    from skerry.infra.run.executor import EntrypointArguments

WITH_SDK = [name for name in executors.__all__ if getattr(getattr(executors, name), "SDK", None)]


@pytest.mark.parametrize(
    ("entrypoint", "arguments", "command"),
    [
        ("acme.train", {}, "python -m acme.train"),
        ("train.py", ["--lr", "0.1"], "python train.py --lr 0.1"),
        ("./train", (), "./train"),
        ("python3.11", ["train.py"], "python3.11 train.py"),
        ("torchrun --nproc-per-node 2 train.py", {"lr": 0.1}, "torchrun --nproc-per-node 2 train.py --lr 0.1"),
        ("train.py", {"resume": True, "no": False, "none": None, "n": 4}, "python train.py --resume --n 4"),
    ],
)
def test_entrypoint_becomes_a_command(entrypoint: str, arguments: EntrypointArguments, command: str) -> None:
    assert read_entrypoint(entrypoint, arguments).command == tuple(command.split())


@pytest.mark.parametrize(
    ("entrypoint", "arguments", "words"),
    [
        (" ", (), "no entry point"),
        ("train.py", {"rank_env": "A=B"}, "not the name of a variable: rank_env='A=B'"),
        ("train.py", {"lr": [1, 2]}, r"cannot pass lr=\[1, 2\]"),
    ],
)
def test_impossible_entrypoint_is_invalid(entrypoint: str, arguments: EntrypointArguments, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        read_entrypoint(entrypoint, arguments)


def test_rendezvous_is_the_run_of_an_executor_without_one(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(work=tmp_path / "work")
    with pytest.raises(Invalid, match=r"no run: write LocalProcessExecutor\(run=\.\.\.\), or 'rendezvous'"):
        executor.launch_replicas(1, "true")
    with executor:
        handles = executor.launch_replicas(1, "true", {"rendezvous": f"{tmp_path.as_uri()}/42/"})
        executor.collect(handles, 30)
    assert (executor.run, executor.name) == (f"{tmp_path.as_uri()}/42", "42")
    assert [(handle.rank, handle.backend, handle.metadata["slot"]) for handle in handles] == [(0, "local", "replica-0")]
    with pytest.raises(Invalid, match="no run yet"):
        LocalProcessExecutor().poll(handles[0])


@pytest.mark.parametrize("name", WITH_SDK)
def test_missing_sdk_is_reported_when_an_executor_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor: type[RunOptions] = getattr(executors, name)
    assert executor.SDK is not None
    module, extra = executor.SDK
    assert find_spec(module) is not None
    monkeypatch.setitem(sys.modules, module, None)
    given = [field for field in fields(executor) if field.init]
    required = [field.name for field in given if field.default is field.default_factory is MISSING]
    with pytest.raises(Invalid, match=rf"^{name} needs {module}: pip install 'skerry\[{extra}\]'$"):
        executor(**dict.fromkeys(required, "x"))


def test_executors_of_clouds_need_an_sdk() -> None:
    clouds = {
        "BatchExecutor",
        "HFJobsExecutor",
        "KubernetesExecutor",
        "ModalExecutor",
        "SageMakerExecutor",
        "VertexExecutor",
    }
    assert clouds | {"DockerExecutor"} <= set(WITH_SDK)
