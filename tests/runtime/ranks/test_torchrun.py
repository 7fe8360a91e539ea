"""Replicas of two ranks under torchrun: a model sharded by FSDP2, with DiLoCo between the replicas.

torchrun and its ranks are forked from a process that has torch imported, except in the last test.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
import torch
from tests.kit.managers import contributions, decisions
from tests.kit.protocol import run_record
from tests.support.forked import ForkedProcess

from skerry.infra.run.source_checkpoint import find_source
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.contract import Contract, ExitCode
from skerry.runtime.export import load
from skerry.runtime.log import keys
from skerry.runtime.log.records import Outcome
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from types import TracebackType

    from skerry.infra.run.source_checkpoint import Source

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "support" / "ranked.py"
CONNECTED = ROOT / "tests" / "support" / "connected.py"
SETTINGS = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "runtime"), str(ROOT / "infra"), str(ROOT)]),
    "OMP_NUM_THREADS": "1",
    # Without this, gloo in torch 2.13 finds the addresses of the last start when a group is restarted.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class TorchrunReplicas:
    """Starts replicas under torchrun. Kills their processes on exit."""

    def __init__(
        self,
        folder: Path,
        slots: tuple[str, ...] = ("r-0", "r-1"),
        rounds: int | None = None,
        minimum: int = 1,
        source: Source | None = None,
    ) -> None:
        """source: the checkpoint of another run to start from."""
        self.folder = folder
        self.uri = (folder / "run").as_uri()
        self.store = open_store(self.uri)
        run = run_record(SystemClock(), slots=slots, rounds=rounds, min_replicas=minimum)
        changes: dict[str, object] = {"grace_s": 2.0}
        if source is not None:
            source.copy_to(self.store)
            changes["init_from"] = source.initial
        self.store.create(keys.RUN, run.model_copy(update=changes).to_bytes())
        self._slots = slots
        self._started: list[ForkedProcess] = []

    def start(self, index: int, *arguments: str, ranks: int = 2, restarts: int = 0) -> ForkedProcess:
        options = ["--store", self.uri, "--slot", f"r-{index}", "--index", str(index), "--out", str(self.folder)]
        return self._torchrun(index, [str(SCRIPT), *options, *arguments], ranks, restarts, {})

    def connect(self, index: int, *arguments: str, restarts: int = 0, fresh: bool = False) -> ForkedProcess:
        """Start a replica with a script that calls `connect()`. fresh: in new interpreters."""
        contract = Contract(run_uri=self.uri, slot=f"r-{index}", index=index, replicas=len(self._slots))
        command = [str(CONNECTED), str(self.folder), *arguments]
        return self._torchrun(index, command, 2, restarts, contract.environment(), fresh=fresh)

    def _torchrun(
        self,
        index: int,
        command: list[str],
        ranks: int,
        restarts: int,
        environment: dict[str, str],
        *,
        fresh: bool = False,
    ) -> ForkedProcess:
        words = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        words += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        words += [] if fresh else ["--run-path", "--start-method", "fork"]
        log = self.folder / f"{len(self._started)}-r-{index}.log"
        process = ForkedProcess([*words, *command], SETTINGS | environment, log, fresh=fresh)
        self._started.append(process)
        return process

    def finish(self) -> dict[str, list[dict[str, object]]]:
        """Wait until all replicas have succeeded. Returns the reports of their ranks, in rank order."""
        for process in self._started:
            assert process.wait(300) == 0, process.output.read_text()[-6000:]
        reports: dict[str, list[dict[str, object]]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            (line,) = path.read_text().splitlines()
            report = json.loads(line)
            reports.setdefault(report["slot"], []).append(report)
        return reports

    def fail(self, process: ForkedProcess) -> str:
        """Wait until a replica has failed. Returns its output."""
        assert process.wait(300) != 0
        return process.output.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.kill()


def assert_same_digests(reports: dict[str, list[dict[str, object]]], at_least: int) -> None:
    """Rank k has the same weights in both replicas after every common round, and other weights than other ranks."""
    for first, second in zip(reports["r-0"], reports["r-1"], strict=True):
        rounds, others = first["digests"], second["digests"]
        assert isinstance(rounds, dict)
        assert isinstance(others, dict)
        common = rounds.keys() & others.keys()
        assert len(common) >= at_least
        assert [rounds[number] for number in common] == [others[number] for number in common]
    by_rank = [list(report["digests"].values()) for report in reports["r-0"]]  # type: ignore[attr-defined]
    assert by_rank[0] != by_rank[1]


@pytest.mark.parametrize("delay", [0, 1])
def test_sharded_model_has_the_same_bits_in_every_replica(tmp_path: Path, delay: int) -> None:
    with TorchrunReplicas(tmp_path) as replicas:
        for index in range(2):
            replicas.start(index, "--rounds", "4", "--delay", str(delay))
        reports = replicas.finish()
    assert_same_digests(reports, at_least=4)
    assert [report["rank"] for report in reports["r-0"]] == [0, 1]
    assert {report["batches"] for replica in reports.values() for report in replica} == {8}
    assert [len(decision.members) for decision in decisions(replicas.store)] == [2] * 4
    assert all(len(contribution.ranks) == 2 for contribution in contributions(replicas.store))
    assert len(replicas.store.list(keys.members_prefix("r-0"))) == 1  # one incarnation for both ranks
    exported = load(replicas.uri)
    for slot in ("r-0", "r-1"):
        trained = torch.load(tmp_path / f"{slot}.pt")
        assert exported.keys() == trained.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in trained.items())


def test_sharded_run_starts_from_the_model_of_another(tmp_path: Path) -> None:
    folders = tmp_path / "source", tmp_path / "fork"
    for folder in folders:
        folder.mkdir()
    with TorchrunReplicas(folders[0], ("r-0",)) as replicas:
        replicas.start(0, "--rounds", "1", "--minimum", "1")
        replicas.finish()
        source = find_source(replicas.store, replicas.uri, 1)
        expected = load(replicas.uri, 1)
    with TorchrunReplicas(folders[1], ("r-0",), source=source) as replicas:
        replicas.start(0, "--rounds", "1", "--minimum", "1")
        replicas.finish()
        first = load(replicas.uri, 0)
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in expected.items())


def test_replica_restarts_after_losing_a_rank(tmp_path: Path) -> None:
    with TorchrunReplicas(tmp_path) as replicas:
        until = ["--rounds", "6", "--until-back", "r-1", "--minimum", "1", "--grace", "2"]
        replicas.start(0, *until)
        replicas.start(1, *until, "--die-at", "1:7", restarts=1)
        reports = replicas.finish()
    assert [report["restarts"] for report in reports["r-1"]] == [1, 1]
    assert [report["restarts"] for report in reports["r-0"]] == [0, 0]
    assert len(replicas.store.list(keys.members_prefix("r-1"))) == 2
    members = [[share.slot for share in decision.members] for decision in decisions(replicas.store)]
    assert all("r-0" in slots for slots in members), "it continued"
    assert members[-1] == ["r-0", "r-1"]  # r-1 joined again
    assert_same_digests(reports, at_least=1)


def test_non_finite_rank_excludes_its_replica(tmp_path: Path) -> None:
    with TorchrunReplicas(tmp_path) as replicas:
        replicas.start(0, "--rounds", "3", "--minimum", "1")
        replicas.start(1, "--rounds", "3", "--minimum", "1", "--nan-at", "1:4")
        reports = replicas.finish()
    assert [share.slot for share in decisions(replicas.store)[1].members] == ["r-0"]
    assert_same_digests(reports, at_least=2)


def test_replica_of_another_size_fails_with_the_next_step(tmp_path: Path) -> None:
    with TorchrunReplicas(tmp_path, slots=("r-0",)) as replicas:
        first = replicas.start(0, "--rounds", "2", "--minimum", "1", "--grace", "1")
        assert first.wait(300) == 0
        output = replicas.fail(replicas.start(1, "--rounds", "4", "--minimum", "1", ranks=1))
    assert "was saved by 2 ranks, this replica has world_size=1" in output
    assert "start this one with 2" in output


def test_connected_scripts_finish_after_the_loss_of_a_rank(tmp_path: Path) -> None:
    with TorchrunReplicas(tmp_path, rounds=8, minimum=2) as replicas:
        replicas.connect(0)
        replicas.connect(1, "1:10", restarts=1)
        reports = replicas.finish()
    assert [report["restarts"] for report in reports["r-1"]] == [1, 1]
    assert {report["rounds"] for replica in reports.values() for report in replica} == {8}
    assert_same_digests(reports, at_least=5)
    ends = {
        (slot, number): Outcome.parse(replicas.store.read(keys.outcome(slot, number)) or b"", "")
        for slot, number in (("r-0", 0), ("r-1", 0), ("r-1", 1))
    }
    assert (ends["r-0", 0].status, ends["r-1", 1].status) == ("done", "done")
    assert ends["r-1", 0].status in {"retry", "stopped"}  # torchrun stops the other rank, or that fails first
    assert ends["r-1", 0].round < 8
    assert ends["r-1", 1].exit_code == 0
    first, second = (report["steps"] for report in reports["r-1"])
    assert first == second
    assert first[0] >= 8, "it continues at the step of the run"  # type: ignore[index]
    members = [[share.slot for share in decision.members] for decision in decisions(replicas.store)]
    assert members == [["r-0", "r-1"]] * 8  # min_replicas: r-0 waited for r-1
    assert all(len(contribution.ranks) == 2 for contribution in contributions(replicas.store))


def test_stopped_torchrun_leaves_the_outcome_of_a_signal(tmp_path: Path) -> None:
    clock = SystemClock()
    with TorchrunReplicas(tmp_path, slots=("r-0",)) as replicas:
        torchrun = replicas.connect(0, fresh=True)
        closed = wait_until(
            clock, lambda: replicas.store.list(keys.COMMITS) or None, clock.now() + 120, Backoff(first=0.1, cap=0.1)
        )
        assert closed
        torchrun.send_signal(signal.SIGTERM)
        replicas.fail(torchrun)
    outcome = Outcome.parse(replicas.store.read(keys.outcome("r-0", 0)) or b"", "")
    assert (outcome.status, outcome.exit_code, outcome.reason) == ("stopped", ExitCode.RETRY, "stopped by a signal")
