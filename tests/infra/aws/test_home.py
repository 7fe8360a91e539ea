"""A run's home: what it needs of AWS for its store and its image, and what is wrong told before anything is made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.aws.account import ACCOUNT, OTHER, REGION, RUN, Account, wanted
from tests.infra.aws.test_registry import ONE as REPOSITORY
from tests.infra.aws.test_registry import push
from tests.infra.aws.test_storage import ONE as BUCKET
from tests.infra.ground import brought, checks_of, failing, ground_from, write_spec
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.home import AwsHome, open_home, place
from skerry.infra.clouds.aws.registry import Repositories, Repository
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.aws.storage import Bucket, Buckets
from skerry.infra.graph import Graph
from skerry.runtime.errors import Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.target import Check, Ground, Home

DIGEST: Final = f"sha256:{'a' * 64}"
IMAGE: Final = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/acme/train@{DIGEST}"
GROUPS: Final = """\
  - {name: batch, count: 2, target: {kind: aws_batch, region: eu-central-1, instance_types: [c6i.xlarge]}}
  - {name: far, count: 2, target: {kind: aws_batch, region: us-west-2, instance_types: [c6i.xlarge]}}
"""


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    path = write_spec(tmp_path, GROUPS, run="tiny-gpt", store="s3://acme-runs/teams", image="ghcr.io/acme/train:1")
    return replace(ground_from(path), image=IMAGE)


def checks(aws: Aws, ground: Ground) -> dict[str, Check]:
    return checks_of(AwsHome(aws), ground)


def test_a_run_needs_its_bucket_and_its_images_repository(ground: Ground) -> None:
    bucket, repository = open_home(FakeClock(), {}).resources(ground)
    assert isinstance(bucket, Bucket)
    assert isinstance(repository, Repository)
    assert (bucket.address, bucket.name, bucket.region) == ("aws_bucket.store", "acme-runs", REGION)
    assert bucket.protected == tuple(
        f"teams/tiny-gpt/{folder}/*" for folder in ("commits", "exchanges", "contributions", "receipts")
    )
    assert (repository.name, repository.registry, repository.region) == ("acme/train", ACCOUNT, REGION)
    assert not bucket.brought
    assert not repository.brought
    assert len(Graph([bucket, repository])) == 2


def test_the_users_own_are_used_as_they_are(ground: Ground) -> None:
    home = open_home(FakeClock(), {})
    assert [one.brought for one in home.resources(brought(ground, bucket=True))] == [True, False]
    assert [one.brought for one in home.resources(brought(ground, repository=True))] == [False, True]


def test_a_store_is_opened_in_its_buckets_region(aws: Aws, ground: Ground) -> None:
    mine = brought(ground, bucket=True)
    home = AwsHome(aws)
    assert [home.environment(one) for one in (ground, mine)] == [{"AWS_REGION": REGION}] * 2
    Buckets(aws).create(wanted(replace(BUCKET.resource, region="us-west-2"), OTHER))
    assert [home.environment(one)["AWS_REGION"] for one in (ground, mine)] == [REGION, "us-west-2"]


def test_an_image_elsewhere_needs_no_repository(ground: Ground) -> None:
    elsewhere = replace(ground, image=f"ghcr.io/acme/train@{DIGEST}")
    assert [one.KIND for one in open_home(FakeClock(), {}).resources(elsewhere)] == ["aws_bucket"]


def test_what_is_made_is_found_again(aws: Aws, ground: Ground) -> None:
    home: Home = AwsHome(aws)
    assert home.identity() == {"aws": ACCOUNT}
    for resource in home.resources(ground):
        handler = home.handlers()[resource.KIND]
        handler.create(wanted(resource))
        assert [made.address for made in handler.owned(RUN, [REGION])] == [resource.address]


def test_before_anything_is_made_all_but_the_image_is_well(aws: Aws, ground: Ground) -> None:
    told = checks(aws, ground)
    assert [told[name].ok for name in ("AWS credentials", "bucket", "image")] == [True, True, False]
    assert ACCOUNT in told["AWS credentials"].text
    assert told["bucket"].text == f"the name acme-runs is free: it will be made in {REGION}"
    assert "push it" in told["image"].advice


def test_without_credentials_nothing_else_is_asked(ground: Ground, monkeypatch: pytest.MonkeyPatch, aws: Aws) -> None:
    monkeypatch.setattr(Aws, "identity", failing(Unauthorized("no AWS credentials")))
    (check,) = AwsHome(aws).checks(ground)
    assert (check.name, check.ok) == ("AWS credentials", False)
    assert check.advice


@pytest.mark.parametrize(
    ("run", "ok", "text"), [(RUN, True, "of this run"), (OTHER, False, f"belongs to the run {OTHER}")]
)
def test_a_bucket_that_is_there_is_ours_or_not(aws: Aws, ground: Ground, run: str, ok: bool, text: str) -> None:  # noqa: FBT001
    Buckets(aws).create(wanted(BUCKET.resource, run))
    check = checks(aws, ground)["bucket"]
    assert check.ok is ok
    assert text in check.text
    assert ("byo: {bucket: true}" in check.advice) is not ok


def test_the_users_own_bucket_must_be_there(aws: Aws, ground: Ground) -> None:
    assert checks(aws, brought(ground, bucket=True))["bucket"].ok is False
    Buckets(aws).create(wanted(BUCKET.resource, OTHER))
    check = checks(aws, brought(ground, bucket=True))["bucket"]
    assert (check.ok, check.text) == (True, "acme-runs is there, and yours")


@pytest.mark.parametrize("mine", [True, False])
def test_a_bucket_in_another_region_is_told(aws: Aws, ground: Ground, mine: bool) -> None:  # noqa: FBT001
    Buckets(aws).create(wanted(replace(BUCKET.resource, region="us-west-2")))
    check = checks(aws, brought(ground, bucket=mine))["bucket"]
    assert check.ok is mine
    assert "acme-runs is in us-west-2, replicas are in eu-central-1" in check.text


def test_an_image_is_there_for_the_machines_or_not(aws: Aws, ground: Ground) -> None:
    Repositories(aws).create(REPOSITORY)
    manifests = {
        machine: push(
            aws, machine, {"manifests": [{"digest": f"sha256:{machine}", "platform": {"architecture": machine}}]}
        )
        for machine in ("amd64", "arm64")
    }
    for machine, ok in (("amd64", True), ("arm64", False)):
        image = IMAGE.replace(DIGEST, manifests[machine])
        check = checks(aws, replace(ground, image=image))["image"]
        assert check.ok is ok
        assert machine in check.text
    assert "--platform linux/amd64" in check.advice


def test_an_image_by_tag_or_elsewhere_is_told(aws: Aws, ground: Ground) -> None:
    by_tag = checks(aws, replace(ground, image=IMAGE.replace(f"@{DIGEST}", ":1")))["image"]
    assert (by_tag.ok, by_tag.advice) == (False, "name it by its digest: repository@sha256:...")
    assert checks(aws, replace(ground, image="ghcr.io/acme/train@sha256:x"))["image"].ok is None


@pytest.mark.parametrize(
    ("error", "ok"), [(Unauthorized("right"), False), (Retryable("busy"), None), (Invalid("odd"), False)]
)
def test_what_cannot_be_looked_at_is_told(
    aws: Aws,
    ground: Ground,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    ok: bool | None,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(Buckets, "look", failing(error))
    check = checks(aws, ground)["bucket"]
    assert (check.ok, check.text) == (ok, str(error))


def test_a_place_is_a_bucket_and_a_prefix() -> None:
    assert place(RUN) == ("acme-runs", "teams/tiny-gpt")
    for uri in ("gs://acme/x", "s3://acme", "s3:///x", "file:///x"):
        with pytest.raises(Invalid, match="needs a store in S3"):
            place(uri)


def test_a_bucket_is_made_where_the_first_group_with_a_region_is(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    assert open_home(FakeClock(), {"AWS_REGION": "eu-west-1"}).region_of(ground) == REGION
    nowhere = replace(ground, spec=ground.spec.model_copy(update={"replicas": ()}))
    with pytest.raises(Invalid, match="so the bucket has none; set AWS_REGION"):
        open_home(FakeClock(), {}).region_of(nowhere)
    assert open_home(FakeClock(), {"AWS_REGION": "eu-west-1"}).region_of(nowhere) == "eu-west-1"


def test_nothing_is_asked_before_it_is_needed(account: Account, ground: Ground) -> None:
    asked: list[str] = []
    aws = Aws(FakeClock(), account.environment, client_made=lambda service, _client: asked.append(service))
    home = AwsHome(aws)
    home.resources(ground)
    home.handlers()
    home.environment(ground)
    assert asked == []
