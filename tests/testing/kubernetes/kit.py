"""A Job as skerry's target writes it, and requests to a cluster as `kubectl` and skerry send them."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any, Final

import httpx2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.kubernetes import KubernetesSandbox

APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
NAMESPACE: Final = "train"


def job(name: str, *, attempts: int = 3, **pod: Any) -> dict[str, Any]:
    """A Job whose pod has these other fields, and `container` those of its container."""
    container = {
        "name": "replica",
        "image": "busybox",
        "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
        "volumeMounts": [{"name": "work", "mountPath": "/work"}, {"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108  of the volume
        **pod.pop("container", {}),
    }
    labels = {"skerry.dev/slot": name}
    volumes = [{"name": "work", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "replica", "operator": "In", "values": [20, 30]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": attempts - 1,
            "podReplacementPolicy": "Failed",
            "activeDeadlineSeconds": 600,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"restartPolicy": "Never", "containers": [container], "volumes": volumes, **pod},
            },
        },
    }


class Api:
    """The cluster's API, for one test. `call` returns the status and the document."""

    def __init__(self, sandbox: KubernetesSandbox) -> None:
        self.sandbox = sandbox
        config = json.loads(sandbox.kubeconfig.read_text())
        token = config["users"][0]["user"]["token"]
        self._http = httpx2.Client(base_url=sandbox.endpoint, headers={"Authorization": f"Bearer {token}"})

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
        **query: str,
    ) -> tuple[int, Any]:
        answer = self.send(method, path, body, content, **query)
        return answer.status_code, answer.json()

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
        **query: str,
    ) -> httpx2.Response:
        """See call. Returns the whole response."""
        data = None if body is None else json.dumps(body)
        return self._http.request(method, path, params=query, content=data, headers={"Content-Type": content})

    def jobs(self, method: str, name: str = "", body: Mapping[str, Any] | None = None, **more: str) -> tuple[int, Any]:
        path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
        return self.call(method, f"{path}/{name}" if name else path, body, **more)

    def create(self, body: Mapping[str, Any]) -> str:
        """Create a Job; what the server says if it refuses it."""
        status, answer = self.jobs("POST", body=body)
        return "" if status == 201 else f"{status} {answer['message']}"

    def apply(self, body: Mapping[str, Any], manager: str = "skerry", **query: str) -> tuple[int, Any]:
        name = body["metadata"]["name"]
        return self.jobs("PATCH", name, body, content=APPLY, fieldManager=manager, **query)

    def may(self, verb: str, resource: str, namespace: str) -> bool:
        """Return whether the server says that its operator has a right."""
        attributes = {"verb": verb, "resource": resource, "namespace": namespace}
        review = {"spec": {"resourceAttributes": attributes}}
        _, answer = self.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def pods(self, job: str) -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        _, answer = self.call("GET", path, labelSelector=f"batch.kubernetes.io/job-name={job}")
        items: list[dict[str, Any]] = answer["items"]
        return items

    def events(self, job: str) -> list[tuple[str, str]]:
        path = f"/api/v1/namespaces/{NAMESPACE}/events"
        _, answer = self.call("GET", path, fieldSelector=f"involvedObject.name={job}")
        return [(event["reason"], event["message"]) for event in answer["items"]]

    def conditions(self, job: str) -> list[tuple[str, str, str]]:
        _, row = self.jobs("GET", job)
        return [(each["type"], each["reason"], each["message"]) for each in row["status"].get("conditions", ())]


def changed(body: Mapping[str, Any], change: Callable[[Any], None]) -> dict[str, Any]:
    """A copy of a Job with one change."""
    result: dict[str, Any] = copy.deepcopy(dict(body))
    change(result)
    return result
