"""Vertex AI's custom jobs: requests, states and errors of its JobService.

A job's id is a number of Google's, never a name of the caller's, so two identical requests create two jobs. `jobs` runs
the job; this module reports it in Vertex's terms. Sources: REST reference of projects.locations.customJobs, "JobState",
"Filtering" of customJobs.list, "Accelerators" of "Configure compute resources".
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.google import list_filters
from skerry.testing.google.refusals import Refusal, absent, invalid
from skerry.testing.google.shared_state import page_of
from skerry.testing.job_runner import JobRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.google.operations import Operations
    from skerry.testing.google.shared_state import Handler, Project, SandboxRequest
    from skerry.testing.job_runner import JobHost, Jobs

OVER: Final = frozenset({"JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED"})
_PREFIX: Final = "aiplatform.projects.locations.customJobs"
_LABEL: Final = re.compile(r"[\w-]{0,63}")  # and no upper case: international letters are allowed
_ENVIRONMENT_MOST: Final = 100
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_WEEK_S: Final = 7 * 24 * 3600.0
_INTERRUPTED: Final = "Host EC2*"
# How often a worker, a whole job and a Spot machine are restarted.
_WORKER: Final = 5
_WHOLE: Final = 3
_SPOT: Final = 6
# Machine types whose accelerators are fixed, with the numbers that each may have.
_MACHINES: Final = {
    "a2-highgpu-": ("NVIDIA_TESLA_A100", {"1g": 1, "2g": 2, "4g": 4, "8g": 8}),
    "a2-megagpu-": ("NVIDIA_TESLA_A100", {"16g": 16}),
    "a2-ultragpu-": ("NVIDIA_A100_80GB", {"1g": 1, "2g": 2, "4g": 4, "8g": 8}),
    "a3-highgpu-": ("NVIDIA_H100_80GB", {"1g": 1, "2g": 2, "4g": 4, "8g": 8}),
    "a3-megagpu-": ("NVIDIA_H100_MEGA_80GB", {"8g": 8}),
    "a3-ultragpu-": ("NVIDIA_H200_141GB", {"8g": 8}),
    "g2-standard-": ("NVIDIA_L4", {"4": 1, "8": 1, "12": 1, "16": 1, "24": 2, "32": 1, "48": 4, "96": 8}),
}


@dataclass(kw_only=True)
class Job:
    """A job: the requested resource and its run. error: set by a test."""

    resource: dict[str, Any]
    run: JobRun
    error: dict[str, Any] | None = None
    queued: bool = False

    @property
    def number(self) -> str:
        """The id of the job."""
        return str(self.resource["name"]).rpartition("/")[2]

    @property
    def state(self) -> str:
        """The state that Vertex reports."""
        run = self.run
        if self.error is not None:
            return "JOB_STATE_FAILED"
        match run.status:
            case "RUNNABLE" | "STARTING":
                # A failed worker restarts on its machine; without its machine it waits for another one.
                restarts = run.last is not None and run.last.end is not None and run.last.end.exit_code is not None
                return "JOB_STATE_RUNNING" if restarts else "JOB_STATE_QUEUED" if self.queued else "JOB_STATE_PENDING"
            case "RUNNING":
                return "JOB_STATE_RUNNING" if run.stopping is None else "JOB_STATE_CANCELLING"
            case "SUCCEEDED":
                return "JOB_STATE_SUCCEEDED"
            case _:
                return "JOB_STATE_FAILED" if run.stopping is None else "JOB_STATE_CANCELLED"


class CustomJobs:
    """The custom jobs of a project, in all its locations."""

    def __init__(
        self, project: Project, operations: Operations, jobs: Jobs, host: Callable[[dict[str, Any]], JobHost]
    ) -> None:
        """host: returns the `jobs.JobHost` of a new job's resource."""
        self._project = project
        self._operations = operations
        self._jobs = jobs
        self._host = host
        self._jobs_by_number: dict[str, Job] = {}
        self.refusal: Refusal | None = None

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by method id."""
        return {
            f"{_PREFIX}.create": self._create,
            f"{_PREFIX}.get": lambda request: self._description(self.find(request.names["name"])),
            f"{_PREFIX}.list": self._list,
            f"{_PREFIX}.cancel": self._cancel,
            f"{_PREFIX}.delete": self._delete,
            "aiplatform.projects.locations.operations.get": self._operations.get,
        }

    def find(self, name: str) -> Job:
        """Find a job by number or full name. Raises Refusal."""
        number = name.rpartition("/")[2]
        job = self._jobs_by_number.get(number)
        if job is None or ("/" in name and not self._is_same(name, str(job.resource["name"]))):
            raise absent(f"The CustomJob does not exist: {name}")
        return job

    def names(self, *, over: bool) -> list[str]:
        """Return the display names of the jobs that are over, or of the others."""
        return [
            str(job.resource["displayName"]) for job in self._jobs_by_number.values() if (job.state in OVER) == over
        ]

    def clear(self) -> None:
        """Delete all jobs."""
        self._jobs_by_number.clear()

    def _create(self, request: SandboxRequest) -> Mapping[str, Any]:
        project, body = self._project, request.body
        self._check(request)
        number = str(4_000_000_000_000_000_000 + project.next_number() * 7_919_000_000_011 % 10**18)
        location = request.names["parent"].split("/")[3]
        now = project.text()
        resource = {
            **body,
            "name": f"projects/{project.number}/locations/{location}/customJobs/{number}",
            "createTime": now,
            "updateTime": now,
        }
        scheduling: Mapping[str, Any] = body["jobSpec"].get("scheduling") or {}
        run = JobRun(
            job=number,
            host=self._host(resource),
            retry=_retry_strategy(scheduling),
            limit_s=_seconds(scheduling.get("timeout")) or _WEEK_S,
            created_ms=self._jobs.now_ms(),
        )
        self._jobs_by_number[number] = Job(resource=resource, run=run)
        self._jobs.submit(run)
        return self._description(self._jobs_by_number[number])

    def _list(self, request: SandboxRequest) -> Mapping[str, Any]:
        parent = request.names["parent"]
        matches = list_filters.parse_filter(
            request.parameter("filter") or "", lambda name: re.fullmatch(_FIELDS, name) is not None
        )
        every = [self._description(job) for job in reversed(self._jobs_by_number.values())]
        every = [job for job in every if self._is_same(parent, "/".join(job["name"].split("/")[:4])) and matches(job)]
        if mask := request.parameter("readMask"):
            raise Refusal(501, f"the sandbox does not support readMask={mask}")
        return page_of(request, "customJobs", every)

    def _cancel(self, request: SandboxRequest) -> Mapping[str, Any]:
        job = self.find(request.names["name"])
        if job.state in OVER:
            # The wording of training pipelines (googleapis' own samples, java-docs-samples 9281).
            message = f'The CustomJob "{job.resource["name"]}" is in state {job.state} and cannot be canceled.'
            raise Refusal(400, message, status="FAILED_PRECONDITION")
        self._jobs.stop(job.number, "cancelled by the user")  # "On success the job is not deleted"
        return {}

    def _delete(self, request: SandboxRequest) -> Mapping[str, Any]:
        job = self.find(request.names["name"])
        if job.state not in OVER:
            raise Refusal(
                400,
                f"The CustomJob {job.resource['name']} is in state {job.state}; only ended jobs can be deleted.",
                status="FAILED_PRECONDITION",
            )
        parent = "/".join(str(job.resource["name"]).split("/")[:4])

        def effect() -> dict[str, Any]:
            self._jobs_by_number.pop(job.number, None)
            return {}

        return self._operations.begin(parent, effect)

    def _description(self, job: Job) -> dict[str, Any]:
        run, state = job.run, job.state
        resource: dict[str, Any] = {**job.resource, "state": state}
        if run.attempts:
            resource["startTime"] = _time(run.attempts[0].started_ms)
        if state in OVER:
            resource["endTime"] = _time(run.stopped_ms or self._jobs.now_ms())
        if state in {"JOB_STATE_FAILED", "JOB_STATE_CANCELLED"}:
            resource["error"] = job.error or self._error(job)
        resource["updateTime"] = resource.get("endTime") or resource.get("startTime") or resource["createTime"]
        return resource

    def _error(self, job: Job) -> dict[str, Any]:
        run = job.run
        end = None if run.last is None else run.last.end
        if run.stopping is not None:
            return {"code": 1, "message": "CANCELED"}
        if end is None or end.exit_code is None:
            reason = run.status_reason if end is None or not end.reason else end.reason
            if reason is not None and reason.startswith(_INTERRUPTED[:-1]):
                reason = "STOCKOUT: the Spot VM was preempted, and resources are insufficient to restart the job."
                return {"code": 8, "message": reason}
            return {"code": 3, "message": str(reason)}
        if end.final:
            return {"code": 4, "message": "The job exceeded its timeout."}
        if "OutOfMemory" in end.reason:
            message = "The replica workerpool0-0 ran out-of-memory and exited with a non-zero status of 137(SIGKILL)."
            return {"code": 3, "message": message}
        logs = f"https://console.cloud.google.com/logs/viewer?project={self._project.number}"
        logs += f"&resource=ml_job%2Fjob_id%2F{job.number}"
        message = f"The replica workerpool0-0 exited with a non-zero status of {end.exit_code}."
        return {
            "code": 3,
            "message": f"{message} To find out more about why your job exited please check the logs: {logs}",
        }

    def _check(self, request: SandboxRequest) -> None:
        project, body = self._project, request.body
        if not project.is_mine(request.names["parent"].split("/")[1]):
            raise Refusal(403, f"Permission denied on resource {request.names['parent']}.")
        if self.refusal is not None:
            raise self.refusal
        if not 0 < len(body.get("displayName", "")) <= 128:
            raise invalid("The display name has between 1 and 128 characters.", "custom_job.display_name")
        labels: Mapping[str, str] = body.get("labels") or {}
        for name, value in labels.items():
            lower = name == name.lower() and value == value.lower()
            if not name or not lower or not _LABEL.fullmatch(name) or not _LABEL.fullmatch(value) or len(labels) > 64:
                raise invalid(f"Invalid label: {name}={value}", "custom_job.labels")
        specification: Mapping[str, Any] = body.get("jobSpec") or {}
        pools: list[Mapping[str, Any]] = specification.get("workerPoolSpecs") or []
        if len(pools) != 1 or int(pools[0].get("replicaCount", 0)) != 1:
            raise Refusal(501, "the sandbox supports only jobs of one worker pool with one replica")
        _check_pool(pools[0])
        _check_scheduling(specification)
        if account := specification.get("serviceAccount"):
            self._check_account(request, str(account))

    def _check_account(self, request: SandboxRequest, account: str) -> None:
        if not self._project.account_exists(account):
            raise invalid(f"Service account {account} does not exist.", "custom_job.job_spec.service_account")
        resource = f"projects/{self._project.id}/serviceAccounts/{account}"
        if not self._project.may(request.principal, "iam.serviceAccounts.actAs", resource):
            message = f"You do not have permission to act as service_account: {account}"
            raise Refusal(403, message, reason="forbidden")

    def _is_same(self, name: str, full_name: str) -> bool:
        """Compare names; responses have the project's number, requests its id or its number."""
        parts, full_parts = name.split("/"), full_name.split("/")
        return self._project.is_mine(parts[1]) and parts[2:] == full_parts[2:]


_FIELDS: Final = r"display_?[nN]ame|state|create_?[tT]ime|update_?[tT]ime|end_?[tT]ime|labels\.(\"[^\"]+\"|[\w-]+)"


def _retry_strategy(scheduling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the retryStrategy of Batch that behaves as Vertex.

    A failed worker is restarted up to five times, and the whole job up to three times, unless retries are disabled or
    the error is a common one, such as too little memory. A reclaimed Spot machine is replaced up to six times;
    whether that needs retries is not documented. Sources: "Understand the training service", "Use Spot VMs".
    """
    lost_machine = {"onStatusReason": _INTERRUPTED, "action": "RETRY"}
    out_of_memory = {"onReason": "OutOfMemory*", "action": "EXIT"}
    spot = scheduling.get("strategy") == "SPOT"
    if scheduling.get("disableRetries"):
        return {
            "attempts": 1 + _SPOT if spot else 1,
            "evaluateOnExit": [lost_machine, {"onStatusReason": "*", "action": "EXIT"}],
        }
    return {"attempts": (1 + _WORKER) * (1 + _WHOLE), "evaluateOnExit": [lost_machine, out_of_memory]}


def _check_pool(pool: Mapping[str, Any]) -> None:
    field = "custom_job.job_spec.worker_pool_specs[0]"
    machine: Mapping[str, Any] = pool.get("machineSpec") or {}
    kind = machine.get("machineType")
    if not kind:
        raise invalid("Machine type is required.", f"{field}.machine_spec.machine_type")
    count, accelerator = int(machine.get("acceleratorCount", 0)), machine.get("acceleratorType")
    for prefix, (only, counts) in _MACHINES.items():
        size = kind.removeprefix(prefix)
        if size != kind and (accelerator != only or counts.get(size) != count):
            message = f"Machine type {kind!r} is not supported with {count} {accelerator}."
            raise invalid(message, f"{field}.machine_spec")
    if kind.startswith(("n2-", "e2-", "c2-", "c3-")) and count:
        raise invalid(f"Machine type {kind!r} does not support accelerators.", f"{field}.machine_spec")
    container: Mapping[str, Any] = pool.get("containerSpec") or {}
    if not container.get("imageUri"):
        raise invalid("an image is required", f"{field}.container_spec.image_uri")
    variables: list[Mapping[str, str]] = container.get("env") or []
    if len(variables) > _ENVIRONMENT_MOST:
        raise invalid(f"more than {_ENVIRONMENT_MOST} environment variables", f"{field}.container_spec.env")
    names = [variable.get("name", "") for variable in variables]
    if bad := [name for name in names if not _NAME.fullmatch(name) or names.count(name) > 1]:
        raise invalid(f"Invalid or repeated environment variable: {bad[0]}", f"{field}.container_spec.env")
    boot: Mapping[str, Any] = pool.get("diskSpec") or {}
    disk = int(boot.get("bootDiskSizeGb", 100))
    if not 100 <= disk <= 64_000:
        raise invalid("The size of the boot disk is between 100 and 64000 GB.", f"{field}.disk_spec")


def _check_scheduling(specification: Mapping[str, Any]) -> None:
    scheduling: Mapping[str, Any] = specification.get("scheduling") or {}
    field = "custom_job.job_spec.scheduling"
    if scheduling.get("maxWaitDuration") and scheduling.get("strategy") != "FLEX_START":
        raise invalid("max_wait_duration is for FLEX_START", f"{field}.max_wait_duration")
    seconds = _seconds(scheduling.get("timeout"))
    if scheduling.get("strategy") == "FLEX_START" and (seconds or _WEEK_S) > _WEEK_S:
        raise invalid("a job with FLEX_START runs for at most 7 days", f"{field}.timeout")


def _seconds(duration: str | None) -> float | None:
    return None if duration is None else float(duration.rstrip("s"))


def _time(at_ms: int) -> str:
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
