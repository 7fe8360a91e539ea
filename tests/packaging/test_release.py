"""Tests a release against a package index on loopback: built, uploaded, installed by name into an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.support.package_index import PackageIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PINS = "cat pyproject.toml constraints.txt | sha256sum"


def run(*command: str | Path, folder: Path, code: int = 0, **variables: str) -> str:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**kept, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == code, f"{command}:\n{ended.stdout[-4000:]}"
    return ended.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone of this commit with the files of the working tree, committed and tagged v7.8.9; it uses our .venv."""
    clone = tmp_path / "checkout"
    run("git", "clone", "--quiet", "--no-tags", ROOT, clone, folder=tmp_path)
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    # Otherwise the scripts in the clone would install the clone into our environment.
    stamp = Path(sys.prefix, "skerry.sha256").read_text()
    assert stamp == run("bash", "-c", PINS, folder=ROOT), "the environment is not that of pyproject.toml: scripts/fmt"
    (clone / ".venv").symlink_to(sys.prefix)
    return clone


def commit(checkout: Path, tag: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    run("git", "add", "--all", folder=checkout)
    run("git", *author, "commit", "--quiet", "--allow-empty", "--message", "state", folder=checkout)
    run("git", *author, "tag", tag, folder=checkout)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PackageIndex]:
    (tmp_path / "packages").mkdir()
    with PackageIndex(tmp_path / "packages") as created:
        yield created


def test_tag_is_built_uploaded_and_installed_by_name(checkout: Path, index: PackageIndex, tmp_path: Path) -> None:
    with (checkout / "CHANGELOG.md").open("a") as changes:
        changes.write("\n## 7.8.9\nA test.\n")
    commit(checkout, "v7.8.9")
    built = run("scripts/release", "build", folder=checkout)
    assert "dist/skerry-7.8.9-py3-none-any.whl\ndist/skerry-7.8.9.tar.gz" in built
    login = {"UV_PUBLISH_USERNAME": "any", "UV_PUBLISH_PASSWORD": "any"}
    run("scripts/release", "publish", f"http://{index.address}/", folder=checkout, **login)

    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "install", "--quiet")
    pins = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_INDEX_URL": index.url}
    run(*pip, "skerry==7.8.9", folder=tmp_path, **pins)
    assert run(tmp_path / "venv/bin/skerry", "--version", folder=tmp_path) == "skerry 7.8.9\n"


def test_tag_without_its_section_of_changes_is_refused(checkout: Path) -> None:
    commit(checkout, "v7.8.9")
    printed = run("scripts/release", "build", folder=checkout, code=1)
    assert "CHANGELOG.md has no section '## 7.8.9' for the tag v7.8.9" in printed


def test_tree_with_changes_at_a_tag_is_refused(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("## 7.8.9\n")
    commit(checkout, "v7.8.9")
    (checkout / "LICENSE").write_text("changed\n")
    printed = run("scripts/release", "build", folder=checkout, code=1)
    assert "is not that of the tag v7.8.9: the tree has changes" in printed


def test_nothing_is_published_without_a_build(checkout: Path) -> None:
    printed = run("scripts/release", "publish", "http://127.0.0.1:9/", folder=checkout, code=1)
    assert "run scripts/release build" in printed


# Makes an environment in which each command succeeds, but for those that match $BROKEN.
INTERPRETER = """\
#!/usr/bin/env bash
if [[ "$*" =~ $BROKEN ]]; then echo broken >&2; exit 1; fi
if [[ "$*" == "-m venv"* ]]; then
    mkdir -p "${@: -1}/bin"
    for name in python skerry skerry-replica; do cp "$0" "${@: -1}/bin/$name"; done
fi
if [[ "$*" == *samples* ]]; then echo local; fi
"""


@pytest.fixture
def tried(tmp_path: Path) -> Path:
    """A checkout with a wheel, whose environment has one program: the interpreter above."""
    for name in ("scripts/release", "scripts/_environment", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    for name in ("dist/skerry-1-py3-none-any.whl", "dist/skerry-1.tar.gz", ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(INTERPRETER)
        (tmp_path / name).chmod(0o755)
    digest = run("bash", "-c", PINS, folder=tmp_path)
    (tmp_path / ".venv/skerry.sha256").write_text(digest)
    return tmp_path


@pytest.mark.parametrize(
    "broken", ["samples", "validate", "check file", "pip .*check", "report", "lightning", "pip .*all,"]
)
def test_try_fails_with_the_first_command_that_fails(tried: Path, broken: str) -> None:
    interpreter = tried / ".venv/bin/python"
    assert "works" in run("scripts/release", "try", interpreter, folder=tried, BROKEN="^$")
    printed = run("scripts/release", "try", interpreter, folder=tried, code=1, BROKEN=broken)
    assert "works" not in printed


def test_try_without_an_interpreter_fails(tried: Path) -> None:
    variables = {"PYTHON": "/nowhere/python", "BROKEN": "^$"}
    assert "needs Python 3.11" in run("scripts/release", "try", folder=tried, code=1, **variables)


def test_workflow_of_a_release_calls_verbs_that_exist() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    lines = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    called = re.findall(r"(scripts/\w+) (\w+)", lines)
    assert {script for script, _ in called} == {"scripts/release", "scripts/image"}
    for script, verb in called:
        assert re.search(rf"^#   {verb}\b", (ROOT / script).read_text(), re.MULTILINE), (script, verb)
