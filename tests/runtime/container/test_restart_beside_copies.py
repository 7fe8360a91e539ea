"""A container whose ranks keep copies of their state runs its command again, a few times, when a rank is lost."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from tests.support.container import ROOT, ContainerStarts, Signpost

from skerry.runtime.log import keys
from skerry.runtime.log.run_record import PeerCopies

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

ONLY = {"SKERRY_INDEX": "0", "SKERRY_REPLICAS": "1"}
STEPS = 4
"""Of a round."""


@pytest.fixture
def copying(tmp_path: Path) -> Iterator[ContainerStarts]:
    """Of a run whose replicas keep copies."""
    with ContainerStarts(tmp_path, slots=("r-1",), peers=PeerCopies(), sync_every=STEPS) as starts:
        yield starts


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[ContainerStarts]:
    with ContainerStarts(tmp_path, slots=("r-1",), sync_every=STEPS) as starts:
        yield starts


def test_killed_rank_gets_its_state_from_the_memory_of_its_peer(copying: ContainerStarts, tmp_path: Path) -> None:
    """It is killed in mid-round, with its own copies: only the other rank has the state of its last step."""
    died = STEPS + 2
    command = ("python", str(ROOT / "tests" / "support" / "connected.py"), str(tmp_path), f"1:{died}", "copies")
    exit_code, output = copying.run(*command, SKERRY_RANKS="2", **ONLY)
    assert exit_code == 0, output[-6000:]
    assert output.count("starting it again beside the copies of its state") == 1
    for rank in range(2):
        (line,) = (tmp_path / f"r-1-{rank}.jsonl").read_text().splitlines()
        report = json.loads(line)
        assert (report["rounds"], report["steps"]) == (2, list(range(died, 2 * STEPS)))
    assert copying.store.list(keys.UNFINISHED) == []
    assert [copying.outcome(incarnation=number).exit_code for number in range(2)] == [10, 0]


def counting(folder: Path, code: int) -> tuple[str, ...]:
    """A script that counts its starts, and exits with this code."""
    text = f"import os, sys; open({str(folder / 'starts')!r}, 'a').write('x'); sys.exit({code})"
    return (sys.executable, "-c", text)


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (10, 4), (20, 1), (30, 1), (1, 4)])
def test_command_is_run_again_a_few_times_if_a_restart_may_help(
    copying: ContainerStarts, tmp_path: Path, code: int, starts: int
) -> None:
    exit_code, output = copying.run(*counting(tmp_path, code), **ONLY)
    assert (exit_code, len((tmp_path / "starts").read_text())) == (10 if code == 1 else code, starts), output


def test_command_without_copies_is_not_run_again(plain: ContainerStarts, tmp_path: Path) -> None:
    exit_code, _ = plain.run(*counting(tmp_path, 10), **ONLY)
    assert (exit_code, (tmp_path / "starts").read_text()) == (10, "x")


def test_stopped_command_is_not_run_again(copying: ContainerStarts, signpost: Signpost) -> None:
    text = "import os, signal; open(os.environ['REACHED'], 'w').write('x'); signal.pause()"
    process = copying.start(sys.executable, "-c", text, REACHED=str(signpost.path), **ONLY)
    signpost.wait()
    process.send_signal(signal.SIGTERM)
    exit_code, output = copying.finish(process)
    assert (exit_code, "starting it again" in output) == (10, False)
