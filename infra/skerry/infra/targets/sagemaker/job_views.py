"""Describes training jobs, with the reason why they wait or ended, and reads their logs.

Sources: SageMaker API reference, DescribeTrainingJob, SecondaryStatusTransition; the contract's exit codes.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.logs import events
from skerry.infra.clouds.handler_helpers import Absent, each
from skerry.infra.provision.target_and_store_interfaces import JobView
from skerry.infra.targets.sagemaker import parse_observed_settings
from skerry.infra.targets.sagemaker.jobs import described
from skerry.infra.targets.sagemaker.resource_graph import LOGS
from skerry.infra.targets.shared.job_view_helpers import (
    AGAIN,
    DOCTOR,
    EXIT_CODES,
    exit_text,
    joined,
    slot_of,
    stream_lines,
    unknown_job,
)
from skerry.runtime.contract import ExitCode, may_succeed_again

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import LogLine

# The meaning of a failure, by the beginning of its reason.
_FAILURES: Final = {
    "CapacityError": "no machine of its type is available now: try another instance or region, spot, or max_pending",
    "InternalServerError": f"an internal failure of SageMaker; {AGAIN}",
    "ResourceLimitExceeded": f"a quota of the account is used up; {DOCTOR}",
    "AlgorithmError": "its container ended with an error",
    "ClientError": "SageMaker could not run it as requested: check image, role, network and S3 locations",
}
# Failures after which another start may succeed.
_PASSING: Final = ("CapacityError", "InternalServerError")
_ENDS: Final = {
    "MaxRuntimeExceeded": "its time limit was reached: max_runtime, or the limits of the run",
    "MaxWaitTimeExceeded": "it waited for spot machines and ran as long as max_wait allows",
    "MaxPendingTimeExceeded": "it waited for a machine as long as max_pending allows",
    "Stopped": "stopped on request",
    "Stopping": "it is being stopped, within two minutes",
}
_WAITING: Final = {
    "Starting": "its machine is being started",
    "Pending": "waits for a machine; if this lasts, none of its type is free",
    "Downloading": "its image is being pulled",
    "DownloadingTrainingImage": "its image is being pulled",
    "Interrupted": "its spot machine was reclaimed; it waits for another",
    "Restarting": "it is being restarted",
    "Uploading": "it has ended, and the files in /opt/ml/model are being stored",
}
# Part of SageMaker's status message while no machine is available.
_SHORT_OF_MACHINES: Final = "Insufficient capacity"
_EXIT_CODES: Final = {**EXIT_CODES, int(ExitCode.RETRY): f"an outside failure; {AGAIN}"}


def views(aws: Aws, state_records: Sequence[StateRecord]) -> list[JobView]:
    """Return the views of these jobs, in their order."""
    rows = each(lambda record: described(aws, record.region, _name(record)), state_records)
    return [view(record, row) for record, row in zip(state_records, rows, strict=True)]


def view(state_record: StateRecord, row: Mapping[str, Any] | None) -> JobView:
    """Describe one job. row: from DescribeTrainingJob; None if SageMaker has no record of it. Pure."""
    if row is None:
        why = "SageMaker has no record of it; the run's own records have its end"
        return unknown_job(state_record, _name(state_record), why)
    status, secondary = str(row["TrainingJobStatus"]), parse_observed_settings.secondary(row)
    return JobView(
        slot=slot_of(state_record),
        job=_name(state_record),
        # The secondary status says more while a job runs, and why it was stopped.
        state=secondary if status in {"InProgress", "Stopped"} else status,
        condition=parse_observed_settings.job(row, None, state_record.region).condition,
        why=_why(row, status, secondary),
        attempt=_starts(row),
        exit_code=parse_observed_settings.exit_code(row),
        started_s=_seconds(row.get("TrainingStartTime")),
        ended_s=None if status in parse_observed_settings.LIVE else _seconds(row.get("TrainingEndTime")),
        again=_may_succeed_again(row, status),
        stopped=status == "Stopped",
        stopping=status == "Stopping",
    )


def lines(aws: Aws, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
    """Return the log lines of a job's starts, oldest first, after `cursor` only."""
    return stream_lines(
        slot_of(state_record),
        _streams(aws, state_record),
        cursor,
        lambda stream, inner: events(aws, state_record.region, LOGS, stream, inner),
    )


def _why(row: Mapping[str, Any], status: str, secondary: str) -> str:
    match status:
        case "Completed":
            return "done"
        case "Failed":
            reason = str(row.get("FailureReason", "")).strip()
            meaning = next((text for start, text in _FAILURES.items() if reason.startswith(start)), "")
            return joined(
                f"{meaning} ({reason})" if meaning else reason,
                exit_text(parse_observed_settings.exit_code(row), _EXIT_CODES),
            )
        case "Stopped" | "Stopping":
            return _ENDS.get(secondary, _ENDS.get(status, ""))
        case _:
            return joined(_why_waiting(row, secondary), _interruptions(row))


def _may_succeed_again(row: Mapping[str, Any], status: str) -> bool:
    """Return whether the job failed and another start may succeed. A stop and a time limit are not failures."""
    if status != "Failed":
        return False
    if (code := parse_observed_settings.exit_code(row)) is not None:
        return may_succeed_again(code)
    return str(row.get("FailureReason", "")).startswith(_PASSING)


def _why_waiting(row: Mapping[str, Any], secondary: str) -> str:
    message = str(_transitions(row)[-1].get("StatusMessage", "")) if _transitions(row) else ""
    if secondary in {"Starting", "Pending"} and _SHORT_OF_MACHINES in message:
        return f"{_FAILURES['CapacityError']} ({message})"
    return _WAITING.get(secondary, "")


def _interruptions(row: Mapping[str, Any]) -> str:
    """Return how often the job's machine was reclaimed."""
    times = sum(transition.get("Status") == "Interrupted" for transition in _transitions(row))
    return f"its machine was reclaimed {times} time{'s' if times > 1 else ''} so far" if times else ""


def _starts(row: Mapping[str, Any]) -> int:
    """Return how often the container was started: each time that training begins after another status."""
    words = [str(transition.get("Status")) for transition in _transitions(row)]
    return sum(word == "Training" and before != "Training" for before, word in zip(["", *words], words, strict=False))


def _transitions(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return row.get("SecondaryStatusTransitions", [])


def _streams(aws: Aws, state_record: StateRecord) -> list[str]:
    """Return the log streams of all starts, oldest first: their names end in the time."""
    prefix = f"{_name(state_record)}/"
    listed = aws.pages(
        "logs", state_record.region, "describe_log_streams", "logStreams", logGroupName=LOGS, logStreamNamePrefix=prefix
    )
    try:
        return sorted(str(stream["logStreamName"]) for stream in listed)
    except Absent:  # this account has never had a training job
        return []


def _name(state_record: StateRecord) -> str:
    return state_record.outputs.get("name") or state_record.name


def _seconds(when: object) -> float | None:
    return when.timestamp() if isinstance(when, dt.datetime) else None
