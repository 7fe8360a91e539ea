"""Runs a Kubernetes cluster in memory behind a real endpoint on this machine: `kubectl` and skerry use it alike.

It plays what skerry uses: Jobs and their controller, pods, service accounts, Secrets, events, one namespace, quotas.
"""

from __future__ import annotations

import functools
import json
import tempfile
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.local.docker_engine import Engine
from skerry.runtime.clock import SystemClock
from skerry.testing.cloud_sandbox import CloudSandbox
from skerry.testing.docker_containers import JobContainers
from skerry.testing.http_server import Server
from skerry.testing.job_runner import Jobs
from skerry.testing.kubernetes.controls import JobControls
from skerry.testing.kubernetes.job_controller import JobController
from skerry.testing.kubernetes.objects import Objects
from skerry.testing.kubernetes.pod_container_setup import PodHost, PodLogs
from skerry.testing.kubernetes.pod_volumes import PodVolumes
from skerry.testing.kubernetes.scheduler_and_nodes import PodController
from skerry.testing.kubernetes.server import CallLimit, KubernetesApplication
from skerry.testing.token_issuer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from skerry.runtime.clock import Clock

NAMESPACE: Final = "train"
SECRET: Final = "store-keys"  # noqa: S105  the name of one
ISSUER: Final = "https://oidc.sandbox.example.com/id/0123"
_NODE: Final = "node-1"
_GPUS: Final = 8
# How often the controllers look at containers, which end by themselves.
_LOOK_S: Final = 0.2


class KubernetesSandbox(CloudSandbox):
    """A cluster for tests. A context manager; everything created in it is gone afterwards.

    containers: pods run in Docker; otherwise a test drives them through `jobs`. network: of the containers. keys: the
    entries of the Secret `store-keys` in the namespace `train`, which exist like a node with 8 GPUs. clock: of time
    limits and pauses; a test may replace `objects.clock`.
    """

    def __init__(
        self,
        *,
        containers: bool = False,
        network: str = "bridge",
        stop_grace_s: float = 30.0,
        keys: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start it. Raises Retryable if containers need an engine and none answers."""
        engine = Engine() if containers else None
        super().__init__(registry=None, settling=0, any_image=True)
        self._mark = uuid.uuid4().hex[:8]
        self.keys: Final[dict[str, str]] = dict(keys or {})
        self.objects: Final = Objects(clock or SystemClock())
        self.tokens: Final = TokenIssuer(ISSUER)
        """Signs the tokens of service accounts; a cloud's sandbox verifies them with its `keys`, if it has them."""
        self._folder = tempfile.TemporaryDirectory(prefix="skerry-kubernetes-")
        self._logs = PodLogs()
        self.job_runs: Final = Jobs(
            None if engine is None else JobContainers(engine, mark=self._mark, network=network, grace_s=stop_grace_s)
        )
        self.controller: Final = JobController(self.objects, PodController(self.objects, self.job_runs, self._host))
        self.jobs: Final = JobControls(self.objects, self.controller, self.job_runs)
        self._token = uuid.uuid4().hex
        self.application: Final = KubernetesApplication(
            self.objects, self.controller, self._logs, self.calls, self._faults, self._token, self.tokens.url
        )
        self.violations: Final = self.application.violations
        """Requests for paths that this sandbox does not have."""
        self._server = Server(self.application, all_addresses=False)
        self.endpoint: Final = f"http://127.0.0.1:{self._server.port}"
        self._write_kubeconfig()
        self.environment: Final[Mapping[str, str]] = {"KUBECONFIG": str(self.kubeconfig)}
        """Variables that make skerry and kubectl use this cluster as its operator."""
        self._populate()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True, name="skerry-kubernetes")
        self._watch.start()
        self._server.start()

    @property
    def kubeconfig(self) -> Path:
        """The file that names this cluster, its namespace and its operator's token."""
        return Path(self._folder.name) / "config"

    def restrict(self, rights: Iterable[tuple[str, str]] | None) -> None:
        """Limit the operator to these verbs on resources of `train`, ("get", "pods/log"); None restores all."""
        self.application.rights = None if rights is None else frozenset((NAMESPACE, *right) for right in rights)

    def limit(self, calls_per_s: float | None) -> None:
        """Answer 429 to calls beyond these of a second, with a time after which to try again; None is no limit."""
        self.application.limit = None if calls_per_s is None else CallLimit(self.objects, calls_per_s)

    def add(self, resource: str, body: Mapping[str, Any], namespace: str = NAMESPACE) -> dict[str, Any]:
        """Create an object as another person would: a Secret, a quota, a node."""
        with self.objects.lock:
            return self.objects.create(resource, namespace, body)

    def add_claim(self, name: str, folder: Path, namespace: str = NAMESPACE) -> None:
        """Create a volume that is a folder of this machine, and a claim of it that pods may mount."""
        volume = {"metadata": {"name": f"{namespace}-{name}"}, "spec": {"hostPath": {"path": str(folder)}}}
        modes = {"accessModes": ["ReadWriteMany"], "volumeName": volume["metadata"]["name"]}
        self.add("persistentvolumes", volume, "")
        self.add("persistentvolumeclaims", {"metadata": {"name": name}, "spec": modes}, namespace)

    def inventory(self) -> dict[str, tuple[str, ...]]:
        """Return the names of everything that a run made, by kind; empty for an empty cluster.

        Jobs that are over are listed, too: they stay until they are deleted.
        """
        self.controller.sync()
        with self.objects.lock:
            names = {
                "job": [row["metadata"]["name"] for row in self.objects.list("jobs", "")],
                "service account": [row["metadata"]["name"] for row in self.objects.list("serviceaccounts", "")],
            }
        return {kind: tuple(sorted(existing)) for kind, existing in names.items() if existing}

    def reset(self) -> None:
        """Empty the cluster, with the same token. Pods end; faults, rights and calls are cleared."""
        self.job_runs.close()
        self.heal()
        self.restrict(None)
        self.limit(None)
        with self.objects.lock:
            self.objects.clear()
            self.controller.clear()
            self._logs.clear()
            self.violations.clear()
            self._populate()
        self.calls.clear()

    def _stop(self) -> None:
        self._closed.set()
        self._watch.join()
        self.job_runs.close()
        self._server.close()
        self._folder.cleanup()

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if self.job_runs.containers is not None:
                self.controller.sync()

    def _host(self, pod: Mapping[str, Any]) -> PodHost:
        volumes = PodVolumes(pod, self.objects, self.tokens, Path(self._folder.name))
        return PodHost(pod, self.objects, self._logs, self._mark, self.variables, volumes)

    def _populate(self) -> None:
        create = functools.partial(self.objects.create)
        for name in (NAMESPACE, "kube-system"):
            create("namespaces", "", {"metadata": {"name": name}})
        capacity = {"cpu": "64", "memory": "256Gi", "nvidia.com/gpu": str(_GPUS)}
        create("nodes", "", {"metadata": {"name": _NODE, "labels": {}}, "status": {"allocatable": capacity}})
        create("secrets", NAMESPACE, {"metadata": {"name": SECRET}, "stringData": self.keys})

    def _write_kubeconfig(self) -> None:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "sandbox", "cluster": {"server": self.endpoint}}],
            "users": [{"name": "operator", "user": {"token": self._token}}],
            "contexts": [
                {"name": "sandbox", "context": {"cluster": "sandbox", "user": "operator", "namespace": NAMESPACE}}
            ],
            "current-context": "sandbox",
        }
        self.kubeconfig.write_text(json.dumps(config))
