"""Describes custom jobs, with the reason why they wait or ended, and reads their logs.

Vertex AI is configured not to restart jobs, because it would ignore the replica's exit code. So a job whose machine was
reclaimed, or that ended with the exit code RETRY, is created again by the next apply.
Sources: Vertex AI API, JobState; "Troubleshooting Vertex AI", custom training; google.rpc.Code; the contract's exit
codes.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google.logs import events
from skerry.infra.provision.target_and_store_interfaces import JobView, LogLine
from skerry.infra.targets.shared.job_view_helpers import (
    AGAIN,
    DOCTOR,
    EXIT_CODES,
    exit_text,
    joined,
    slot_of,
    unknown_job,
)
from skerry.infra.targets.vertex import parse_observed_settings
from skerry.infra.targets.vertex.accelerators_disk_time_and_quota import quota_of
from skerry.infra.targets.vertex.jobs import described, listed, place_of
from skerry.runtime.contract import ExitCode, may_succeed_again
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.handler import StateRecord

_STATUS: Final = re.compile(r"non-zero status of (\d+)")
# The meaning of a message of Vertex AI, by a pattern in it; the first that is found counts.
_REASONS: Final = (
    (r"quota", f"a quota is used up; {DOCTOR}"),
    (r"STOCKOUT|preempt", f"its machine was reclaimed, or none is available now; {AGAIN}"),
    (
        r"insufficient (resources|capacity)|not have enough resources|resources are (insufficient|.*unavailable)",
        "no machine of its type is available now: try another machine, region or scheduling (flex_start)",
    ),
    (r"out-of-memory|out of memory", "it used more memory than its machine has; take a larger machine"),
    (
        r"timeout|time limit",
        "its time limit was reached: max_runtime, the limits of the run, or seven days",
    ),
    (
        r"image.*(not found|does not exist)|manifest unknown",
        "its image could not be pulled: check that it exists with this digest",
    ),
    (
        r"artifactregistry|pull image|image pull",
        "its image could not be pulled: check that the Vertex AI service agent of the project may read the repository",
    ),
    (r"permission|authentication scopes|unauthorized", f"a permission is missing; {DOCTOR}"),
    (r"CANCELED|cancelled", f"it was stopped; {AGAIN}"),
)
# Failures after which another start may succeed.
_PASSING: Final = frozenset(_REASONS[number][1] for number in (1, 2))
_PASSING_CODES: Final = (13, 14)
# The meaning of an error code (google.rpc.Code), for errors without a known message.
_CODES: Final = {
    4: "its time limit was reached: max_runtime, the limits of the run, or seven days",
    7: f"a permission is missing; {DOCTOR}",
    8: f"no machine of its type is available now, or a quota is used up; {DOCTOR}",
    13: f"an internal failure of Vertex AI; {AGAIN}",
    14: f"an internal failure of Vertex AI; {AGAIN}",
}
_EXIT_CODES: Final = {**EXIT_CODES, int(ExitCode.RETRY): f"an outside failure; {AGAIN}"}
_STATES: Final = {
    "JOB_STATE_PENDING": "its machine is being started, or its image pulled",
    "JOB_STATE_RUNNING": "",
    "JOB_STATE_CANCELLING": "it is being stopped",
    "JOB_STATE_PAUSED": "it is paused",
    "JOB_STATE_UPDATING": "it is being changed",
}
_STOPPED: Final = ("JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED")
# Without a time, a listing of log entries covers one day.
_LONG_AGO: Final = "2020-01-01T00:00:00Z"
_QUOTAS_PAGE: Final = "https://console.cloud.google.com/iam-admin/quotas?project={}"


def views(google: Google, state_records: Sequence[StateRecord]) -> list[JobView]:
    """Return the views of these jobs, in their order.

    One listing for each region. Jobs that are missing from it are read by name, because a listing may be late; so is a
    single job.
    """
    rows: dict[str, Mapping[str, Any]] = {}
    several = state_records if len(state_records) > 1 else ()
    for place in {place for record in several if (place := place_of(record)) is not None}:
        rows |= {parse_observed_settings.outputs(row)["id"]: row for row in listed(google, *place)}
    return [
        view(record, rows.get(record.outputs.get("id", "")) or _by_name(google, record)) for record in state_records
    ]


def view(state_record: StateRecord, row: Mapping[str, Any] | None) -> JobView:
    """Describe one job. row: from customJobs.get; None if Vertex AI has no record of it. Pure."""
    job = state_record.outputs.get("id", state_record.name)
    if row is None:
        return unknown_job(state_record, job, f"Vertex AI has no record of it: it was stopped and deleted; {AGAIN}")
    started = _seconds(row.get("startTime"))
    return JobView(
        slot=slot_of(state_record),
        job=job,
        state=parse_observed_settings.state(row).removeprefix("JOB_STATE_"),
        condition=parse_observed_settings.condition(row),
        why=_why(state_record, row),
        # A job that replaces a lost one is the next generation.
        attempt=0 if started is None else state_record.generation + 1,
        exit_code=_exit_code(row),
        started_s=started,
        ended_s=None
        if parse_observed_settings.state(row) in parse_observed_settings.LIVE
        else _seconds(row.get("endTime")),
        again=_may_succeed_again(row),
        stopped=parse_observed_settings.state(row) in _STOPPED,
    )


def lines(google: Google, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
    """Return the log lines of a job, oldest first, after `cursor` only. Raises Invalid if it was never created."""
    job = state_record.outputs.get("id")
    if not job:
        raise Invalid(f"no logs of {state_record.name}: its job was never created; run `skerry apply` again")
    where = f'resource.type="ml_job" AND resource.labels.job_id="{job}"'
    if cursor is None:
        where = f'{where} AND timestamp >= "{_LONG_AGO}"'
    for event in events(google, where, cursor):
        yield LogLine(slot=slot_of(state_record), at_s=event.at_s, text=event.text, cursor=event.cursor)


def _by_name(google: Google, state_record: StateRecord) -> Mapping[str, Any] | None:
    name = state_record.outputs.get("name")
    return described(google, name) if name else None


def _why(state_record: StateRecord, row: Mapping[str, Any]) -> str:
    state = parse_observed_settings.state(row)
    if state == parse_observed_settings.DONE:
        return "done"
    if state == "JOB_STATE_QUEUED":
        return _why_waiting(state_record)
    if state in parse_observed_settings.LIVE:
        return _STATES.get(state, "")
    if state == "JOB_STATE_EXPIRED":
        return f"its time limit was reached before it ran; {AGAIN}"
    error = parse_observed_settings.error(row)
    message, code = str(error.get("message", "")), _exit_code(row)
    if code is not None:
        return joined(_meaning(message), exit_text(code, _EXIT_CODES))
    meaning = _meaning(message) or _CODES.get(int(error.get("code", 0)), "")
    return f"{meaning} ({message})" if meaning and message else meaning or message or state.removeprefix("JOB_STATE_")


def _may_succeed_again(row: Mapping[str, Any]) -> bool:
    """Return whether the job failed and another start may succeed. A stop and a time limit are not failures."""
    if parse_observed_settings.state(row) != "JOB_STATE_FAILED":
        return False
    error = parse_observed_settings.error(row)
    if (code := _exit_code(row)) is not None:
        return may_succeed_again(code)
    meaning = _meaning(str(error.get("message", "")))
    return meaning in _PASSING or (not meaning and error.get("code") in _PASSING_CODES)


def _why_waiting(state_record: StateRecord) -> str:
    """Return why a queued job does not run: Vertex AI does not say whether it is machines or quota."""
    settings = state_record.settings
    if settings.get("scheduling") == "flex_start":
        return "queued for machines by flex_start, until max_wait is over"
    accelerator = settings.get("accelerator")
    quota = quota_of(str(accelerator) if accelerator else None, str(settings.get("scheduling", "standard")))
    page = _QUOTAS_PAGE.format(settings.get("project", ""))
    return (
        f"waits for a machine: none is free in {state_record.region}, or its quota {quota} is used up; see "
        f"`skerry doctor` and {page}"
    )


def _meaning(message: str) -> str:
    meanings = (meaning for pattern, meaning in _REASONS if re.search(pattern, message, re.IGNORECASE))
    return next(meanings, "")


def _exit_code(row: Mapping[str, Any]) -> int | None:
    if parse_observed_settings.state(row) == parse_observed_settings.DONE:
        return 0
    match = _STATUS.search(str(parse_observed_settings.error(row).get("message", "")))
    return None if match is None else int(match[1])


def _seconds(time: object) -> float | None:
    return dt.datetime.fromisoformat(time).timestamp() if isinstance(time, str) and time else None
