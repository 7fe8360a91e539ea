"""Runs the steps of infra/examples/ci as they stand: an empty environment, a local package index, real containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
from ruamel.yaml import YAML
from tests.e2e.conftest import ROOT
from tests.support.package_index import PackageIndex

from skerry.infra.cli import recipes_for_init

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLES: Final = ROOT / "infra/examples/ci"
SPEC: Final = """\
run: tried
store: s3://skerry-ci/runs
image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:latest
code: {path: ./train, command: [python, train.py]}
outer: {rounds: 20, sync_every: 5}
replicas:
  - name: c
    count: 2
    target: {kind: aws_batch, region: us-east-1, instance_types: [c7i.2xlarge], memory: 3GiB, shared_memory: 256MiB}
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackageIndex]:
    """An index with this checkout's wheel; it redirects to PyPI for every other package."""
    folder = tmp_path_factory.mktemp("index")
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT))
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    with PackageIndex(folder) as created:
        yield created


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The checkout of a user: the spec, what `skerry init` wrote beside it, and the example's test."""
    (tmp_path / "tests").mkdir()
    shutil.copy(EXAMPLES / "test_skerry.py", tmp_path / "tests")
    (tmp_path / "train").mkdir()
    (tmp_path / "train/train.py").write_text(recipes_for_init.script_of(recipes_for_init.PLAIN))
    (tmp_path / "skerry.yaml").write_text(SPEC)
    return tmp_path


@pytest.fixture
def variables(index: PackageIndex, image: str, registry: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a CI machine, which has the image in a registry and `sudo`."""
    published = f"{registry}/skerry:cpu"
    for command in (("tag", image, published), ("push", "--quiet", published)):
        subprocess.run(["docker", *command], check=True, stdout=subprocess.DEVNULL)
    programs = tmp_path / "programs"
    programs.mkdir()
    if shutil.which("sudo") is None:
        (programs / "sudo").write_text('#!/bin/sh\nexec env "$@"\n')
        (programs / "sudo").chmod(0o755)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PIP_"))}
    path = [folder for folder in os.environ["PATH"].split(":") if not folder.startswith(str(ROOT))]
    python = f"{sys.base_prefix}/bin"
    pip = {name: os.environ[name] for name in ("PIP_CERT",) if name in os.environ}
    return {
        **kept,
        **pip,
        "PATH": ":".join([str(programs), python, *path]),
        "PIP_INDEX_URL": index.url,
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "SKERRY_IMAGE": published,
    }


def document(name: str) -> Any:
    return YAML(typ="safe").load(EXAMPLES / name)


def run(step: str, folder: Path, variables: dict[str, str]) -> None:
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", step],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{step}:\n{ended.stdout[-6000:]}"


def test_steps_for_gitlab_pass(repository: Path, variables: dict[str, str]) -> None:
    job = document("gitlab.yaml")["skerry"]
    steps = [*job["before_script"], *job["script"]]
    assert steps[-1].startswith("pytest")
    # One shell for all of them, as the runner has.
    run("\n".join(steps), repository, {**variables, **job["variables"]})


def test_steps_for_github_are_those_for_gitlab() -> None:
    job = document("github.yaml")["jobs"]["spec"]
    assert job["env"].pop("SKERRY_IMAGE") == "${{ vars.SKERRY_IMAGE }}"
    gitlab = document("gitlab.yaml")["skerry"]
    assert job["env"] == gitlab["variables"]
    steps = [step["run"] for step in job["steps"] if "run" in step]
    # GitHub's machine has no docker-registry, and actions/setup-python makes the environment.
    same = [step.removeprefix("command -v docker-registry || ") for step in gitlab["before_script"] + gitlab["script"]]
    assert steps == [step for step in same if ".venv" not in step]
