"""Replicas of two ranks as torchrun starts them: a model that FSDP2 shards, DiLoCo between the replicas."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from tests.support.logs import run_record
from tests.support.managers import contributions, decisions

from skerry.runtime import keys
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.contract import Contract, ExitCode
from skerry.runtime.records import Outcome
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from types import TracebackType

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "ranked.py"
CONNECTED = ROOT / "tests" / "support" / "connected.py"


class Fleet:
    """Replicas under torchrun. On exit every process of theirs that still runs is killed."""

    def __init__(
        self, folder: Path, slots: tuple[str, ...] = ("r-0", "r-1"), rounds: int | None = None, minimum: int = 1
    ) -> None:
        self.folder = folder
        self.uri = (folder / "run").as_uri()
        self.store = open_store(self.uri)
        run = run_record(SystemClock(), slots=slots, rounds=rounds, min_replicas=minimum)
        self.store.create(keys.RUN, run.model_copy(update={"grace_s": 2.0}).to_bytes())
        self._slots = slots
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self, index: int, *arguments: str, ranks: int = 2, restarts: int = 0) -> subprocess.Popen[bytes]:
        place = ["--store", self.uri, "--slot", f"r-{index}", "--index", str(index), "--out", str(self.folder)]
        return self._torchrun(index, [str(SCRIPT), *place, *arguments], ranks, restarts, {})

    def connect(self, index: int, *arguments: str, restarts: int = 0) -> subprocess.Popen[bytes]:
        """A replica whose script finds its place by `connect()`."""
        place = Contract(run_uri=self.uri, slot=f"r-{index}", index=index, replicas=len(self._slots))
        return self._torchrun(index, [str(CONNECTED), str(self.folder), *arguments], 2, restarts, place.environment())

    def _torchrun(
        self, index: int, command: list[str], ranks: int, restarts: int, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        torchrun = ["torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        settings = {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "runtime"), str(ROOT / "infra"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            # torch 2.13's own gloo finds its last start's addresses when a group is restarted, without this.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        log = self.folder / f"{len(self._started)}-r-{index}.log"
        many = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *torchrun, *many, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | settings | environment,
                start_new_session=True,
            )
        self._started.append((process, log))
        return process

    def finish(self) -> dict[str, list[dict[str, object]]]:
        """What the ranks of each replica reported, in rank order, once all have ended well."""
        for process, log in self._started:
            code = process.wait(120)
            assert code == 0, log.read_text()[-6000:]
        found: dict[str, list[dict[str, object]]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            (line,) = path.read_text().splitlines()
            report = json.loads(line)
            found.setdefault(report["slot"], []).append(report)
        return found

    def failed(self, process: subprocess.Popen[bytes]) -> str:
        """What a replica said that ended badly."""
        assert process.wait(120) != 0
        return next(log for started, log in self._started if started is process).read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, _ in self._started:
            # Its session: the ranks are torchrun's children, and outlive it if it is killed.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def same_bits(reports: dict[str, list[dict[str, object]]], at_least: int) -> None:
    """Rank k holds the same in every replica after every round that both have seen; no two ranks hold the same."""
    for first, second in zip(reports["r-0"], reports["r-1"], strict=True):
        ours, theirs = first["digests"], second["digests"]
        assert isinstance(ours, dict)
        assert isinstance(theirs, dict)
        common = ours.keys() & theirs.keys()
        assert len(common) >= at_least
        assert {number: ours[number] for number in common} == {number: theirs[number] for number in common}
    by_rank = [list(report["digests"].values()) for report in reports["r-0"]]  # type: ignore[attr-defined]
    assert by_rank[0] != by_rank[1]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_sharded_model_trains_to_the_same_bits_in_every_replica(tmp_path: Path, delay: int) -> None:
    with Fleet(tmp_path) as fleet:
        for index in range(2):
            fleet.start(index, "--rounds", "4", "--delay", str(delay))
        reports = fleet.finish()
    same_bits(reports, at_least=4)
    assert [report["rank"] for report in reports["r-0"]] == [0, 1]
    assert {report["batches"] for replica in reports.values() for report in replica} == {8}
    assert [len(decision.members) for decision in decisions(fleet.store)] == [2] * 4
    assert all(len(one.ranks) == 2 for one in contributions(fleet.store))
    assert len(fleet.store.list(keys.members_of("r-0"))) == 1  # one incarnation for both ranks


def test_a_replica_that_lost_a_rank_is_started_again_and_the_other_goes_on(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        until = ["--rounds", "6", "--until-back", "r-1", "--minimum", "1", "--grace", "2"]
        fleet.start(0, *until)
        fleet.start(1, *until, "--die-at", "1:7", restarts=1)
        reports = fleet.finish()
    assert [report["restarts"] for report in reports["r-1"]] == [1, 1]
    assert [report["restarts"] for report in reports["r-0"]] == [0, 0]
    assert len(fleet.store.list(keys.members_of("r-1"))) == 2
    members = [[share.slot for share in decision.members] for decision in decisions(fleet.store)]
    assert ["r-0"] in members  # it went on alone
    assert members[-1] == ["r-0", "r-1"]  # and was joined again
    same_bits(reports, at_least=1)


def test_a_rank_that_is_not_finite_keeps_its_whole_replica_out(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        fleet.start(0, "--rounds", "3", "--minimum", "1")
        fleet.start(1, "--rounds", "3", "--minimum", "1", "--nan-at", "1:4")
        reports = fleet.finish()
    assert [share.slot for share in decisions(fleet.store)[1].members] == ["r-0"]
    same_bits(reports, at_least=2)


def test_a_replica_of_another_size_is_told_what_to_do(tmp_path: Path) -> None:
    with Fleet(tmp_path, slots=("r-0",)) as fleet:
        first = fleet.start(0, "--rounds", "2", "--minimum", "1", "--grace", "1")
        assert first.wait(120) == 0
        said = fleet.failed(fleet.start(1, "--rounds", "4", "--minimum", "1", ranks=1))
    assert "is of a replica of 2 ranks, this one has 1: world_size=1" in said
    assert "so start this one with 2" in said


def test_scripts_that_connect_train_through_the_loss_of_a_rank_to_the_end(tmp_path: Path) -> None:
    with Fleet(tmp_path, rounds=8, minimum=2) as fleet:
        fleet.connect(0)
        fleet.connect(1, "1:10", restarts=1)
        reports = fleet.finish()
    assert [report["restarts"] for report in reports["r-1"]] == [1, 1]
    assert {report["rounds"] for replica in reports.values() for report in replica} == {8}
    same_bits(reports, at_least=5)
    ends = {
        (slot, number): Outcome.parse(fleet.store.read(keys.outcome(slot, number)) or b"", "")
        for slot, number in (("r-0", 0), ("r-1", 0), ("r-1", 1))
    }
    assert (ends["r-0", 0].status, ends["r-1", 1].status) == ("done", "done")
    assert ends["r-1", 0].status in {"retry", "stopped"}  # torchrun stops the rank that is left, or it fails first
    assert ends["r-1", 0].round < 8
    assert ends["r-1", 1].exit_code == 0
    first, second = (report["steps"] for report in reports["r-1"])
    assert first == second
    assert first[0] >= 8, "it goes on where the run is"  # type: ignore[index]
    members = [[share.slot for share in decision.members] for decision in decisions(fleet.store)]
    assert members == [["r-0", "r-1"]] * 8  # min_replicas: the other one waited for it
    assert all(len(one.ranks) == 2 for one in contributions(fleet.store))


def test_ranks_that_torchrun_stops_leave_the_outcome_of_a_signal(tmp_path: Path) -> None:
    clock = SystemClock()
    with Fleet(tmp_path, slots=("r-0",)) as fleet:
        torchrun = fleet.connect(0)
        closed = wait_until(
            clock, lambda: fleet.store.list(keys.COMMITS) or None, clock.now() + 120, Backoff(first=0.1, cap=0.1)
        )
        assert closed
        torchrun.send_signal(signal.SIGTERM)
        fleet.failed(torchrun)
    told = Outcome.parse(fleet.store.read(keys.outcome("r-0", 0)) or b"", "")
    assert (told.status, told.exit_code, told.reason) == ("stopped", ExitCode.RETRY, "stopped by a signal")
