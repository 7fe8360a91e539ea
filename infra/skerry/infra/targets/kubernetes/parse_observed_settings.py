"""Parses a Job of Kubernetes into the settings and condition that a plan compares. Pure."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.handler_helpers import tagged_record
from skerry.infra.provision.handler import Condition, Observed
from skerry.infra.targets.kubernetes import manifests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.provision.graph import Json, Resource
    from skerry.infra.provision.handler import StateRecord

COMPLETE: Final = "COMPLETE"
FAILED: Final = "FAILED"
STOPPED: Final = "STOPPED"
TERMINATING: Final = "TERMINATING"
SUSPENDED: Final = "SUSPENDED"
PENDING: Final = "PENDING"
RUNNING: Final = "RUNNING"
_CHANGEABLE: Final = {"attempts": "backoffLimit", "deadline_s": "activeDeadlineSeconds"}
_ENDED: Final = (FAILED, STOPPED, TERMINATING)


def job(row: Mapping[str, Any]) -> Observed:
    """From the API's Job."""
    spec: Mapping[str, Any] = row["spec"]
    pod: Mapping[str, Any] = spec["template"]["spec"]
    container: Mapping[str, Any] = pod["containers"][0]
    settings: dict[str, Json] = {
        "region": str(row["metadata"]["namespace"]),
        "image": str(container.get("image", "")),
        "args": [str(word) for word in container.get("args", ())],
        "environment": environment(row),
        "secrets": {
            str(item["name"]): {name: str(item["valueFrom"]["secretKeyRef"][name]) for name in ("name", "key")}
            for item in container.get("env", ())
            if "secretKeyRef" in item.get("valueFrom", {})
        },
        "service_account": str(pod.get("serviceAccountName", "")),
    }
    if not over(row):
        settings |= {
            "attempts": int(spec.get("backoffLimit", 6)) + 1,
            "deadline_s": spec.get("activeDeadlineSeconds"),
        }
    return Observed(
        outputs=outputs(row),
        settings=settings,
        owner=owner(row),
        condition=condition(row),
        detail=reason(row).get("message") or state(row).lower(),
        changed_by=_other_managers(row),
    )


def _other_managers(row: Mapping[str, Any]) -> dict[str, str]:
    """The managers other than skerry of the fields that may change in a job, by setting; a conflict names the same."""
    return {
        setting: f"{entry['manager']} (.spec.{name})"
        for entry in row["metadata"].get("managedFields") or ()
        if not str(entry.get("manager", "")).startswith(manifests.MANAGER)
        for setting, name in _CHANGEABLE.items()
        if f"f:{name}" in (entry.get("fieldsV1") or {}).get("f:spec", {})
    }


def service_account(row: Mapping[str, Any]) -> Observed:
    """From the API's ServiceAccount."""
    return Observed(outputs=outputs(row), settings={"region": str(row["metadata"]["namespace"])}, owner=owner(row))


def record_of(kind: type[Resource], row: Mapping[str, Any], key: str, generation: int) -> StateRecord:
    """The record of an object of the run. key, generation: for one that has lost its annotations."""
    address = notes(row).get(manifests.ADDRESS, f"{kind.KIND}.{key}")
    metadata = row["metadata"]
    return tagged_record(
        kind,
        address=address,
        name=str(metadata["name"]),
        generation=notes(row).get(manifests.GENERATION, str(generation)),
        region=str(metadata["namespace"]),
        outputs=outputs(row),
    )


def outputs(row: Mapping[str, Any]) -> dict[str, str]:
    """Its uid."""
    return {"uid": str(row["metadata"].get("uid", ""))}


def owner(row: Mapping[str, Any]) -> str | None:
    """The URI of the run that it belongs to; None without one."""
    return notes(row).get(manifests.RUN)


def notes(row: Mapping[str, Any]) -> Mapping[str, str]:
    """Its annotations."""
    annotations: Mapping[str, str] = row["metadata"].get("annotations") or {}
    return annotations


def condition(row: Mapping[str, Any]) -> Condition:
    """The condition of a job. One that was stopped or is being deleted is lost."""
    current = state(row)
    if current == COMPLETE:
        return Condition.DONE
    return Condition.LOST if current in _ENDED else Condition.READY


def over(row: Mapping[str, Any]) -> bool:
    """Return whether the job has ended, or is about to be gone."""
    return condition(row) is not Condition.READY


def pods_over(row: Mapping[str, Any]) -> bool:
    """Return whether the job and its pods have ended."""
    return over(row) and not any(status(row).get(name) for name in ("active", "terminating"))


def state(row: Mapping[str, Any]) -> str:
    """The state of a job in one word."""
    if _is(row, "Complete"):
        return COMPLETE
    if row["metadata"].get("deletionTimestamp"):
        return TERMINATING
    if manifests.STOPPED in notes(row):
        return STOPPED
    if _is(row, "Failed"):
        return FAILED
    if row["spec"].get("suspend"):
        return SUSPENDED
    return RUNNING if status(row).get("ready") else PENDING


def reason(row: Mapping[str, Any]) -> Mapping[str, str]:
    """The condition with which a job failed; empty if it did not."""
    return next((row for row in conditions(row) if row["type"] == "Failed" and row["status"] == "True"), {})


def conditions(row: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """The conditions of a job or a pod."""
    return list(status(row).get("conditions") or ())


def status(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of a job or a pod."""
    reported: Mapping[str, Any] = row.get("status") or {}
    return reported


def environment(row: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables of its container."""
    container: Mapping[str, Any] = row["spec"]["template"]["spec"]["containers"][0]
    return {
        str(item["name"]): manifests.unescaped(str(item.get("value", "")))
        for item in container.get("env", ())
        if "valueFrom" not in item
    }


def _is(row: Mapping[str, Any], kind: str) -> bool:
    return any(condition["type"] == kind and condition["status"] == "True" for condition in conditions(row))
