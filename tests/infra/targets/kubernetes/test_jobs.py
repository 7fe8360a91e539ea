from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.infra.handlers import HandlerSuite
from tests.infra.kit import Listener, wanted
from tests.infra.targets.kubernetes.kit import NAMESPACE, Scene, context_of
from tests.support.clocks import FakeClock

from skerry.infra.clouds.handler_helpers import Absent, NotYetVisible
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.plan import differences
from skerry.infra.targets.kubernetes import manifests
from skerry.infra.targets.kubernetes.cluster import Cluster, core_path, jobs_path
from skerry.infra.targets.kubernetes.jobs import Jobs, ServiceAccounts, stop
from skerry.infra.targets.kubernetes.resource_types import ServiceAccount
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.errors import Conflict, Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.handler import Desired, Observed
    from skerry.testing.faults import How
    from skerry.testing.kubernetes import KubernetesSandbox


class HeardCluster(Cluster):
    """A cluster whose calls a listener hears."""

    listener: Listener

    def send(self, method: str, path: str, *more: Any) -> Any:
        self.listener.heard("before", f"{method} {path}")
        response = super().send(method, path, *more)
        self.listener.heard("after", f"{method} {path}")
        return response


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def cloud(sandbox: KubernetesSandbox, listener: Listener) -> HeardCluster:
    cluster = HeardCluster(FakeClock(), sandbox.environment)
    cluster.listener = listener
    return cluster


class TestServiceAccounts(HandlerSuite[Cluster]):
    RUN = "s3://acme/runs/tiny"
    OTHER = "s3://other/runs/tiny"
    REGIONS: ClassVar = (NAMESPACE,)
    STRANGER = "s3://other/runs/tiny"
    EXTRA: ClassVar = {"team": "research, and more"}
    HANDLER = ServiceAccounts
    RESOURCE = ServiceAccount(key="a-0", name="skerry-tiny-a-0", region=NAMESPACE)


def read(cluster: Cluster, desired: Desired) -> Observed:
    (seen,) = Jobs(cluster).read([desired])
    assert seen is not None
    return seen


def take_calls(sandbox: KubernetesSandbox) -> list[str]:
    names = [call.operation for call in sandbox.calls]
    sandbox.calls.clear()
    return names


def test_job_is_read_with_its_condition(cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene) -> None:
    done, failed = scene.jobs
    assert (read(cluster, done).condition, read(cluster, done).owner) == (Condition.READY, done.run)
    sandbox.jobs.start(done.name)
    assert read(cluster, done).detail == "running"
    sandbox.jobs.finish(done.name, 0)
    sandbox.jobs.finish(failed.name, 20)
    assert read(cluster, done).condition is Condition.DONE
    lost = read(cluster, failed)
    assert lost.condition is Condition.LOST
    assert "failed with exit code 20" in lost.detail


def test_jobs_are_created_by_one_call_and_read_by_one(
    cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path
) -> None:
    scene = Scene(cluster, context_of(tmp_path, count=3))
    assert take_calls(sandbox) == ["apply serviceaccounts"] * 3 + ["apply jobs"] * 3
    assert len(Jobs(cluster).read(scene.jobs)) == 3
    assert take_calls(sandbox) == ["list jobs"]


def test_listing_of_many_jobs_is_read_in_pages(
    cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.infra.targets.kubernetes.cluster._PAGE", "1")
    take_calls(sandbox)
    assert None not in Jobs(cluster).read(scene.jobs)
    assert take_calls(sandbox) == ["list jobs"] * 2


def test_change_from_outside_is_seen_and_taken_back(cluster: Cluster, scene: Scene) -> None:
    desired = scene.jobs[0]
    cluster.patch(jobs_path(NAMESPACE, desired.name), {"spec": {"backoffLimit": 9, "activeDeadlineSeconds": 60}})
    seen = read(cluster, desired)
    assert (seen.settings["attempts"], seen.settings["deadline_s"]) == (10, 60)
    # What skerry itself has patched is no other manager's.
    assert seen.changed_by == {}
    Jobs(cluster).update(desired, {"attempts", "deadline_s"})
    assert (read(cluster, desired).settings["attempts"], read(cluster, desired).settings["deadline_s"]) == (4, None)


def test_other_manager_of_a_changed_field_is_named(cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene) -> None:
    desired = scene.jobs[0]
    assert read(cluster, desired).changed_by == {}
    with sandbox.objects.lock:
        sandbox.objects.patch(("jobs", NAMESPACE, desired.name), {"spec": {"backoffLimit": 9}}, "kubectl-edit")
    seen = read(cluster, desired)
    assert seen.changed_by == {"attempts": "kubectl-edit (.spec.backoffLimit)"}
    (difference,) = differences(desired.resource, desired.settings, scene.records[0].settings, seen)
    assert (difference.setting, difference.drift, difference.by) == ("attempts", True, seen.changed_by["attempts"])
    # The server names the same manager and field.
    path, body = jobs_path(NAMESPACE, desired.name), ready(manifests.job(desired))
    with pytest.raises(Conflict, match=r'conflict with "kubectl-edit" using batch/v1: \.spec\.backoffLimit'):
        cluster.apply(path, body, manifests.manager(desired.run))
    Jobs(cluster).update(desired, {"attempts"})
    assert read(cluster, desired).changed_by == {}


def test_setting_of_a_pod_cannot_change(cluster: Cluster, scene: Scene) -> None:
    with pytest.raises(Invalid, match=r"a job cannot change: kubernetes_job.cluster-0: image"):
        Jobs(cluster).update(scene.jobs[0], {"image"})


def test_creation_over_a_job_with_other_settings_ends_it_first(
    cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene
) -> None:
    before = scene.jobs[0]
    sandbox.jobs.start(before.name)
    other = replace(before, settings={**before.settings, "cpu": "2"})
    outputs = Jobs(cluster).create(other)
    assert outputs != scene.records[0].outputs
    assert len(sandbox.inventory()["job"]) == 2
    assert Jobs(cluster).create(other) == outputs


def test_lost_job_of_the_same_name_is_replaced(cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene) -> None:
    sandbox.jobs.finish(scene.names[0], 20)
    outputs = Jobs(cluster).create(scene.jobs[0])
    assert outputs != scene.records[0].outputs
    assert read(cluster, scene.jobs[0]).condition is Condition.READY


def test_job_of_another_run_is_not_changed(cluster: Cluster, scene: Scene) -> None:
    with pytest.raises(Conflict, match="belongs to the run s3://acme/runs/tiny: it is not changed; delete it"):
        Jobs(cluster).create(replace(scene.jobs[0], run="s3://other/runs/tiny"))


@pytest.mark.parametrize("how", ["timeout", "lost_reply"])
def test_job_of_a_call_without_an_answer_is_adopted(
    cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene, how: How
) -> None:
    Jobs(cluster).delete(scene.records[0])
    sandbox.fail(how=how, on="kubernetes:apply jobs")
    if how == "timeout":
        with pytest.raises(Retryable, match="no answer from Kubernetes"):
            Jobs(cluster).create(scene.jobs[0])
    outputs = Jobs(cluster).create(scene.jobs[0])
    assert read(cluster, scene.jobs[0]).outputs == outputs
    assert len(sandbox.inventory()["job"]) == 2


def test_busy_server_is_asked_again(cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene) -> None:
    sandbox.fail(how="throttle", on="kubernetes:list jobs", times=2)
    assert None not in Jobs(cluster).read(scene.jobs)
    sandbox.fail(how="throttle", on="kubernetes:list jobs", times=None)
    with pytest.raises(Retryable, match="Kubernetes is busy: the server has received too many requests"):
        Jobs(cluster).read(scene.jobs)


def test_creations_beyond_the_limit_of_a_server_wait_until_it_asks(
    cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(cluster, context_of(tmp_path, count=24))
    assert isinstance(cluster.clock, FakeClock)
    monkeypatch.setattr(sandbox.objects, "clock", cluster.clock)
    sandbox.limit(4)
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(Jobs(cluster).create, scene.jobs))
    assert outputs == [record.outputs for record in scene.records]
    refused = [call.status for call in sandbox.calls].count(429)
    assert cluster.clock.pauses == [1.0] * refused != []


def test_refused_job_shows_the_words_of_the_server(cluster: Cluster, scene: Scene) -> None:
    desired = scene.jobs[0]
    wrong = replace(desired, generation=1, settings={**desired.settings, "cpu": "1 GB"})
    with pytest.raises(Invalid, match=r"Kubernetes refuses it: Job in version .v1. cannot be handled as a Job: quant"):
        Jobs(cluster).create(wrong)


def test_deleted_job_and_its_pods_are_gone(cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene) -> None:
    sandbox.jobs.start(scene.names[0])
    for _ in range(2):
        Jobs(cluster).delete(scene.records[0])
    assert sandbox.inventory()["job"] == (scene.names[1],)
    assert [pod["metadata"]["labels"]["skerry.dev/slot"] for pod in sandbox.objects.list("pods", "")] == ["cluster-1"]
    # Another job of the name is not deleted by an old record.
    Jobs(cluster).create(scene.jobs[0])
    Jobs(cluster).delete(scene.records[0])
    assert len(sandbox.inventory()["job"]) == 2


def test_job_on_a_lost_node_is_reported_when_it_does_not_end(
    cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene
) -> None:
    sandbox.jobs.start(scene.names[0])
    sandbox.jobs.lose_node(scene.names[0])
    with pytest.raises(NotYetVisible, match=r"is deleted \(a pod of a lost node ends when its Node is deleted\)"):
        Jobs(cluster).delete(scene.records[0])
    assert isinstance(cluster.clock, FakeClock)
    assert sum(cluster.clock.pauses) == pytest.approx(180)


def test_stopped_job_is_kept_and_starts_no_pod(cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene) -> None:
    sandbox.jobs.start(scene.names[0])
    for _ in range(2):
        stop(cluster, NAMESPACE, scene.names[0])
    assert read(cluster, scene.jobs[0]).condition is Condition.LOST
    assert len(sandbox.objects.list("pods", "")) == 1
    with pytest.raises(Absent):
        stop(cluster, NAMESPACE, "nothing")


def test_jobs_are_listed_by_their_run_or_their_names(cluster: Cluster, scene: Scene) -> None:
    run = scene.context.run_uri
    lost = {"metadata": {"annotations": None, "labels": None}}
    cluster.patch(jobs_path(NAMESPACE, scene.names[1]), lost)
    records = list(Jobs(cluster).list_owned(run, [NAMESPACE]))
    assert [(each.address, each.name, each.generation) for each in records] == [
        ("kubernetes_job.cluster-0", scene.names[0], 0),
        ("kubernetes_job.cluster-1", scene.names[1], 0),
    ]
    assert list(Jobs(cluster).list_owned("s3://other/run", [NAMESPACE])) == []
    # A listing by label lacks it, so it is read by its name.
    known = replace(scene.jobs[1], outputs=scene.records[1].outputs)
    assert [seen is None for seen in Jobs(cluster).read([scene.jobs[1], known])] == [True, False]


def test_account_that_another_changed_is_taken_back(cluster: Cluster, scene: Scene) -> None:
    path = core_path(NAMESPACE, "serviceaccounts", scene.names[0])
    cluster.patch(path, {"automountServiceAccountToken": True})
    account = ServiceAccount(key="cluster-0", name=scene.names[0], region=NAMESPACE)
    ServiceAccounts(cluster).create(wanted(account, scene.context.run_uri))
    assert cluster.get(path)["automountServiceAccountToken"] is False


def test_unusable_kubeconfig_is_reported_with_the_next_step(
    cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path
) -> None:
    with pytest.raises(Unauthorized, match=r"no cluster to use: log in, so that kubectl works, or set KUBECONFIG"):
        Cluster(cluster.clock, {"KUBECONFIG": str(tmp_path / "none")}).get("/version")
    with pytest.raises(Unauthorized, match="Context 'other' not found"):
        Cluster(cluster.clock, sandbox.environment, "other").get("/version")
    old = tmp_path / "config"
    old.write_text(sandbox.kubeconfig.read_text().replace('"token": "', '"token": "old'))
    with pytest.raises(Unauthorized, match="Kubernetes does not know these credentials"):
        Cluster(cluster.clock, {"KUBECONFIG": str(old)}).get("/version")
    old.write_text(sandbox.kubeconfig.read_text().replace(sandbox.endpoint, "http://127.0.0.1:9"))
    with pytest.raises(Retryable, match=r"no answer from Kubernetes at http://127\.0\.0\.1:9"):
        Cluster(cluster.clock, {"KUBECONFIG": str(old)}).get("/version")
