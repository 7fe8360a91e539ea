"""What is said to Vertex AI, as its REST API has it: trees that may hold references. Pure.

Golden files show them; tests check them against the discovery document that Google ships, and against what the SDK
sends. Vertex AI takes no token that would make a repeat harmless, and display names are not unique: a job is known by
its labels, which say whose it is, which replica (by the key of its address), and by a digest what it was made with.
Source: Vertex AI API, projects.locations.customJobs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.google import marks
from skerry.infra.graph import Ref, as_json, refs
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.graph import Value
    from skerry.infra.handler import Wanted

Tree = dict[str, "Value"]

SPEC_LABEL: Final = "skerry-spec"
"""Digest of all that a job was made with: another job of its name and run has another."""

_DIGITS: Final = 16
# Not what the job is, but where it is written down.
_NOT_OF_THE_JOB: Final = frozenset({"region", "project"})


def job(wanted: Wanted) -> Tree:
    """The body of customJobs.create.

    Retries are off: Vertex AI would start a container again whatever code it ended with, up to five times in its place
    and three times anew; which codes mean that, it cannot be told.
    """
    said = wanted.settings
    machine: Tree = {"machineType": said["machine"]}
    if said["accelerator"] is not None:
        machine |= {
            "acceleratorType": str(said["accelerator"]).upper().replace("-", "_"),
            "acceleratorCount": said["accelerators"],
        }
    disk: Tree = {"bootDiskSizeGb": said["disk_gb"]}
    if said["disk_type"] is not None:
        disk["bootDiskType"] = said["disk_type"]
    pool: Tree = {
        "machineSpec": machine,
        "replicaCount": "1",
        "diskSpec": disk,
        "containerSpec": {
            "imageUri": said["image"],
            "args": said["args"],
            "env": _variables(said["environment"]),
        },
    }
    spec: Tree = {
        "workerPoolSpecs": [pool],
        "scheduling": _scheduling(wanted),
        "serviceAccount": said["service_account"],
    }
    if said["network"] is not None:
        spec["network"] = said["network"]
    encryption: Tree = {}
    if said["encryption_key"] is not None:
        encryption["encryptionSpec"] = {"kmsKeyName": said["encryption_key"]}
    return {"displayName": wanted.name, "jobSpec": spec, "labels": labels(wanted), **encryption}


def plain(words: str) -> str:
    """JSON that Vertex AI leaves as it is: it puts variables where a value has $(NAME)."""
    return words.replace("$", "\\u0024")


def labels(wanted: Wanted) -> dict[str, str]:
    """What marks a job as this run's, and as this one; and what its user wants on it."""
    return {**marks.labels(wanted), SPEC_LABEL: spec_digest(wanted)}


def known_by(wanted: Wanted) -> str | None:
    """`spec_digest`, if all that a job is made with is known by now."""
    return None if any(True for _ in refs(wanted.settings)) else spec_digest(wanted)


def spec_digest(wanted: Wanted) -> str:
    """Of all that a job is made with."""
    settings = {name: as_json(value) for name, value in wanted.settings.items() if name not in _NOT_OF_THE_JOB}
    return _digest(json.dumps(settings, sort_keys=True))


def ready(tree: Tree) -> dict[str, object]:
    """`tree` as it is sent. Raises Invalid if something in it is not known yet."""
    return {name: _ready(value) for name, value in tree.items()}


def _scheduling(wanted: Wanted) -> Tree:
    said = wanted.settings
    tree: Tree = {"disableRetries": True, "strategy": str(said["scheduling"]).upper()}
    if said["timeout_s"] is not None:
        tree["timeout"] = f"{said['timeout_s']}s"
    if said["max_wait_s"] is not None:
        tree["maxWaitDuration"] = f"{said['max_wait_s']}s"
    return tree


def _variables(environment: Value) -> Sequence[Value]:
    if not isinstance(environment, Mapping):
        return []
    return [{"name": name, "value": environment[name]} for name in sorted(environment)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _ready(value: Value) -> object:
    match value:
        case Ref():
            raise Invalid(f"cannot send a request that waits for {value}")
        case Mapping():
            return {name: _ready(inner) for name, inner in value.items()}
        case str() | None | bool() | int() | float():
            return value
        case _:
            return [_ready(inner) for inner in value]
