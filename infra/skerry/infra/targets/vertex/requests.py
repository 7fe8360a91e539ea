"""Builds the body of the request that creates a custom job of Vertex AI. Pure.

It is a tree that may hold references to other resources. Golden files show it; tests check it against Google's
discovery document, and against what the SDK sends. Vertex AI has no token that makes a repeated request harmless, and
display names are not unique. So a job is identified by its labels: the run, the replica (the key of its address), and a
digest of the settings that it was created with.
Source: Vertex AI API, projects.locations.customJobs.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.google import owner_labels
from skerry.infra.provision.graph import as_json, refs
from skerry.infra.targets.shared.resolve_refs import Tree, environment_list

if TYPE_CHECKING:
    from skerry.infra.provision.handler import Desired

SPEC_LABEL: Final = "skerry-spec"
"""The label with the digest of a job's settings: two jobs of one name and run differ in it."""

_DIGITS: Final = 16
# Settings that say where the job is, not what it is.
_LOCATION_SETTINGS: Final = frozenset({"region", "project"})


def job(desired: Desired) -> Tree:
    """The body of customJobs.create.

    Retries are off: Vertex AI would restart a container whatever its exit code, up to five times on its machine and
    three times on another, and cannot be told which exit codes are final.
    """
    settings = desired.settings
    machine: Tree = {"machineType": settings["machine"]}
    if settings["accelerator"] is not None:
        machine |= {
            "acceleratorType": str(settings["accelerator"]).upper().replace("-", "_"),
            "acceleratorCount": settings["accelerators"],
        }
    disk: Tree = {"bootDiskSizeGb": settings["disk_gb"]}
    if settings["disk_type"] is not None:
        disk["bootDiskType"] = settings["disk_type"]
    pool: Tree = {
        "machineSpec": machine,
        "replicaCount": "1",
        "diskSpec": disk,
        "containerSpec": {
            "imageUri": settings["image"],
            "args": settings["args"],
            "env": environment_list(settings["environment"]),
        },
    }
    spec: Tree = {
        "workerPoolSpecs": [pool],
        "scheduling": _scheduling(desired),
        "serviceAccount": settings["service_account"],
    }
    if settings["network"] is not None:
        spec["network"] = settings["network"]
    encryption: Tree = {}
    if settings["encryption_key"] is not None:
        encryption["encryptionSpec"] = {"kmsKeyName": settings["encryption_key"]}
    return {"displayName": desired.name, "jobSpec": spec, "labels": labels(desired), **encryption}


def escaped(json_text: str) -> str:
    """Return JSON that Vertex AI does not change: it replaces $(NAME) in values by variables."""
    return json_text.replace("$", "\\u0024")


def labels(desired: Desired) -> dict[str, str]:
    """Return the labels that identify the run and the job, and the user's own."""
    return {**owner_labels.labels(desired), SPEC_LABEL: spec_digest(desired)}


def known_digest(desired: Desired) -> str | None:
    """Return `spec_digest`; None while a setting depends on a resource that does not exist yet."""
    return None if any(True for _ in refs(desired.settings)) else spec_digest(desired)


def spec_digest(desired: Desired) -> str:
    """Return the digest of the settings that a job is created with."""
    settings = {name: as_json(value) for name, value in desired.settings.items() if name not in _LOCATION_SETTINGS}
    return _digest(json.dumps(settings, sort_keys=True))


def _scheduling(desired: Desired) -> Tree:
    settings = desired.settings
    tree: Tree = {"disableRetries": True, "strategy": str(settings["scheduling"]).upper()}
    if settings["timeout_s"] is not None:
        tree["timeout"] = f"{settings['timeout_s']}s"
    if settings["max_wait_s"] is not None:
        tree["maxWaitDuration"] = f"{settings['max_wait_s']}s"
    return tree


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
