"""Parses the description of a custom job into the settings and condition that a plan compares. Pure.

Settings to which Vertex AI gives defaults (disk, times) are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google import owner_labels
from skerry.infra.provision.handler import Condition, Observed
from skerry.infra.targets.vertex.resource_types import Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.provision.graph import Json
    from skerry.infra.provision.handler import StateRecord

STOPPABLE: Final = (
    "JOB_STATE_QUEUED",
    "JOB_STATE_PENDING",
    "JOB_STATE_RUNNING",
    "JOB_STATE_PAUSED",
    "JOB_STATE_UPDATING",
)
"""The states of a job that has not ended and is not being cancelled."""
LIVE: Final = (*STOPPABLE, "JOB_STATE_CANCELLING")
"""The states of a job that has not ended."""
DONE: Final = "JOB_STATE_SUCCEEDED"


def job(row: Mapping[str, Any], region: str, run: str) -> Observed:
    """From customJobs.get or list. run: of the caller."""
    mark = owner_labels.of_labels(labels(row))
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
    return Observed(
        outputs=outputs(row),
        settings=settings,
        owner=None if mark is None else mark.owner(run),
        condition=condition(row),
        detail=str(error(row).get("message") or state(row).removeprefix("JOB_STATE_").lower()),
    )


def record_of(row: Mapping[str, Any], mark: owner_labels.OwnerLabel, region: str) -> StateRecord:
    """Return the record of a job that was found by its labels."""
    return owner_labels.owned_record(
        Job, mark, name=str(row.get("displayName", "")), region=region, outputs=outputs(row)
    )


def outputs(row: Mapping[str, Any]) -> dict[str, str]:
    """Return its full name and its number."""
    name = str(row["name"])
    return {"name": name, "id": name.rpartition("/")[2]}


def condition(row: Mapping[str, Any]) -> Condition:
    """Return the condition. A job that was cancelled, or reached its time limit, is lost."""
    current = state(row)
    if current == DONE:
        return Condition.DONE
    return Condition.READY if current in LIVE else Condition.LOST


def state(row: Mapping[str, Any]) -> str:
    """Return the state in Vertex AI's words. A new job may have none yet."""
    current = str(row.get("state", ""))
    return "JOB_STATE_PENDING" if current in {"", "JOB_STATE_UNSPECIFIED"} else current


def error(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the error of a failed or cancelled job; empty if there is none."""
    reported: Mapping[str, Any] = row.get("error", {})
    return reported


def labels(row: Mapping[str, Any]) -> Mapping[str, str]:
    """Return its labels."""
    own_labels: Mapping[str, str] = row.get("labels", {})
    return own_labels


def environment(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of its container."""
    return {str(item["name"]): str(item.get("value", "")) for item in _container(row).get("env", [])}


def _container(row: Mapping[str, Any]) -> Mapping[str, Any]:
    container: Mapping[str, Any] = _pool(row).get("containerSpec", {})
    return container


def _pool(row: Mapping[str, Any]) -> Mapping[str, Any]:
    pools: Sequence[Mapping[str, Any]] = row.get("jobSpec", {}).get("workerPoolSpecs", [])
    return pools[0] if pools else {}
