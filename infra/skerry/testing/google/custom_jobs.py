"""Vertex AI's custom jobs, as its JobService tells them.

A job gets a number of Google's, never a name of the caller's, so nothing keeps two of the same from being made. Its
way is that of jobs.py; here it is put in Vertex's words. Sources: REST reference of projects.locations.customJobs,
"JobState", "Filtering" of customJobs.list, "Accelerators" of "Configure compute resources".
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.google import filters
from skerry.infra.testing.google.project import paged
from skerry.infra.testing.google.refusals import Refusal, absent, invalid
from skerry.infra.testing.jobs import Course

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.testing.google.operations import Operations
    from skerry.infra.testing.google.project import Asked, Handler, Project
    from skerry.infra.testing.jobs import Host, Jobs

OVER: Final = frozenset({"JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED"})
_PREFIX: Final = "aiplatform.projects.locations.customJobs"
_LABEL: Final = re.compile(r"[\w-]{0,63}")  # and no upper case: international letters are allowed
_ENVIRONMENT_MOST: Final = 100
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_WEEK_S: Final = 7 * 24 * 3600.0
_INTERRUPTED: Final = "Host EC2*"
# How often a worker, a whole job and a Spot machine are started again.
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
    """A job as it was asked for, and where it is on its way. error: one that a test has asked for."""

    told: dict[str, Any]
    course: Course
    error: dict[str, Any] | None = None
    queued: bool = False

    @property
    def number(self) -> str:
        """Its id."""
        return str(self.told["name"]).rpartition("/")[2]

    @property
    def state(self) -> str:
        """As Vertex tells it."""
        course = self.course
        if self.error is not None:
            return "JOB_STATE_FAILED"
        match course.status:
            case "RUNNABLE" | "STARTING":
                # A worker that failed is started again where it is; one whose machine is gone waits for another.
                again = (
                    course.last is not None and course.last.end is not None and course.last.end.exit_code is not None
                )
                return "JOB_STATE_RUNNING" if again else "JOB_STATE_QUEUED" if self.queued else "JOB_STATE_PENDING"
            case "RUNNING":
                return "JOB_STATE_RUNNING" if course.stopping is None else "JOB_STATE_CANCELLING"
            case "SUCCEEDED":
                return "JOB_STATE_SUCCEEDED"
            case _:
                return "JOB_STATE_FAILED" if course.stopping is None else "JOB_STATE_CANCELLED"


class CustomJobs:
    """The custom jobs of a project, in all its locations."""

    def __init__(
        self, project: Project, operations: Operations, jobs: Jobs, host: Callable[[dict[str, Any]], Host]
    ) -> None:
        """host: the surroundings of a job that is asked for so."""
        self._project = project
        self._operations = operations
        self._jobs = jobs
        self._host = host
        self._all: dict[str, Job] = {}
        self.refusal: Refusal | None = None

    def handlers(self) -> dict[str, Handler]:
        """By method."""
        return {
            f"{_PREFIX}.create": self._create,
            f"{_PREFIX}.get": lambda asked: self._shown(self.find(asked.names["name"])),
            f"{_PREFIX}.list": self._list,
            f"{_PREFIX}.cancel": self._cancel,
            f"{_PREFIX}.delete": self._delete,
            "aiplatform.projects.locations.operations.get": self._operations.get,
        }

    def find(self, name: str) -> Job:
        """By number or full name. Raises Refusal."""
        number = name.rpartition("/")[2]
        found = self._all.get(number)
        if found is None or ("/" in name and not self._is_same(name, str(found.told["name"]))):
            raise absent(f"The CustomJob does not exist: {name}")
        return found

    def names(self, *, over: bool) -> list[str]:
        """Display names of those that are over, or of those that are not."""
        return [str(one.told["displayName"]) for one in self._all.values() if (one.state in OVER) == over]

    def clear(self) -> None:
        """None at all."""
        self._all.clear()

    def _create(self, asked: Asked) -> Mapping[str, Any]:
        project, body = self._project, asked.body
        self._check(asked)
        number = str(4_000_000_000_000_000_000 + project.next_number() * 7_919_000_000_011 % 10**18)
        location = asked.names["parent"].split("/")[3]
        now = project.text()
        told = {
            **body,
            "name": f"projects/{project.number}/locations/{location}/customJobs/{number}",
            "createTime": now,
            "updateTime": now,
        }
        scheduling: Mapping[str, Any] = body["jobSpec"].get("scheduling") or {}
        course = Course(
            job=number,
            host=self._host(told),
            retry=_retries(scheduling),
            limit_s=_seconds(scheduling.get("timeout")) or _WEEK_S,
            created_ms=self._jobs.now_ms(),
        )
        self._all[number] = Job(told=told, course=course)
        self._jobs.submit(course)
        return self._shown(self._all[number])

    def _list(self, asked: Asked) -> Mapping[str, Any]:
        parent = asked.names["parent"]
        test = filters.parsed(asked.one("filter") or "", lambda name: re.fullmatch(_FIELDS, name) is not None)
        every = [self._shown(one) for one in reversed(self._all.values())]
        every = [one for one in every if self._is_same(parent, "/".join(one["name"].split("/")[:4])) and test(one)]
        found, token = paged(every, asked.number("pageSize"), asked.one("pageToken"))
        if mask := asked.one("readMask"):
            raise Refusal(501, f"this sandbox tells jobs whole, not by {mask}")
        return {**({"customJobs": found} if found else {}), **({"nextPageToken": token} if token else {})}

    def _cancel(self, asked: Asked) -> Mapping[str, Any]:
        job = self.find(asked.names["name"])
        if job.state in OVER:
            # As training pipelines say it (googleapis' own samples, java-docs-samples 9281).
            why = f'The CustomJob "{job.told["name"]}" is in state {job.state} and cannot be canceled.'
            raise Refusal(400, why, status="FAILED_PRECONDITION")
        self._jobs.stop(job.number, "cancelled by the user")  # "On success the job is not deleted"
        return {}

    def _delete(self, asked: Asked) -> Mapping[str, Any]:
        job = self.find(asked.names["name"])
        if job.state not in OVER:
            raise Refusal(
                400,
                f"The CustomJob {job.told['name']} is in state {job.state}; only jobs that are over can be deleted.",
                status="FAILED_PRECONDITION",
            )
        parent = "/".join(str(job.told["name"]).split("/")[:4])

        def effect() -> dict[str, Any]:
            self._all.pop(job.number, None)
            return {}

        return self._operations.begin(parent, effect)

    def _shown(self, job: Job) -> dict[str, Any]:
        course, state = job.course, job.state
        told: dict[str, Any] = {**job.told, "state": state}
        if course.attempts:
            told["startTime"] = _time(course.attempts[0].started_ms)
        if state in OVER:
            told["endTime"] = _time(course.stopped_ms or self._jobs.now_ms())
        if state in {"JOB_STATE_FAILED", "JOB_STATE_CANCELLED"}:
            told["error"] = job.error or self._error(job)
        told["updateTime"] = told.get("endTime") or told.get("startTime") or told["createTime"]
        return told

    def _error(self, job: Job) -> dict[str, Any]:
        course = job.course
        end = None if course.last is None else course.last.end
        if course.stopping is not None:
            return {"code": 1, "message": "CANCELED"}
        if end is None or end.exit_code is None:
            why = course.status_reason if end is None or not end.reason else end.reason
            if why is not None and why.startswith(_INTERRUPTED[:-1]):
                why = "STOCKOUT: the Spot VM was preempted, and resources are insufficient to restart the job."
                return {"code": 8, "message": why}
            return {"code": 3, "message": str(why)}
        if end.final:
            return {"code": 4, "message": "The job exceeded its timeout."}
        if "OutOfMemory" in end.reason:
            said = "The replica workerpool0-0 ran out-of-memory and exited with a non-zero status of 137(SIGKILL)."
            return {"code": 3, "message": said}
        logs = f"https://console.cloud.google.com/logs/viewer?project={self._project.number}"
        logs += f"&resource=ml_job%2Fjob_id%2F{job.number}"
        said = f"The replica workerpool0-0 exited with a non-zero status of {end.exit_code}."
        return {
            "code": 3,
            "message": f"{said} To find out more about why your job exited please check the logs: {logs}",
        }

    def _check(self, asked: Asked) -> None:
        project, body = self._project, asked.body
        if not project.is_mine(asked.names["parent"].split("/")[1]):
            raise Refusal(403, f"Permission denied on resource {asked.names['parent']}.")
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
            raise Refusal(501, "this sandbox runs jobs of one worker pool with one replica")
        _check_pool(pools[0])
        _check_scheduling(specification)
        if account := specification.get("serviceAccount"):
            self._check_account(asked, str(account))

    def _check_account(self, asked: Asked, account: str) -> None:
        if not self._project.account_exists(account):
            raise invalid(f"Service account {account} does not exist.", "custom_job.job_spec.service_account")
        resource = f"projects/{self._project.id}/serviceAccounts/{account}"
        if not self._project.may(asked.principal, "iam.serviceAccounts.actAs", resource):
            message = f"You do not have permission to act as service_account: {account}"
            raise Refusal(403, message, reason="forbidden")

    def _is_same(self, name: str, told: str) -> bool:
        """Names are told with the project's number, and asked for with its id or its number."""
        parts, others = name.split("/"), told.split("/")
        return self._project.is_mine(parts[1]) and parts[2:] == others[2:]


_FIELDS: Final = r"display_?[nN]ame|state|create_?[tT]ime|update_?[tT]ime|end_?[tT]ime|labels\.(\"[^\"]+\"|[\w-]+)"


def _retries(scheduling: Mapping[str, Any]) -> dict[str, Any]:
    """What Batch would be told so that it did as Vertex does.

    A worker that fails is started again up to five times, and the whole job up to three, unless retries are disabled
    or the error is a common one, such as too little memory. A Spot machine that is taken away is replaced up to six
    times; nobody says whether that needs retries. Sources: "Understand the training service", "Use Spot VMs".
    """
    gone = {"onStatusReason": _INTERRUPTED, "action": "RETRY"}
    common = {"onReason": "OutOfMemory*", "action": "EXIT"}
    spot = scheduling.get("strategy") == "SPOT"
    if scheduling.get("disableRetries"):
        return {
            "attempts": 1 + _SPOT if spot else 1,
            "evaluateOnExit": [gone, {"onStatusReason": "*", "action": "EXIT"}],
        }
    return {"attempts": (1 + _WORKER) * (1 + _WHOLE), "evaluateOnExit": [gone, common]}


def _check_pool(pool: Mapping[str, Any]) -> None:
    where = "custom_job.job_spec.worker_pool_specs[0]"
    machine: Mapping[str, Any] = pool.get("machineSpec") or {}
    kind = machine.get("machineType")
    if not kind:
        raise invalid("Machine type is required.", f"{where}.machine_spec.machine_type")
    count, accelerator = int(machine.get("acceleratorCount", 0)), machine.get("acceleratorType")
    for prefix, (only, counts) in _MACHINES.items():
        size = kind.removeprefix(prefix)
        if size != kind and (accelerator != only or counts.get(size) != count):
            message = f"Machine type {kind!r} is not supported with {count} {accelerator}."
            raise invalid(message, f"{where}.machine_spec")
    if kind.startswith(("n2-", "e2-", "c2-", "c3-")) and count:
        raise invalid(f"Machine type {kind!r} does not support accelerators.", f"{where}.machine_spec")
    container: Mapping[str, Any] = pool.get("containerSpec") or {}
    if not container.get("imageUri"):
        raise invalid("an image is required", f"{where}.container_spec.image_uri")
    told: list[Mapping[str, str]] = container.get("env") or []
    if len(told) > _ENVIRONMENT_MOST:
        raise invalid(f"more than {_ENVIRONMENT_MOST} environment variables", f"{where}.container_spec.env")
    names = [one.get("name", "") for one in told]
    if bad := [name for name in names if not _NAME.fullmatch(name) or names.count(name) > 1]:
        raise invalid(f"Invalid or repeated environment variable: {bad[0]}", f"{where}.container_spec.env")
    boot: Mapping[str, Any] = pool.get("diskSpec") or {}
    disk = int(boot.get("bootDiskSizeGb", 100))
    if not 100 <= disk <= 64_000:
        raise invalid("The size of the boot disk is between 100 and 64000 GB.", f"{where}.disk_spec")


def _check_scheduling(specification: Mapping[str, Any]) -> None:
    scheduling: Mapping[str, Any] = specification.get("scheduling") or {}
    where = "custom_job.job_spec.scheduling"
    if scheduling.get("maxWaitDuration") and scheduling.get("strategy") != "FLEX_START":
        raise invalid("max_wait_duration is for FLEX_START", f"{where}.max_wait_duration")
    seconds = _seconds(scheduling.get("timeout"))
    if scheduling.get("strategy") == "FLEX_START" and (seconds or _WEEK_S) > _WEEK_S:
        raise invalid("a job with FLEX_START runs for at most 7 days", f"{where}.timeout")


def _seconds(duration: str | None) -> float | None:
    return None if duration is None else float(duration.rstrip("s"))


def _time(at_ms: int) -> str:
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
