from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.executors.clouds import CloudStage, CloudSuite, check_requests
from tests.infra.executors.suite import LONG

from skerry.infra.executors import Ending, KubernetesExecutor
from skerry.infra.targets.kubernetes import parse_observed_settings
from skerry.runtime.errors import Invalid
from skerry.testing.kubernetes.server import KubernetesCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.batchplace import Place

    from skerry.infra.executors import ReplicaHandle
    from skerry.testing.kubernetes import KubernetesSandbox

IMAGE = f"ghcr.io/acme/skerry@sha256:{'1' * 64}"


class KubernetesStage(CloudStage):
    """A run with its store in S3."""

    CREATE = "kubernetes:apply jobs"
    RECLAIMED = "Job has reached the specified backoff limit"

    @property
    def driver(self) -> Any:
        return self.sandbox.jobs

    def __init__(self, sandbox: KubernetesSandbox, place: Place) -> None:
        super().__init__("s3://acme")
        self.sandbox = sandbox
        self._store = place.sandbox.environment

    def executor(self, **options: Any) -> KubernetesExecutor:
        own = {"image": IMAGE, "namespace": "train", "secret": "store-keys"}
        return KubernetesExecutor(**self.with_defaults({**own, **options}))

    def environment(self) -> Mapping[str, str]:
        return {**self._store, **self.sandbox.environment, "AWS_MAX_ATTEMPTS": "1"}

    def live(self) -> int:
        with self.sandbox.objects.lock:
            self.sandbox.controller.sync()
            rows = self.sandbox.objects.list("jobs", "")
        return sum(not parse_observed_settings.over(row) for row in rows)

    def variables_of(self, handle: ReplicaHandle) -> Mapping[str, str]:
        container = self.sandbox.controller.pods.host_of(self.sandbox.jobs.pod(handle.job)).container_for(1)
        return container.environment


@pytest.fixture
def stage(cluster: KubernetesSandbox, aws: Place) -> KubernetesStage:
    return KubernetesStage(cluster, aws)


class TestKubernetes(CloudSuite):
    pass


def test_replica_that_fails_is_not_started_again_by_the_cluster(stage: KubernetesStage) -> None:
    with stage.executor() as executor:
        handles = stage.launch(executor, 1)
        stage.finish(handles[0], 10)
        assert executor.collect(handles, LONG) == [Ending(exit_code=10)]
        assert len(stage.sandbox.objects.list("pods", "")) == 1


def test_job_with_a_stopping_pod_is_not_over(stage: KubernetesStage) -> None:
    with stage.executor() as executor:
        handles = stage.launch(executor, 1)
        stage.driver.start(handles[0].job)
        row = stage.sandbox.objects.get("jobs", "train", handles[0].job)
        row["spec"]["suspend"] = True
        row["metadata"]["annotations"]["skerry.dev/stopped"] = "true"
        row["status"]["terminating"] = 1
        assert not parse_observed_settings.pods_over(row)
        executor.cancel(handles[0])
        assert executor.collect(handles, LONG) == [Ending(signal=15)]


def test_tolerations_may_have_fields_that_a_spec_has_not(stage: KubernetesStage) -> None:
    toleration = {"key": "spot", "effect": "NoExecute", "tolerationSeconds": 30}
    with stage.executor(tolerations=(toleration,)) as executor:
        (handle,) = stage.launch(executor, 1)
        pod = stage.sandbox.objects.get("jobs", "train", handle.job)["spec"]["template"]["spec"]
        assert {**toleration, "operator": "Exists"} in pod["tolerations"]


def test_options_that_a_spec_could_not_have_are_refused(stage: KubernetesStage) -> None:
    with pytest.raises(Invalid, match=r"KubernetesExecutor cannot take this: cpu: .*; grace_s: must be 30s to 1h"):
        stage.executor(cpu="two", grace_s=5)
    with pytest.raises(Invalid, match="cannot take this: memory_mib: must be at least 256MiB"):
        stage.executor(memory_mib=100)


def test_kubernetes_requests_match_the_golden_file(stage: KubernetesStage) -> None:
    options = {"gpus": 2, "node_selector": {"gpu": "h100"}, "tolerations": ({"key": "spot"},), "queue": "research"}
    with stage.executor(run="s3://acme/golden/tiny", **options) as executor:
        executor.launch_replicas(1, "python", ["train.py"])
        calls = [call for call in stage.sandbox.calls if isinstance(call, KubernetesCall) and call.name == stage.CREATE]
        check_requests("kubernetes", [call.body for call in calls])
