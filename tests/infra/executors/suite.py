"""The contract of every executor; each target subclasses `ExecutorSuite` and provides a fixture `stage`."""

from __future__ import annotations

import json
import os
import shlex
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from skerry.infra.executors import Ending, Outer, ReplicaHandle
from skerry.runtime import contract
from skerry.runtime.errors import Conflict, Invalid, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import Run
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.executors import ServerlessExecutor

LONG = timedelta(seconds=30)
OUTER = Outer(rounds=3, sync_every=2)
# What a replica does on receiving `verb text`, in its loop.
ACTIONS = """\
    if verb == 'write':
        print(text, flush=True)
    elif verb == 'tell':
        print(json.dumps([os.getcwd(), dict(os.environ)]), flush=True)
    elif verb == 'exit':
        os._exit(int(text))
    elif verb == 'kill':
        os.kill(os.getpid(), 9)
"""
# Reads lines of a named pipe; where a test drives the jobs, only the command's words matter.
SCRIPT = f"""\
import json, os, sys
for line in open(os.path.join(sys.argv[1], os.environ['SKERRY_SLOT'])):
    verb, _, text = line.strip().partition(' ')
{ACTIONS}"""


class Stage(ABC):
    """A target with one run, and what a test does to its replicas."""

    run: str
    folder: str = "/pipes"

    @abstractmethod
    def executor(self, **options: Any) -> ServerlessExecutor:
        """A new executor, as another process would create it."""

    @abstractmethod
    def write(self, handle: ReplicaHandle, text: str) -> None:
        """Make a replica write a line; start it first if it waits."""

    @abstractmethod
    def finish(self, handle: ReplicaHandle, code: int) -> None:
        """Make a replica end with this exit code."""

    @abstractmethod
    def lose(self, handle: ReplicaHandle) -> None:
        """End a replica by SIGKILL."""

    @abstractmethod
    def variables_of(self, handle: ReplicaHandle) -> Mapping[str, str]:
        """The environment variables of a replica."""

    @abstractmethod
    def live(self) -> int:
        """The number of the run's replicas that wait or run."""

    @abstractmethod
    def refuse_one(self) -> None:
        """Make one of the next two starts fail."""

    def environment(self) -> Mapping[str, str]:
        """The variables that open the run's store."""
        return {}

    @property
    def command(self) -> list[str]:
        return ["-S", "-c", SCRIPT, self.folder]

    def launch(self, executor: ServerlessExecutor, count: int = 2) -> list[ReplicaHandle]:
        return executor.launch_replicas(count, "python", self.command)

    def run_record(self) -> Run:
        data = open_store(self.run, environment={**os.environ, **self.environment()}).read(keys.RUN)
        assert data is not None
        return Run.parse(data, keys.RUN)


def until(look: Callable[[], bool]) -> None:
    """Wait until `look` is true: real processes need a moment, jobs that a test drives do not."""
    deadline = time.monotonic() + 300
    while not look():
        assert time.monotonic() < deadline
        os.sched_yield()


def through_json(handle: ReplicaHandle) -> ReplicaHandle:
    """The handle after a trip through JSON, as another process gets it."""
    return ReplicaHandle(**json.loads(json.dumps(asdict(handle))))


class ExecutorSuite:
    STOPPED: ClassVar[tuple[Ending, ...]] = (Ending(signal=15),)
    """The endings allowed after a request to stop."""
    KILLED: ClassVar[tuple[Ending, ...]] = (Ending(signal=9),)

    def test_launched_replicas_are_polled_and_collected_in_the_order_given(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            assert [(handle.slot, handle.index, handle.attempt) for handle in handles] == [
                ("replica-0", 0, 0),
                ("replica-1", 1, 0),
            ]
            assert len({handle.job for handle in handles}) == 2
            assert [executor.poll(handle) for handle in handles] == [None, None]
            stage.finish(handles[1], 20)
            assert executor.collect(handles[1:], LONG) == [Ending(exit_code=20)]
            assert executor.poll(handles[0]) is None
            stage.finish(handles[0], 0)
            assert executor.collect([handles[1], handles[0]], LONG) == [Ending(exit_code=20), Ending(exit_code=0)]
            assert executor.poll(handles[0]) == Ending(exit_code=0)

    def test_killed_replica_ends_by_sigkill(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 1)
            stage.write(handles[0], "up")
            stage.lose(handles[0])
            assert executor.collect(handles, LONG) == [Ending(signal=9)]

    def test_collect_timeout_names_the_running_slots(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            stage.finish(handles[0], 0)
            executor.collect(handles[:1], LONG)
            with pytest.raises(TimeoutError, match=r"still running after 0:00:00: replica-1$"):
                executor.collect(handles, timedelta())
            with pytest.raises(TimeoutError, match=r"still running after 0:00:00"):
                executor.collect(handles, 0)

    def test_replica_gets_the_contract_and_the_added_variables(self, stage: Stage) -> None:
        with stage.executor(variables={"HF_HOME": "/data"}) as executor:
            handles = stage.launch(executor)
            variables = stage.variables_of(handles[1])
            expected = contract.Contract(run_uri=stage.run, slot="replica-1", index=1, replicas=2)
            assert contract.read(variables) == expected
            assert variables["HF_HOME"] == "/data"

    def test_options_and_the_named_variable_reach_each_replica(self, stage: Stage) -> None:
        with stage.executor() as executor:
            command = shlex.join(["python", *stage.command])
            handles = executor.launch_replicas(2, command, {"rank_env": "REPLICA_RANK"})
            assert [stage.variables_of(handle)["REPLICA_RANK"] for handle in handles] == ["0", "1"]
            assert [handle.rank for handle in handles] == [0, 1]
            assert handles[0].backend
            assert handles[0].metadata == {"slot": "replica-0", "attempt": 0, "job": handles[0].job}

    def test_logs_return_the_lines_written_so_far(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            for text in ("one", "two"):
                stage.write(handles[0], text)
            until(lambda: lines_of(executor, handles[0])[-2:] == ["one", "two"])
            assert "one" not in lines_of(executor, handles[1])

    def test_cancel_ends_one_replica_and_not_the_others(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            stage.write(handles[0], "up")
            until(lambda: "up" in lines_of(executor, handles[0]))
            executor.cancel(handles[0])
            (ending,) = executor.collect(handles[:1], LONG)
            assert ending in self.STOPPED
            assert executor.poll(handles[1]) is None
            executor.cancel(handles[0], kill=True)  # succeeds although it has ended
            executor.cancel(handles[1], kill=True)
            (ending,) = executor.collect(handles[1:], LONG)
            assert ending in self.KILLED

    def test_another_process_polls_reads_and_cancels_by_handle(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 3)
            other = stage.executor()
            assert [other.poll(through_json(handle)) for handle in handles] == [None] * 3
            stage.write(handles[0], "here")
            until(lambda: "here" in lines_of(other, through_json(handles[0])))
            stage.finish(handles[0], 10)
            assert other.collect([through_json(handles[0])], LONG) == [Ending(exit_code=10)]
            stage.write(handles[1], "up")
            other.cancel(through_json(handles[1]))
            other.cancel(through_json(handles[2]), kill=True)
            stopped, killed = other.collect([through_json(handle) for handle in handles[1:]], LONG)
            assert (stopped in self.STOPPED, killed in self.KILLED) == (True, True), (stopped, killed)
            other.close()
        after = stage.executor()
        assert after.collect([through_json(handle) for handle in handles], LONG) == [
            Ending(exit_code=10),
            stopped,
            killed,
        ]

    def test_close_keeps_replicas_of_another_executor_running(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 1)
            with stage.executor() as other:
                assert other.poll(handles[0]) is None
            assert executor.poll(handles[0]) is None

    def test_leaving_the_context_ends_running_replicas(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            stage.finish(handles[0], 0)
            executor.collect(handles[:1], LONG)
        done, ended = executor.collect(handles, LONG)
        assert (done, ended in self.KILLED) == (Ending(exit_code=0), True)
        assert stage.live() == 0
        executor.close()

    def test_failed_start_cancels_the_whole_launch(self, stage: Stage) -> None:
        stage.refuse_one()
        executor = stage.executor()
        with pytest.raises((SkerryError, OSError)):
            stage.launch(executor)
        assert stage.live() == 0

    def test_launch_is_refused_while_a_slot_runs(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            stage.finish(handles[0], 10)
            executor.collect(handles[:1], LONG)
            with pytest.raises(Conflict, match="replica-1"):
                stage.launch(executor)
            with pytest.raises(Conflict):
                stage.launch(stage.executor())
            assert executor.poll(handles[1]) is None

    def test_launch_after_the_end_starts_the_next_attempt(self, stage: Stage) -> None:
        with stage.executor() as executor:
            first = stage.launch(executor)
            for handle in first:
                stage.finish(handle, 10)
            executor.collect(first, LONG)
            second = stage.launch(executor)
            assert [(handle.slot, handle.attempt) for handle in second] == [("replica-0", 1), ("replica-1", 1)]
            assert {handle.job for handle in first}.isdisjoint(handle.job for handle in second)
            assert [executor.poll(handle) for handle in (*first, *second)] == [Ending(exit_code=10)] * 2 + [None] * 2
            stage.write(second[0], "again")
            until(lambda: "again" in lines_of(executor, second[0]))
            assert "again" not in lines_of(executor, first[0])
            for handle in second:
                stage.finish(handle, 0)
            executor.collect(second, LONG)
            assert [handle.attempt for handle in stage.launch(executor)] == [2, 2]

    def test_first_launch_fixes_run_json(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            run = stage.run_record()
            assert (run.name, run.rounds, run.sync_every, run.slots) == ("tiny", 3, 2, ("replica-0", "replica-1"))
            for handle in handles:
                stage.finish(handle, 0)
            executor.collect(handles, LONG)
        with pytest.raises(Invalid, match="rounds: 3 -> 4"):
            stage.launch(stage.executor(outer=Outer(rounds=4, sync_every=2)))
        with stage.executor() as executor:
            stage.launch(executor)
        assert stage.run_record() == run

    def test_invalid_options_are_refused_before_any_start(self, stage: Stage) -> None:
        executor = stage.executor()
        with pytest.raises(Invalid, match="cannot start 0 replicas"):
            stage.launch(executor, 0)
        with pytest.raises(Invalid, match="must be a multiple of fragments"):
            stage.launch(stage.executor(outer=Outer(rounds=1, sync_every=3, fragments=2)))
        with pytest.raises(Invalid, match="not a name for slots"):
            stage.executor(slots="Not A Slot")
        with pytest.raises(Invalid, match="not a run"):
            stage.executor(run="tiny")
        assert stage.live() == 0

    def test_unknown_handle_raises_no_record(self, stage: Stage) -> None:
        with stage.executor() as executor:
            (handle,) = stage.launch(executor, 1)
            unknown = ReplicaHandle(slot="replica-0", index=0, attempt=7, job=self.other_job(handle.job))
            calls: list[Callable[[], object]] = [
                lambda: executor.poll(unknown),
                lambda: executor.collect([unknown], LONG),
                lambda: list(executor.logs(unknown)),
                lambda: executor.cancel(unknown),
            ]
            for call in calls:
                with pytest.raises(Invalid, match="no record of"):
                    call()

    @staticmethod
    def other_job(job: str) -> str:
        """A well-formed job name that no job has."""
        return f"{job[:-1]}{(int(job[-1], 36) + 1) % 10}"


def lines_of(executor: ServerlessExecutor, handle: ReplicaHandle) -> list[str]:
    return list(executor.logs(handle))
