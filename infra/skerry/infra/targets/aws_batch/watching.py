"""What jobs are doing, in words that say why they wait or how they ended, and what they wrote.

Sources: Batch user guide, "Job states", "Jobs stuck in a RUNNABLE status", "Job timeouts"; our contract's exit codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.logs import events
from skerry.infra.handler import Condition
from skerry.infra.target import JobView, LogLine
from skerry.infra.targets.aws_batch import reading
from skerry.infra.targets.aws_batch.resources import Job
from skerry.infra.targets.aws_batch.working import described
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.handler import Made

# A batch of ours is at most a thousand jobs; queues are few.
_AT_ONCE: Final = 100

# What Batch or ECS say, by how it begins, and what it means here.
_REASONS: Final = {
    "Host EC2": "its machine was taken back or was lost",
    "Job attempt duration exceeded timeout": "its time was up: `limits` or max_runtime of the spec",
    "CannotPullContainerError": "its image could not be fetched: is it there, and may the execution role read it?",
    "CannotStartContainerError": "its container could not be started",
    "ResourceInitializationError": "its container could not be set up: roles, log group or network",
    "OutOfMemoryError": "it used more memory than it asked for; raise `memory`",
    "DockerTimeoutError": "the machine's engine did not answer",
    "MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED": (
        "the machines cannot be started as they are set up: disk, network or machine image do not fit the types"
    ),
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": (
        "no machine of its types is to be had now; add instance_types, zones or a region"
    ),
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": "the compute environment may not have enough vCPUs for it",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": "none of the types has what it asks for; ask less vcpus or memory",
    "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS": "Batch's own role lacks a right",
    "Instance has been unhealthy": "its machine did not join the cluster; can it reach AWS from its subnet?",
}
_CODES: Final = {
    int(ExitCode.DONE): "done",
    int(ExitCode.RETRY): (
        "stopped by a signal, or something outside broke; tried again while attempts are left, if nobody cancelled it"
    ),
    int(ExitCode.PERMANENT): "the spec, the code or the rights are wrong; see its logs",
    int(ExitCode.STOPPED): "stopped by its script, or the run has had its time: see its logs",
    137: "killed, often for want of memory",
    143: "ended by a signal to stop",
}
_WAITING: Final = {
    "SUBMITTED": "Batch has just taken it",
    "PENDING": "it waits for others",
    "STARTING": "its image is being fetched",
}


@dataclass(frozen=True, kw_only=True)
class Around:
    """What is known of queues and machines, by ARN."""

    queues: Mapping[str, Mapping[str, Any]]
    environments: Mapping[str, Mapping[str, Any]]


def views(aws: Aws, made: Sequence[Made]) -> list[JobView]:
    """What these jobs are doing, in the order asked."""
    rows: dict[str, Mapping[str, Any]] = {}
    waiting: dict[str, set[str]] = {}
    for region in sorted({one.region for one in made}):
        ids = [one.outputs["id"] for one in made if one.region == region and one.outputs.get("id")]
        for row in described(aws, region, ids):
            rows[str(row["jobId"])] = row
            if row["status"] == "RUNNABLE":
                waiting.setdefault(region, set()).add(str(row["jobQueue"]))
    around = _around(aws, waiting)
    return [view(one, rows.get(one.outputs.get("id", "")), around) for one in made]


def view(made: Made, row: Mapping[str, Any] | None, around: Around) -> JobView:
    """One job in words. row: as Batch describes it; None if it does not know it any more. Pure."""
    slot = made.address.removeprefix(f"{Job.KIND}.")
    job = made.outputs.get("id", made.name)
    if row is None:
        why = "Batch has forgotten it, as it does some days after a job ended; the run's records say how"
        return JobView(slot=slot, job=job, state="UNKNOWN", condition=Condition.LOST, why=why)
    status = str(row["status"])
    attempts: Sequence[Mapping[str, Any]] = row.get("attempts", [])
    code = _exit_code(row, attempts)
    return JobView(
        slot=slot,
        job=job,
        state=status,
        condition=reading.job(row, made.region).condition,
        why=_why(row, status, attempts, code, around),
        # While it runs, the attempt at hand is not among those that Batch tells.
        attempt=len(attempts) + (1 if status == "RUNNING" and not _of_now(row, attempts) else 0),
        exit_code=code,
        started_s=_seconds(row.get("startedAt")),
        ended_s=_seconds(row.get("stoppedAt")) if status in {"SUCCEEDED", "FAILED"} else None,
    )


def lines(aws: Aws, made: Made, cursor: str | None) -> Iterator[LogLine]:
    """What the attempts have written, one after the other. cursor: which attempt, and where in it."""
    group, job = made.settings.get("log_group"), made.outputs.get("id", "")
    rows = described(aws, made.region, [job]) if job else []
    if not rows or not isinstance(group, str):
        raise Invalid(f"Batch has forgotten {made.name}; its lines are in the log group {group}, by time")
    slot = made.address.removeprefix(f"{Job.KIND}.")
    first, inner = _place(cursor)
    for number, stream in enumerate(_streams(rows[0])):
        if number < first:
            continue
        for event in events(aws, made.region, group, stream, inner if number == first else None):
            yield LogLine(slot=slot, at_s=event.at_s, text=event.text, cursor=f"{number}/{event.cursor}")


def _why(
    row: Mapping[str, Any],
    status: str,
    attempts: Sequence[Mapping[str, Any]],
    code: int | None,
    around: Around,
) -> str:
    reason = str(row.get("statusReason", ""))
    if status == "SUCCEEDED":
        return "done"
    if status == "FAILED":
        said = str(row.get("container", {}).get("reason", "")) or _last(attempts, "reason")
        # Of one's own stop Batch tells the words that were given with it.
        return "; ".join(filter(None, (_told(reason), _told(said) if said else "", _code(code))))
    before = _before(attempts)
    if status == "RUNNABLE":
        return "; ".join(filter(None, (_waits(row, reason, around), before)))
    return "; ".join(filter(None, (_WAITING.get(status, ""), before)))


def _waits(row: Mapping[str, Any], reason: str, around: Around) -> str:
    """Why a job that could run does not: what Batch says, or else what is wrong with queue or machines."""
    if reason:
        return _told(reason)
    queue = around.queues.get(str(row["jobQueue"]))
    if queue is None:
        return "waits for a machine"
    if queue.get("state") != "ENABLED":
        return f"the queue {queue['jobQueueName']} is switched off"
    if queue.get("status") != "VALID":
        return f"the queue {queue['jobQueueName']} is {queue.get('status')}: {queue.get('statusReason', '')}"
    for place in queue.get("computeEnvironmentOrder", []):
        environment = around.environments.get(str(place["computeEnvironment"]))
        if environment is None or (environment.get("status") == "VALID" and environment.get("state") == "ENABLED"):
            continue
        name, status = environment["computeEnvironmentName"], environment.get("status")
        what = f"{status}: {environment.get('statusReason', '')}" if status != "VALID" else "switched off"
        return f"the compute environment {name} is {what}"
    return "waits for a machine: if it stays so, none is free, or the quota for them is used up (see `skerry doctor`)"


def _before(attempts: Sequence[Mapping[str, Any]]) -> str:
    """How the attempt before this one ended."""
    if not attempts:
        return ""
    last = attempts[-1]
    code = last.get("container", {}).get("exitCode")
    told = _told(str(last.get("statusReason") or last.get("container", {}).get("reason") or ""))
    said = "; ".join(filter(None, (told, _code(code))))
    return f"attempt {len(attempts)} ended: {said}" if said else ""


def _told(reason: str) -> str:
    """A reason in our words, with AWS's own behind it."""
    for start, meaning in _REASONS.items():
        if start in reason:
            return f"{meaning} ({reason})"
    return reason


def _code(code: int | None) -> str:
    return "" if code is None else f"exit code {code}: {_CODES.get(code, 'not a code of the runtime; see its logs')}"


def _exit_code(row: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> int | None:
    if row["status"] not in {"SUCCEEDED", "FAILED"}:
        return None
    found = row.get("container", {}).get("exitCode")
    if found is None and attempts:
        found = attempts[-1].get("container", {}).get("exitCode")
    return None if found is None else int(found)


def _last(attempts: Sequence[Mapping[str, Any]], name: str) -> str:
    return str(attempts[-1].get("container", {}).get(name, "")) if attempts else ""


def _streams(row: Mapping[str, Any]) -> list[str]:
    """The log streams of all attempts, oldest first; the one at hand comes last."""
    told = [one.get("container", {}).get("logStreamName") for one in row.get("attempts", [])]
    told.append(row.get("container", {}).get("logStreamName"))
    return list(dict.fromkeys(str(stream) for stream in told if stream))


def _of_now(row: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the attempt at hand is told among the attempts: some services do."""
    return bool(attempts) and not attempts[-1].get("stoppedAt") and row["status"] == "RUNNING"


def _place(cursor: str | None) -> tuple[int, str | None]:
    if cursor is None:
        return 0, None
    number, slash, inner = cursor.partition("/")
    if not slash or not number.isdecimal():
        raise Invalid(f"not a place in a job's log: {cursor!r}")
    return int(number), inner


def _seconds(milliseconds: object) -> float | None:
    """Batch tells 0 for what has not been."""
    return milliseconds / 1000 if isinstance(milliseconds, int | float) and milliseconds > 0 else None


def _around(aws: Aws, waiting: Mapping[str, set[str]]) -> Around:
    """Queues and machines of what waits. Not to be allowed to look costs the reason, and nothing else."""
    queues: dict[str, Mapping[str, Any]] = {}
    environments: dict[str, Mapping[str, Any]] = {}
    for region, arns in waiting.items():
        try:
            told = aws.call("batch", region, "describe_job_queues", jobQueues=sorted(arns)[:_AT_ONCE])
            queues |= {str(row["jobQueueArn"]): row for row in told["jobQueues"]}
            named = {
                str(place["computeEnvironment"])
                for row in told["jobQueues"]
                for place in row.get("computeEnvironmentOrder", [])
            }
            some = sorted(named)[:_AT_ONCE]
            told = aws.call("batch", region, "describe_compute_environments", computeEnvironments=some)
            environments |= {str(row["computeEnvironmentArn"]): row for row in told["computeEnvironments"]}
        except SkerryError:
            continue
    return Around(queues=queues, environments=environments)
