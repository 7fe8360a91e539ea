"""Access of replicas to the store by the tokens of their service accounts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.kit import document_of, of_kind, plain, wanted
from tests.infra.targets.kubernetes.kit import GCS_STORE, check_golden, context_of, graph_of
from tests.infra.targets.runs import KubernetesRun

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.session import Account, Aws
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.provision.graph import Graph
from skerry.infra.targets.kubernetes import checks, manifests
from skerry.infra.targets.kubernetes.resource_graph import build_resources
from skerry.infra.targets.kubernetes.resource_types import Job
from skerry.infra.targets.kubernetes.store_identity import AwsTrust, GkeTrust

if TYPE_CHECKING:
    from pathlib import Path

    from tests.infra.targets.runs import ClusterAndAccount

    from skerry.infra.targets.kubernetes.cluster import Cluster

ISSUER = "https://oidc.eks.us-east-1.amazonaws.com/id/0123"
AWS = AwsTrust(account=Account(number="123456789012", partition="aws"), issuer=ISSUER)
GKE = GkeTrust(number="415104041262", project="acme-diloco")


def keyless(folder: Path, store: str = "s3://acme/runs") -> Graph:
    context = context_of(folder, "secret: null", count=1, store=store)
    if store.startswith("s3://"):
        return graph_of(context, lambda run, group, account: AWS.identity(run, account, run.inputs(group)))
    trusted = build_resources(context, context.spec.replicas, {}, lambda run, _, account: GKE.identity(run, account))
    return Graph([GCS_STORE, *trusted])


def test_role_trusts_one_service_account_of_the_cluster(tmp_path: Path) -> None:
    graph = keyless(tmp_path)
    (role,), (job,) = of_kind(graph, Role), of_kind(graph, Job)
    check_golden("role", document_of(role))
    (trust,) = role.trust
    host = ISSUER.removeprefix("https://")
    subject = f"system:serviceaccount:train:{job.service_account}"
    assert trust.conditions == {"StringEquals": {f"{host}:sub": (subject,), f"{host}:aud": ("sts.amazonaws.com",)}}
    assert trust.principal == {"Federated": (f"arn:aws:iam::123456789012:oidc-provider/{host}",)}
    assert role.address in job.needs()


def test_pod_has_a_projected_token_only_without_a_secret(tmp_path: Path) -> None:
    graph = keyless(tmp_path)
    (job,) = of_kind(graph, Job)
    body: Any = plain(json.loads(json.dumps(manifests.job(wanted(job, "s3://acme/runs/tiny")), default=str)))
    pod = body["spec"]["template"]["spec"]
    (token,) = [volume["projected"] for volume in pod["volumes"] if volume["name"] == "token"]
    assert token["sources"] == [
        {"serviceAccountToken": {"audience": "sts.amazonaws.com", "expirationSeconds": 3600, "path": "token"}}
    ]
    assert {"name": "token", "mountPath": "/var/run/secrets/skerry.dev"} in pod["containers"][0]["volumeMounts"]
    variables = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
    assert variables["AWS_WEB_IDENTITY_TOKEN_FILE"] == manifests.TOKEN_FILE == "/var/run/secrets/skerry.dev/token"  # noqa: S105  a path
    assert "envFrom" not in pod["containers"][0]
    assert pod["automountServiceAccountToken"] is False


def test_account_of_a_gke_cluster_is_bound_to_its_own_keys(tmp_path: Path) -> None:
    graph = keyless(tmp_path, "gs://acme/runs")
    (binding,), (job,) = of_kind(graph, BucketBinding), of_kind(graph, Job)
    pool = "projects/415104041262/locations/global/workloadIdentityPools/acme-diloco.svc.id.goog"
    assert binding.member == f"principal://iam.googleapis.com/{pool}/subject/ns/train/sa/{job.service_account}"
    assert "cluster-0" in str(binding.rules)
    assert (job.token_audience, binding.address in job.needs()) == (None, True)


@pytest.mark.usefixtures("quick")
def test_run_without_a_secret_makes_a_role_for_each_replica(
    kubernetes_place: ClusterAndAccount, tmp_path: Path
) -> None:
    operator = KubernetesRun(tmp_path, kubernetes_place).operator(options="keyless")
    planned = operator.plan()
    assert planned.plan.problems == ()
    (check,) = [check for check in planned.resolved.checks if check.name == "OIDC provider of the cluster"]
    assert check.ok is False
    assert [check.ok for check in planned.resolved.checks if check.name == "jobs of a"] == [True]
    assert "create-open-id-connect-provider --url https://oidc.sandbox.example.com/id/0123" in check.advice
    assert operator.apply().ok
    assert len(kubernetes_place.inventory()["role"]) == 2
    assert not any(change.acts for change in operator.plan().plan.changes)
    assert operator.destroy().ok
    assert kubernetes_place.inventory() == {}


def test_account_with_an_oidc_provider_passes(kubernetes_place: ClusterAndAccount, cluster: Cluster) -> None:
    client = kubernetes_place.account.client("iam")
    url = checks.issuer_of(cluster)
    client.create_open_id_connect_provider(Url=url, ClientIDList=["sts.amazonaws.com"], ThumbprintList=["0" * 40])
    aws = Aws(cluster.clock, {**kubernetes_place.account.environment, "AWS_REGION": "us-east-1"})
    assert checks.provider_check(cluster, aws).ok
    assert replace(AWS, issuer=url).provider.endswith(":oidc-provider/oidc.sandbox.example.com/id/0123")
