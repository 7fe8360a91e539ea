"""The controller of Jobs: makes their pods, counts their ends, and ends Jobs by their policies.

The words of conditions and events are those of a control plane 1.36.2. A Job that is deleted ends after its pods.
Sources: Kubernetes, "Jobs", "Pod failure policy"; recorded answers (tests/testing/kubernetes/recorded.txt).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import copy
import uuid
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.kubernetes.objects import key_of, set_condition
from skerry.testing.kubernetes.scheduler_and_nodes import gpus_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.kubernetes.objects import Key, Objects
    from skerry.testing.kubernetes.scheduler_and_nodes import PodController

JOB_NAME: Final = "batch.kubernetes.io/job-name"
_CONTROLLER: Final = "batch.kubernetes.io/controller-uid"
_GPU: Final = "nvidia.com/gpu"
# The pauses of the controller between failed pods.
_FIRST_PAUSE_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 600.0


class JobController:
    """See the module. pauses: wait between failed pods, as a cluster does."""

    def __init__(self, objects: Objects, pods: PodController) -> None:
        self._objects = objects
        self.pods = pods
        self.pauses = False
        self._counted: dict[str, set[str]] = {}
        self._last_failure: dict[str, float] = {}
        self._started: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        self._owned: dict[str, list[dict[str, Any]]] = {}

    def sync(self, only: Key | None = None) -> None:
        """Carry every Job and its pods one step on. Called with each request and after whatever a pod does.

        only: the key of a Job; the others follow with the next call without it, so that a thousand requests, each of
        which changes one of a thousand Jobs, do not look at a million.
        """
        with self._objects.lock:
            if only is not None:
                jobs = [job for job in (self._objects.find(only),) if job is not None]
            else:
                self.pods.sync_nodes()
                jobs, self._owned = self._objects.list("jobs", ""), {}
                for pod in self._objects.list("pods", ""):
                    self._owned.setdefault(_owner(pod), []).append(pod)
            for job in jobs:
                for pod in self.pods_of(job):
                    self._sync_pod(job, pod)
                self._sync_job(job)

    def pods_of(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The pods that a job owns, oldest first."""
        owned = self._owned.get(str(job["metadata"]["uid"]), ())
        return [pod for pod in owned if self._objects.find(key_of(pod)) is not None]

    def clear(self) -> None:
        """Forget all jobs."""
        self.pods.clear()
        for known in (self._counted, self._last_failure, self._started, self._refusals, self._owned):
            known.clear()

    def _sync_pod(self, job: Mapping[str, Any], pod: dict[str, Any]) -> None:
        counted = str(pod["metadata"]["uid"]) in self._counted.get(str(job["metadata"]["uid"]), set())
        over = bool(job["metadata"].get("deletionTimestamp")) or _is_over(job)
        self.pods.sync(pod, keep=not counted and not over)

    def _sync_job(self, job: dict[str, Any]) -> None:
        pods = self.pods_of(job)
        if job["metadata"].get("deletionTimestamp"):
            for pod in pods:
                if not pod["metadata"].get("deletionTimestamp"):
                    self.pods.delete(pod)
                self._sync_pod(job, pod)
            if not self.pods_of(job):
                self._objects.remove(key_of(job))
            return
        if _is_over(job):
            self._status(job)
            return
        self._count_ended(job, pods)
        if not _is_over(job):
            self._go_on(job)
        for pod in self.pods_of(job):
            self._sync_pod(job, pod)
        self._status(job)

    def _go_on(self, job: dict[str, Any]) -> None:
        uid, spec, status = str(job["metadata"]["uid"]), job["spec"], job["status"]
        live = [pod for pod in self.pods_of(job) if str(pod["metadata"]["uid"]) not in self._counted.get(uid, set())]
        if spec.get("suspend"):
            for pod in live:
                self._counted.setdefault(uid, set()).add(str(pod["metadata"]["uid"]))
                self.pods.delete(pod)
            if not any(row["type"] == "Suspended" and row["status"] == "True" for row in status.get("conditions", ())):
                set_condition(self._objects, job, "Suspended", "True", "JobSuspended", "Job suspended")
            status.pop("startTime", None)
            self._started.pop(uid, None)
            return
        now = self._objects.clock.now()
        if "startTime" not in status:
            status["startTime"] = self._objects.now()
        if now - self._started.setdefault(uid, now) >= spec.get("activeDeadlineSeconds", float("inf")):
            status["failed"] = status.get("failed", 0) + len(live)
            self._finish(job, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
        elif not live and self._may_start(uid, int(status.get("failed", 0)), now):
            self._make_pod(job)

    def _may_start(self, uid: str, failed: int, now: float) -> bool:
        if not self.pauses or uid not in self._last_failure:
            return True
        return now - self._last_failure[uid] >= min(_FIRST_PAUSE_S * 2 ** max(0, failed - 1), _LONGEST_PAUSE_S)

    def _make_pod(self, job: dict[str, Any]) -> None:
        metadata, template = job["metadata"], job["spec"]["template"]
        name, namespace = str(metadata["name"]), str(metadata["namespace"])
        refusal = self._refusal(namespace, template["spec"])
        if refusal is not None and self._refusals.get(str(metadata["uid"])) == refusal:
            return
        if refusal is not None:
            self._refusals[str(metadata["uid"])] = refusal
            pod = f"{name}-{uuid.uuid4().hex[:5]}" if "quota" in refusal else f"{name}-"
            self._objects.event(job, "FailedCreate", f'Error creating: pods "{pod}" is forbidden: {refusal}')
            return
        metadata_of_pod: Mapping[str, Any] = template.get("metadata") or {}
        pod = self._objects.create(
            "pods",
            namespace,
            {
                "metadata": {
                    "name": f"{name}-{uuid.uuid4().hex[:5]}",
                    "annotations": dict(metadata_of_pod.get("annotations") or {}),
                    "labels": {**(metadata_of_pod.get("labels") or {}), JOB_NAME: name, _CONTROLLER: metadata["uid"]},
                    "ownerReferences": [
                        {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": metadata["uid"]}
                    ],
                },
                "spec": copy.deepcopy(template["spec"]),
                "status": {"phase": "Pending"},
            },
        )
        self._owned.setdefault(str(metadata["uid"]), []).append(pod)
        self._objects.event(job, "SuccessfulCreate", f"Created pod: {pod['metadata']['name']}", "Normal")

    def _refusal(self, namespace: str, pod: Mapping[str, Any]) -> str | None:
        """The reason why the server makes no pod; None if it does."""
        account = pod.get("serviceAccountName", "default")
        if account != "default" and self._objects.find(("serviceaccounts", namespace, account)) is None:
            return f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        wanted = gpus_of({"spec": pod})
        for quota in self._objects.list("resourcequotas", namespace):
            hard = quota["spec"]["hard"].get(f"requests.{_GPU}")
            used = sum(
                gpus_of(row) for row in self._objects.list("pods", namespace) if row["status"].get("phase") != "Failed"
            )
            if hard is not None and used + wanted > int(hard):
                name, what = quota["metadata"]["name"], f"requests.{_GPU}"
                return (
                    f"exceeded quota: {name}, requested: {what}={wanted}, used: {what}={used}, limited: {what}={hard}"
                )
        return None

    def _count_ended(self, job: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        uid, status = str(job["metadata"]["uid"]), job["status"]
        counted = self._counted.setdefault(uid, set())
        for pod in pods:
            run, pod_uid = self.pods.run_of(pod), str(pod["metadata"]["uid"])
            over = pod["metadata"].get("deletionTimestamp") if run is None else run.is_over
            phase = pod["status"].get("phase")
            if not over or pod_uid in counted or (phase == "Pending" and not pod["metadata"].get("deletionTimestamp")):
                continue
            counted.add(pod_uid)
            action, text = self._verdict(job, pod)
            if phase == "Succeeded":
                status["succeeded"] = 1
                text = "Reached expected number of succeeded pods"
                self._finish(job, "Complete", "CompletionsReached", text)
                return
            if action == "Ignore":
                continue
            status["failed"] = status.get("failed", 0) + 1
            self._last_failure[uid] = self._objects.clock.now()
            if action == "FailJob":
                self._finish(job, "Failed", "PodFailurePolicy", text)
                return
            if status["failed"] > job["spec"]["backoffLimit"]:
                text = "Job has reached the specified backoff limit"
                self._finish(job, "Failed", "BackoffLimitExceeded", text)
                return

    def _verdict(self, job: Mapping[str, Any], pod: Mapping[str, Any]) -> tuple[str, str]:
        """The action of the policy after the end of a pod, and the reason of a Job that it fails."""
        statuses = pod["status"].get("containerStatuses") or ()
        codes = [row["state"]["terminated"]["exitCode"] for row in statuses if "terminated" in row["state"]]
        code = codes[0] if codes else None
        met = {(row["type"], row["status"]) for row in pod["status"].get("conditions") or ()}
        for number, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules", ())):
            exits = rule.get("onExitCodes")
            by_code = exits is not None and bool(code) and (code in exits["values"]) == (exits["operator"] == "In")
            wanted = [(row["type"], row.get("status", "True")) for row in rule.get("onPodConditions") or ()]
            if by_code or met & set(wanted):
                where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                text = (
                    f"Container {statuses[0]['name'] if statuses else ''} for pod {where} failed with exit code {code}"
                )
                return rule["action"], f"{text} matching {rule['action']} rule at index {number}"
        return "Count", ""

    def _finish(self, job: dict[str, Any], kind: str, reason: str, message: str) -> None:
        first = "SuccessCriteriaMet" if kind == "Complete" else "FailureTarget"
        for condition in (first, kind):
            set_condition(self._objects, job, condition, "True", reason, message)
        if kind == "Complete":
            job["status"]["completionTime"] = self._objects.now()
        for pod in self.pods_of(job):
            run = self.pods.run_of(pod)
            if run is None or not run.is_over:
                self.pods.delete(pod)

    def _status(self, job: dict[str, Any]) -> None:
        """The numbers of a Job's status; those that are zero are left out, as the server does."""
        pods = self.pods_of(job)
        live = [pod for pod in pods if pod["status"].get("phase") in {"Pending", "Running"}]
        ending = sum(1 for pod in live if pod["metadata"].get("deletionTimestamp"))
        ready = sum(1 for pod in live if pod["status"]["phase"] == "Running")
        numbers = {"active": len(live) - ending, "ready": ready, "terminating": ending}
        status: dict[str, Any] = {name: value for name, value in job["status"].items() if name not in numbers}
        status |= {name: value for name, value in numbers.items() if value or name != "active"}
        if status != job["status"]:
            job["status"] = status
            self._objects.touch(key_of(job))


def _owner(pod: Mapping[str, Any]) -> str:
    return next((str(owner["uid"]) for owner in pod["metadata"].get("ownerReferences") or ()), "")


def _is_over(job: Mapping[str, Any]) -> bool:
    return any(row["type"] in {"Complete", "Failed"} for row in job["status"].get("conditions") or ())
