"""Describes jobs of AWS Batch, with the reason why they wait or ended, and reads their logs.

Sources: Batch user guide, "Job states", "Jobs stuck in a RUNNABLE status", "Job timeouts"; the contract's exit codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.logs import events
from skerry.infra.provision.target_and_store_interfaces import JobView
from skerry.infra.targets.aws_batch import parse_observed_settings
from skerry.infra.targets.aws_batch.jobs import STOPPED, described
from skerry.infra.targets.shared.job_view_helpers import (
    EXIT_CODES,
    exit_text,
    joined,
    slot_of,
    stream_lines,
    unknown_job,
)
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import LogLine

# The most names in one call.
_AT_ONCE: Final = 100

# The meaning of a reason that Batch or ECS give, by a part of it.
_REASONS: Final = {
    "Host EC2": "its machine was reclaimed or lost",
    "Job attempt duration exceeded timeout": "its time limit was reached: max_runtime, or the limits of the run",
    "CannotPullContainerError": (
        "its image could not be pulled: check that it exists and its execution role may read it"
    ),
    "CannotStartContainerError": "its container could not be started",
    "ResourceInitializationError": "its container could not be set up: roles, log group or network",
    "OutOfMemoryError": "it used more memory than it requested; raise `memory`",
    "DockerTimeoutError": "the machine's Docker engine did not answer",
    "MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED": (
        "the machines cannot start with this configuration: disk, network or machine image do not fit the types"
    ),
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": (
        "no machine of its types is available now; add instance_types, zones or a region"
    ),
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": "the compute environment may not start enough vCPUs for it",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": "none of the types has what it requests; write less vcpus or memory",
    "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS": "Batch's own role lacks a permission",
    "Instance has been unhealthy": "its machine did not join the cluster; check that it can reach AWS from its subnet",
}
_EXIT_CODES: Final = {
    **EXIT_CODES,
    int(ExitCode.RETRY): (
        "stopped by a signal, or an outside failure; retried while attempts are left, unless it was cancelled"
    ),
}
_WAITING: Final = {
    "SUBMITTED": "Batch has just accepted it",
    "PENDING": "it waits for other jobs",
    "STARTING": "its image is being pulled",
}


@dataclass(frozen=True, kw_only=True)
class QueueContext:
    """The queues and compute environments of waiting jobs, by ARN."""

    queues: Mapping[str, Mapping[str, Any]]
    environments: Mapping[str, Mapping[str, Any]]


def views(aws: Aws, state_records: Sequence[StateRecord]) -> list[JobView]:
    """Return the views of these jobs, in their order."""
    rows: dict[str, Mapping[str, Any]] = {}
    waiting: dict[str, set[str]] = {}
    for region in sorted({record.region for record in state_records}):
        ids = [record.outputs["id"] for record in state_records if record.region == region and record.outputs.get("id")]
        for row in described(aws, region, ids):
            rows[str(row["jobId"])] = row
            if row["status"] == "RUNNABLE":
                waiting.setdefault(region, set()).add(str(row["jobQueue"]))
    context = _queue_context(aws, waiting)
    return [view(record, rows.get(record.outputs.get("id", "")), context) for record in state_records]


def view(state_record: StateRecord, row: Mapping[str, Any] | None, context: QueueContext) -> JobView:
    """Describe one job. row: from DescribeJobs; None if Batch has no record of it. Pure."""
    job = state_record.outputs.get("id", state_record.name)
    if row is None:
        why = "Batch has deleted its record, as it does some days after a job ended; the run's own records have its end"
        return unknown_job(state_record, job, why)
    status = str(row["status"])
    attempts: Sequence[Mapping[str, Any]] = row.get("attempts", [])
    code = _exit_code(row, attempts)
    return JobView(
        slot=slot_of(state_record),
        job=job,
        state=status,
        condition=parse_observed_settings.job(row, state_record.region).condition,
        why=_why(row, status, attempts, code, context),
        # While a job runs, its current attempt is usually not in the list of attempts.
        attempt=len(attempts) + (1 if status == "RUNNING" and not _lists_current(row, attempts) else 0),
        exit_code=code,
        started_s=_seconds(row.get("startedAt")),
        ended_s=_seconds(row.get("stoppedAt")) if status in {"SUCCEEDED", "FAILED"} else None,
        stopped=row.get("isTerminated") is True or row.get("isCancelled") is True or row.get("statusReason") == STOPPED,
    )


def lines(aws: Aws, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
    """Return the log lines of a job's attempts, oldest first, after `cursor` only."""
    group, job = state_record.settings.get("log_group", ""), state_record.outputs.get("id", "")
    rows = described(aws, state_record.region, [job]) if job else []
    if not rows:
        text = f"Batch has no record of {state_record.name} any more; find its lines by time in the log group {group}"
        raise Invalid(text)
    # A job that was found by its tag has no settings.
    group = str(group or rows[0]["container"]["logConfiguration"]["options"]["awslogs-group"])
    return stream_lines(
        slot_of(state_record),
        _streams(rows[0]),
        cursor,
        lambda stream, inner: events(aws, state_record.region, group, stream, inner),
    )


def _why(
    row: Mapping[str, Any],
    status: str,
    attempts: Sequence[Mapping[str, Any]],
    code: int | None,
    context: QueueContext,
) -> str:
    reason = str(row.get("statusReason", ""))
    if status == "SUCCEEDED":
        return "done"
    if status == "FAILED":
        container = str(row.get("container", {}).get("reason", "")) or _last(attempts, "reason")
        # For a terminated job Batch repeats the reason that was given with the request.
        return joined(_meaning(reason), _meaning(container), exit_text(code, _EXIT_CODES))
    waits = _why_waiting(row, reason, context) if status == "RUNNABLE" else _WAITING.get(status, "")
    return joined(waits, _previous_attempt(attempts))


def _why_waiting(row: Mapping[str, Any], reason: str, context: QueueContext) -> str:
    """Return why a runnable job does not run: Batch's reason, else the state of its queue and machines."""
    if reason:
        return _meaning(reason)
    queue = context.queues.get(str(row["jobQueue"]))
    if queue is None:
        return "waits for a machine"
    if queue.get("state") != "ENABLED":
        return f"the queue {queue['jobQueueName']} is disabled"
    if queue.get("status") != "VALID":
        return f"the queue {queue['jobQueueName']} is {queue.get('status')}: {queue.get('statusReason', '')}"
    for place in queue.get("computeEnvironmentOrder", []):
        environment = context.environments.get(str(place["computeEnvironment"]))
        if environment is None or (environment.get("status") == "VALID" and environment.get("state") == "ENABLED"):
            continue
        name, status = environment["computeEnvironmentName"], environment.get("status")
        what = f"{status}: {environment.get('statusReason', '')}" if status != "VALID" else "disabled"
        return f"the compute environment {name} is {what}"
    return "waits for a machine; if this lasts, none is free or the quota is used up (see `skerry doctor`)"


def _previous_attempt(attempts: Sequence[Mapping[str, Any]]) -> str:
    """Return how the attempt before the current one ended."""
    if not attempts:
        return ""
    last = attempts[-1]
    reason = str(last.get("statusReason") or last.get("container", {}).get("reason") or "")
    text = joined(_meaning(reason), exit_text(last.get("container", {}).get("exitCode"), _EXIT_CODES))
    return f"attempt {len(attempts)} ended: {text}" if text else ""


def _meaning(reason: str) -> str:
    """Return the meaning of a reason, with AWS's own words in parentheses."""
    for part, meaning in _REASONS.items():
        if part in reason:
            return f"{meaning} ({reason})"
    return reason


def _exit_code(row: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> int | None:
    if row["status"] not in {"SUCCEEDED", "FAILED"}:
        return None
    code = row.get("container", {}).get("exitCode")
    if code is None and attempts:
        code = attempts[-1].get("container", {}).get("exitCode")
    return None if code is None else int(code)


def _last(attempts: Sequence[Mapping[str, Any]], name: str) -> str:
    return str(attempts[-1].get("container", {}).get(name, "")) if attempts else ""


def _streams(row: Mapping[str, Any]) -> list[str]:
    """Return the log streams of all attempts, oldest first; that of the current attempt is the last."""
    names = [attempt.get("container", {}).get("logStreamName") for attempt in row.get("attempts", [])]
    names.append(row.get("container", {}).get("logStreamName"))
    return list(dict.fromkeys(str(name) for name in names if name))


def _lists_current(row: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the current attempt is in the list of attempts, as with some services."""
    return bool(attempts) and not attempts[-1].get("stoppedAt") and row["status"] == "RUNNING"


def _seconds(milliseconds: object) -> float | None:
    """Return a time in seconds; Batch reports 0 for a time that has not come."""
    return milliseconds / 1000 if isinstance(milliseconds, int | float) and milliseconds > 0 else None


def _queue_context(aws: Aws, waiting: Mapping[str, set[str]]) -> QueueContext:
    """Read the queues and machines of waiting jobs. Without the permission, views lack the reason of the waiting."""
    queues: dict[str, Mapping[str, Any]] = {}
    environments: dict[str, Mapping[str, Any]] = {}
    for region, arns in waiting.items():
        try:
            answer = aws.call("batch", region, "describe_job_queues", jobQueues=sorted(arns)[:_AT_ONCE])
            queues |= {str(row["jobQueueArn"]): row for row in answer["jobQueues"]}
            names = {
                str(place["computeEnvironment"])
                for row in answer["jobQueues"]
                for place in row.get("computeEnvironmentOrder", [])
            }
            batch = sorted(names)[:_AT_ONCE]
            answer = aws.call("batch", region, "describe_compute_environments", computeEnvironments=batch)
            environments |= {str(row["computeEnvironmentArn"]): row for row in answer["computeEnvironments"]}
        except SkerryError:
            continue
    return QueueContext(queues=queues, environments=environments)
