"""constraints.txt is the environment that this runs in, whole and consistent."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Laid over the environment by `scripts/test --nightly`, never installed into it.
ELSEWHERE = {"torchft-nightly"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    result = [re.fullmatch(r"([\w.-]+)==([\w.!]+)", line) for line in lines if line and not line.startswith("#")]
    assert all(result), "a line is no pin"
    return {canonicalize_name(match[1]): match[2] for match in result if match}


def required() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    lists = [project["project"]["dependencies"], *extras.values(), *project["dependency-groups"].values()]
    result = [Requirement(text) for texts in lists for text in texts]
    return [requirement for requirement in result if requirement.name != "skerry"]


def test_everything_that_is_required_is_pinned_within_its_bounds() -> None:
    pinned = pins()
    for requirement in required():
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_extras_of_targets_with_a_store_in_s3_bring_boto3() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lacking = [name for name in ("hf-jobs", "modal", "sagemaker") if "skerry[aws]" not in extras[name]]
    assert lacking == []


def test_every_pin_is_what_is_installed() -> None:
    wanted = {name: version for name, version in pins().items() if name not in ELSEWHERE}
    installed = {
        canonicalize_name(result.name): result.version.partition("+")[0]
        for result in importlib.metadata.distributions()
    }
    assert {name: installed.get(name) for name in wanted} == wanted


def test_what_is_installed_fits_together() -> None:
    # Without the packages beside it, of which each was installed without what it requires.
    own = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "check"], env=own, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stdout
