"""The scheduler and the nodes of a cluster: finds a node for each pod, runs it, reports its state.

A pod that a node took is one run of `skerry.testing.job_runner`: a container, or driven by the test.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import base64
import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.job_runner import JobRun
from skerry.testing.kubernetes.objects import key_of, set_condition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.job_runner import JobHost, Jobs
    from skerry.testing.kubernetes.objects import Objects

_GPU: Final = "nvidia.com/gpu"
_UNREACHABLE: Final = "node.kubernetes.io/unreachable"
_NOT_TAKEN: Final = (
    "no new claims to deallocate, preemption: 0/{count} nodes are available: {count} Preemption is not helpful for "
    "scheduling."
)


class PodController:
    """See the module. host_of: the container and log of a pod."""

    def __init__(self, objects: Objects, runs: Jobs, host_of: Callable[[Mapping[str, Any]], JobHost]) -> None:
        self._objects = objects
        self._runs = runs
        self.host_of = host_of
        self._pods: dict[str, JobRun] = {}
        self._reports: dict[str, str] = {}
        self._silent: set[str] = set()

    def run_of(self, pod: Mapping[str, Any]) -> JobRun | None:
        """The run of a pod that a node took."""
        return self._pods.get(str(pod["metadata"]["uid"]))

    def delete(self, pod: dict[str, Any], reason: str | None = None, message: str = "") -> None:
        """Stop a pod; it is gone when it has ended. reason: of a disruption, which is no failure of the pod."""
        if reason is not None:
            set_condition(self._objects, pod, "DisruptionTarget", "True", reason, message)
        pod["metadata"].setdefault("deletionTimestamp", self._objects.now())
        run = self.run_of(pod)
        if run is not None and not run.is_over and pod["spec"]["nodeName"] not in self._silent:
            self._runs.stop(run.job, "deleted")
        self._objects.touch(key_of(pod))

    def lose_node(self, pod: Mapping[str, Any]) -> None:
        """Let the node of a pod fall silent, for longer than the cluster and the pods tolerate."""
        self._silent.add(str(pod["spec"]["nodeName"]))

    def sync_nodes(self) -> None:
        """Taint silent nodes and evict their pods; end the pods of nodes that are deleted.

        While every node is silent, none is evicted: the control plane may be what has lost its connection.
        """
        nodes = {str(node["metadata"]["name"]): node for node in self._objects.list("nodes", "")}
        evicting = not nodes.keys() <= self._silent
        for name in self._silent & nodes.keys():
            effects = ("NoSchedule", "NoExecute") if evicting else ("NoSchedule",)
            nodes[name]["spec"] = {"taints": [{"key": _UNREACHABLE, "effect": effect} for effect in effects]}
        for pod in self._objects.list("pods", ""):
            name, run = pod["spec"].get("nodeName"), self.run_of(pod)
            if name is not None and name not in nodes:
                if run is not None:
                    self._runs.stop(run.job, "its node was deleted")
                self._objects.remove(key_of(pod))
            elif evicting and name in self._silent and _is_live(pod):
                self.delete(pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")

    def report(self, pod: Mapping[str, Any], reason: str) -> None:
        """Let a pod's container wait for this reason instead of starting: ImagePullBackOff, ..."""
        self._reports[str(pod["metadata"]["uid"])] = reason

    def clear(self) -> None:
        """Forget all runs; their pods are gone."""
        self._pods.clear()
        self._reports.clear()
        self._silent.clear()

    def sync(self, pod: dict[str, Any], *, keep: bool) -> None:
        """Carry a pod one step on. keep: a deleted one stays until its Job has looked at its end."""
        status = pod.setdefault("status", {"phase": "Pending"})
        run = self.run_of(pod)
        if run is None and not pod["metadata"].get("deletionTimestamp") and self._schedule(pod):
            run = self._pods[str(pod["metadata"]["uid"])] = self._begin(pod)
        if run is not None:
            self._report_run(pod, run)
        if pod["metadata"].get("deletionTimestamp") and (run is None or run.is_over) and not keep:
            self._objects.remove(key_of(pod))
        elif status.get("phase") is None:
            status["phase"] = "Pending"

    def _begin(self, pod: Mapping[str, Any]) -> JobRun:
        run = JobRun(
            job=str(pod["metadata"]["uid"]),
            host=self.host_of(pod),
            retry=None,
            limit_s=None,
            created_ms=self._runs.now_ms(),
        )
        self._runs.submit(run)
        return run

    def _report_run(self, pod: dict[str, Any], run: JobRun) -> None:
        status, container = pod["status"], pod["spec"]["containers"][0]
        base = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        attempt = run.last
        refused = attempt is not None and attempt.end is not None and attempt.end.exit_code is None
        waiting = self._reports.get(str(pod["metadata"]["uid"]))
        if refused and attempt is not None and attempt.end is not None and not run.interrupted and run.stopping is None:
            waiting = _words_of_a_node(attempt.end.reason, str(container["image"]))
        if waiting is not None and not pod["metadata"].get("deletionTimestamp"):
            reason, _, message = waiting.partition(": ")
            state: dict[str, Any] = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
            status.update(phase="Pending", containerStatuses=[{**base, "ready": False, "state": state}])
            return
        if run.is_over and attempt is not None and attempt.end is not None and attempt.end.exit_code is not None:
            code = attempt.end.exit_code
            ended = {
                "exitCode": code,
                "reason": _end_reason(code, attempt.end.reason),
                "startedAt": _time(attempt.started_ms),
                "finishedAt": _time(attempt.stopped_ms or attempt.started_ms),
            }
            status.update(
                phase="Succeeded" if code == 0 else "Failed",
                containerStatuses=[{**base, "ready": False, "state": {"terminated": ended}}],
            )
        elif run.is_over:
            status.update(phase="Failed", containerStatuses=[])
        elif run.status == "RUNNING" and attempt is not None:
            state = {"running": {"startedAt": _time(attempt.started_ms)}}
            status.update(phase="Running", containerStatuses=[{**base, "ready": True, "state": state}])
        else:
            state = {"waiting": {"reason": "ContainerCreating"}}
            status.update(phase="Pending", containerStatuses=[{**base, "ready": False, "state": state}])

    def _schedule(self, pod: dict[str, Any]) -> bool:
        """Return whether the pod is on a node and its container can be made."""
        if not pod["spec"].get("nodeName"):
            node, reason = self._node_for(pod)
            if node is None:
                message = f"{reason} {_NOT_TAKEN.format(count=len(self._objects.list('nodes', '')))}"
                set_condition(self._objects, pod, "PodScheduled", "False", "Unschedulable", message)
                return False
            pod["spec"]["nodeName"] = node["metadata"]["name"]
            set_condition(self._objects, pod, "PodScheduled", "True", "", "")
        container = pod["spec"]["containers"][0]
        if (missing := self._missing_secret(pod)) is not None:
            waiting = {"reason": "CreateContainerConfigError", "message": missing}
            base = {"name": container["name"], "image": container["image"], "ready": False, "restartCount": 0}
            pod["status"].update(phase="Pending", containerStatuses=[{**base, "state": {"waiting": waiting}}])
        return missing is None

    def _missing_secret(self, pod: Mapping[str, Any]) -> str | None:
        """A kubelet's words for a Secret that the container names and that it cannot find, or whose entry it cannot."""
        container, namespace = pod["spec"]["containers"][0], pod["metadata"]["namespace"]
        entries = [variable.get("valueFrom", {}).get("secretKeyRef") for variable in container.get("env", ())]
        for entry in (*(source.get("secretRef") for source in container.get("envFrom", ())), *entries):
            if entry is None:
                continue
            secret = self._objects.find(("secrets", namespace, entry["name"]))
            if secret is None:
                return f'secrets "{entry["name"]}" not found'
            if "key" in entry and entry["key"] not in entries_of(secret):
                return f"couldn't find key {entry['key']} in Secret {namespace}/{entry['name']}"
        return None

    def _node_for(self, pod: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
        nodes = self._objects.list("nodes", "")
        spec = pod["spec"]
        for name in claims_of(pod).values():
            if self._objects.find(("persistentvolumeclaims", pod["metadata"]["namespace"], name)) is None:
                return None, f'0/{len(nodes)} nodes are available: persistentvolumeclaim "{name}" not found.'
        selected = [node for node in nodes if _has_labels(node, spec.get("nodeSelector") or {})]
        if not selected:
            text = f"{len(nodes)} node(s) didn't match Pod's node affinity/selector."
            return None, f"0/{len(nodes)} nodes are available: {text}"
        reached = [node for node in selected if node["metadata"]["name"] not in self._silent]
        if not reached:
            return None, f"0/{len(nodes)} nodes are available: {len(selected)} node(s) had untolerated taint(s)."
        gpus = gpus_of(pod)
        for node in reached:
            if gpus == 0 or gpus <= int(node["status"].get("allocatable", {}).get(_GPU, 0)) - self._used_gpus(node):
                return node, ""
        return None, f"0/{len(nodes)} nodes are available: {len(reached)} Insufficient {_GPU}."

    def _used_gpus(self, node: Mapping[str, Any]) -> int:
        name = node["metadata"]["name"]
        pods = [pod for pod in self._objects.list("pods", "") if pod["spec"].get("nodeName") == name]
        return sum(gpus_of(pod) for pod in pods if pod["status"].get("phase") not in {"Succeeded", "Failed"})


def _is_live(pod: Mapping[str, Any]) -> bool:
    """True unless the pod has ended or is being deleted."""
    return not pod["metadata"].get("deletionTimestamp") and pod["status"].get("phase") not in {"Succeeded", "Failed"}


def gpus_of(pod: Mapping[str, Any]) -> int:
    """The GPUs that a pod has."""
    resources = pod["spec"]["containers"][0].get("resources") or {}
    return int((resources.get("limits") or {}).get(_GPU, 0))


def entries_of(secret: Mapping[str, Any]) -> dict[str, bytes]:
    """The entries of a Secret."""
    data = {name: base64.b64decode(value) for name, value in (secret.get("data") or {}).items()}
    return data | {name: text.encode() for name, text in (secret.get("stringData") or {}).items()}


def claims_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """The claims of a pod by the names of its volumes."""
    volumes = pod["spec"].get("volumes") or ()
    return {
        str(volume["name"]): str(volume["persistentVolumeClaim"]["claimName"])
        for volume in volumes
        if "persistentVolumeClaim" in volume
    }


def _has_labels(node: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    labels = node["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in wanted.items())


def _words_of_a_node(reason: str, image: str) -> str:
    """The waiting reason of a container that the engine could not make, as a kubelet writes it."""
    kind, _, message = reason.partition(": ")
    if kind == "CannotPullContainerError":
        return f'ImagePullBackOff: Back-off pulling image "{image}"'
    return f"CreateContainerError: {message}" if kind == "CannotStartContainerError" else reason


def _end_reason(code: int, reason: str) -> str:
    if code == 0:
        return "Completed"
    return "OOMKilled" if "OutOfMemory" in reason else "Error"


def _time(at_ms: int) -> str:
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
