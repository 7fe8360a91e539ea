"""ECR repositories, and what the registry reports of an image."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.clouds.aws.account import ACCOUNT, REGION, answer, check_requests, wanted
from tests.infra.clouds.aws.handlers import AwsHandlerSuite
from tests.infra.clouds.suites import RepositorySuite

from skerry.infra.clouds.aws.ecr import (
    Image,
    Repositories,
    Repository,
    create_request,
    fetched,
    image_in_ecr,
    lifecycle_request,
    read_manifest,
)
from skerry.infra.clouds.handler_helpers import Absent
from skerry.infra.provision.handler import Contents
from skerry.runtime.errors import Conflict, Invalid, Retryable

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws

REPOSITORY = Repository(key="image", name="acme/train", region=REGION, registry=ACCOUNT)
ONE = wanted(REPOSITORY)
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"


def push(aws: Aws, tag: str, manifest: dict[str, Any]) -> str:
    """Its digest. The registry that keeps layers is not there, its catalogue is."""
    text = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, **manifest})
    digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    where = {"repositoryName": "acme/train", "imageManifestMediaType": MANIFEST, "imageDigest": digest}
    aws.call("ecr", REGION, "put_image", **where, imageManifest=text, imageTag=tag)
    return digest


def image(digest: str) -> Image:
    return Image(registry=ACCOUNT, region=REGION, repository="acme/train", reference=digest)


class TestRepositories(AwsHandlerSuite, RepositorySuite):
    HANDLER = Repositories
    RESOURCE = REPOSITORY
    CHANGE = ("untagged_days", 5)

    @pytest.mark.parametrize("setting", ["immutable", "scan"])
    def test_settings_are_updated_in_place(self, aws: Aws, setting: str) -> None:
        Repositories(aws).create(wanted(replace(REPOSITORY, **{setting: False})))
        self.assert_restored(aws, ONE, setting)

    def test_foreign_lifecycle_rule_is_reported(self, aws: Aws) -> None:
        Repositories(aws).create(ONE)
        policy = json.loads(lifecycle_request(ONE)["lifecyclePolicyText"])
        policy["rules"].append({**policy["rules"][0], "rulePriority": 2})
        where = {"repositoryName": "acme/train", "lifecyclePolicyText": json.dumps(policy)}
        aws.call("ecr", REGION, "put_lifecycle_policy", **where)
        assert self.differing(ONE, self.seen(aws, ONE)) == {"untagged_days"}

    def test_repository_with_images_is_not_deleted(self, aws: Aws) -> None:
        record = self.created(aws, ONE)
        for tag in ("1", "2"):
            push(aws, tag, {"config": {"digest": f"sha256:{tag}"}})
        self.assert_kept(aws, record, Contents(objects=2, noun="image"))

    def test_repository_of_another_account_is_not_created(self, aws: Aws) -> None:
        with pytest.raises(Conflict, match=rf"account 999999999999, not of {ACCOUNT}.*byo"):
            Repositories(aws).create(wanted(replace(REPOSITORY, registry="999999999999")))

    def test_lifecycle_of_a_brought_repository_is_not_read(self, aws: Aws) -> None:
        aws.call("ecr", REGION, "create_repository", repositoryName="acme/train")
        seen = self.seen(aws, wanted(replace(REPOSITORY, brought=True)))
        assert seen.outputs["uri"] == f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/acme/train"
        assert "untagged_days" not in seen.settings


def test_requests_equal_the_golden_file() -> None:
    requests = {"CreateRepository": create_request(ONE), "PutLifecyclePolicy": lifecycle_request(ONE)}
    check_requests("ecr", "repository", requests)


@pytest.mark.parametrize(
    ("name", "repository", "reference"),
    [
        ("acme/train@sha256:ab", "acme/train", "sha256:ab"),
        ("acme/train:1@sha256:ab", "acme/train", "sha256:ab"),
        ("train:1", "train", "1"),
        ("train", "train", "latest"),
    ],
)
def test_image_name_is_parsed(name: str, repository: str, reference: str) -> None:
    parsed = image_in_ecr(f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/{name}")
    assert parsed == replace(image(reference), repository=repository)
    assert parsed.is_pinned is reference.startswith("sha256:")


@pytest.mark.parametrize("name", ["ghcr.io/acme/train:1", "busybox", "123.dkr.ecr.eu-central-1.amazonaws.com/x"])
def test_image_of_another_registry_is_none(name: str) -> None:
    assert image_in_ecr(name) is None


def test_architecture_is_read_from_the_image_configuration(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    Repositories(aws).create(ONE)
    digest = push(aws, "1", {"config": {"digest": "sha256:cc"}})

    def url(*_: object, layerDigest: str, **__: object) -> dict[str, Any]:  # noqa: N803  the parameter of ECR
        return {"downloadUrl": f"https://layers/{layerDigest}"}

    answer(monkeypatch, "get_download_url_for_layer", url)  # the account in memory keeps no layers
    layers = {"https://layers/sha256:cc": b'{"architecture": "arm64", "os": "linux"}'}
    assert read_manifest(aws, image(digest), layers.__getitem__).architectures == {"arm64"}


def test_missing_image_and_manifest_without_configuration_are_errors(aws: Aws) -> None:
    with pytest.raises(Absent):
        read_manifest(aws, image("sha256:" + "0" * 64))
    Repositories(aws).create(ONE)
    with pytest.raises(Absent, match="no image sha256:000"):
        read_manifest(aws, image("sha256:" + "0" * 64))
    with pytest.raises(Invalid, match="names no configuration"):
        read_manifest(aws, image(push(aws, "1", {"layers": []})))


def test_signed_address_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "config").write_bytes(b"{}")
    assert fetched((tmp_path / "config").as_uri()) == b"{}"
    with pytest.raises(Retryable, match="cannot fetch"):
        fetched((tmp_path / "none").as_uri())
