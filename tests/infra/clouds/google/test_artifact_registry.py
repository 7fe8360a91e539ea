"""Artifact Registry repositories, and what the registry reports of an image."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.clouds.google.handlers import GoogleHandlerSuite
from tests.infra.clouds.google.kit import REGION, check_golden, check_request, wanted
from tests.infra.clouds.suites import RepositorySuite
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.artifact_registry import (
    Image,
    Repositories,
    Repository,
    create_request,
    image_in_registry,
    is_location,
    parts,
    read_manifest,
    vertex_agent,
)
from skerry.infra.clouds.google.session import Google
from skerry.infra.provision.handler import Contents
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

DIGEST = f"sha256:{'a' * 64}"
REPOSITORY = Repository(key="image", name="train", region=REGION, why="the run's image")
ONE = wanted(REPOSITORY)


class TestRepositories(GoogleHandlerSuite, RepositorySuite):
    HANDLER = Repositories
    RESOURCE = REPOSITORY
    CHANGE = ("untagged_days", 7)

    def test_repository_with_images_is_not_deleted(self, google: Google, sandbox: GoogleSandbox) -> None:
        record = self.created(google, ONE)
        for number, name in enumerate(("trainer", "trainer", "other"), start=1):
            sandbox.repositories.push(REGION, "train", name, f"sha256:{number:064d}", size=number * 100)
        self.assert_kept(google, record, Contents(objects=3, size_bytes=600, noun="image"))

    @pytest.mark.parametrize(
        "policies",
        [
            {},
            {"mine": {"id": "mine", "action": "DELETE", "condition": {"tagState": "ANY", "olderThan": "3600s"}}},
            {"skerry-untagged": {"id": "skerry-untagged", "action": "DELETE", "condition": {"olderThan": "2592000s"}}},
        ],
    )
    def test_foreign_cleanup_policy_is_reported(self, google: Google, policies: dict[str, Any]) -> None:
        Repositories(google).create(ONE)
        path = "v1/projects/skerry-sandbox/locations/europe-west4/repositories/train"
        body, mask = {"cleanupPolicies": policies}, {"updateMask": "cleanupPolicies"}
        google.call("artifactregistry", "PATCH", path, body=body, query=mask)
        self.assert_restored(google, ONE, "untagged_days")


def test_request_equals_the_golden_file() -> None:
    request = create_request(ONE)
    path = f"v1/projects/acme/locations/{REGION}/repositories"
    check_request("artifactregistry", "POST", path, request, repositoryId="train")
    mask = ",".join(parts(ONE))
    check_request("artifactregistry", "PATCH", f"{path}/train", parts(ONE), updateMask=mask)
    check_golden("repository", request)


def test_image_name_is_parsed() -> None:
    name = f"europe-west4-docker.pkg.dev/acme/train/deep/trainer@{DIGEST}"
    image = Image(location="europe-west4", project="acme", repository="train", image="deep/trainer", reference=DIGEST)
    assert image_in_registry(name) == image
    assert (image.is_pinned, image.host) == (True, "europe-west4-docker.pkg.dev")
    tagged = image_in_registry("us-docker.pkg.dev/acme/train/trainer:1")
    assert tagged is not None
    assert (tagged.reference, tagged.is_pinned, tagged.location) == ("1", False, "us")
    for elsewhere in ("ghcr.io/acme/x", "docker.pkg.dev/a/b/c", "123456789012.dkr.ecr.eu-west-1.amazonaws.com/x"):
        assert image_in_registry(elsewhere) is None
    with pytest.raises(Invalid, match=r"write us-docker\.pkg\.dev/PROJECT/REPOSITORY/IMAGE@sha256"):
        image_in_registry("us-docker.pkg.dev/acme/train")


def test_regions_of_google_are_recognised() -> None:
    assert all(map(is_location, ("europe-west4", "us-central1", "northamerica-northeast1", "us")))
    assert not any(map(is_location, ("eu-west-1", "us-gov-west-1", "", "ap-southeast-2")))


def test_vertex_agent_has_the_number_of_the_project() -> None:
    assert vertex_agent("42") == "service-42@gcp-sa-aiplatform.iam.gserviceaccount.com"


def test_architectures_are_read_from_the_registry() -> None:
    fetched: list[str] = []

    def fetch(url: str, media_type: str) -> bytes:
        fetched.append(url)
        assert media_type
        manifest = {"config": {"digest": "sha256:c"}}
        return json.dumps(manifest if "/manifests/" in url else {"architecture": "arm64"}).encode()

    image = image_in_registry(f"europe-west4-docker.pkg.dev/acme/train/trainer@{DIGEST}")
    assert image is not None
    assert read_manifest(Google(FakeClock(), {}), image, fetch).architectures == {"arm64"}
    base = "https://europe-west4-docker.pkg.dev/v2/acme/train/trainer"
    assert fetched == [f"{base}/manifests/{DIGEST}", f"{base}/blobs/sha256:c"]
