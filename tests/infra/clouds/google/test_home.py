"""A run's home: what it needs of Google for its store and its image, and what is wrong told before anything is made."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.google.ground import OTHER, REGION, RUN, wanted
from tests.infra.google.test_identity import ACCOUNT
from tests.infra.google.test_registry import DIGEST
from tests.infra.google.test_storage import ONE as BUCKET
from tests.infra.ground import brought, checks_of, failing, ground_from, write_spec
from tests.support.clocks import FakeClock

from skerry.infra import clouds
from skerry.infra.clouds.google import rights
from skerry.infra.clouds.google.bindings import BucketBinding
from skerry.infra.clouds.google.federation import Pool, Provider
from skerry.infra.clouds.google.home import GoogleHome, open_home, place, project_of
from skerry.infra.clouds.google.registry import Repository
from skerry.infra.clouds.google.services import Service, service
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.google.storage import Bucket, Buckets
from skerry.infra.graph import Graph
from skerry.runtime.errors import Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.target import Check, Ground, Home
    from skerry.infra.testing.google import GoogleSandbox

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


def grounded(tmp_path: Path, group: str, scheme: str) -> Ground:
    path = write_spec(tmp_path, group, run="tiny-gpt", store=f"{scheme}://acme-runs/teams", image="acme/train:1")
    return replace(ground_from(path), image=IMAGE)


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return grounded(tmp_path, GROUP, "gs")


def fetched(machine: str) -> Any:
    def fetch(url: str, _type: str) -> bytes:
        return json.dumps(
            {"config": {"digest": "sha256:c"}} if "/manifests/" in url else {"architecture": machine}
        ).encode()

    return fetch


def checks(google: Google, ground: Ground, machine: str = "amd64") -> dict[str, Check]:
    return checks_of(GoogleHome(google, fetch=fetched(machine)), ground)


def test_a_run_needs_its_bucket_and_its_images_repository(ground: Ground) -> None:
    home = clouds.open_home(RUN, FakeClock(), {}, ground.spec.replicas)
    bucket, registry, repository = home.resources(ground)
    assert isinstance(bucket, Bucket)
    assert isinstance(registry, Service)
    assert isinstance(repository, Repository)
    assert (bucket.address, bucket.name, bucket.region) == ("google_bucket.store", "acme-runs", REGION)
    assert bucket.expire_days == {"teams/tiny-gpt/probe/": 1}
    assert (repository.name, repository.region, repository.after) == ("train", REGION, (registry.address,))
    assert len(Graph([bucket, registry, repository])) == 3
    assert home.environment(ground) == {}


def test_the_users_own_are_used_as_they_are(ground: Ground) -> None:
    home = open_home(FakeClock(), {}, ground.spec.replicas)
    assert [one.brought for one in home.resources(brought(ground, bucket=True))] == [True, False, False]
    assert [one.brought for one in home.resources(brought(ground, repository=True))] == [False, False, True]


@pytest.mark.parametrize("image", [f"ghcr.io/acme/train@{DIGEST}", IMAGE.replace(PROJECT, "another-project")])
def test_an_image_elsewhere_needs_no_repository(ground: Ground, image: str) -> None:
    home = open_home(FakeClock(), {}, ground.spec.replicas)
    assert [one.KIND for one in home.resources(replace(ground, image=image))] == ["google_bucket"]


def test_the_project_is_the_specs_or_else_the_environments(ground: Ground) -> None:
    assert project_of(ground.spec.replicas) == PROJECT
    assert project_of(()) is None
    given = {"GOOGLE_CLOUD_PROJECT": "of-the-environment"}
    assert open_home(FakeClock(), given, ground.spec.replicas).google.project == PROJECT
    assert clouds.open_home(RUN, FakeClock(), given).handlers()
    assert open_home(FakeClock(), given).google.project == "of-the-environment"


def test_what_is_made_is_found_again(google: Google, ground: Ground) -> None:
    home: Home = GoogleHome(google)
    assert home.identity() == {"google": PROJECT}
    for resource in home.resources(ground):
        handler = home.handlers()[resource.KIND]
        handler.create(wanted(resource))
        addresses = [made.address for made in handler.owned(RUN, [REGION])]
        assert addresses == ([] if isinstance(resource, Service) else [resource.address])


def test_every_kind_of_google_but_jobs_has_a_handler(google: Google) -> None:
    kinds = {"bucket", "service", "service_account", "bucket_binding", "pool", "pool_provider", "repository"}
    assert set(GoogleHome(google).handlers()) == {f"google_{kind}" for kind in kinds}
    assert {BucketBinding.KIND, Pool.KIND, Provider.KIND} < set(GoogleHome(google).handlers())


def test_before_anything_is_made_all_is_well(google: Google, ground: Ground) -> None:
    told = checks(google, ground)
    assert {name: check.ok for name, check in told.items()} == {
        "Google credentials": True,
        "Google rights": True,
        "billing": None,
        "bucket": True,
        "image": True,
    }
    assert told["Google credentials"].text == f"project {PROJECT} (415104041262), as the token's owner"
    assert told["bucket"].text == f"the name acme-runs is free: it will be made in {REGION}"


def test_without_credentials_nothing_else_is_asked(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, google: Google
) -> None:
    monkeypatch.setattr(Google, "identity", failing(Unauthorized("no credentials")))
    (check,) = GoogleHome(google).checks(ground)
    assert (check.name, check.ok) == ("Google credentials", False)
    assert check.advice


def test_permissions_that_are_lacking_are_named(google: Google, sandbox: GoogleSandbox, ground: Ground) -> None:
    given = {*rights.HOME, *rights.ACCOUNTS, *rights.REPOSITORIES, "resourcemanager.projects.get"}
    sandbox.restrict(given - {"iam.serviceAccounts.actAs", "storage.buckets.setIamPolicy"})
    check = checks(google, ground)["Google rights"]
    sandbox.restrict(None)
    assert (check.ok, check.text) == (False, "lacking: iam.serviceAccounts.actAs, storage.buckets.setIamPolicy")
    assert "ask for a role" in check.advice


def test_rights_that_cannot_be_asked_for_are_not_said_to_be_lacking(google: Google, ground: Ground) -> None:
    path = f"v1/projects/{PROJECT}/services/cloudresourcemanager.googleapis.com:disable"
    google.call("serviceusage", "POST", path, body={})
    check = checks(google, ground)["Google rights"]
    assert check.ok is None
    assert "cannot be looked at: cloudresourcemanager.googleapis.com is not enabled" in check.text


def test_pools_need_rights_only_where_aws_comes_in(
    google: Google, sandbox: GoogleSandbox, tmp_path: Path, ground: Ground
) -> None:
    given = {*rights.HOME, *rights.ACCOUNTS, *rights.REPOSITORIES, "resourcemanager.projects.get"}
    sandbox.restrict(given)
    both = replace(ground, spec=ground.spec.model_copy(update={"replicas": (*ground.spec.replicas, _batch(tmp_path))}))
    found = [checks(google, one)["Google rights"] for one in (ground, both)]
    sandbox.restrict(None)
    assert [check.ok for check in found] == [True, False]
    assert "iam.workloadIdentityPools.create" in found[1].text


def _batch(tmp_path: Path) -> Any:
    return grounded(tmp_path, BATCH, "s3").spec.replicas[0]


def test_a_bucket_lies_in_a_region_of_google(tmp_path: Path, ground: Ground) -> None:
    aws = replace(ground, spec=ground.spec.model_copy(update={"replicas": (_batch(tmp_path),)}))
    assert open_home(FakeClock(), {}).region_of(ground) == REGION
    assert open_home(FakeClock(), {"CLOUDSDK_COMPUTE_REGION": "us-east1"}).region_of(aws) == "us-east1"
    assert open_home(FakeClock(), {}).region_of(brought(aws, bucket=True)) == ""
    with pytest.raises(Invalid, match=r"set CLOUDSDK_COMPUTE_REGION, or make the bucket"):
        open_home(FakeClock(), {}).region_of(aws)


@pytest.mark.parametrize(
    ("run", "ok", "text"), [(RUN, True, "of this run"), (OTHER, False, "belongs to the run with the label other-")]
)
def test_a_bucket_that_is_there_is_ours_or_not(google: Google, ground: Ground, run: str, ok: bool, text: str) -> None:  # noqa: FBT001
    Buckets(google).create(wanted(BUCKET.resource, run))
    check = checks(google, ground)["bucket"]
    assert check.ok is ok
    assert text in check.text
    assert ("byo: {bucket: true}" in check.advice) is not ok


def test_the_users_own_bucket_must_be_there(google: Google, ground: Ground) -> None:
    assert checks(google, brought(ground, bucket=True))["bucket"].ok is False
    Buckets(google).create(wanted(BUCKET.resource, OTHER))
    check = checks(google, brought(ground, bucket=True))["bucket"]
    assert (check.ok, check.text) == (True, "acme-runs is there, and yours")
    body = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": False}}}
    google.call("storage", "PATCH", "storage/v1/b/acme-runs", body=body)
    check = checks(google, brought(ground, bucket=True))["bucket"]
    assert (check.ok, "--uniform-bucket-level-access" in check.advice) == (False, True)


@pytest.mark.parametrize("mine", [True, False])
def test_a_bucket_in_another_region_is_told(google: Google, ground: Ground, mine: bool) -> None:  # noqa: FBT001
    Buckets(google).create(wanted(replace(BUCKET.resource, region="us-east1")))
    check = checks(google, brought(ground, bucket=mine))["bucket"]
    assert check.ok is mine
    assert "acme-runs is in us-east1, replicas are in europe-west4" in check.text


def test_an_image_is_there_for_the_machines_or_not(google: Google, ground: Ground) -> None:
    assert checks(google, ground)["image"].text == f"train has {DIGEST[:19]} for amd64"
    check = checks(google, ground, "arm64")["image"]
    assert (check.ok, check.advice) == (False, "build it with --platform linux/amd64")


def test_an_image_by_tag_or_elsewhere_is_told(google: Google, ground: Ground) -> None:
    by_tag = checks(google, replace(ground, image=IMAGE.replace(f"@{DIGEST}", ":1")))["image"]
    assert (by_tag.ok, by_tag.advice) == (False, "name it by its digest: repository@sha256:...")
    assert checks(google, replace(ground, image="ghcr.io/acme/train@sha256:x"))["image"].ok is None
    others = checks(google, replace(ground, image=IMAGE.replace(PROJECT, "another-project")))["image"]
    assert others.ok is None
    agent = "service-415104041262@gcp-sa-aiplatform.iam.gserviceaccount.com"
    assert others.advice == f"let its owner give {agent} the role roles/artifactregistry.reader on it"


def test_a_project_without_billing_is_told(google: Google, sandbox: GoogleSandbox, ground: Ground) -> None:
    sandbox.enable("cloudbilling.googleapis.com")
    assert checks(google, ground)["billing"].ok is True
    sandbox.unpay()
    check = checks(google, ground)["billing"]
    assert (check.ok, check.advice) == (False, "link one in the console, under Billing")


@pytest.mark.parametrize(
    ("error", "ok"), [(Unauthorized("right"), False), (Retryable("busy"), None), (Invalid("odd"), False)]
)
def test_what_cannot_be_looked_at_is_told(
    google: Google,
    ground: Ground,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    ok: bool | None,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(Buckets, "look", failing(error))
    check = checks(google, ground)["bucket"]
    assert (check.ok, check.text) == (ok, str(error))


def test_a_place_is_a_bucket_and_a_prefix() -> None:
    assert place(RUN) == ("acme-runs", "teams/tiny-gpt")
    for uri in ("s3://acme/x", "gs://acme", "gs:///x", "file:///x"):
        with pytest.raises(Invalid, match="needs a store in Cloud Storage"):
            place(uri)


def test_nothing_is_asked_before_it_is_needed(ground: Ground) -> None:
    asked: list[str] = []
    google = Google(FakeClock(), {}, project=PROJECT, heard=lambda _when, what: asked.append(what))
    home = GoogleHome(google)
    home.resources(ground)
    home.handlers()
    home.environment(ground)
    assert asked == []


def test_what_is_there_and_nobodys_can_be_taken_over(google: Google, ground: Ground) -> None:
    home = GoogleHome(google)
    body: dict[str, Any] = {"name": "acme-runs", "location": "EUROPE-WEST4", "labels": {"team": "x"}}
    google.call("storage", "POST", "storage/v1/b", body=body, query={"project": PROJECT})
    body = {"accountId": ACCOUNT.name, "serviceAccount": {"description": "made by Ann"}}
    google.call("iam", "POST", f"v1/projects/{PROJECT}/serviceAccounts", body=body)
    where = f"v1/projects/{PROJECT}/locations/{REGION}/repositories"
    body = {"format": "DOCKER", "labels": {"team": "x"}}
    google.call("artifactregistry", "POST", where, body=body, query={"repositoryId": "train"})
    pools = f"v1/projects/{PROJECT}/locations/global/workloadIdentityPools"
    google.call("iam", "POST", pools, body={"description": "ours"}, query={"workloadIdentityPoolId": "pool"})
    body = {"aws": {"accountId": "123456789012"}}
    google.call("iam", "POST", f"{pools}/pool/providers", body=body, query={"workloadIdentityPoolProviderId": "aws-x"})
    bucket, _, repository = home.resources(ground)
    pool = Pool(key="aws", name="pool", region="")
    provider = Provider(
        key="x", name="pool/aws-x", region="", pool="pool", account="123456789012", sessions="", roles=()
    )
    for resource in (bucket, repository, ACCOUNT, pool, provider):
        one, handler = wanted(resource, generation=0), home.handlers()[resource.KIND]
        (before,) = handler.read([one])
        assert before is not None
        assert before.owner is None
        home.claim(one, before)
        (after,) = handler.read([one])
        assert after is not None
        assert after.owner == RUN
        assert [made.address for made in handler.owned(RUN, [REGION])] == [resource.address]
    assert google.call("storage", "GET", "storage/v1/b/acme-runs")["labels"]["team"] == "x"
    assert google.call("artifactregistry", "GET", f"{where}/train")["labels"]["team"] == "x"
    account = google.call(
        "iam", "GET", f"v1/projects/-/serviceAccounts/{ACCOUNT.name}@{PROJECT}.iam.gserviceaccount.com"
    )
    assert account["description"].startswith("made by Ann [skerry run=")
    with pytest.raises(Invalid, match="google_service cannot be imported"):
        home.claim(wanted(service("iam", "x")), before)
