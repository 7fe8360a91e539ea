"""Access of replicas to the store by the tokens of their service accounts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.kit import document_of, of_kind, plain, wanted
from tests.infra.targets.kubernetes.kit import GCS_STORE, check_golden, context_of, graph_of
from tests.infra.targets.runs import KubernetesRun
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.session import Account, Aws
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.secret_bindings import SecretBinding
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.google.workload_identity import OidcProvider, oidc_provider_body
from skerry.infra.deploy.plan_and_apply import make_plan
from skerry.infra.provision.graph import Graph
from skerry.infra.spec.env_secrets_and_data import Inputs
from skerry.infra.spec_and_store_errors import SpecInvalid
from skerry.infra.targets.kubernetes import checks, manifests
from skerry.infra.targets.kubernetes.cluster import Cluster
from skerry.infra.targets.kubernetes.resource_graph import build_resources
from skerry.infra.targets.kubernetes.resource_types import Job, ServiceAccount
from skerry.infra.targets.kubernetes.store_identity import AwsTrust, GkeTrust, OidcTrust, StoreIdentity
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.infra.targets.runs import ClusterAndAccount

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas
    from skerry.testing.google.sandbox import GoogleSandbox

ISSUER = "https://oidc.eks.us-east-1.amazonaws.com/id/0123"
AWS = AwsTrust(account=Account(number="123456789012", partition="aws"), issuer=ISSUER)
GKE = GkeTrust(number="415104041262", project="acme-diloco")
OIDC = OidcTrust(issuer=ISSUER, project="acme-diloco", token_url="https://sts.googleapis.com/v1/token")  # noqa: S106
INPUTS = """
secrets: {HF_TOKEN: {google_secret: projects/acme/secrets/hf/versions/1}}
data: {corpus: gs://acme-data/corpus}
"""


def keyless(folder: Path, google: GkeTrust | OidcTrust | None = None) -> Graph:
    store = "s3://acme/runs" if google is None else "gs://acme/runs"
    context = context_of(folder, "secret: null", count=1, store=store, more="" if google is None else INPUTS)
    trusted = google or AWS

    def trust(run: RunContext, group: Replicas, account: ServiceAccount) -> StoreIdentity:
        return trusted.identity(run, account, run.inputs(group))

    if google is None:
        return graph_of(context, trust)
    return Graph([GCS_STORE, *build_resources(context, context.spec.replicas, {}, trust)])


def pod_of(job: Job, run: str) -> dict[str, Any]:
    """The template of the job's pod, as it is sent once its references are known."""
    body: Any = plain(json.loads(json.dumps(manifests.job(wanted(job, run)), default=str)))
    return body["spec"]["template"]


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
    pod = pod_of(job, "s3://acme/runs/tiny")["spec"]
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
    graph = keyless(tmp_path, GKE)
    (binding,) = [each for each in of_kind(graph, BucketBinding) if each.bucket == "acme"]
    (job,) = of_kind(graph, Job)
    pool = "projects/415104041262/locations/global/workloadIdentityPools/acme-diloco.svc.id.goog"
    assert binding.member == f"principal://iam.googleapis.com/{pool}/subject/ns/train/sa/{job.service_account}"
    assert "cluster-0" in str(binding.rules)
    assert (job.token_audience, binding.address in job.needs()) == (None, True)


@pytest.mark.parametrize("trust", [GKE, OIDC], ids=["gke", "elsewhere"])
def test_account_is_bound_to_the_inputs_of_its_group(tmp_path: Path, trust: GkeTrust | OidcTrust) -> None:
    graph = keyless(tmp_path, trust)
    (store,) = [each for each in of_kind(graph, BucketBinding) if each.bucket == "acme"]
    (data,) = [each for each in of_kind(graph, BucketBinding) if each.bucket == "acme-data"]
    (secret,) = of_kind(graph, SecretBinding)
    assert (data.member, secret.member) == (store.member, store.member)
    assert secret.secret == "projects/acme/secrets/hf"  # noqa: S105  a name
    assert {data.address, secret.address} <= of_kind(graph, Job)[0].needs()


def test_pool_trusts_the_accounts_of_the_run_in_a_cluster_elsewhere(tmp_path: Path) -> None:
    graph = keyless(tmp_path, OIDC)
    (provider,), (job,) = of_kind(graph, OidcProvider), of_kind(graph, Job)
    (store,) = [each for each in of_kind(graph, BucketBinding) if each.bucket == "acme"]
    check_golden(
        "oidc_provider", {"settings": document_of(provider), "body": oidc_provider_body(wanted(provider, "r"))}
    )
    assert job.service_account.startswith(provider.subjects[0].rpartition(":")[2])
    subject = f"system:serviceaccount:train:{job.service_account}"
    assert str(store.member) == f"principal://iam.googleapis.com/${{google_pool.kubernetes.name}}/subject/{subject}"
    assert {store.address, provider.address} <= job.needs()


def test_pod_has_its_token_and_the_configuration_of_google(tmp_path: Path) -> None:
    (job,) = of_kind(keyless(tmp_path, OIDC), Job)
    pod = pod_of(job, "gs://acme/runs/tiny")
    audience = "${google_pool_oidc_provider.kubernetes.audience}"
    (token,) = [volume["projected"]["sources"] for volume in pod["spec"]["volumes"] if volume["name"] == "token"]
    assert token[0]["serviceAccountToken"]["audience"] == f"https:{audience}"
    (file,) = token[1]["downwardAPI"]["items"]
    (name, text), *others = pod["metadata"]["annotations"].items()
    assert file == {"path": "google.json", "fieldRef": {"fieldPath": f"metadata.annotations['{name}']"}}
    assert others == []
    assert json.loads(text) == {
        "audience": audience,
        "type": "external_account",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "https://sts.googleapis.com/v1/token",
        "credential_source": {"file": manifests.TOKEN_FILE},
    }
    assert job.environment["GOOGLE_APPLICATION_CREDENTIALS"] == "/var/run/secrets/skerry.dev/google.json"


def test_secret_opens_a_store_and_mirrors_in_google(tmp_path: Path) -> None:
    def opened(mirror: str) -> RunContext:
        more = f"replication: [{{to: {mirror}://acme-dr/runs}}]\n"
        return context_of(tmp_path, count=1, store="gs://acme/runs", more=more)

    def trust(run: RunContext, group: Replicas, account: ServiceAccount) -> StoreIdentity:
        raise AssertionError(f"{account.key} of {group.name} in {run.run_uri} has a Secret")

    context = opened("gs")
    resources = build_resources(context, context.spec.replicas, {}, trust)
    assert [resource.KIND for resource in resources] == [ServiceAccount.KIND, Job.KIND]
    (job,) = [resource for resource in resources if isinstance(resource, Job)]
    assert (job.secret, job.token_audience, job.credentials) == ("store-keys", None, None)
    with pytest.raises(SpecInvalid, match=r"write e\.g\. to: gs://acme-dr/runs"):
        opened("s3")


def test_account_with_a_long_name_is_refused_before_google_does(tmp_path: Path) -> None:
    account = ServiceAccount(key="a", name="a" * 63, region="n" * 63)
    with pytest.raises(Invalid, match="has more than the 127 characters of Google; shorten `namespace`"):
        OIDC.identity(context_of(tmp_path, store="gs://acme/runs"), account, Inputs())


def test_issuer_of_the_cluster_selects_the_trust(cluster: Cluster, google_sandbox: GoogleSandbox) -> None:
    google = Google(cluster.clock, google_sandbox.environment)
    check = checks.issuer_check(cluster, google)
    assert (check.ok, check.text) == (True, "a pool of the run trusts https://oidc.sandbox.example.com/id/0123")
    google_sandbox.restrict(["storage.buckets.get"])
    assert "iam.workloadIdentityPools.create" in checks.issuer_check(cluster, google).text
    google_sandbox.restrict(None)
    for issuer, expected in (
        ("https://kubernetes.default.svc.cluster.local", False),
        ("https://master", False),
        ("http://oidc.example.com", False),
        ("https://10.96.0.1:6443", False),
        ("https://[fd00::1]:6443", False),
        ("https://api.corp.internal:6443", False),
        ("https://api.corp.internal.", False),
        ("https://container.googleapis.com/v1/projects/p/locations/l/clusters/c", True),
    ):
        inside = Answering(issuer)
        assert checks.issuer_check(inside, google).ok is expected, issuer
        assert checks.is_gke(checks.issuer_of(inside)) is expected


class Answering(Cluster):
    """A cluster with this issuer."""

    def __init__(self, issuer: str) -> None:
        super().__init__(FakeClock(), {})
        self._issuer = issuer

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        del path, query
        return {"issuer": self._issuer}


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


@pytest.mark.usefixtures("quick")
def test_replicas_keep_their_accounts_in_another_namespace(kubernetes_place: ClusterAndAccount, tmp_path: Path) -> None:
    operator = KubernetesRun(tmp_path, kubernetes_place).operator(options="keyless")
    assert operator.apply().ok
    operator.path.write_text(operator.path.read_text().replace("namespace: train", "namespace: other"))
    kubernetes_place.cluster.add("namespaces", {"metadata": {"name": "other"}}, "")
    assert operator.apply().ok
    cluster = kubernetes_place.cluster
    accounts = {row["metadata"]["name"] for row in cluster.objects.list("serviceaccounts", "other")}
    pods = [row["spec"]["serviceAccountName"] for row in cluster.objects.list("pods", "other")]
    assert (len(pods), set(pods)) == (2, accounts)
    roles = kubernetes_place.account.client("iam").list_roles(PathPrefix="/skerry/")["Roles"]
    trusted = re.findall(r"system:serviceaccount:other:([\w-]+)", str(roles))
    assert sorted(trusted) == sorted(accounts)
    assert operator.plan().plan.empty
    with pytest.raises(Invalid, match=r"kubernetes_service_account\.a-0 is never replaced"):
        make_plan(operator.deployment(), to_replace=["kubernetes_service_account.a-0"])
    assert operator.destroy().ok
    assert kubernetes_place.inventory() == {}


def test_account_with_an_oidc_provider_passes(kubernetes_place: ClusterAndAccount, cluster: Cluster) -> None:
    client = kubernetes_place.account.client("iam")
    url = checks.issuer_of(cluster)
    client.create_open_id_connect_provider(Url=url, ClientIDList=["sts.amazonaws.com"], ThumbprintList=["0" * 40])
    aws = Aws(cluster.clock, {**kubernetes_place.account.environment, "AWS_REGION": "us-east-1"})
    assert checks.provider_check(cluster, aws).ok
    assert replace(AWS, issuer=url).provider.endswith(":oidc-provider/oidc.sandbox.example.com/id/0123")
    kubernetes_place.account.fail(how="deny", on="iam:ListOpenIDConnectProviders")
    refused = checks.provider_check(cluster, aws)
    assert (refused.ok, refused.advice) == (False, "log in, or ask for the right iam:ListOpenIDConnectProviders")
