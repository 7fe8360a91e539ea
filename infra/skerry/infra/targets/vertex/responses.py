"""What Vertex AI says of a job, as the settings and conditions that a plan compares. Pure.

What Vertex AI fills in by itself where nothing was asked (disk, times) is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google import marks
from skerry.infra.handler import Condition, Seen
from skerry.infra.targets.vertex.resources import Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.graph import Json
    from skerry.infra.handler import Made

STOPPABLE: Final = (
    "JOB_STATE_QUEUED",
    "JOB_STATE_PENDING",
    "JOB_STATE_RUNNING",
    "JOB_STATE_PAUSED",
    "JOB_STATE_UPDATING",
)
"""Words for a job that has not ended, and that nobody has stopped."""
LIVE: Final = (*STOPPABLE, "JOB_STATE_CANCELLING")
"""Words for a job that has not ended."""
DONE: Final = "JOB_STATE_SUCCEEDED"


def job(row: Mapping[str, Any], region: str, run: str) -> Seen:
    """From customJobs.get or list. run: that asks."""
    mark = marks.of_labels(labels(row))
    container = _container(row)
    machine: Mapping[str, Any] = _pool(row).get("machineSpec", {})
    accelerator = machine.get("acceleratorType")
    spec: Mapping[str, Any] = row.get("jobSpec", {})
    settings: dict[str, Json] = {
        "region": region,
        "image": str(container.get("imageUri", "")),
        "args": [str(word) for word in container.get("args", [])],
        "environment": environment(row),
        "machine": str(machine.get("machineType", "")),
        "accelerator": None if accelerator is None else str(accelerator).lower().replace("_", "-"),
        "accelerators": int(machine.get("acceleratorCount", 0)),
        "service_account": str(spec.get("serviceAccount", "")),
    }
    return Seen(
        outputs=outputs(row),
        settings=settings,
        owner=None if mark is None else mark.owner(run),
        condition=condition(row),
        detail=str(error(row).get("message") or state(row).removeprefix("JOB_STATE_").lower()),
    )


def made(row: Mapping[str, Any], mark: marks.Mark, region: str) -> Made:
    """A job that was found by its labels."""
    return marks.found(Job, mark, name=str(row.get("displayName", "")), region=region, outputs=outputs(row))


def outputs(row: Mapping[str, Any]) -> dict[str, str]:
    """By what it is known: its whole name, and the number at its end."""
    name = str(row["name"])
    return {"name": name, "id": name.rpartition("/")[2]}


def condition(row: Mapping[str, Any]) -> Condition:
    """What a job is fit for. One that was cancelled, or ran out of time, is lost: the next apply makes another."""
    told = state(row)
    if told == DONE:
        return Condition.DONE
    return Condition.READY if told in LIVE else Condition.LOST


def state(row: Mapping[str, Any]) -> str:
    """Vertex AI's own word. A job that was just made may have none yet."""
    told = str(row.get("state", ""))
    return "JOB_STATE_PENDING" if told in {"", "JOB_STATE_UNSPECIFIED"} else told


def error(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Why it failed or was cancelled; empty if nobody says."""
    found: Mapping[str, Any] = row.get("error", {})
    return found


def labels(row: Mapping[str, Any]) -> Mapping[str, str]:
    """Its labels."""
    found: Mapping[str, str] = row.get("labels", {})
    return found


def environment(row: Mapping[str, Any]) -> dict[str, str]:
    """What its container finds in its environment."""
    return {str(one["name"]): str(one.get("value", "")) for one in _container(row).get("env", [])}


def _container(row: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _pool(row).get("containerSpec", {})
    return found


def _pool(row: Mapping[str, Any]) -> Mapping[str, Any]:
    pools: Sequence[Mapping[str, Any]] = row.get("jobSpec", {}).get("workerPoolSpecs", [])
    return pools[0] if pools else {}
