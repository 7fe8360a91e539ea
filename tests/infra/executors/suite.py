"""What every executor promises, said once: each place subclasses `ExecutorSuite` and brings a fixture `stage`."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from skerry.infra.executors import Ending, Outer, ReplicaHandle
from skerry.runtime import contract, keys
from skerry.runtime.errors import Conflict, Invalid, SkerryError
from skerry.runtime.records import Run
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.executors import ServerlessExecutor

LONG = timedelta(seconds=30)
OUTER = Outer(rounds=3, sync_every=2)
# What a replica does that is told `verb text`, in a loop of its own.
DEEDS = """\
    if verb == 'write':
        print(text, flush=True)
    elif verb == 'tell':
        print(json.dumps([os.getcwd(), dict(os.environ)]), flush=True)
    elif verb == 'exit':
        os._exit(int(text))
    elif verb == 'kill':
        os.kill(os.getpid(), 9)
"""
# By lines of a named pipe; in places where a test drives the jobs it is words that arrive.
SCRIPT = f"""\
import json, os, sys
for line in open(os.path.join(sys.argv[1], os.environ['SKERRY_SLOT'])):
    verb, _, text = line.strip().partition(' ')
{DEEDS}"""


class Stage(ABC):
    """A place with one run in it, and what a test does to its replicas."""

    run: str
    folder: str = "/pipes"

    @abstractmethod
    def executor(self, **options: Any) -> ServerlessExecutor:
        """A new one, as another process would make it."""

    @abstractmethod
    def write(self, handle: ReplicaHandle, text: str) -> None:
        """Let a replica write a line, starting it first if it waits."""

    @abstractmethod
    def finish(self, handle: ReplicaHandle, code: int) -> None:
        """Let a replica end."""

    @abstractmethod
    def lose(self, handle: ReplicaHandle) -> None:
        """End a replica by SIGKILL."""

    @abstractmethod
    def told(self, handle: ReplicaHandle) -> Mapping[str, str]:
        """What a replica finds in its environment."""

    @abstractmethod
    def live(self) -> int:
        """How many replicas of the run wait or run."""

    @abstractmethod
    def refuse_one(self) -> None:
        """Let one of the next two starts fail."""

    def environment(self) -> Mapping[str, str]:
        """What opens the run's store."""
        return {}

    @property
    def command(self) -> list[str]:
        return ["-S", "-c", SCRIPT, self.folder]

    def launch(self, executor: ServerlessExecutor, count: int = 2) -> list[ReplicaHandle]:
        return executor.launch_replicas(count, "python", self.command)

    def founded(self) -> Run:
        data = open_store(self.run, environment={**os.environ, **self.environment()}).read(keys.RUN)
        assert data is not None
        return Run.parse(data, keys.RUN)


def until(look: Callable[[], bool]) -> None:
    """Real processes need a moment; jobs that a test drives none."""
    deadline = time.monotonic() + 30
    while not look():
        assert time.monotonic() < deadline
        os.sched_yield()


def sent(handle: ReplicaHandle) -> ReplicaHandle:
    """As it comes out of a file or a queue, in another process."""
    return ReplicaHandle(**json.loads(json.dumps(asdict(handle))))


class ExecutorSuite:
    STOPPED: ClassVar[tuple[Ending, ...]] = (Ending(signal=15),)
    """How a replica may end that was asked to stop and says nothing of its own."""
    KILLED: ClassVar[tuple[Ending, ...]] = (Ending(signal=9),)

    def test_replicas_are_launched_followed_and_collected_in_the_order_asked(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            assert [(one.slot, one.index, one.attempt) for one in handles] == [
                ("replica-0", 0, 0),
                ("replica-1", 1, 0),
            ]
            assert len({one.job for one in handles}) == 2
            assert [executor.poll(one) for one in handles] == [None, None]
            stage.finish(handles[1], 20)
            assert executor.collect(handles[1:], LONG) == [Ending(exit_code=20)]
            assert executor.poll(handles[0]) is None
            stage.finish(handles[0], 0)
            assert executor.collect([handles[1], handles[0]], LONG) == [Ending(exit_code=20), Ending(exit_code=0)]
            assert executor.poll(handles[0]) == Ending(exit_code=0)

    @pytest.mark.parametrize("code", [10, 30])
    def test_every_code_of_the_contract_comes_back(self, stage: Stage, code: int) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 1)
            stage.finish(handles[0], code)
            assert executor.collect(handles, LONG) == [Ending(exit_code=code)]

    def test_a_replica_that_was_killed_has_ended_by_a_signal(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 1)
            stage.write(handles[0], "up")
            stage.lose(handles[0])
            assert executor.collect(handles, LONG) == [Ending(signal=9)]

    def test_collect_names_what_still_runs_when_the_time_is_over(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            stage.finish(handles[0], 0)
            executor.collect(handles[:1], LONG)
            with pytest.raises(TimeoutError, match=r"still running after 0:00:00: replica-1$"):
                executor.collect(handles, timedelta())

    def test_a_replica_finds_the_contract_and_what_was_given_besides(self, stage: Stage) -> None:
        with stage.executor(variables={"HF_HOME": "/data"}) as executor:
            handles = stage.launch(executor)
            told = stage.told(handles[1])
            assert contract.read(told) == contract.Contract(run_uri=stage.run, slot="replica-1", index=1, replicas=2)
            assert told["HF_HOME"] == "/data"

    def test_logs_are_the_lines_written_so_far(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            for text in ("one", "two"):
                stage.write(handles[0], text)
            until(lambda: lines_of(executor, handles[0])[-2:] == ["one", "two"])
            assert "one" not in lines_of(executor, handles[1])

    def test_a_cancelled_replica_ends_and_the_others_go_on(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            stage.write(handles[0], "up")
            until(lambda: "up" in lines_of(executor, handles[0]))
            executor.cancel(handles[0])
            (ending,) = executor.collect(handles[:1], LONG)
            assert ending in self.STOPPED
            assert executor.poll(handles[1]) is None
            executor.cancel(handles[0], kill=True)  # ended is success
            executor.cancel(handles[1], kill=True)
            (ending,) = executor.collect(handles[1:], LONG)
            assert ending in self.KILLED

    def test_a_handle_is_enough_for_another_process(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 3)
            other = stage.executor()
            assert [other.poll(sent(one)) for one in handles] == [None] * 3
            stage.write(handles[0], "here")
            until(lambda: "here" in lines_of(other, sent(handles[0])))
            stage.finish(handles[0], 10)
            assert other.collect([sent(handles[0])], LONG) == [Ending(exit_code=10)]
            stage.write(handles[1], "up")
            other.cancel(sent(handles[1]))
            other.cancel(sent(handles[2]), kill=True)
            stopped, killed = other.collect([sent(one) for one in handles[1:]], LONG)
            assert (stopped in self.STOPPED, killed in self.KILLED) == (True, True), (stopped, killed)
            other.close()
        after = stage.executor()
        assert after.collect([sent(one) for one in handles], LONG) == [Ending(exit_code=10), stopped, killed]

    def test_what_an_executor_did_not_launch_it_leaves_running_when_it_is_closed(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor, 1)
            with stage.executor() as other:
                assert other.poll(handles[0]) is None
            assert executor.poll(handles[0]) is None

    def test_leaving_the_context_ends_what_still_runs(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            stage.finish(handles[0], 0)
            executor.collect(handles[:1], LONG)
        done, ended = executor.collect(handles, LONG)
        assert (done, ended in self.KILLED) == (Ending(exit_code=0), True)
        assert stage.live() == 0
        executor.close()

    def test_it_is_all_or_none(self, stage: Stage) -> None:
        stage.refuse_one()
        executor = stage.executor()
        with pytest.raises((SkerryError, OSError)):
            stage.launch(executor)
        assert stage.live() == 0

    def test_a_slot_that_still_runs_is_not_started_twice(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            stage.finish(handles[0], 10)
            executor.collect(handles[:1], LONG)
            with pytest.raises(Conflict, match="replica-1"):
                stage.launch(executor)
            with pytest.raises(Conflict):
                stage.launch(stage.executor())
            assert executor.poll(handles[1]) is None

    def test_a_launch_after_the_end_is_the_next_attempt(self, stage: Stage) -> None:
        with stage.executor() as executor:
            first = stage.launch(executor)
            for handle in first:
                stage.finish(handle, 10)
            executor.collect(first, LONG)
            second = stage.launch(executor)
            assert [(one.slot, one.attempt) for one in second] == [("replica-0", 1), ("replica-1", 1)]
            assert {one.job for one in first}.isdisjoint(one.job for one in second)
            assert [executor.poll(one) for one in (*first, *second)] == [Ending(exit_code=10)] * 2 + [None] * 2
            stage.write(second[0], "again")
            until(lambda: "again" in lines_of(executor, second[0]))
            assert "again" not in lines_of(executor, first[0])
            for handle in second:
                stage.finish(handle, 0)
            executor.collect(second, LONG)
            assert [one.attempt for one in stage.launch(executor)] == [2, 2]

    def test_the_run_is_founded_once_and_for_good(self, stage: Stage) -> None:
        with stage.executor() as executor:
            handles = stage.launch(executor)
            run = stage.founded()
            assert (run.name, run.rounds, run.sync_every, run.slots) == ("tiny", 3, 2, ("replica-0", "replica-1"))
            for handle in handles:
                stage.finish(handle, 0)
            executor.collect(handles, LONG)
        with pytest.raises(Invalid, match="rounds: 3 -> 4"):
            stage.launch(stage.executor(outer=Outer(rounds=4, sync_every=2)))
        with stage.executor() as executor:
            stage.launch(executor)
        assert stage.founded() == run

    def test_what_cannot_be_is_refused_before_anything_is_started(self, stage: Stage) -> None:
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

    def test_of_what_was_never_started_there_is_no_record(self, stage: Stage) -> None:
        with stage.executor() as executor:
            (handle,) = stage.launch(executor, 1)
            stranger = ReplicaHandle(slot="replica-0", index=0, attempt=7, job=self.other_job(handle.job))
            asks: list[Callable[[], object]] = [
                lambda: executor.poll(stranger),
                lambda: executor.collect([stranger], LONG),
                lambda: list(executor.logs(stranger)),
                lambda: executor.cancel(stranger),
            ]
            for ask in asks:
                with pytest.raises(Invalid, match="no record of"):
                    ask()

    @staticmethod
    def other_job(job: str) -> str:
        """A name that a job could have, and none has."""
        return f"{job[:-1]}{(int(job[-1], 36) + 1) % 10}"


def lines_of(executor: ServerlessExecutor, handle: ReplicaHandle) -> list[str]:
    return list(executor.logs(handle))
