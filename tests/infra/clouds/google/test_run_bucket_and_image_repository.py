"""The home of a run on Google: its resources, its checks and imports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.clouds.google.kit import OTHER, REGION, RUN, wanted
from tests.infra.clouds.google.test_artifact_registry import DIGEST
from tests.infra.clouds.google.test_gcs import BUCKET
from tests.infra.clouds.google.test_service_accounts import ACCOUNT
from tests.infra.clouds.suites import HomeSuite
from tests.infra.kit import brought, checks_of, ground_from, write_spec
from tests.support.clocks import FakeClock

from skerry.infra import clouds
from skerry.infra.clouds.google import permissions
from skerry.infra.clouds.google.artifact_registry import Repository
from skerry.infra.clouds.google.gcs import Bucket, Buckets
from skerry.infra.clouds.google.run_bucket_and_image_repository import GoogleHome, open_home
from skerry.infra.clouds.google.services import Service, service
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.google.workload_identity import Pool, Provider
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.provision.graph import Graph
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target_and_store_interfaces import Check, RunContext
    from skerry.testing.google import GoogleSandbox

PROJECT: Final = "skerry-sandbox"
IMAGE: Final = f"{REGION}-docker.pkg.dev/{PROJECT}/train/trainer@{DIGEST}"
GROUP: Final = f"""\
  - name: vertex
    count: 2
    target: {{kind: vertex, project: {PROJECT}, region: europe-west4, machine: n1-standard-4}}
"""
BATCH: Final = """\
  - {name: batch, count: 2, target: {kind: aws_batch, region: eu-central-1, instance_types: [c6i.xlarge]}}
"""
# All that an operator needs for a run without jobs on AWS.
GIVEN: Final = frozenset(
    {*permissions.HOME, *permissions.ACCOUNTS, *permissions.REPOSITORIES, "resourcemanager.projects.get"}
)


def grounded(tmp_path: Path, group: str, scheme: str) -> RunContext:
    path = write_spec(tmp_path, group, run="tiny-gpt", store=f"{scheme}://acme-runs/teams", image="acme/train:1")
    return replace(ground_from(path), image=IMAGE)


@pytest.fixture
def ground(tmp_path: Path) -> RunContext:
    return grounded(tmp_path, GROUP, "gs")


@pytest.fixture
def batch(tmp_path: Path, ground: RunContext) -> Any:
    """A group of replicas on AWS."""
    del ground  # it writes the same file
    return grounded(tmp_path, BATCH, "s3").spec.replicas[0]


def checks(google: Google, ground: RunContext) -> dict[str, Check]:
    def fetch(url: str, _type: str) -> bytes:
        manifest = {"config": {"digest": "sha256:c"}}
        return json.dumps(manifest if "/manifests/" in url else {"architecture": "amd64"}).encode()

    return checks_of(GoogleHome(google, fetch=fetch), ground)


class TestGoogleHome(HomeSuite):
    NAME = "Google"
    ACCOUNT = ("google", PROJECT)
    KINDS = ("google_bucket", "google_service", "google_repository")
    UNOWNED = (Service.KIND,)
    OTHER_IMAGES = (f"ghcr.io/acme/train@{DIGEST}", IMAGE.replace(PROJECT, "another-project"))

    def home(self, cloud: Google) -> GoogleHome:
        return GoogleHome(cloud)

    def test_planning_resources_makes_no_calls(self, ground: RunContext) -> None:
        calls: list[str] = []
        google = Google(FakeClock(), {}, project=PROJECT, heard=lambda _when, what: calls.append(what))
        self.assert_no_calls(google, ground, calls)


def test_run_needs_bucket_service_and_repository(ground: RunContext) -> None:
    home = clouds.open_home(RUN, OperatorAccess(FakeClock(), {}, ground.spec))
    bucket, registry, repository = home.resources(ground)
    assert isinstance(bucket, Bucket)
    assert isinstance(repository, Repository)
    assert (bucket.address, bucket.name, bucket.region) == ("google_bucket.store", "acme-runs", REGION)
    assert bucket.expire_days == {"teams/tiny-gpt/probe/": 1}
    assert (repository.name, repository.region, repository.after) == ("train", REGION, (registry.address,))
    assert len(Graph([bucket, registry, repository])) == 3
    assert home.environment(ground) == {}


def test_project_comes_from_spec_or_environment(ground: RunContext) -> None:
    given = {"GOOGLE_CLOUD_PROJECT": "of-the-environment"}
    assert open_home(OperatorAccess(FakeClock(), given, ground.spec)).google.project == PROJECT
    assert open_home(OperatorAccess(FakeClock(), given)).google.project == "of-the-environment"


def test_checks_before_an_apply_pass(google: Google, ground: RunContext) -> None:
    by_name = checks(google, ground)
    assert {name: check.ok for name, check in by_name.items()} == {
        "Google credentials": True,
        "Google rights": True,
        "billing": None,
        "bucket": True,
        "image": True,
    }
    assert by_name["Google credentials"].text == f"project {PROJECT} (415104041262), as the token's owner"
    assert by_name["bucket"].text == f"the name acme-runs is free: it will be created in {REGION}"


def test_missing_permissions_are_named(google: Google, sandbox: GoogleSandbox, ground: RunContext) -> None:
    sandbox.restrict(GIVEN - {"iam.serviceAccounts.actAs", "storage.buckets.setIamPolicy"})
    check = checks(google, ground)["Google rights"]
    assert (check.ok, check.text) == (False, "lacking: iam.serviceAccounts.actAs, storage.buckets.setIamPolicy")
    assert "ask for a role" in check.advice


def test_permissions_that_cannot_be_read_are_undecided(google: Google, ground: RunContext) -> None:
    path = f"v1/projects/{PROJECT}/services/cloudresourcemanager.googleapis.com:disable"
    google.call("serviceusage", "POST", path, body={})
    check = checks(google, ground)["Google rights"]
    assert check.ok is None
    assert "cannot be checked: cloudresourcemanager.googleapis.com is not enabled" in check.text


def test_pool_permissions_are_needed_only_for_jobs_on_aws(
    google: Google, sandbox: GoogleSandbox, batch: Any, ground: RunContext
) -> None:
    sandbox.restrict(GIVEN)
    both = replace(ground, spec=ground.spec.model_copy(update={"replicas": (*ground.spec.replicas, batch)}))
    rights = [checks(google, context)["Google rights"] for context in (ground, both)]
    assert [check.ok for check in rights] == [True, False]
    assert "iam.workloadIdentityPools.create" in rights[1].text


def test_bucket_is_in_a_region_of_google(batch: Any, ground: RunContext) -> None:
    aws = replace(ground, spec=ground.spec.model_copy(update={"replicas": (batch,)}))
    assert open_home(OperatorAccess(FakeClock(), {})).region_of(ground) == REGION
    assert open_home(OperatorAccess(FakeClock(), {"CLOUDSDK_COMPUTE_REGION": "us-east1"})).region_of(aws) == "us-east1"
    assert open_home(OperatorAccess(FakeClock(), {})).region_of(brought(aws, bucket=True)) == ""
    with pytest.raises(Invalid, match=r"set CLOUDSDK_COMPUTE_REGION, or create the bucket"):
        open_home(OperatorAccess(FakeClock(), {})).region_of(aws)


def test_brought_bucket_needs_uniform_access(google: Google, ground: RunContext) -> None:
    Buckets(google).create(wanted(BUCKET, OTHER))
    assert checks(google, brought(ground, bucket=True))["bucket"].text == "acme-runs exists, and is yours"
    body = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": False}}}
    google.call("storage", "PATCH", "storage/v1/b/acme-runs", body=body)
    check = checks(google, brought(ground, bucket=True))["bucket"]
    assert (check.ok, "--uniform-bucket-level-access" in check.advice) == (False, True)


def test_image_of_another_project_needs_a_reader_role(google: Google, ground: RunContext) -> None:
    assert checks(google, ground)["image"].text == f"train has {DIGEST[:19]} for amd64"
    others = checks(google, replace(ground, image=IMAGE.replace(PROJECT, "another-project")))["image"]
    assert others.ok is None
    agent = "service-415104041262@gcp-sa-aiplatform.iam.gserviceaccount.com"
    assert others.advice == f"let its owner give {agent} the role roles/artifactregistry.reader on it"


def test_project_without_billing_is_reported(google: Google, sandbox: GoogleSandbox, ground: RunContext) -> None:
    sandbox.enable("cloudbilling.googleapis.com")
    assert checks(google, ground)["billing"].ok is True
    sandbox.unpay()
    check = checks(google, ground)["billing"]
    assert (check.ok, check.advice) == (False, "link one in the console, under Billing")


def test_existing_resources_can_be_imported(google: Google, ground: RunContext) -> None:
    home, project = GoogleHome(google), f"v1/projects/{PROJECT}"
    pools = f"{project}/locations/global/workloadIdentityPools"
    repositories = f"{project}/locations/{REGION}/repositories"

    def make(service: str, path: str, body: dict[str, Any], **query: str) -> None:
        google.call(service, "POST", path, body=body, query=query)

    bucket_body = {"name": "acme-runs", "location": "EUROPE-WEST4", "labels": {"team": "x"}}
    account_body = {"accountId": ACCOUNT.name, "serviceAccount": {"description": "made by Ann"}}
    make("storage", "storage/v1/b", bucket_body, project=PROJECT)
    make("iam", f"{project}/serviceAccounts", account_body)
    make("artifactregistry", repositories, {"format": "DOCKER", "labels": {"team": "x"}}, repositoryId="train")
    make("iam", pools, {"description": "ours"}, workloadIdentityPoolId="pool")
    aws = {"aws": {"accountId": "123456789012"}}
    make("iam", f"{pools}/pool/providers", aws, workloadIdentityPoolProviderId="aws-x")
    bucket, _, repository = home.resources(ground)
    pool = Pool(key="aws", name="pool", region="")
    provider = Provider(
        key="x", name="pool/aws-x", region="", pool="pool", account="123456789012", sessions="", roles=()
    )
    for resource in (bucket, repository, ACCOUNT, pool, provider):
        desired, handler = wanted(resource), home.handlers()[resource.KIND]
        (before,) = handler.read([desired])
        assert before is not None
        assert before.owner is None
        home.claim(desired, before)
        (after,) = handler.read([desired])
        assert after is not None
        assert after.owner == RUN
        assert [record.address for record in handler.list_owned(RUN, [REGION])] == [resource.address]
    assert google.call("storage", "GET", "storage/v1/b/acme-runs")["labels"]["team"] == "x"
    assert google.call("artifactregistry", "GET", f"{repositories}/train")["labels"]["team"] == "x"
    email = f"{ACCOUNT.name}@{PROJECT}.iam.gserviceaccount.com"
    account = google.call("iam", "GET", f"v1/projects/-/serviceAccounts/{email}")
    assert account["description"].startswith("made by Ann [skerry run=")
    with pytest.raises(Invalid, match="google_service cannot be imported"):
        home.claim(wanted(service("iam", "x")), before)
