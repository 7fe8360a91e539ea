"""Builds the objects that are applied to a Kubernetes cluster: the Job and the service account of a replica. Pure.

A run's URI fits into no label, so labels hold a digest of it, and annotations the URI itself. A job is identified by
its name and a digest of the settings of its pods.
Sources: Kubernetes API, batch/v1; "Handling retriable and non-retriable pod failures with Pod failure policy".
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google.owner_labels import run_mark
from skerry.infra.provision.graph import as_json
from skerry.infra.targets.kubernetes.resource_types import Job
from skerry.infra.targets.shared.resolve_refs import Tree, environment_list
from skerry.runtime.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.provision.handler import Desired

RUN_LABEL: Final = "skerry.dev/run"
SLOT_LABEL: Final = "skerry.dev/slot"
RUN: Final = "skerry.dev/run"
ADDRESS: Final = "skerry.dev/address"
GENERATION: Final = "skerry.dev/generation"
TAGS: Final = "skerry.dev/tags"
SETTINGS: Final = "skerry.dev/settings"
"""The annotation with the digest of the settings that a job's pods are created with."""
STOPPED: Final = "skerry.dev/stopped"
"""The annotation of a job that was stopped on request."""
CONTAINER: Final = "replica"
GPU: Final = "nvidia.com/gpu"
_TOKEN_FOLDER: Final = "/var/run/secrets/skerry.dev"  # noqa: S105  a folder
TOKEN_FILE: Final = f"{_TOKEN_FOLDER}/token"
"""The token of the replica's service account for the store's cloud; the kubelet renews it."""
CREDENTIALS_FILE: Final = f"{_TOKEN_FOLDER}/google.json"
"""The configuration with which Google's clients exchange the token, from an annotation of the pod."""
_CREDENTIALS: Final = "skerry.dev/google-credentials"

MANAGER: Final = "skerry"
"""The beginning of the names of skerry's field managers."""
_MANAGER_LABEL: Final = "app.kubernetes.io/managed-by"
ALL_RUNS: Final = f"{_MANAGER_LABEL}=skerry"
"""The label selector of the objects of all runs."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
# The user of the replica image (images/README.md).
_USER: Final = 10001
# A lost node: the default of 300 s would only delay the next pod.
_UNREACHABLE_S: Final = 60
_TOKEN_S: Final = 3600
_DIGITS: Final = 16


def job(desired: Desired) -> Tree:
    """The Job of a replica."""
    settings = desired.settings
    labels: Tree = _labels(desired)
    if settings["queue"] is not None:
        labels[QUEUE_LABEL] = settings["queue"]
    attempts = int(str(settings["attempts"]))
    of_pod: Tree = {"labels": labels}
    if settings["credentials"] is not None:
        of_pod["annotations"] = {_CREDENTIALS: settings["credentials"]}
    spec: Tree = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": attempts - 1,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _rules(free_evictions=attempts > 1)},
        "template": {"metadata": of_pod, "spec": _pod(desired)},
    }
    if settings["deadline_s"] is not None:
        spec["activeDeadlineSeconds"] = settings["deadline_s"]
    metadata: Tree = {**_metadata(desired), "labels": labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def service_account(desired: Desired) -> Tree:
    """The service account of a replica. Without rights of its own, and without a token in its pods."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {**_metadata(desired), "labels": _labels(desired)},
        "automountServiceAccountToken": False,
    }


def settings_digest(desired: Desired) -> str:
    """The digest of the settings that a job's pods are created with."""
    settings = {name: as_json(value) for name, value in desired.settings.items() if name in Job.FIXED}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def manager(run: str) -> str:
    """The field manager of a run, so that the server refuses to change what another run, or a person, has set."""
    return f"{MANAGER}-{run_mark(run)}"


def selector(run: str) -> str:
    """The label selector of a run's objects."""
    return f"{RUN_LABEL}={run_mark(run)}"


def unescaped(text: str) -> str:
    """The value of a variable as a process gets it: Kubernetes reads $$ as a dollar sign."""
    return text.replace("$$", "$")


def _escaped(value: Any) -> Any:
    """A value in which Kubernetes replaces no $(NAME)."""
    return value.replace("$", "$$") if isinstance(value, str) else value


def _labels(desired: Desired) -> Tree:
    return {
        _MANAGER_LABEL: "skerry",
        RUN_LABEL: run_mark(desired.run),
        SLOT_LABEL: desired.resource.key,
    }


def _metadata(desired: Desired) -> Tree:
    notes: Tree = {
        # The names of tags have characters that keys of annotations have not.
        **({TAGS: json.dumps(dict(desired.extra), sort_keys=True)} if desired.extra else {}),
        RUN: desired.run,
        ADDRESS: desired.resource.address,
        GENERATION: str(desired.generation),
    }
    if isinstance(desired.resource, Job):
        notes[SETTINGS] = settings_digest(desired)
    return {"name": desired.name, "namespace": desired.resource.region, "annotations": notes}


def _rules(*, free_evictions: bool) -> list[Tree]:
    """The meaning of the end of a pod: the exit codes after which no other start helps end the job.

    An eviction (a drain, a preemption, a lost node) costs no attempt, except for a job that is to be started once.
    """
    final: Tree = {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": CONTAINER,
            "operator": "In",
            "values": [int(ExitCode.PERMANENT), int(ExitCode.STOPPED)],
        },
    }
    evicted: Tree = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [final, evicted] if free_evictions else [final]


def _pod(desired: Desired) -> Tree:
    settings: Mapping[str, Any] = desired.settings
    claim: Mapping[str, Any] | None = settings["claim"]
    user = _USER if claim is None else claim["user"]
    pod: Tree = {
        "restartPolicy": "Never",
        "serviceAccountName": settings["service_account"],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings["grace_s"],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": _tolerations(settings),
        "containers": [_container(settings)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(settings["shared_memory"])}},
            *_token_volume(settings),
            *([] if claim is None else [{"name": "store", "persistentVolumeClaim": {"claimName": claim["name"]}}]),
        ],
    }
    if settings["node_selector"]:
        pod["nodeSelector"] = settings["node_selector"]
    if settings["priority_class"] is not None:
        pod["priorityClassName"] = settings["priority_class"]
    if settings["pull_secret"] is not None:
        pod["imagePullSecrets"] = [{"name": settings["pull_secret"]}]
    return pod


def _container(settings: Mapping[str, Any]) -> Tree:
    memory, gpus = str(settings["memory"]), settings["gpus"]
    gpu: Tree = {GPU: str(gpus)} if gpus else {}
    container: Tree = {
        "name": CONTAINER,
        "image": settings["image"],
        "args": settings["args"],
        "env": [
            *environment_list({name: _escaped(text) for name, text in settings["environment"].items()}),
            *(
                {"name": variable, "valueFrom": {"secretKeyRef": dict(entry)}}
                for variable, entry in sorted(settings["secrets"].items())
            ),
        ],
        "resources": {"requests": {"cpu": settings["cpu"], "memory": memory}, "limits": {"memory": memory, **gpu}},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  the mount point of the volume
            *([] if settings["token_audience"] is None else [{"name": "token", "mountPath": _TOKEN_FOLDER}]),
            *([] if settings["claim"] is None else [{"name": "store", "mountPath": settings["claim"]["path"]}]),
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if settings["secret"] is not None:
        container["envFrom"] = [{"secretRef": {"name": settings["secret"]}}]
    return container


def _token_volume(settings: Mapping[str, Any]) -> list[Tree]:
    if settings["token_audience"] is None:
        return []
    path = TOKEN_FILE.rpartition("/")[2]
    token: Tree = {"audience": settings["token_audience"], "expirationSeconds": _TOKEN_S, "path": path}
    sources: list[Tree] = [{"serviceAccountToken": token}]
    if settings["credentials"] is not None:
        annotation: Tree = {"fieldPath": f"metadata.annotations['{_CREDENTIALS}']"}
        file: Tree = {"path": CREDENTIALS_FILE.rpartition("/")[2], "fieldRef": annotation}
        sources.append({"downwardAPI": {"items": [file]}})
    return [{"name": "token", "projected": {"sources": sources}}]


def _tolerations(settings: Mapping[str, Any]) -> list[Tree]:
    lost: list[Tree] = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _UNREACHABLE_S,
        }
        for state in ("not-ready", "unreachable")
    ]
    gpu: list[Tree] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}] if settings["gpus"] else []
    own: list[Tree] = [
        {"operator": "Equal" if "value" in toleration else "Exists", **toleration}
        for toleration in settings["tolerations"]
    ]
    return [*lost, *gpu, *own]
