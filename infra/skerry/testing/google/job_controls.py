"""What a test does to the jobs of Vertex, by number or by full name: the sandbox's `jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.testing.google.customjobs import OVER, CustomJobs

if TYPE_CHECKING:
    from skerry.infra.testing.google.project import Project
    from skerry.infra.testing.google.refusals import Refusal
    from skerry.infra.testing.jobs import Jobs

# From Vertex's states to those that a course has; waiting is done there.
_COURSES: Final = {
    "JOB_STATE_QUEUED": {"RUNNABLE"},
    "JOB_STATE_PENDING": {"RUNNABLE", "STARTING"},
    "JOB_STATE_RUNNING": {"RUNNING"},
    "JOB_STATE_CANCELLING": {"RUNNING"},
    "JOB_STATE_SUCCEEDED": {"SUCCEEDED"},
    "JOB_STATE_FAILED": {"FAILED"},
    "JOB_STATE_CANCELLED": {"FAILED"},
}


class Driven:
    """All jobs of a sandbox. Without containers nothing happens by itself: a test says what does."""

    def __init__(self, project: Project, custom: CustomJobs, jobs: Jobs) -> None:
        self._project = project
        self._custom = custom
        self._jobs = jobs

    def start(self, job: str) -> None:
        """Let a waiting job run."""
        self._custom.find(job).queued = False
        self._jobs.start(self._number(job))

    def finish(self, job: str, exit_code: int = 0, *, reason: str = "") -> str:
        """Let the job's worker end, starting it first if it waits, and return the job's state after that."""
        self._jobs.finish(self._number(job), exit_code, reason=reason)
        return self.state(job)

    def fail(self, job: str, code: int, message: str) -> None:
        """End a job as Vertex does for reasons of its own: code 8 is RESOURCE_EXHAUSTED, 13 an internal error."""
        found = self._custom.find(job)
        self._jobs.stop(found.number, message)
        found.error = {"code": code, "message": message}

    def queue(self, job: str) -> None:
        """Let a job that waits say that it waits for quota."""
        self._custom.find(job).queued = True

    def refuse(self, refusal: Refusal | None) -> None:
        """Let every creation be refused so, until it is told None: quotas, permissions."""
        self._custom.refusal = refusal

    def interrupt(self, job: str) -> None:
        """Take the machine away from under a running job, as the end of a Spot VM does."""
        self._jobs.interrupt(self._number(job))

    def write(self, job: str, text: str) -> None:
        """Let the job write a line, starting it first if it waits."""
        self._jobs.write(self._number(job), text)

    def wait(self, job: str, *states: str, within_s: float = 60.0, attempt: int = 0) -> str:
        """Stay until the job has one of these states, in attempt `attempt` or later; without any, until its end.

        Raises TimeoutError with what the job is doing instead.
        """
        wanted = frozenset(states) or OVER
        statuses = {status for state in wanted for status in _COURSES.get(state, ())}
        self._jobs.wait(self._number(job), *statuses, within_s=within_s, attempt=attempt)
        if (state := self.state(job)) not in wanted:
            raise TimeoutError(f"job {job} is {state}, not {', '.join(sorted(wanted))}")
        return state

    def container(self, job: str) -> str:
        """The id of the container in which the job runs. Raises LookupError if it runs in none."""
        return self._jobs.container(self._number(job))

    def state(self, job: str) -> str:
        """As Vertex tells it now."""
        with self._project.lock:
            return self._custom.find(job).state

    def _number(self, job: str) -> str:
        with self._project.lock:
            return self._custom.find(job).number
