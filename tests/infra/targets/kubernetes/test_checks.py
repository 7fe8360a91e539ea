from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.infra.targets.kubernetes.kit import EXAMPLE, context_of, graph_of

from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.targets.kubernetes import checks, unknown_costs
from skerry.infra.targets.kubernetes.target import open_target
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.infra.provision.target_and_store_interfaces import Check
    from skerry.infra.targets.kubernetes.cluster import Cluster
    from skerry.testing.kubernetes import KubernetesSandbox

ROLE = Path(EXAMPLE).with_name("kubernetes-operator.yaml")


def checks_by_name(cluster: Cluster, folder: Path, target: str = "") -> dict[str, Check]:
    context = context_of(folder, target)
    results = checks.checks(cluster, context.run_uri, context.spec.replicas, tuple(graph_of(context)))
    return {check.name: check for check in results}


def rules() -> list[tuple[str, str, str]]:
    """The rights of the example's Role, as group, resource and verb."""
    role = next(each for each in yaml.safe_load_all(ROLE.read_text()) if each["kind"] == "Role")
    return [
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def test_usable_cluster_passes_and_nothing_is_created(
    cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path
) -> None:
    assert {name: check.ok for name, check in checks_by_name(cluster, tmp_path).items()} == {
        "Kubernetes": True,
        "rights in train": True,
        "jobs of cluster": True,
    }
    assert sandbox.inventory() == {}
    assert sandbox.calls.writes == []


@pytest.mark.parametrize(("version", "ok"), [(("1", "25"), False), (("1", "30+"), None), (("1", "33"), True)])
def test_version_without_a_pod_failure_policy_is_refused(
    cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path, version: tuple[str, str], ok: Any
) -> None:
    sandbox.application.version = version
    try:
        results = checks_by_name(cluster, tmp_path)
    finally:
        sandbox.application.version = ("1", "36")
    assert results["Kubernetes"].ok is ok
    assert len(results) == (1 if ok is False else 3)


def test_missing_rights_are_listed(cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path) -> None:
    sandbox.restrict([("list", "jobs"), ("get", "jobs")])
    results = checks_by_name(cluster, tmp_path)
    assert results["rights in train"].ok is False
    assert results["rights in train"].text.startswith(
        "lacking: create jobs, patch jobs, delete jobs, get serviceaccounts"
    )
    assert "kubernetes-operator.yaml" in results["rights in train"].advice
    assert results["jobs of cluster"].ok is False


def test_rights_of_the_example_are_those_that_are_checked() -> None:
    assert sorted(rules()) == sorted({*checks.RIGHTS, ("", "namespaces", "get")})


def test_missing_namespace_and_refused_job_show_the_words_of_the_server(
    cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.objects.remove(("namespaces", "", "train"))
    check = checks_by_name(cluster, tmp_path)["jobs of cluster"]
    assert (check.ok, check.advice) == (False, "create it: kubectl create namespace train")

    def refused(*_: object, **__: object) -> None:
        raise Invalid("Kubernetes refuses it: spec.x")

    monkeypatch.setattr(type(cluster), "apply", refused)
    assert checks_by_name(cluster, tmp_path)["jobs of cluster"].text == "Kubernetes refuses it: spec.x"


def test_plan_is_bound_to_the_namespaces_of_the_run(
    sandbox: KubernetesSandbox, cluster: Cluster, tmp_path: Path
) -> None:
    context = context_of(tmp_path)
    target = open_target(OperatorAccess(cluster.clock, sandbox.environment, context.spec))
    uid = sandbox.objects.get("namespaces", "", "train")["metadata"]["uid"]
    assert target.identity() == {"kubernetes/train": uid}


def test_price_is_unknown_and_the_time_limit_is_the_shorter_one(tmp_path: Path) -> None:
    context = context_of(tmp_path, "gpus: 1, max_runtime: 6h", more="limits: {max_hours: 24}\n")
    (rate,) = unknown_costs.rates(context.spec.limits, context.spec.replicas)
    assert (rate.per_hour, rate.cap_hours, rate.what) == (None, 6.0, "1 CPU, 1 GPU in the namespace train")
    (rate,) = unknown_costs.rates(context_of(tmp_path).spec.limits, context.spec.replicas[:1])
    assert rate.cap_hours == 6.0
