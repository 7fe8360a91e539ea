"""Runs the jobs of a sandbox from RUNNABLE to their end, as containers or driven by the test.

With an engine every attempt is a container. Without one nothing happens by itself: the test calls `start`, `finish`
and `interrupt`. In both cases retries.py decides about the next attempt, and the API reports the same fields.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from skerry.runtime.clock import SystemClock
from skerry.testing.batch_retry_rules import EXITED, AttemptEnd, Strategy, is_retried
from skerry.testing.docker_containers import NOT_STARTED

if TYPE_CHECKING:
    from skerry.testing.docker_containers import JobContainer, JobContainers

_LOG: Final = logging.getLogger(__name__)
OVER: Final = frozenset({"SUCCEEDED", "FAILED"})
INTERRUPTED: Final = "Host EC2 (instance i-0123456789abcdef0) terminated."
"""Status reason of an attempt that lost its machine."""
# The time a container takes to its end in a test; a slower test passes its own.
_WITHIN_S: Final = 60.0
# How long `close` waits for the threads of removed containers.
_CLOSE_S: Final = 10.0


class StartRefused(Exception):  # noqa: N818  named for what happened
    """The cloud cannot start this attempt; the message is the container's reason."""


class JobHost(Protocol):
    """Provides the container and the log of each attempt of one job."""

    def container_for(self, number: int) -> JobContainer:
        """Return the container of attempt `number`, from 1. Raises StartRefused."""
        ...

    def open_log(self) -> str:
        """Open a log stream for one attempt and return its name. Raises StartRefused."""
        ...

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """Add a line to the stream."""
        ...


@dataclass(kw_only=True)
class Attempt:
    """One attempt of a job. stream: its log; empty if it has none."""

    started_ms: int
    stream: str = ""
    stopped_ms: int | None = None
    end: AttemptEnd | None = None
    task: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(kw_only=True)
class JobRun:
    """The state of one job. stopping: the reason given with the stop request. status_reason: as the API reports it."""

    job: str
    host: JobHost
    retry: Strategy | None
    limit_s: float | None
    created_ms: int
    status: str = "RUNNABLE"
    status_reason: str | None = None
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    container_id: str | None = None
    stopping: str | None = None
    interrupted: bool = False
    stopped_ms: int | None = None

    @property
    def is_over(self) -> bool:
        """True once the status is final."""
        return self.status in OVER

    @property
    def last(self) -> Attempt | None:
        """The current attempt, or the latest."""
        return self.attempts[-1] if self.attempts else None


class Jobs:
    """All jobs of a sandbox. Thread-safe."""

    def __init__(self, containers: JobContainers | None) -> None:
        self.containers = containers
        self._runs: dict[str, JobRun] = {}
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition(threading.RLock())
        self._clock = SystemClock()

    def start(self, job: str) -> None:
        """Let a waiting job run. Only without containers."""
        with self._changed:
            run = self._driven_run(job)
            if run.status == "RUNNABLE":
                self._begin_attempt(run)
                self._mark_running(run, None)

    def finish(self, job: str, exit_code: int = 0, *, reason: str = "", status_reason: str = EXITED) -> str:
        """End the current attempt, starting it first if necessary, and return the job's new status.

        A job that is retried is RUNNABLE again. Only without containers.
        """
        with self._changed:
            self.start(job)
            run = self._driven_run(job)
            if not run.is_over:
                self._end_attempt(run, AttemptEnd(exit_code=exit_code, reason=reason, status_reason=status_reason))
            return run.status

    def write(self, job: str, text: str) -> None:
        """Write a log line of the current attempt, starting it first if necessary. Only without containers."""
        with self._changed:
            self.start(job)
            run = self._driven_run(job)
            attempt = run.attempts[-1]
            if not attempt.stream:
                attempt.stream = run.host.open_log()
            run.host.write_log(attempt.stream, self.now_ms(), text)

    def interrupt(self, job: str) -> None:
        """End the attempt as the loss of its Spot machine does."""
        with self._changed:
            run = self._runs[job]
            run.interrupted = True
            if run.container_id is not None and self.containers is not None:
                self.containers.stop(run.container_id)
            elif run.status == "RUNNING":
                self._end_attempt(run, AttemptEnd(exit_code=None))

    def wait(self, job: str, *statuses: str, within_s: float = _WITHIN_S, attempt: int = 0) -> str:
        """Wait until the job has one of these statuses in attempt `attempt` or later; without statuses, until its end.

        Raises TimeoutError with the job's current status.
        """
        awaited = frozenset(statuses) or OVER
        with self._changed:
            run = self._runs[job]
            reached = lambda: run.status in awaited and len(run.attempts) >= attempt  # noqa: E731  short
            if not self._changed.wait_for(reached, within_s):
                raise TimeoutError(
                    f"timed out after {within_s:g} s: job={job} status={run.status} reason={run.status_reason}"
                )
            return run.status

    def container(self, job: str) -> str:
        """Return the id of the job's running container. Raises LookupError if it has none."""
        with self._changed:
            if (container_id := self._runs[job].container_id) is None:
                raise LookupError(f"no running container: job={job} status={self._runs[job].status}")
            return container_id

    def submit(self, run: JobRun) -> None:
        """Add a job; with an engine it starts in its own thread."""
        with self._changed:
            self._runs[run.job] = run
            if self.containers is not None:
                thread = threading.Thread(target=self._run_attempts, args=(run, self.containers), daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self, job: str, reason: str) -> None:
        """End a job as TerminateJob does: it becomes FAILED with this reason. A job that is over does not change."""
        with self._changed:
            run = self._runs[job]
            if run.is_over or run.stopping is not None:
                return
            run.stopping = reason
            if run.status == "RUNNABLE":
                self._finish_run(run, "FAILED", reason)
            elif self.containers is None:
                self._end_attempt(run, AttemptEnd(exit_code=143))
            elif run.container_id is not None:
                self.containers.stop(run.container_id)

    def close(self) -> None:
        """End and forget all jobs; no container is left."""
        with self._changed:
            for run in self._runs.values():
                run.stopping = run.stopping or "the sandbox was closed"
                if not run.is_over and run.container_id is None:
                    self._finish_run(run, "FAILED", run.stopping)
            threads, self._threads = self._threads, []
        if self.containers is not None:
            self.containers.close()
        for thread in threads:
            thread.join(_CLOSE_S)
        if self.containers is not None and threads:
            self.containers.close()  # a container may have been created meanwhile
        with self._changed:
            self._runs.clear()

    def now_ms(self) -> int:
        """The current time in milliseconds, as the API reports it."""
        return int(dt.datetime.fromisoformat(self._clock.utc_text()).timestamp() * 1000)

    def _driven_run(self, job: str) -> JobRun:
        if self.containers is not None:
            raise RuntimeError("jobs of this sandbox are containers; start it with containers=False to drive them")
        return self._runs[job]

    def _run_attempts(self, run: JobRun, containers: JobContainers) -> None:
        while True:
            with self._changed:
                if run.is_over:
                    return
                attempt = self._begin_attempt(run)
            try:
                end = self._attempt(run, attempt, containers)
            except Exception as error:  # noqa: BLE001  a thread's entry: the error becomes the reason
                _LOG.exception("job %s failed in the sandbox", run.job)
                end = AttemptEnd(
                    exit_code=None, reason=f"SandboxFailed: {error}", status_reason=NOT_STARTED, final=True
                )
            with self._changed:
                if not run.is_over:
                    self._end_attempt(run, end)

    def _attempt(self, run: JobRun, attempt: Attempt, containers: JobContainers) -> AttemptEnd:
        try:
            attempt.stream = run.host.open_log()
            container = run.host.container_for(len(run.attempts))
        except StartRefused as error:
            return AttemptEnd(exit_code=None, reason=str(error), status_reason=NOT_STARTED)
        return containers.run(
            container,
            started=lambda container_id: self._mark_running(run, container_id),
            line=lambda text: run.host.write_log(attempt.stream, self.now_ms(), text),
            limit_s=run.limit_s,
        )

    def _begin_attempt(self, run: JobRun) -> Attempt:
        run.status, run.interrupted = "STARTING", False
        run.attempts.append(Attempt(started_ms=self.now_ms()))
        self._changed.notify_all()
        return run.attempts[-1]

    def _mark_running(self, run: JobRun, container_id: str | None) -> None:
        with self._changed:
            run.container_id = container_id
            if run.is_over:  # closed meanwhile
                return
            run.status = "RUNNING"
            if run.stopping is not None and container_id is not None and self.containers is not None:
                self.containers.stop(container_id)
            self._changed.notify_all()

    def _end_attempt(self, run: JobRun, end: AttemptEnd) -> None:
        run.container_id = None
        if run.stopping is not None:
            end = replace(end, final=True, status_reason=run.stopping)
        elif run.interrupted:
            end = AttemptEnd(exit_code=None, status_reason=INTERRUPTED)
        attempt = run.attempts[-1]
        attempt.stopped_ms, attempt.end = self.now_ms(), end
        if is_retried(run.retry, len(run.attempts), end):
            run.status = "RUNNABLE"
            self._changed.notify_all()
        else:
            done = end.exit_code == 0 and not end.final
            self._finish_run(run, "SUCCEEDED" if done else "FAILED", end.status_reason)

    def _finish_run(self, run: JobRun, status: str, reason: str) -> None:
        run.stopped_ms = self.now_ms()
        run.status, run.status_reason = status, reason
        self._changed.notify_all()


def attempt_fields(attempt: Attempt) -> dict[str, Any]:
    """The fields with which DescribeJobs lists an attempt."""
    container: dict[str, Any] = {"taskArn": attempt.task, "networkInterfaces": []}
    if attempt.stream:
        container["logStreamName"] = attempt.stream
    fields: dict[str, Any] = {"container": container, "startedAt": attempt.started_ms}
    if attempt.end is not None:
        fields |= {"stoppedAt": attempt.stopped_ms, "statusReason": attempt.end.status_reason}
        if attempt.end.exit_code is not None:
            container["exitCode"] = attempt.end.exit_code
        if attempt.end.reason:
            container["reason"] = attempt.end.reason
    return fields
