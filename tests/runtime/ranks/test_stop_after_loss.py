"""A replica of two ranks is asked to stop after one of them was killed. Real processes, without torchrun."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.kit.managers import begin_run
from tests.support.forked import ForkedProcess
from torch.distributed import TCPStore

from skerry.runtime.contract import Contract, ExitCode
from skerry.runtime.log import keys
from skerry.runtime.log.records import Heartbeat, Outcome
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = pytest.mark.slow

SCRIPT: Final = Path(__file__).parents[2] / "support" / "script.py"
# The hard exit comes after 23 s; two seconds of silence are enough.
LIMIT_S: Final = 12.0


class TwoRanks:
    """One replica whose ranks are processes. In mode slow rank 1 waits for the reader of what it prints."""

    def __init__(self, folder: Path, uri: str, modes: Sequence[str]) -> None:
        server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._server = server
        contract = Contract(run_uri=uri, slot="r-0", index=0, replicas=1).environment()
        torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port)}
        outputs = [folder / "rank-0", folder / "rank-1"]
        os.mkfifo(outputs[1])
        self.ranks: list[ForkedProcess] = []
        for rank, (output, mode) in enumerate(zip(outputs, modes, strict=True)):
            environment = {**os.environ, **contract, **torchrun, "RANK": str(rank)}
            errors = output.with_suffix(".err")
            self.ranks.append(ForkedProcess([str(SCRIPT), mode], environment, output, errors=errors))
        self._lines = outputs[1].open()

    def read_steps(self, number: int) -> None:
        """Wait until rank 1 has taken so many steps."""
        for _ in range(number):
            self._lines.readline()

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
        self._lines.close()


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "run").as_uri()


@pytest.fixture
def start(tmp_path: Path, uri: str) -> Iterator[Callable[[str, str], TwoRanks]]:
    started: list[TwoRanks] = []

    def start(*modes: str) -> TwoRanks:
        begin_run(open_store(uri), ["r-0"], rounds=None, sync_every=1)
        started.append(TwoRanks(tmp_path, uri, modes))
        return started[0]

    yield start
    for replica in started:
        replica.end()


def outcome_of(survivor: ForkedProcess, uri: str) -> Outcome:
    """Wait until rank 0 has ended. Returns its outcome."""
    code = survivor.wait(LIMIT_S)
    store = open_store(uri)
    outcome = Outcome.parse(store.read(keys.outcome("r-0", 0)) or b"", "")
    assert (outcome.status, outcome.exit_code) == ("stopped", code), survivor.errors.read_text()
    assert Heartbeat.parse(store.read(keys.heartbeat("r-0")) or b"", "").phase == "left"
    return outcome


def test_stop_after_the_loss_of_a_rank_leaves_an_outcome(start: Callable[[str, str], TwoRanks], uri: str) -> None:
    """Otherwise the survivor waits for it until the hard exit, and leaves nothing."""
    replica = start("train", "slow")
    replica.read_steps(6)
    survivor, lost = replica.ranks
    lost.kill()
    survivor.send_signal(signal.SIGTERM)
    outcome = outcome_of(survivor, uri)
    assert outcome.exit_code == ExitCode.RETRY
    assert "rank 1 of 2 of r-0 has had no heartbeat for 2 s" in outcome.reason


def test_loss_of_a_rank_after_its_last_step_leaves_an_outcome(start: Callable[[str, str], TwoRanks], uri: str) -> None:
    replica = start("stop", "vanish")
    replica.read_steps(2)
    outcome = outcome_of(replica.ranks[0], uri)
    assert outcome.exit_code == ExitCode.STOPPED
    assert "stopped on request; rank 1 of 2 of r-0 has had no heartbeat for 2 s, at 'record'" in outcome.reason
