"""The home of a run on AWS: its resources, its environment and its checks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.aws.account import ACCOUNT, OTHER, REGION, wanted
from tests.infra.clouds.aws.test_s3 import BUCKET
from tests.infra.clouds.suites import HomeSuite
from tests.infra.kit import brought, checks_of, ground_from, write_spec
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.ecr import Repository
from skerry.infra.clouds.aws.run_bucket_and_image_repository import AwsHome, open_home
from skerry.infra.clouds.aws.s3 import Bucket, Buckets
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.provision.graph import Graph
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from skerry.infra.provision.target_and_store_interfaces import RunContext

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


class TestAwsHome(HomeSuite):
    NAME = "AWS"
    ACCOUNT = ("aws", ACCOUNT)
    KINDS = ("aws_bucket", "aws_repository")
    OTHER_IMAGES = (f"ghcr.io/acme/train@{DIGEST}",)

    def home(self, cloud: Aws) -> AwsHome:
        return AwsHome(cloud)

    def test_planning_resources_makes_no_calls(self, account: Mapping[str, str], ground: RunContext) -> None:
        services: list[str] = []
        aws = Aws(FakeClock(), account, client_made=lambda service, _client: services.append(service))
        self.assert_no_calls(aws, ground, services)


def test_run_needs_bucket_and_repository(ground: RunContext) -> None:
    bucket, repository = open_home(OperatorAccess(FakeClock(), {})).resources(ground)
    assert isinstance(bucket, Bucket)
    assert isinstance(repository, Repository)
    assert (bucket.address, bucket.name, bucket.region) == ("aws_bucket.store", "acme-runs", REGION)
    assert bucket.protected == tuple(
        f"*/{folder}/*" for folder in ("commits", "exchanges", "contributions", "receipts", "failover")
    )
    assert (repository.name, repository.registry, repository.region) == ("acme/train", ACCOUNT, REGION)
    assert not bucket.brought
    assert not repository.brought
    assert len(Graph([bucket, repository])) == 2


def test_environment_has_the_region_of_the_bucket(aws: Aws, ground: RunContext) -> None:
    mine = brought(ground, bucket=True)
    home = AwsHome(aws)
    assert [home.environment(context) for context in (ground, mine)] == [{"AWS_REGION": REGION}] * 2
    Buckets(aws).create(wanted(replace(BUCKET, region="us-west-2"), OTHER))
    assert [home.environment(context)["AWS_REGION"] for context in (ground, mine)] == [REGION, "us-west-2"]


def test_checks_before_an_apply_miss_only_the_image(aws: Aws, ground: RunContext) -> None:
    by_name = checks_of(AwsHome(aws), ground)
    assert [by_name[name].ok for name in ("AWS credentials", "bucket", "image")] == [True, True, False]
    assert ACCOUNT in by_name["AWS credentials"].text
    assert by_name["bucket"].text == f"the name acme-runs is free: it will be created in {REGION}"
    assert "push it" in by_name["image"].advice


def test_bucket_is_in_the_region_of_the_first_group(ground: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    assert open_home(OperatorAccess(FakeClock(), {"AWS_REGION": "eu-west-1"})).region_of(ground) == REGION
    nowhere = replace(ground, spec=ground.spec.model_copy(update={"replicas": ()}))
    with pytest.raises(Invalid, match="so the bucket has no region; set AWS_REGION"):
        open_home(OperatorAccess(FakeClock(), {})).region_of(nowhere)
    assert open_home(OperatorAccess(FakeClock(), {"AWS_REGION": "eu-west-1"})).region_of(nowhere) == "eu-west-1"
