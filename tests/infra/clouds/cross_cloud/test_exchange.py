"""What is made for a crossing lets a job in with no key of its own, for its keys alone, and nobody else at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.crossing.test_crossing import BATCH, PREFIX, VERTEX, batch_in_gcs, ground, vertex_in_s3
from tests.infra.google.ground import wanted
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.home import AwsHome
from skerry.infra.clouds.aws.identity import Role, Roles
from skerry.infra.clouds.aws.policies import trust_service
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.aws.storage import Bucket as S3Bucket
from skerry.infra.clouds.google.home import handlers
from skerry.infra.clouds.google.identity import ServiceAccount
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.google.storage import Bucket
from skerry.infra.graph import Graph, resolved
from skerry.infra.testing.google import GoogleSandbox
from skerry.infra.testing.google.crossing import Clouds
from skerry.infra.testing.roles import keys_of
from skerry.infra.testing.sandbox import Sandbox
from skerry.runtime import keys
from skerry.runtime.errors import SkerryError, Unauthorized
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.clouds.crossing import Crossing
    from skerry.infra.graph import Resource
    from skerry.infra.target import Ground
    from skerry.runtime.store import Store

__all__ = ["ground"]

DIGEST: Final = "0" * 32


@pytest.fixture
def both(request: pytest.FixtureRequest) -> Iterator[Clouds]:
    enforces: bool = request.cls.ENFORCES
    with Sandbox(enforce_iam=enforces, region="eu-central-1") as aws, GoogleSandbox() as google:
        yield Clouds(aws=aws, google=google)
        assert list(google.violations) == []


class Made:
    """All that a graph holds, made in its order, and what became known of each."""

    def __init__(self, clouds: Clouds, resources: list[Resource]) -> None:
        aws = Aws(FakeClock(), clouds.environment)
        google = Google(FakeClock(), clouds.environment)
        by_kind = {**AwsHome(aws).handlers(), Role.KIND: Roles(aws), **handlers(google)}
        self.outputs: dict[str, Mapping[str, str]] = {}
        for resource in Graph(resources):
            one = wanted(resource)
            settings = {name: resolved(value, self._look_up) for name, value in one.settings.items()}
            one = replace(one, settings=settings)
            self.outputs[resource.address] = by_kind[resource.KIND].create(one)

    def environment(self, crossing: Crossing) -> dict[str, str]:
        """What a job is told, as it is when all is made."""
        told = {name: resolved(value, self._look_up) for name, value in crossing.environment.items()}
        return {name: str(value) for name, value in told.items()}

    def _look_up(self, ref: object) -> str:
        return self.outputs[ref.address][ref.output]  # type: ignore[attr-defined]


def opened(uri: str, environment: Mapping[str, str]) -> Store:
    return open_store(uri, clock=FakeClock(), deadline_s=20, environment=environment)


def check_own_keys_alone(store: Store, mine: str, others: str) -> None:
    for key in (keys.member(mine, 1), keys.contribution(1, 0, mine), keys.commit(1)):
        assert store.read(key) is None
        assert store.create(key, b"mine")
        assert not store.create(key, b"again")
    for _ in range(2):
        store.replace(keys.heartbeat(mine), b"beat")
    assert [entry.key for entry in store.list(keys.COMMITS)] == [keys.commit(1)]
    for attempt in (
        lambda: store.replace(keys.commit(1), b"x"),
        lambda: store.delete(keys.commit(1)),
        lambda: store.create(keys.member(others, 1), b"x"),
        lambda: store.create(keys.pin(1), b"x"),
    ):
        with pytest.raises(Unauthorized):
            attempt()


class TestGoogleIntoAws:
    ENFORCES = True

    def job(self, both: Clouds, email: str, told: Mapping[str, str]) -> dict[str, str]:
        return {
            **both.google.acting_as(email),
            "AWS_ENDPOINT_URL": both.aws.endpoint,
            "SKERRY_SLOT": "vertex-0",
            **told,
        }

    def made(self, both: Clouds, ground: Ground) -> tuple[Made, Crossing]:
        bucket = S3Bucket(key="store", name="acme-runs", region="eu-central-1")
        named = {"name": "skerry-tiny-gpt-vertex", "region": ""}
        crossing = vertex_in_s3(ground)
        accounts = [
            ServiceAccount(key="vertex-all", **named),
            ServiceAccount(key="other", name="skerry-other", region=""),
        ]
        return Made(both, [bucket, *accounts, *crossing.resources]), crossing

    def test_a_job_is_let_in_for_its_own_keys(self, both: Clouds, ground: Ground) -> None:
        made, crossing = self.made(both, ground)
        email = made.outputs["google_service_account.vertex-all"]["email"]
        job = self.job(both, email, made.environment(crossing))
        assert not [name for name in job if "KEY" in name or "TOKEN" in name]
        check_own_keys_alone(opened(f"s3://acme-runs/{PREFIX}", job), "vertex-0", "local-0")
        assert VERTEX.group == "vertex"

    @pytest.mark.parametrize("wrong", ["account", "audience"])
    def test_nobody_else_is(self, both: Clouds, ground: Ground, wrong: str) -> None:
        made, crossing = self.made(both, ground)
        told = made.environment(crossing)
        who = "google_service_account.other" if wrong == "account" else "google_service_account.vertex-all"
        if wrong == "audience":
            told["SKERRY_AWS_AUDIENCE"] += "x"
        job = self.job(both, made.outputs[who]["email"], told)
        with pytest.raises(SkerryError, match="sub") as caught:
            opened(f"s3://acme-runs/{PREFIX}", job).read(keys.RUN)
        assert isinstance(caught.value, Unauthorized)


class TestAwsIntoGoogle:
    # Whoever asks AWS who he is needs no right to it, and moto wants one.
    ENFORCES = False

    def made(self, both: Clouds, ground: Ground) -> tuple[Made, Crossing]:
        bucket = Bucket(key="store", name="acme-runs", region="europe-west4")
        trust = (trust_service("ecs-tasks.amazonaws.com", both.aws.account),)
        roles = [
            Role(key=key, name=f"skerry-tiny-gpt-{key}", region="", trust=trust)
            for key in ("batch-0", "batch-1", "other")
        ]
        crossing = batch_in_gcs(ground)
        return Made(both, [bucket, *roles, *crossing.resources]), crossing

    def job(self, both: Clouds, role: str, told: Mapping[str, str]) -> dict[str, str]:
        """As its container finds it: keys that end, and no account of Google's."""
        given = keys_of(both.aws.client("iam").get_role(RoleName=role)["Role"]["Arn"], "task", "eu-central-1")
        return {
            "AWS_ENDPOINT_URL": both.aws.endpoint,
            "AWS_REGION": "eu-central-1",
            **given,
            "STORAGE_EMULATOR_HOST": both.google.endpoint,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STS": both.google.endpoint,
            **told,
        }

    def test_a_job_is_let_in_for_its_own_keys(self, both: Clouds, ground: Ground) -> None:
        made, crossing = self.made(both, ground)
        job = self.job(both, "skerry-tiny-gpt-batch-0", made.environment(crossing))
        check_own_keys_alone(opened(f"gs://acme-runs/{PREFIX}", job), BATCH.slots[0], "batch-1")

    def test_nobody_else_is(self, both: Clouds, ground: Ground) -> None:
        made, crossing = self.made(both, ground)
        job = self.job(both, "skerry-tiny-gpt-other", made.environment(crossing))
        with pytest.raises(Unauthorized, match="condition"):
            opened(f"gs://acme-runs/{PREFIX}", job).read(keys.RUN)

    def test_a_user_whose_path_imitates_a_role_is_not(self, both: Clouds, ground: Ground) -> None:
        made, crossing = self.made(both, ground)
        iam = both.aws.client("iam")
        iam.create_user(UserName="mallory", Path="/assumed-role/skerry-tiny-gpt-batch-0/")
        given = iam.create_access_key(UserName="mallory")["AccessKey"]
        job = self.job(both, "skerry-tiny-gpt-batch-0", made.environment(crossing))
        job |= {"AWS_ACCESS_KEY_ID": given["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": given["SecretAccessKey"]}
        del job["AWS_SESSION_TOKEN"]
        with pytest.raises(Unauthorized, match="condition"):
            opened(f"gs://acme-runs/{PREFIX}", job).read(keys.RUN)
