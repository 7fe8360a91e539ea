"""What training jobs are doing, in words that say why they wait or how they ended, and what they wrote.

Sources: SageMaker API reference, DescribeTrainingJob, SecondaryStatusTransition; our contract's exit codes.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.logs import events
from skerry.infra.clouds.handling import Absent, each
from skerry.infra.handler import Condition
from skerry.infra.target import JobView, LogLine
from skerry.infra.targets.sagemaker import reading
from skerry.infra.targets.sagemaker.layout import LOGS
from skerry.infra.targets.sagemaker.resources import TrainingJob
from skerry.infra.targets.sagemaker.working import described
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.handler import Made

# What SageMaker says of a failure, by how it begins, and what it means here.
_FAILURES: Final = {
    "CapacityError": "no machine of its type is to be had now: try another instance or region, spot, or max_pending",
    "InternalServerError": "SageMaker failed by its own fault; `skerry apply` starts it again",
    "ResourceLimitExceeded": "a quota of the account is used up: see `skerry doctor`",
    "AlgorithmError": "its container ended with an error",
    "ClientError": "SageMaker could not run it as it was asked to: image, role, network or places in S3",
}
# Those of them that may have passed by the next start.
_PASSING: Final = ("CapacityError", "InternalServerError")
_ENDS: Final = {
    "MaxRuntimeExceeded": "its time was up: `limits` or max_runtime of the spec",
    "MaxWaitTimeExceeded": "it waited for spare machines, and ran, as long as max_wait of the spec allows",
    "MaxPendingTimeExceeded": "it waited for a machine as long as max_pending of the spec allows",
    "Stopped": "stopped on request",
    "Stopping": "it is being stopped, and has two minutes for that",
}
_WAITING: Final = {
    "Starting": "a machine is being found and set up",
    "Pending": "waits for a machine: if it stays so, none of its type is free",
    "Downloading": "its image is being fetched",
    "DownloadingTrainingImage": "its image is being fetched",
    "Interrupted": "its spare machine was taken back; it waits for another",
    "Restarting": "it is being started again",
    "Uploading": "it has ended, and what it left in /opt/ml/model is being stored",
}
# SageMaker's own words for where it is in a start; nothing hangs on them.
_SHORT_OF_MACHINES: Final = "Insufficient capacity"
_CODES: Final = {
    int(ExitCode.RETRY): "something outside broke; `skerry apply` starts it again",
    int(ExitCode.PERMANENT): "the spec, the code or the rights are wrong; see its logs",
    int(ExitCode.STOPPED): "it stopped by itself, or the run has had its time: see its logs",
    137: "killed, often for want of memory",
    143: "ended by a signal to stop",
}


def views(aws: Aws, made: Sequence[Made]) -> list[JobView]:
    """What these jobs are doing, in the order asked."""
    rows = each(lambda one: described(aws, one.region, _name(one)), made)
    return [view(one, row) for one, row in zip(made, rows, strict=True)]


def view(made: Made, row: Mapping[str, Any] | None) -> JobView:
    """One job in words. row: as SageMaker describes it; None if it does not know it. Pure."""
    slot = made.address.removeprefix(f"{TrainingJob.KIND}.")
    if row is None:
        why = "SageMaker has no record of it; the run's records say how it ended"
        return JobView(slot=slot, job=_name(made), state="UNKNOWN", condition=Condition.LOST, why=why)
    status, finer = str(row["TrainingJobStatus"]), reading.secondary(row)
    return JobView(
        slot=slot,
        job=_name(made),
        # While a job goes on only the finer word says anything; why it was stopped, too.
        state=finer if status in {"InProgress", "Stopped"} else status,
        condition=reading.job(row, None, made.region).condition,
        why=_why(row, status, finer),
        attempt=_starts(row),
        exit_code=reading.exit_code(row),
        started_s=_seconds(row.get("TrainingStartTime")),
        ended_s=None if status in reading.LIVE else _seconds(row.get("TrainingEndTime")),
        again=_may_go_on(row, status),
    )


def lines(aws: Aws, made: Made, cursor: str | None) -> Iterator[LogLine]:
    """What the starts have written, one after the other. cursor: which start, and where in it."""
    slot = made.address.removeprefix(f"{TrainingJob.KIND}.")
    first, inner = _place(cursor)
    for number, stream in enumerate(_streams(aws, made)):
        if number < first:
            continue
        for event in events(aws, made.region, LOGS, stream, inner if number == first else None):
            yield LogLine(slot=slot, at_s=event.at_s, text=event.text, cursor=f"{number}/{event.cursor}")


def _why(row: Mapping[str, Any], status: str, finer: str) -> str:
    match status:
        case "Completed":
            return "done"
        case "Failed":
            reason = str(row.get("FailureReason", "")).strip()
            meaning = next((text for start, text in _FAILURES.items() if reason.startswith(start)), "")
            code = reading.exit_code(row)
            said = (
                "" if code is None else f"exit code {code}: {_CODES.get(code, 'no code of the runtime; see its logs')}"
            )
            return "; ".join(filter(None, (f"{meaning} ({reason})" if meaning else reason, said)))
        case "Stopped" | "Stopping":
            return _ENDS.get(finer, _ENDS.get(status, ""))
        case _:
            return "; ".join(filter(None, (_waits(row, finer), _before(row))))


def _may_go_on(row: Mapping[str, Any], status: str) -> bool:
    """Whether it failed in a way that another start may not. What was stopped, or had its time, did not fail."""
    if status != "Failed":
        return False
    if (code := reading.exit_code(row)) is not None:
        return code not in {ExitCode.PERMANENT, ExitCode.STOPPED}
    return str(row.get("FailureReason", "")).startswith(_PASSING)


def _waits(row: Mapping[str, Any], finer: str) -> str:
    message = str(_transitions(row)[-1].get("StatusMessage", "")) if _transitions(row) else ""
    if finer in {"Starting", "Pending"} and _SHORT_OF_MACHINES in message:
        return f"{_FAILURES['CapacityError']} ({message})"
    return _WAITING.get(finer, "")


def _before(row: Mapping[str, Any]) -> str:
    """What became of the starts before this one."""
    times = sum(one.get("Status") == "Interrupted" for one in _transitions(row))
    return f"its machine was taken back {times} time{'s' if times > 1 else ''} so far" if times else ""


def _starts(row: Mapping[str, Any]) -> int:
    """How often its container was started: each time that training begins after something else."""
    words = [str(one.get("Status")) for one in _transitions(row)]
    return sum(word == "Training" and before != "Training" for before, word in zip(["", *words], words, strict=False))


def _transitions(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return row.get("SecondaryStatusTransitions", [])


def _streams(aws: Aws, made: Made) -> list[str]:
    """The log streams of all starts, oldest first: their names end in the time."""
    prefix = f"{_name(made)}/"
    listed = aws.pages(
        "logs", made.region, "describe_log_streams", "logStreams", logGroupName=LOGS, logStreamNamePrefix=prefix
    )
    try:
        return sorted(str(stream["logStreamName"]) for stream in listed)
    except Absent:  # nothing was ever trained in this account
        return []


def _name(made: Made) -> str:
    return made.outputs.get("name") or made.name


def _place(cursor: str | None) -> tuple[int, str | None]:
    if cursor is None:
        return 0, None
    number, slash, inner = cursor.partition("/")
    if not slash or not number.isdecimal():
        raise Invalid(f"not a place in a job's log: {cursor!r}")
    return int(number), inner


def _seconds(when: object) -> float | None:
    return when.timestamp() if isinstance(when, dt.datetime) else None
