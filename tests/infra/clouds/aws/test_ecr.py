"""The repository, which goes only when it is empty, and what can be known of an image before it runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.aws.account import ACCOUNT, REGION, check_golden, check_model, wanted
from tests.infra.aws.handlers import AwsHandlerSuite
from tests.infra.ground import made

from skerry.infra.clouds.aws.registry import (
    Image,
    Repositories,
    Repository,
    architectures,
    create_request,
    fetched,
    image_in_ecr,
    lifecycle_request,
)
from skerry.infra.clouds.handling import Absent
from skerry.infra.handler import Held
from skerry.runtime.errors import Conflict, Invalid, Retryable

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.graph import Resource

REPOSITORY = Repository(key="image", name="acme/train", region=REGION, registry=ACCOUNT)
ONE = wanted(REPOSITORY)
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"


def push(aws: Aws, tag: str, manifest: dict[str, Any], kind: str = MANIFEST) -> str:
    """Its digest. The registry that keeps layers is not there, its catalogue is."""
    text = json.dumps({"schemaVersion": 2, "mediaType": kind, **manifest})
    digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    where = {"repositoryName": "acme/train", "imageManifestMediaType": kind, "imageDigest": digest}
    aws.call("ecr", REGION, "put_image", **where, imageManifest=text, imageTag=tag)
    return digest


def image(digest: str) -> Image:
    return Image(registry=ACCOUNT, region=REGION, repository="acme/train", reference=digest)


class TestRepositories(AwsHandlerSuite):
    REMEDY = r"byo: \{repository: true\}"

    def handler(self, aws: Aws) -> Repositories:
        return Repositories(aws)

    def resource(self, aws: Aws) -> Repository:
        del aws
        return REPOSITORY

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, Repository)
        return replace(resource, untagged_days=5), "untagged_days"

    @pytest.mark.parametrize("other", [{"immutable": False}, {"scan": False}])
    def test_each_setting_is_changed_where_it_stands(self, aws: Aws, other: dict[str, bool]) -> None:
        Repositories(aws).create(wanted(replace(REPOSITORY, **other)))
        assert self.differing(ONE, self.seen(aws, ONE)) == set(other)
        Repositories(aws).update(ONE, set(other))
        self.assert_as_wanted(ONE, self.seen(aws, ONE))

    def test_another_rule_that_deletes_images_is_seen(self, aws: Aws) -> None:
        Repositories(aws).create(ONE)
        policy = json.loads(lifecycle_request(ONE)["lifecyclePolicyText"])
        policy["rules"].append({**policy["rules"][0], "rulePriority": 2})
        where = {"repositoryName": "acme/train", "lifecyclePolicyText": json.dumps(policy)}
        aws.call("ecr", REGION, "put_lifecycle_policy", **where)
        assert self.differing(ONE, self.seen(aws, ONE)) == {"untagged_days"}

    def test_a_repository_with_images_in_it_stays_until_it_is_emptied(self, aws: Aws) -> None:
        one = made(ONE, Repositories(aws).create(ONE))
        for tag in ("1", "2"):
            push(aws, tag, {"config": {"digest": f"sha256:{tag}"}})
        with pytest.raises(Conflict, match=r"holds 2 images.*skerry destroy --data"):
            Repositories(aws).delete(one)
        assert Repositories(aws).held(one) == Repositories(aws).empty(one) == Held(objects=2, noun="image")
        Repositories(aws).delete(one)
        assert Repositories(aws).held(one) == Repositories(aws).empty(one) == Held(objects=0, noun="image")
        assert list(Repositories(aws).read([ONE])) == [None]

    def test_images_that_do_not_go_are_told(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        one = made(ONE, Repositories(aws).create(ONE))
        monkeypatch.setattr(Repositories, "_images", lambda _self, _made: [{"imageDigest": "sha256:x"}])
        with pytest.raises(Retryable, match="none of the 1 images"):
            Repositories(aws).empty(one)

    def test_another_accounts_repository_is_not_made_here(self, aws: Aws) -> None:
        with pytest.raises(Conflict, match=rf"account 999999999999's, and this is account {ACCOUNT}.*byo"):
            Repositories(aws).create(wanted(replace(REPOSITORY, registry="999999999999")))

    def test_of_the_users_own_no_rules_are_read(self, aws: Aws) -> None:
        aws.call("ecr", REGION, "create_repository", repositoryName="acme/train")
        (seen,) = Repositories(aws).read([wanted(replace(REPOSITORY, brought=True))])
        assert seen is not None
        assert seen.outputs["uri"] == f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/acme/train"
        assert "untagged_days" not in seen.settings


def test_the_requests_are_those_of_the_golden_file() -> None:
    requests = {"CreateRepository": create_request(ONE), "PutLifecyclePolicy": lifecycle_request(ONE)}
    for operation, request in requests.items():
        check_model("ecr", operation, request)
    check_golden("repository", requests)


@pytest.mark.parametrize(
    ("name", "repository", "reference"),
    [
        ("acme/train@sha256:ab", "acme/train", "sha256:ab"),
        ("acme/train:1@sha256:ab", "acme/train", "sha256:ab"),
        ("train:1", "train", "1"),
        ("train", "train", "latest"),
    ],
)
def test_an_images_name_has_parts(name: str, repository: str, reference: str) -> None:
    found = image_in_ecr(f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/{name}")
    assert found == Image(registry=ACCOUNT, region=REGION, repository=repository, reference=reference)
    assert found.is_pinned is reference.startswith("sha256:")


@pytest.mark.parametrize("name", ["ghcr.io/acme/train:1", "busybox", "123.dkr.ecr.eu-central-1.amazonaws.com/x"])
def test_other_registries_are_told_from_ecr(name: str) -> None:
    assert image_in_ecr(name) is None


def test_the_architecture_of_an_image_is_read_from_its_configuration(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    Repositories(aws).create(ONE)
    digest = push(aws, "1", {"config": {"digest": "sha256:cc"}})
    call = type(aws).call

    def with_layers(self: Aws, service: str, region: str, operation: str, /, **parameters: object) -> dict[str, Any]:
        if operation == "get_download_url_for_layer":  # the account in memory keeps no layers
            return {"downloadUrl": f"https://layers/{parameters['layerDigest']}"}
        return call(self, service, region, operation, **parameters)

    monkeypatch.setattr(type(aws), "call", with_layers)
    layers = {"https://layers/sha256:cc": b'{"architecture": "arm64", "os": "linux"}'}
    assert architectures(aws, image(digest), layers.__getitem__) == {"arm64"}


def test_the_architectures_of_an_index_are_those_of_its_images(aws: Aws) -> None:
    Repositories(aws).create(ONE)
    platforms = [{"architecture": "amd64"}, {"architecture": "arm64"}, {"architecture": "unknown"}]
    parts = [
        {"digest": f"sha256:{number}", "mediaType": MANIFEST, "platform": one} for number, one in enumerate(platforms)
    ]
    digest = push(aws, "1", {"manifests": parts}, INDEX)
    assert architectures(aws, image(digest)) == {"amd64", "arm64"}


def test_what_is_no_image_is_told(aws: Aws) -> None:
    with pytest.raises(Absent):
        architectures(aws, image("sha256:" + "0" * 64))
    Repositories(aws).create(ONE)
    with pytest.raises(Absent, match="no image sha256:000"):
        architectures(aws, image("sha256:" + "0" * 64))
    with pytest.raises(Invalid, match="names no configuration"):
        architectures(aws, image(push(aws, "1", {"layers": []})))


def test_what_ecr_signed_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "config").write_bytes(b"{}")
    assert fetched((tmp_path / "config").as_uri()) == b"{}"
    with pytest.raises(Retryable, match="cannot fetch"):
        fetched((tmp_path / "none").as_uri())
