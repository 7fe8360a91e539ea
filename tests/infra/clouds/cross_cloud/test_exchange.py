"""Jobs in one cloud use a store in the other without keys of their own, and no other identity does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.cross_cloud.test_cross_cloud import BATCH, BUCKET, PREFIX, batch_in_gcs, ground, vertex_in_s3
from tests.infra.clouds.google.kit import wanted
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.iam import Role, Roles
from skerry.infra.clouds.aws.policies import trust_service
from skerry.infra.clouds.aws.run_bucket_and_image_repository import AwsHome
from skerry.infra.clouds.aws.s3 import Bucket as S3Bucket
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.google.run_bucket_and_image_repository import handlers
from skerry.infra.clouds.google.service_accounts import ServiceAccount
from skerry.infra.clouds.google.session import Google
from skerry.infra.provision.graph import Graph, resolved
from skerry.runtime.errors import SkerryError, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.store import open_store
from skerry.testing.aws.container_role_keys import role_keys
from skerry.testing.both_clouds import Clouds
from skerry.testing.google import GoogleSandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.clouds.cross_cloud import CrossCloudAccess
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.runtime.store import Store

__all__ = ["ground"]

DIGEST: Final = "0" * 32


@pytest.fixture
def both(request: pytest.FixtureRequest) -> Iterator[Clouds]:
    enforces: bool = request.cls.ENFORCES
    with Sandbox(enforce_iam=enforces, region="eu-central-1") as aws, GoogleSandbox() as google:
        yield Clouds(aws=aws, google=google)
        assert list(google.violations) == []


class CreatedGraph:
    """Creates the resources of a graph in order and records their outputs."""

    def __init__(self, clouds: Clouds, resources: list[Resource]) -> None:
        aws = Aws(FakeClock(), clouds.environment)
        google = Google(FakeClock(), clouds.environment)
        by_kind = {**AwsHome(aws).handlers(), Role.KIND: Roles(aws), **handlers(google)}
        self.outputs: dict[str, Mapping[str, str]] = {}
        for resource in Graph(resources):
            desired = wanted(resource)
            settings = {name: resolved(value, self._look_up) for name, value in desired.settings.items()}
            desired = replace(desired, settings=settings)
            self.outputs[resource.address] = by_kind[resource.KIND].create(desired)

    def environment(self, crossing: CrossCloudAccess) -> dict[str, str]:
        """The environment of a job, with all references resolved."""
        variables = {name: resolved(value, self._look_up) for name, value in crossing.environment.items()}
        return {name: str(value) for name, value in variables.items()}

    def _look_up(self, ref: object) -> str:
        return self.outputs[ref.address][ref.output]  # type: ignore[attr-defined]


def opened(uri: str, environment: Mapping[str, str]) -> Store:
    return open_store(uri, clock=FakeClock(), deadline_s=20, environment=environment)


def assert_only_own_keys_writable(store: Store, mine: str, others: str) -> None:
    """Assert that the job has the permissions of a replica; `test_replica_calls` has all of them."""
    assert store.create(keys.contribution(1, 0, mine), b"mine")
    assert not store.create(keys.contribution(1, 0, mine), b"again")
    store.replace(keys.heartbeat(mine), b"beat")
    assert [entry.key for entry in store.list(keys.HEARTBEATS)] == [keys.heartbeat(mine)]
    with pytest.raises(Unauthorized):
        store.replace(keys.contribution(1, 0, mine), b"x")
    with pytest.raises(Unauthorized):
        store.create(keys.member(others, 1), b"x")


class TestGoogleIntoAws:
    ENFORCES = True

    def job(self, both: Clouds, email: str, variables: Mapping[str, str]) -> dict[str, str]:
        account = both.google.acting_as(email)
        return {**account, "AWS_ENDPOINT_URL": both.aws.endpoint, "SKERRY_SLOT": "vertex-0", **variables}

    def created(self, both: Clouds, ground: RunContext) -> tuple[CreatedGraph, CrossCloudAccess]:
        bucket = S3Bucket(key="store", name="acme-runs", region="eu-central-1")
        crossing = vertex_in_s3(ground)
        accounts = [
            ServiceAccount(key="vertex-all", name="skerry-tiny-gpt-vertex", region=""),
            ServiceAccount(key="other", name="skerry-other", region=""),
        ]
        return CreatedGraph(both, [bucket, *accounts, *crossing.resources]), crossing

    def test_job_writes_only_its_own_keys(self, both: Clouds, ground: RunContext) -> None:
        created, crossing = self.created(both, ground)
        email = created.outputs["google_service_account.vertex-all"]["email"]
        job = self.job(both, email, created.environment(crossing))
        assert not [name for name in job if "KEY" in name or "TOKEN" in name]
        assert_only_own_keys_writable(opened(f"s3://acme-runs/{PREFIX}", job), "vertex-0", "local-0")

    @pytest.mark.parametrize("wrong", ["account", "audience"])
    def test_other_identities_are_refused(self, both: Clouds, ground: RunContext, wrong: str) -> None:
        created, crossing = self.created(both, ground)
        variables = created.environment(crossing)
        who = "google_service_account.other" if wrong == "account" else "google_service_account.vertex-all"
        if wrong == "audience":
            variables["SKERRY_AWS_AUDIENCE"] += "x"
        job = self.job(both, created.outputs[who]["email"], variables)
        with pytest.raises(SkerryError, match="sub") as caught:
            opened(f"s3://acme-runs/{PREFIX}", job).read(keys.RUN)
        assert isinstance(caught.value, Unauthorized)


class TestAwsIntoGoogle:
    # GetCallerIdentity needs no permission in AWS, but moto requires one.
    ENFORCES = False

    def created(self, both: Clouds, ground: RunContext) -> tuple[CreatedGraph, CrossCloudAccess]:
        trust = (trust_service("ecs-tasks.amazonaws.com", both.aws.account),)
        roles = [
            Role(key=key, name=f"skerry-tiny-gpt-{key}", region="", trust=trust)
            for key in ("batch-0", "batch-1", "other")
        ]
        crossing = batch_in_gcs(ground)
        return CreatedGraph(both, [BUCKET, *roles, *crossing.resources]), crossing

    def job(self, both: Clouds, role: str, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment of a container: temporary keys, and no account of Google."""
        given = role_keys(both.aws.client("iam").get_role(RoleName=role)["Role"]["Arn"], "task", "eu-central-1")
        return {
            "AWS_ENDPOINT_URL": both.aws.endpoint,
            "AWS_REGION": "eu-central-1",
            **given,
            "STORAGE_EMULATOR_HOST": both.google.endpoint,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STS": both.google.endpoint,
            **variables,
        }

    def test_job_writes_only_its_own_keys(self, both: Clouds, ground: RunContext) -> None:
        created, crossing = self.created(both, ground)
        job = self.job(both, "skerry-tiny-gpt-batch-0", created.environment(crossing))
        assert_only_own_keys_writable(opened(f"gs://acme-runs/{PREFIX}", job), BATCH.slots[0], "batch-1")

    def test_other_identities_are_refused(self, both: Clouds, ground: RunContext) -> None:
        created, crossing = self.created(both, ground)
        job = self.job(both, "skerry-tiny-gpt-other", created.environment(crossing))
        with pytest.raises(Unauthorized, match="condition"):
            opened(f"gs://acme-runs/{PREFIX}", job).read(keys.RUN)

    def test_user_with_the_path_of_a_role_is_refused(self, both: Clouds, ground: RunContext) -> None:
        created, crossing = self.created(both, ground)
        iam = both.aws.client("iam")
        iam.create_user(UserName="mallory", Path="/assumed-role/skerry-tiny-gpt-batch-0/")
        given = iam.create_access_key(UserName="mallory")["AccessKey"]
        job = self.job(both, "skerry-tiny-gpt-batch-0", created.environment(crossing))
        job |= {"AWS_ACCESS_KEY_ID": given["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": given["SecretAccessKey"]}
        del job["AWS_SESSION_TOKEN"]
        with pytest.raises(Unauthorized, match="condition"):
            opened(f"gs://acme-runs/{PREFIX}", job).read(keys.RUN)
