"""Lets a test drive the jobs of Vertex, by number or full name: the sandbox's `jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.testing.google.custom_jobs import OVER, CustomJobs

if TYPE_CHECKING:
    from skerry.testing.google.refusals import Refusal
    from skerry.testing.google.shared_state import Project
    from skerry.testing.job_runner import Jobs

# Vertex's states as statuses of a JobRun, which `Jobs.wait` compares.
_STATUSES: Final = {
    "JOB_STATE_QUEUED": {"RUNNABLE"},
    "JOB_STATE_PENDING": {"RUNNABLE", "STARTING"},
    "JOB_STATE_RUNNING": {"RUNNING"},
    "JOB_STATE_CANCELLING": {"RUNNING"},
    "JOB_STATE_SUCCEEDED": {"SUCCEEDED"},
    "JOB_STATE_FAILED": {"FAILED"},
    "JOB_STATE_CANCELLED": {"FAILED"},
}


class JobControls:
    """All jobs of a sandbox. Without containers nothing happens by itself: the test drives each job."""

    def __init__(self, project: Project, custom: CustomJobs, jobs: Jobs) -> None:
        self._project = project
        self._custom = custom
        self._jobs = jobs

    def start(self, job: str) -> None:
        """Let a waiting job run."""
        self._custom.find(job).queued = False
        self._jobs.start(self._number(job))

    def finish(self, job: str, exit_code: int = 0, *, reason: str = "") -> str:
        """End the job's worker, starting it first if necessary, and return the job's new state."""
        self._jobs.finish(self._number(job), exit_code, reason=reason)
        return self.state(job)

    def fail(self, job: str, code: int, message: str) -> None:
        """End a job as Vertex does after its own errors: code 8 is RESOURCE_EXHAUSTED, 13 an internal error."""
        custom_job = self._custom.find(job)
        self._jobs.stop(custom_job.number, message)
        custom_job.error = {"code": code, "message": message}

    def queue(self, job: str) -> None:
        """Let a waiting job report that it waits for quota."""
        self._custom.find(job).queued = True

    def refuse(self, refusal: Refusal | None) -> None:
        """Refuse every creation with this error, such as a quota or a permission; None stops that."""
        self._custom.refusal = refusal

    def interrupt(self, job: str) -> None:
        """End the attempt as the loss of its Spot VM does."""
        self._jobs.interrupt(self._number(job))

    def write(self, job: str, text: str) -> None:
        """Write a log line of the job, starting it first if necessary."""
        self._jobs.write(self._number(job), text)

    def wait(self, job: str, *states: str, within_s: float = 60.0, attempt: int = 0) -> str:
        """Wait until the job has one of these states in attempt `attempt` or later; without states, until its end.

        Raises TimeoutError with the job's current state.
        """
        awaited = frozenset(states) or OVER
        statuses = {status for state in awaited for status in _STATUSES.get(state, ())}
        self._jobs.wait(self._number(job), *statuses, within_s=within_s, attempt=attempt)
        if (state := self.state(job)) not in awaited:
            raise TimeoutError(f"unexpected state: job={job} state={state} expected={', '.join(sorted(awaited))}")
        return state

    def container(self, job: str) -> str:
        """Return the id of the job's running container. Raises LookupError if it has none."""
        return self._jobs.container(self._number(job))

    def state(self, job: str) -> str:
        """Return the state that Vertex reports."""
        with self._project.lock:
            return self._custom.find(job).state

    def _number(self, job: str) -> str:
        with self._project.lock:
            return self._custom.find(job).number
