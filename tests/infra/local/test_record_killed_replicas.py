"""Outcomes that the launcher writes for replicas of this machine that could not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.kit.protocol import heartbeat, run_record
from tests.kit.records import outcome
from tests.support.clocks import FakeClock

from skerry.infra.local.record_killed_replicas import EndingRecorder
from skerry.infra.run.executor import Ending
from skerry.runtime.errors import Retryable
from skerry.runtime.failure_text import OUT_OF_MEMORY
from skerry.runtime.log import keys
from skerry.runtime.log.records import Member, Memory, Outcome
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.store import Data, Entry

RUN = run_record(FakeClock(), slots=("a-0",))
KILLED = Ending(signal=signal.SIGKILL)


class Log(MemoryStore):
    """The log of a run with one replica, which fails if `away`."""

    away = False

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        if self.away:
            raise Retryable("away")
        return [*super().list(prefix, after)]

    def claim(self, incarnation: int, process: int, host: str | None = None) -> None:
        member = Member(
            run=RUN.nonce,
            slot="a-0",
            incarnation=incarnation,
            nonce="b" * 32,
            host=host or socket.gethostname(),
            process=process,
            created="now",
        )
        assert self.create(keys.member("a-0", incarnation), member.to_bytes())

    def outcomes(self) -> dict[int, Outcome]:
        stored = {entry.key: self.read(entry.key) for entry in self.list(keys.OUTCOMES)}
        return {keys.incarnation_of(key): Outcome.parse(data or b"", key) for key, data in stored.items()}

    def replace_heartbeat(self, data: Data) -> None:
        self.replace(keys.heartbeat("a-0"), data)


def ended_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def log() -> Log:
    return Log(FakeClock())


def recorder(log: Log) -> EndingRecorder:
    return EndingRecorder(log, RUN, FakeClock())


def test_killed_replica_gets_an_outcome_with_its_signal_and_a_remedy(log: Log) -> None:
    endings = recorder(log)
    log.claim(0, ended_process())
    log.replace_heartbeat(heartbeat("a-0", run=RUN.nonce, round=3, tokens=70, loss=2.5).to_bytes())
    endings.note("a-0", KILLED, "step 12")
    endings.write()
    record = log.outcomes()[0]
    assert (record.status, record.exit_code, record.round, record.tokens, record.loss_last) == (
        "retry",
        137,
        3,
        70,
        2.5,
    )
    assert record.reason == (
        "killed (signal SIGKILL); if not by a person, then out of memory: use a smaller batch or model, or a machine "
        "with more memory"
    )


@pytest.mark.parametrize(
    ("peak", "reason"),
    [
        (15_200_000_000, f"killed (signal SIGKILL), probably {OUT_OF_MEMORY}; it had used 15.2 of 16.0 GB"),
        (
            2_000_000_000,
            f"killed (signal SIGKILL); if not by a person, then {OUT_OF_MEMORY}; it had used 2.0 of 16.0 GB",
        ),
    ],
)
def test_lack_of_memory_is_guessed_from_the_last_heartbeat(log: Log, peak: int, reason: str) -> None:
    endings = recorder(log)
    log.claim(0, ended_process())
    memory = Memory(peak_bytes=peak, limit_bytes=16_000_000_000)
    log.replace_heartbeat(heartbeat("a-0", run=RUN.nonce, memory=memory).to_bytes())
    endings.note("a-0", KILLED, None)
    endings.write()
    assert log.outcomes()[0].reason == reason


@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        (Ending(exit_code=1), "retry", "exit code 1: ImportError: x"),
        (Ending(exit_code=20), "failed", "exit code 20: ImportError: x"),
        (Ending(signal=9, why="on purpose"), "stopped", "killed (signal SIGKILL): on purpose"),
        (Ending(signal=11), "retry", "killed (signal SIGSEGV)"),
    ],
)
def test_status_and_reason_follow_from_the_ending(log: Log, ending: Ending, status: str, reason: str) -> None:
    endings = recorder(log)
    log.claim(0, ended_process())
    endings.note("a-0", ending, "ImportError: x")
    endings.write()
    assert (log.outcomes()[0].status, log.outcomes()[0].reason) == (status, reason)


def test_outcome_of_the_replica_itself_is_kept(log: Log) -> None:
    endings = recorder(log)
    log.claim(0, ended_process())
    log.create(keys.outcome("a-0", 0), outcome("a-0", run=RUN.nonce).to_bytes())
    endings.note("a-0", Ending(exit_code=0), None)
    endings.write()
    assert log.outcomes()[0].reason == "all rounds are closed"


def test_starts_of_others_and_live_ones_get_no_outcome(log: Log) -> None:
    log.claim(0, ended_process())  # before this `up`
    endings = recorder(log)
    log.claim(1, ended_process(), host="elsewhere")
    log.claim(2, os.getpid())
    endings.note("a-0", KILLED, None)
    endings.write()
    assert log.outcomes() == {}


def test_two_kills_are_recorded_for_their_own_starts_after_an_outage(log: Log) -> None:
    endings = recorder(log)
    log.claim(0, ended_process())
    endings.note("a-0", KILLED, None)
    log.away = True
    with pytest.raises(Retryable):
        endings.write()
    log.away = False
    log.claim(1, ended_process())
    endings.note("a-0", Ending(signal=signal.SIGSEGV), None)
    endings.write()
    assert [record.exit_code for record in log.outcomes().values()] == [137, 139]
