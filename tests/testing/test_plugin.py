"""The plugin as a user's tests meet it: fixtures by name, cheap to load, quick to use, and honest about Docker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import boto3
import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.sandbox import Sandbox

ROOT: Final = Path(__file__).parents[2]
USERS: Final = """
import boto3, os

def test_quick(skerry_sandbox):
    boto3.client("s3").create_bucket(Bucket="run")
    assert skerry_sandbox.inventory() == {"bucket": ("run",)}
    assert os.environ["AWS_ENDPOINT_URL"] == skerry_sandbox.endpoint

def test_alone(skerry_sandbox):
    assert skerry_sandbox.inventory() == {}

def test_docker(skerry_containers):
    assert skerry_containers.registry
"""


def outcome(folder: Path, tests: str, environment: Mapping[str, str]) -> tuple[int, str]:
    (folder / "test_users.py").write_text(tests)
    # Installed, it is there by its entry point.
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(folder)]
    ended = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT / 'infra'}", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
def test_container_tests_are_skipped_with_a_reason_without_docker(tmp_path: Path) -> None:
    nowhere = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    code, text = outcome(tmp_path, USERS, nowhere)
    assert code == 0, text
    assert "2 passed, 1 skipped" in text
    assert "no Docker engine responds" in text
    code, text = outcome(tmp_path, USERS, {**nowhere, "SKERRY_TEST_DOCKER": "required"})
    assert code == 1, text
    assert "no Docker engine responds" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "spec", "passed"), [("README.md", "batch.yaml", 2), ("google/README.md", "vertex.yaml", 1)]
)
def test_example_of_the_readme_passes(tmp_path: Path, page: str, spec: str, passed: int) -> None:
    tutorial = (ROOT / "docs/tutorial-sandbox.md").read_text()
    assert f"(../infra/skerry/testing/{page})" in tutorial
    readme = (ROOT / "infra/skerry/testing" / page).read_text()
    example = readme.partition("```python\n")[2].partition("```")[0]
    text = (ROOT / "infra/examples" / spec).read_text()
    if spec == "vertex.yaml":
        text = text.replace("acme-diloco", "skerry-sandbox")
    (tmp_path / "skerry.yaml").write_text(text.replace("../..", str(ROOT)))
    scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    code, text = outcome(tmp_path, example, {"PATH": scripts})
    assert code == 0, text
    assert f"{passed} passed" in text


def test_loading_the_plugin_imports_no_moto_and_no_sdk() -> None:
    program = "import json, sys, skerry.testing.plugin; json.dump(sorted(sys.modules), sys.stdout)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    loaded = {name.split(".")[0] for name in json.loads(ended.stdout)}
    assert not loaded & {"moto", "boto3", "botocore", "docker", "flask", "werkzeug", "obstore", "torch"}


def test_keys_of_the_developer_are_not_used(skerry_sandbox: Sandbox) -> None:
    assert os.environ["AWS_SHARED_CREDENTIALS_FILE"] == os.devnull
    assert "AWS_PROFILE" not in os.environ
    assert boto3.client("sts").get_caller_identity()["Account"] == skerry_sandbox.account
