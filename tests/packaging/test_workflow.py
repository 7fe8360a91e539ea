"""The tests that only root can run have a step of their own in CI, and no mode of scripts/test skips them."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_workflow_runs_every_test_of_slurm_as_root() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    (command,) = [step["run"] for step in steps if "SKERRY_TEST_SLURM=required" in step.get("run", "")]
    assert command.startswith("sudo ")
    starting = [
        path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"slurm_site\(\) as ", path.read_text())
    ]
    assert set(re.findall(r"tests/\S+", command)) == {str(path.relative_to(ROOT)) for path in starting}


def test_workflow_requires_chromium_and_limits_of_memory() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    (whole,) = [step for step in steps if step.get("run") == ".ci/run"]
    assert whole["env"]["SKERRY_TEST_CHROMIUM"] == "required"
    (command,) = [step["run"] for step in steps if "SKERRY_TEST_CGROUPS=required" in step.get("run", "")]
    assert command.startswith("sudo ")
    (chosen, path) = command.rpartition(" -k ")[2].split()
    assert re.search(rf"def test_\w*{chosen}\w*\(.*limited: Path", (ROOT / path).read_text())
    for name in ("CHROMIUM", "CGROUPS"):
        assert f"export SKERRY_TEST_{name}=required" in (ROOT / "scripts/test").read_text()


def test_root_may_skip_slurm_in_neither_whole_nor_docker_tests() -> None:
    script = (ROOT / "scripts/test").read_text()
    docker = re.search(r"(?s)\n    --docker\).*?\n        ;;\n", script)
    assert docker is not None
    assert "require_slurm" in docker[0]
    assert "\nrequire_slurm\n" in script.partition("\nesac\n")[2]
