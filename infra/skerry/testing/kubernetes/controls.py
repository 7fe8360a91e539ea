"""Lets a test drive the pods of a cluster, by the names of their Jobs: the sandbox's `jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.testing.kubernetes.refusals import Refused

if TYPE_CHECKING:
    from skerry.testing.job_runner import JobRun, Jobs
    from skerry.testing.kubernetes.job_controller import JobController
    from skerry.testing.kubernetes.objects import Objects


class JobControls:
    """All Jobs of a sandbox. Without containers nothing happens by itself: the test drives the newest pod of each."""

    def __init__(self, objects: Objects, controller: JobController, runs: Jobs) -> None:
        self._objects = objects
        self._controller = controller
        self._runs = runs

    def start(self, job: str) -> None:
        """Let the pod run."""
        self._runs.start(self._run(job).job)
        self._controller.sync()

    def finish(self, job: str, exit_code: int = 0, *, reason: str = "") -> None:
        """End the pod's container, starting it first if necessary."""
        self._runs.finish(self._run(job).job, exit_code, reason=reason)
        self._controller.sync()

    def write(self, job: str, text: str) -> None:
        """Write a log line of the pod, starting it first if necessary."""
        self._runs.write(self._run(job).job, text)

    def interrupt(self, job: str) -> None:
        """Evict the pod, as a drain of its node does: it is deleted, and its log with it."""
        with self._objects.lock:
            self._controller.pods.delete(self.pod(job), "EvictionByEvictionAPI", "Eviction API: evicting")
            self._controller.sync()

    def lose_node(self, job: str) -> None:
        """Let the node of the pod fall silent: its pods are Terminating, and end only when the Node is deleted.

        The cluster needs another node: one whose every node is silent evicts nothing.
        """
        with self._objects.lock:
            self._controller.pods.lose_node(self.pod(job))
            self._controller.sync()

    def wait_for(self, job: str, reason: str) -> None:
        """Let the pod's container wait for this reason: `ImagePullBackOff: Back-off pulling image "x"`."""
        self._controller.pods.report(self.pod(job), reason)
        self._controller.sync()

    def pod(self, job: str) -> dict[str, Any]:
        """The newest pod of a Job. Raises LookupError if it has none."""
        self._controller.sync()
        with self._objects.lock:
            pods = self._controller.pods_of(self._job(job))
        if not pods:
            raise LookupError(f"no pod: job={job}")
        return pods[-1]

    def wait(self, job: str, *phases: str, within_s: float = 60.0) -> str:
        """Wait until the newest pod has one of these phases; without phases, until its end."""
        statuses = {"Running": ("RUNNING",), "Pending": ("RUNNABLE", "STARTING")}
        awaited = [status for phase in phases for status in statuses.get(phase, ("SUCCEEDED", "FAILED"))]
        self._runs.wait(self._run(job).job, *awaited, within_s=within_s)
        self._controller.sync()
        return str(self.pod(job)["status"]["phase"])

    def container(self, job: str) -> str:
        """Return the id of the pod's container. Raises LookupError if it has none."""
        return self._runs.container(self._run(job).job)

    def _run(self, job: str) -> JobRun:
        run = self._controller.pods.run_of(self.pod(job))
        if run is None:
            raise LookupError(f"no node took the pod: job={job}")
        return run

    def _job(self, name: str) -> dict[str, Any]:
        jobs = [job for job in self._objects.list("jobs", "") if job["metadata"]["name"] == name]
        if not jobs:
            raise Refused(404, f'jobs.batch "{name}" not found')
        return jobs[-1]
