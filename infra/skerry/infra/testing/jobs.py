"""The jobs of a sandbox: how each goes from RUNNABLE to its end, and what a test does to them.

With an engine every attempt is a container. Without one nothing happens by itself: a test says `start`, `finish`,
`interrupt`. Either way retries.py decides what follows an attempt, and the API tells the same.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from skerry.infra.testing.boxes import NOT_STARTED
from skerry.infra.testing.retries import EXITED, End, Strategy, is_tried_again
from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from skerry.infra.testing.boxes import Box, Boxes

_LOG: Final = logging.getLogger(__name__)
OVER: Final = frozenset({"SUCCEEDED", "FAILED"})
INTERRUPTED: Final = "Host EC2 (instance i-0123456789abcdef0) terminated."
"""What is said of an attempt whose machine was taken away."""
# A container's way to its end in a test; whoever needs longer says so.
_WITHIN_S: Final = 60.0
# How long `close` waits for threads whose containers it has removed.
_CLOSE_S: Final = 10.0


class Refused(Exception):  # noqa: N818  named for what happened
    """The cloud would not start this attempt; the message is the container's reason."""


class Host(Protocol):
    """What a job's surroundings give to one attempt of it."""

    def box(self, number: int) -> Box:
        """Its container. Raises Refused."""
        ...

    def open_log(self) -> str:
        """The name of a new log stream. Raises Refused."""
        ...

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """Add a line to it."""
        ...


@dataclass(kw_only=True)
class Attempt:
    """One try. stream: its log; empty if it never had one."""

    started_ms: int
    stream: str = ""
    stopped_ms: int | None = None
    end: End | None = None
    task: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(kw_only=True)
class Course:
    """A job on its way. stopping: the reason it was asked to stop with. status_reason: as the API tells it."""

    job: str
    host: Host
    retry: Strategy | None
    limit_s: float | None
    created_ms: int
    status: str = "RUNNABLE"
    status_reason: str | None = None
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    container: str | None = None
    stopping: str | None = None
    interrupted: bool = False
    stopped_ms: int | None = None

    @property
    def is_over(self) -> bool:
        """Nothing changes any more."""
        return self.status in OVER

    @property
    def last(self) -> Attempt | None:
        """The attempt that runs, or ran last."""
        return self.attempts[-1] if self.attempts else None


class Jobs:
    """All jobs of a sandbox. Thread-safe."""

    def __init__(self, boxes: Boxes | None) -> None:
        self._boxes = boxes
        self._courses: dict[str, Course] = {}
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition(threading.RLock())
        self._clock = SystemClock()

    def start(self, job: str) -> None:
        """Let a waiting job run; for tests without containers."""
        with self._changed:
            course = self._driven(job)
            if course.status == "RUNNABLE":
                self._begin(course)
                self._running(course, None)

    def finish(self, job: str, exit_code: int = 0, *, reason: str = "", status_reason: str = EXITED) -> str:
        """Let the job's attempt end, starting it first if it waits, and return the job's status after that.

        A job that is tried again is RUNNABLE then. For tests without containers.
        """
        with self._changed:
            self.start(job)
            course = self._driven(job)
            if not course.is_over:
                self._end(course, End(exit_code=exit_code, reason=reason, status_reason=status_reason))
            return course.status

    def write(self, job: str, text: str) -> None:
        """Let the job's attempt write a line, starting it first if it waits. For tests without containers."""
        with self._changed:
            self.start(job)
            course = self._driven(job)
            attempt = course.attempts[-1]
            if not attempt.stream:
                attempt.stream = course.host.open_log()
            course.host.write_log(attempt.stream, self.now_ms(), text)

    def interrupt(self, job: str) -> None:
        """Take the machine away from under a running job, as the end of a Spot instance does."""
        with self._changed:
            course = self._courses[job]
            course.interrupted = True
            if course.container is not None and self._boxes is not None:
                self._boxes.stop(course.container)
            elif course.status == "RUNNING":
                self._end(course, End(exit_code=None))

    def wait(self, job: str, *statuses: str, within_s: float = _WITHIN_S, attempt: int = 0) -> str:
        """Stay until the job has one of these statuses, in attempt `attempt` or later; without any, until its end.

        Raises TimeoutError with what the job is doing instead.
        """
        wanted = frozenset(statuses) or OVER
        with self._changed:
            course = self._courses[job]
            reached = lambda: course.status in wanted and len(course.attempts) >= attempt  # noqa: E731  short
            if not self._changed.wait_for(reached, within_s):
                raise TimeoutError(f"job {job} is {course.status} after {within_s:g} s: {course.status_reason}")
            return course.status

    def container(self, job: str) -> str:
        """The id of the container in which the job runs. Raises LookupError if it runs in none."""
        with self._changed:
            if (found := self._courses[job].container) is None:
                raise LookupError(f"job {job} has no container now: {self._courses[job].status}")
            return found

    def submit(self, course: Course) -> None:
        """Take a job on."""
        with self._changed:
            self._courses[course.job] = course
            if self._boxes is not None:
                thread = threading.Thread(target=self._carry_out, args=(course, self._boxes), daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self, job: str, reason: str) -> None:
        """End a job as TerminateJob does: it will be FAILED, with this reason. One that is over stays what it is."""
        with self._changed:
            course = self._courses[job]
            if course.is_over or course.stopping is not None:
                return
            course.stopping = reason
            if course.status == "RUNNABLE":
                self._over(course, "FAILED", reason)
            elif self._boxes is None:
                self._end(course, End(exit_code=143))
            elif course.container is not None:
                self._boxes.stop(course.container)

    def close(self) -> None:
        """End everything and forget it; no container is left."""
        with self._changed:
            for course in self._courses.values():
                course.stopping = course.stopping or "the sandbox was closed"
                if not course.is_over and course.container is None:
                    self._over(course, "FAILED", course.stopping)
            threads, self._threads = self._threads, []
        if self._boxes is not None:
            self._boxes.close()
        for thread in threads:
            thread.join(_CLOSE_S)
        if self._boxes is not None and threads:
            self._boxes.close()  # one may have been made meanwhile
        with self._changed:
            self._courses.clear()

    def now_ms(self) -> int:
        """The time as the API tells it."""
        return int(dt.datetime.fromisoformat(self._clock.utc_text()).timestamp() * 1000)

    def _driven(self, job: str) -> Course:
        if self._boxes is not None:
            raise RuntimeError("this sandbox runs containers: they say themselves how they end")
        return self._courses[job]

    def _carry_out(self, course: Course, boxes: Boxes) -> None:
        while True:
            with self._changed:
                if course.is_over:
                    return
                attempt = self._begin(course)
            try:
                end = self._attempt(course, attempt, boxes)
            except Exception as error:  # noqa: BLE001  a thread's entry: the job tells what went wrong, and does not hang
                _LOG.exception("job %s failed in the sandbox", course.job)
                end = End(exit_code=None, reason=f"SandboxFailed: {error}", status_reason=NOT_STARTED, final=True)
            with self._changed:
                if not course.is_over:
                    self._end(course, end)

    def _attempt(self, course: Course, attempt: Attempt, boxes: Boxes) -> End:
        try:
            attempt.stream = course.host.open_log()
            box = course.host.box(len(course.attempts))
        except Refused as error:
            return End(exit_code=None, reason=str(error), status_reason=NOT_STARTED)
        return boxes.run(
            box,
            started=lambda container: self._running(course, container),
            line=lambda text: course.host.write_log(attempt.stream, self.now_ms(), text),
            limit_s=course.limit_s,
        )

    def _begin(self, course: Course) -> Attempt:
        course.status, course.interrupted = "STARTING", False
        course.attempts.append(Attempt(started_ms=self.now_ms()))
        self._changed.notify_all()
        return course.attempts[-1]

    def _running(self, course: Course, container: str | None) -> None:
        with self._changed:
            course.container = container
            if course.is_over:  # closed meanwhile
                return
            course.status = "RUNNING"
            if course.stopping is not None and container is not None and self._boxes is not None:
                self._boxes.stop(container)
            self._changed.notify_all()

    def _end(self, course: Course, end: End) -> None:
        course.container = None
        if course.stopping is not None:
            end = replace(end, final=True, status_reason=course.stopping)
        elif course.interrupted:
            end = End(exit_code=None, status_reason=INTERRUPTED)
        attempt = course.attempts[-1]
        attempt.stopped_ms, attempt.end = self.now_ms(), end
        if is_tried_again(course.retry, len(course.attempts), end):
            course.status = "RUNNABLE"
            self._changed.notify_all()
        else:
            done = end.exit_code == 0 and not end.final
            self._over(course, "SUCCEEDED" if done else "FAILED", end.status_reason)

    def _over(self, course: Course, status: str, reason: str) -> None:
        course.stopped_ms = self.now_ms()
        course.status, course.status_reason = status, reason
        self._changed.notify_all()


def attempt_told(attempt: Attempt) -> dict[str, Any]:
    """An attempt as DescribeJobs lists it, once it is over."""
    container: dict[str, Any] = {"taskArn": attempt.task, "networkInterfaces": []}
    if attempt.stream:
        container["logStreamName"] = attempt.stream
    told: dict[str, Any] = {"container": container, "startedAt": attempt.started_ms}
    if attempt.end is not None:
        told |= {"stoppedAt": attempt.stopped_ms, "statusReason": attempt.end.status_reason}
        if attempt.end.exit_code is not None:
            container["exitCode"] = attempt.end.exit_code
        if attempt.end.reason:
            container["reason"] = attempt.end.reason
    return told
