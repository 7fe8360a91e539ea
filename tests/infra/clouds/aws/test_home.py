"""The home of a run on AWS: its resources, its environment and its checks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.aws.account import ACCOUNT, OTHER, REGION, RUN, Account, wanted
from tests.infra.clouds.aws.test_s3 import ONE as BUCKET
from tests.infra.kit import brought, checks_of, failing, ground_from, write_spec
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.ecr import Repository
from skerry.infra.clouds.aws.home import AwsHome, open_home
from skerry.infra.clouds.aws.s3 import Bucket, Buckets
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.provision.graph import Graph
from skerry.runtime.errors import Invalid, Unauthorized

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target import Check, RunContext, StoreCloud

DIGEST: Final = f"sha256:{'a' * 64}"
IMAGE: Final = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/acme/train@{DIGEST}"
GROUPS: Final = """\
  - {name: batch, count: 2, target: {kind: aws_batch, region: eu-central-1, instance_types: [c6i.xlarge]}}
  - {name: far, count: 2, target: {kind: aws_batch, region: us-west-2, instance_types: [c6i.xlarge]}}
"""


@pytest.fixture
def ground(tmp_path: Path) -> RunContext:
    path = write_spec(tmp_path, GROUPS, run="tiny-gpt", store="s3://acme-runs/teams", image="ghcr.io/acme/train:1")
    return replace(ground_from(path), image=IMAGE)


def checks(aws: Aws, ground: RunContext) -> dict[str, Check]:
    return checks_of(AwsHome(aws), ground)


def test_run_needs_bucket_and_repository(ground: RunContext) -> None:
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


def test_brought_resources_are_marked(ground: RunContext) -> None:
    home = open_home(FakeClock(), {})
    assert [resource.brought for resource in home.resources(brought(ground, bucket=True))] == [True, False]
    assert [resource.brought for resource in home.resources(brought(ground, repository=True))] == [False, True]


def test_environment_has_the_region_of_the_bucket(aws: Aws, ground: RunContext) -> None:
    mine = brought(ground, bucket=True)
    home = AwsHome(aws)
    assert [home.environment(context) for context in (ground, mine)] == [{"AWS_REGION": REGION}] * 2
    Buckets(aws).create(wanted(replace(BUCKET.resource, region="us-west-2"), OTHER))
    assert [home.environment(context)["AWS_REGION"] for context in (ground, mine)] == [REGION, "us-west-2"]


def test_image_of_another_registry_needs_no_repository(ground: RunContext) -> None:
    elsewhere = replace(ground, image=f"ghcr.io/acme/train@{DIGEST}")
    assert [resource.KIND for resource in open_home(FakeClock(), {}).resources(elsewhere)] == ["aws_bucket"]


def test_created_resources_are_listed_as_owned(aws: Aws, ground: RunContext) -> None:
    home: StoreCloud = AwsHome(aws)
    assert home.identity() == {"aws": ACCOUNT}
    for resource in home.resources(ground):
        handler = home.handlers()[resource.KIND]
        handler.create(wanted(resource))
        assert [record.address for record in handler.list_owned(RUN, [REGION])] == [resource.address]


def test_checks_before_an_apply_miss_only_the_image(aws: Aws, ground: RunContext) -> None:
    by_name = checks(aws, ground)
    assert [by_name[name].ok for name in ("AWS credentials", "bucket", "image")] == [True, True, False]
    assert ACCOUNT in by_name["AWS credentials"].text
    assert by_name["bucket"].text == f"the name acme-runs is free: it will be created in {REGION}"
    assert "push it" in by_name["image"].advice


def test_missing_credentials_end_the_checks(ground: RunContext, monkeypatch: pytest.MonkeyPatch, aws: Aws) -> None:
    monkeypatch.setattr(Aws, "identity", failing(Unauthorized("no AWS credentials")))
    (check,) = AwsHome(aws).checks(ground)
    assert (check.name, check.ok) == ("AWS credentials", False)
    assert check.advice


def test_bucket_is_in_the_region_of_the_first_group(ground: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    assert open_home(FakeClock(), {"AWS_REGION": "eu-west-1"}).region_of(ground) == REGION
    nowhere = replace(ground, spec=ground.spec.model_copy(update={"replicas": ()}))
    with pytest.raises(Invalid, match="so the bucket has no region; set AWS_REGION"):
        open_home(FakeClock(), {}).region_of(nowhere)
    assert open_home(FakeClock(), {"AWS_REGION": "eu-west-1"}).region_of(nowhere) == "eu-west-1"


def test_planning_resources_makes_no_calls(account: Account, ground: RunContext) -> None:
    services: list[str] = []
    aws = Aws(FakeClock(), account.environment, client_made=lambda service, _client: services.append(service))
    home = AwsHome(aws)
    home.resources(ground)
    home.handlers()
    home.environment(ground)
    assert services == []
