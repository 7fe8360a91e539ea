"""Replays docs/restore.md: the store is deleted in mid-run, and real replicas go on from the mirror."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import ROOT, Skerry, environment
from tests.kit.managers import wait_for

from skerry.infra.cli.common import NOT_BY_ALL
from skerry.runtime.log.read_rounds import find_closed
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

SECTION = re.compile(r"^## Rehearse the loss on this machine\n(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
ROUNDS = 14
BEFORE = 4


@pytest.fixture
def second_cloud() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def shown(second_cloud: Path) -> list[tuple[str, list[str]]]:
    """Each command of the section, with the lines that the page shows of its output."""
    section = SECTION.findall((ROOT / "docs/restore.md").read_text())[0]
    section = section.replace("/dev/shm/second-cloud", str(second_cloud))  # noqa: S108  as on the page
    section = section.replace("rounds=40", f"rounds={ROUNDS}")
    commands: list[tuple[str, list[str]]] = []
    for line in "".join(BLOCK.findall(section)).splitlines():
        if line.startswith("$ "):
            commands.append((line.removeprefix("$ "), []))
        else:
            commands[-1][1].append(line)
    return commands


def run(command: str, folder: Path) -> str:
    """The output of a command that ends well. An `up` may end without a replica that came late in so short a run."""
    program = f'skerry() {{ {sys.executable} -c "from skerry.infra.cli.app import main; main()" "$@"; }}; {command}'
    ended = subprocess.run(
        ["bash", "-c", program], cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=240
    )
    assert ended.returncode in ({0, NOT_BY_ALL} if command.startswith("skerry up") else {0}), (
        f"$ {command}\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    )
    return ended.stdout


@pytest.mark.slow
def test_training_goes_on_from_the_mirror_of_a_deleted_store(
    tmp_path: Path, second_cloud: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init, replicate, up, remove, restore, *others = shown(second_cloud)
    for command, _ in (init, replicate):
        run(command, tmp_path)
    store, mirror = open_store((tmp_path / ".skerry/store/my-run").as_uri()), second_cloud / "my-run"
    with Skerry(*up[0].split()[1:]) as training:
        wait_for(lambda: find_closed(store, 0) >= BEFORE)
        wait_for(lambda: find_closed(open_store(mirror.as_uri()), 0) >= find_closed(store, 0))
        closed = find_closed(open_store(mirror.as_uri()), 0)
        run(remove[0], tmp_path)
        training.interrupt()
        training.end()
    printed = run(restore[0], tmp_path)
    for line in restore[1]:
        assert line in printed
    for command, _ in others:
        run(command, tmp_path)
    target = f"{mirror.as_uri()}-2"
    compared = json.loads(run(f"skerry doctor {mirror.as_uri()} {target} --json", tmp_path))
    assert compared["relation"] == "restored"
    assert compared["common"] >= closed >= BEFORE
    assert compared["rounds"][1] == ROUNDS
