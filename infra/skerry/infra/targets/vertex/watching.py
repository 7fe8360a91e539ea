"""What jobs are doing, in words that say why they wait or how they ended, and what they wrote.

Vertex AI is told not to start a job again, for it would not look at the code with which a replica ended. So one whose
machine was taken back, or that ended with a code that says "again", is made again by the next apply.
Sources: Vertex AI API, JobState; "Troubleshooting Vertex AI", custom training; google.rpc.Code; our exit codes.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google.logs import events
from skerry.infra.handler import Condition
from skerry.infra.target import JobView, LogLine
from skerry.infra.targets.vertex import reading
from skerry.infra.targets.vertex.machines import quota_of
from skerry.infra.targets.vertex.resources import Job
from skerry.infra.targets.vertex.working import described, listed, place_of
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.handler import Made

_AGAIN: Final = "`skerry apply` starts another"
_STATUS: Final = re.compile(r"non-zero status of (\d+)")
# What Vertex AI says, and what it means here; the first that is found counts.
_REASONS: Final = (
    (r"quota", "a quota is used up; see `skerry doctor`"),
    (r"STOCKOUT|preempt", f"its machine was taken back, or none is to be had now; {_AGAIN}"),
    (
        r"insufficient (resources|capacity)|not have enough resources|resources are (insufficient|.*unavailable)",
        "no machine of its kind is to be had now: another machine, region or scheduling (flex_start) may be",
    ),
    (r"out-of-memory|out of memory", "it used more memory than its machine has; take a larger machine"),
    (r"timeout|time limit", "its time was up: `limits` or max_runtime of the spec, or Vertex AI's own seven days"),
    (
        r"image.*(not found|does not exist)|manifest unknown",
        "its image could not be fetched: is it there, by this digest?",
    ),
    (
        r"artifactregistry|pull image|image pull",
        "its image could not be fetched: may the Vertex AI service agent of the project read the repository?",
    ),
    (r"permission|authentication scopes|unauthorized", "a right is missing; see `skerry doctor`"),
    (r"CANCELED|cancelled", f"it was stopped; {_AGAIN}"),
)
# Those of them that may have passed by the next start.
_PASSING: Final = frozenset(_REASONS[number][1] for number in (1, 2))
_PASSING_CODES: Final = (13, 14)
# What google.rpc.Code says where no words do.
_CODES: Final = {
    4: "its time was up: `limits` or max_runtime of the spec, or Vertex AI's own seven days",
    7: "a right is missing; see `skerry doctor`",
    8: "no machine of its kind is to be had now, or a quota is used up; see `skerry doctor`",
    13: f"something broke inside Vertex AI; {_AGAIN}",
    14: f"something broke inside Vertex AI; {_AGAIN}",
}
_EXITS: Final = {
    int(ExitCode.RETRY): f"something outside broke; {_AGAIN}",
    int(ExitCode.PERMANENT): "the spec, the code or the rights are wrong; see its logs",
    int(ExitCode.STOPPED): "stopped on request, or the run has had its time: see its logs",
    137: "killed, often for want of memory",
    143: "ended by a signal to stop",
}
_DOING: Final = {
    "JOB_STATE_PENDING": "its machine is being found and started, or its image fetched",
    "JOB_STATE_RUNNING": "",
    "JOB_STATE_CANCELLING": "it is being stopped",
    "JOB_STATE_PAUSED": "it is paused",
    "JOB_STATE_UPDATING": "it is being changed",
}
# Without a time, a listing of entries looks at one day.
_EVER: Final = "2020-01-01T00:00:00Z"
_QUOTAS_PAGE: Final = "https://console.cloud.google.com/iam-admin/quotas?project={}"


def views(google: Google, made: Sequence[Made]) -> list[JobView]:
    """What these jobs are doing, in the order asked. One listing for each region; what it lacks is asked for by name,
    for a listing may be late.
    """
    rows: dict[str, Mapping[str, Any]] = {}
    for place in {place for one in made if (place := place_of(one)) is not None}:
        rows |= {reading.outputs(row)["id"]: row for row in listed(google, *place)}
    return [view(one, rows.get(one.outputs.get("id", "")) or _by_name(google, one)) for one in made]


def view(made: Made, row: Mapping[str, Any] | None) -> JobView:
    """One job in words. row: as Vertex AI tells it; None if it has no record of it. Pure."""
    slot = made.address.removeprefix(f"{Job.KIND}.")
    job = made.outputs.get("id", made.name)
    if row is None:
        why = f"Vertex AI has no record of it: it was stopped and deleted; {_AGAIN}"
        return JobView(slot=slot, job=job, state="UNKNOWN", condition=Condition.LOST, why=why)
    started = _seconds(row.get("startTime"))
    return JobView(
        slot=slot,
        job=job,
        state=reading.state(row).removeprefix("JOB_STATE_"),
        condition=reading.condition(row),
        why=_why(made, row),
        # What is made again after one was lost is its next generation.
        attempt=0 if started is None else made.generation + 1,
        exit_code=_exit_code(row),
        started_s=started,
        ended_s=None if reading.state(row) in reading.LIVE else _seconds(row.get("endTime")),
        again=_may_go_on(row),
    )


def lines(google: Google, made: Made, cursor: str | None) -> Iterator[LogLine]:
    """What a job has written. Raises Invalid if it was never made, or its lines are kept elsewhere."""
    job = made.outputs.get("id")
    if not job:
        raise Invalid(f"{made.name} was never made, and has written nothing; run `skerry apply` again")
    slot = made.address.removeprefix(f"{Job.KIND}.")
    where = f'resource.type="ml_job" AND resource.labels.job_id="{job}"'
    if cursor is None:
        where = f'{where} AND timestamp >= "{_EVER}"'
    for event in events(google, where, cursor):
        yield LogLine(slot=slot, at_s=event.at_s, text=event.text, cursor=event.cursor)


def _by_name(google: Google, made: Made) -> Mapping[str, Any] | None:
    name = made.outputs.get("name")
    return described(google, name) if name else None


def _why(made: Made, row: Mapping[str, Any]) -> str:
    state = reading.state(row)
    if state == reading.DONE:
        return "done"
    if state == "JOB_STATE_QUEUED":
        return _waits(made)
    if state in reading.LIVE:
        return _DOING.get(state, "")
    if state == "JOB_STATE_EXPIRED":
        return f"it ran out of time before it ran; {_AGAIN}"
    error = reading.error(row)
    message, code = str(error.get("message", "")), _exit_code(row)
    if code is not None:
        told = _EXITS.get(code, "not a code of the runtime; see its logs")
        return "; ".join(filter(None, (_meaning(message), f"exit code {code}: {told}")))
    meaning = _meaning(message) or _CODES.get(int(error.get("code", 0)), "")
    return f"{meaning} ({message})" if meaning and message else meaning or message or state.removeprefix("JOB_STATE_")


def _may_go_on(row: Mapping[str, Any]) -> bool:
    """Whether it failed in a way that another start may not. What was cancelled, or had its time, did not fail."""
    if reading.state(row) != "JOB_STATE_FAILED":
        return False
    error = reading.error(row)
    if (code := _exit_code(row)) is not None:
        return code not in {ExitCode.PERMANENT, ExitCode.STOPPED}
    meaning = _meaning(str(error.get("message", "")))
    return meaning in _PASSING or (not meaning and error.get("code") in _PASSING_CODES)


def _waits(made: Made) -> str:
    """Why a job that could run does not: Vertex AI does not say which of the two it is."""
    said = made.settings
    if said.get("scheduling") == "flex_start":
        return "queues for machines, as flex_start does, until max_wait is over"
    accelerator = said.get("accelerator")
    quota = quota_of(str(accelerator) if accelerator else None, str(said.get("scheduling", "standard")))
    page = _QUOTAS_PAGE.format(said.get("project", ""))
    return (
        f"waits for a machine: none is free in {made.region}, or the quota {quota} is used up there; see "
        f"`skerry doctor` and {page}"
    )


def _meaning(message: str) -> str:
    found = (meaning for pattern, meaning in _REASONS if re.search(pattern, message, re.IGNORECASE))
    return next(found, "")


def _exit_code(row: Mapping[str, Any]) -> int | None:
    if reading.state(row) == reading.DONE:
        return 0
    found = _STATUS.search(str(reading.error(row).get("message", "")))
    return None if found is None else int(found[1])


def _seconds(told: object) -> float | None:
    return dt.datetime.fromisoformat(told).timestamp() if isinstance(told, str) and told else None
