"""A mirror as the clouds in memory judge it: replicas create and read all of it, and overwrite nothing that decides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.aws import account as aws_kit
from tests.infra.clouds.aws.test_iam import ROLE
from tests.infra.clouds.aws.test_s3 import ONE as S3_BUCKET
from tests.infra.clouds.google import kit as google_kit
from tests.infra.clouds.google.test_gcs import ONE as GCS_BUCKET
from tests.infra.clouds.google.test_service_accounts import ACCOUNT
from tests.infra.clouds.test_replica_calls import DIGEST, OTHERS, PREFIX, Replica, opened
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.iam import Roles
from skerry.infra.clouds.aws.policies import mirror_policy
from skerry.infra.clouds.aws.s3 import Buckets as S3Buckets
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.google.bucket_bindings import BucketBinding, BucketBindings
from skerry.infra.clouds.google.gcs import Buckets as GcsBuckets
from skerry.infra.clouds.google.replica_rules import mirror_rules
from skerry.infra.clouds.google.service_accounts import ServiceAccounts
from skerry.infra.clouds.google.session import Google
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.log import keys
from skerry.testing.aws.container_role_keys import role_keys
from skerry.testing.google import GoogleSandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OTHER_RUN: Final = f"acme-runs/{PREFIX}-2"
COPIED: Final = (
    keys.ELSEWHERE,
    keys.RUN,
    keys.code("0" * 64),
    keys.member(OTHERS, 1),
    keys.payload(1, OTHERS, DIGEST),
    keys.contribution(1, 0, OTHERS),
    keys.decision(1, 0),
    keys.commit(1),
    keys.receipt(1, OTHERS),
    keys.checkpoint_part(1, DIGEST),
    keys.checkpoint_manifest(1),
    keys.checkpoint_manifest(1, keys.private_prefix(OTHERS, 2)),
    keys.outcome(OTHERS, 1),
)
DELETED: Final = (
    keys.payload(1, OTHERS, DIGEST),
    keys.checkpoint_manifest(1),
    keys.checkpoint_manifest(1, keys.private_prefix(OTHERS, 2)),
)
FORBIDDEN: Final[dict[str, Callable[[Replica], object]]] = {
    **{
        f"delete {key}": lambda job, key=key: job.store().delete(key)
        for key in (keys.ELSEWHERE, keys.RUN, keys.commit(1), keys.decision(1, 0), keys.receipt(1, OTHERS))
    },
    **{
        f"overwrite {key}": lambda job, key=key: job.store().replace(key, b"x")
        for key in (keys.ELSEWHERE, keys.RUN, keys.commit(1), keys.member(OTHERS, 1))
    },
    "read beside the mirror": lambda job: job.store(OTHER_RUN).read(keys.RUN),
    "write beside the mirror": lambda job: job.store(OTHER_RUN).create(keys.commit(2), b"x"),
    "list beside the mirror": lambda job: list(job.store(OTHER_RUN).list("")),
}


def on_aws(*, goes_on: bool = False) -> Iterator[Replica]:
    with Sandbox(enforce_iam=True, region=aws_kit.REGION) as sandbox:
        aws = Aws(FakeClock(), sandbox.environment)
        S3Buckets(aws).create(S3_BUCKET)
        policies = {"mirrors": mirror_policy(bucket_arn="arn:aws:s3:::acme-runs", prefix=PREFIX, goes_on=goes_on)}
        role = Roles(aws).create(aws_kit.wanted(replace(ROLE, managed=(), policies=policies)))
        assert opened(f"s3://{OTHER_RUN}", sandbox.environment).create(keys.RUN, b"1")
        given = role_keys(role["arn"], "replica", aws_kit.REGION)
        yield Replica(scheme="s3", environment={**sandbox.environment, **given}, operator=sandbox.environment)


def on_google(*, goes_on: bool = False) -> Iterator[Replica]:
    with GoogleSandbox() as sandbox:
        google = Google(FakeClock(), sandbox.environment)
        GcsBuckets(google).create(GCS_BUCKET)
        email = ServiceAccounts(google).create(google_kit.wanted(ACCOUNT))["email"]
        binding = BucketBinding(
            key="mirror",
            name="skerry-tiny-gpt-batch",
            region="",
            bucket="acme-runs",
            member=f"serviceAccount:{email}",
            rules=mirror_rules(PREFIX, goes_on=goes_on),
        )
        BucketBindings(google).create(google_kit.wanted(binding))
        assert opened(f"gs://{OTHER_RUN}", sandbox.environment).create(keys.RUN, b"1")
        yield Replica(scheme="gs", environment=sandbox.acting_as(email), operator=sandbox.environment)
        assert list(sandbox.violations) == []


@pytest.fixture(params=[on_aws, on_google], ids=["aws", "google"])
def replica(request: pytest.FixtureRequest) -> Iterator[Replica]:
    """An empty mirror, and one replica's job."""
    yield from request.param()


def test_replica_keeps_a_mirror_and_can_do_nothing_else(replica: Replica) -> None:
    store = replica.store()
    for key in COPIED:
        assert store.read(key) is None
        assert store.create(key, b"1")
        assert not store.create(key, b"2")
    assert bytes(store.read(keys.RUN) or b"") == b"1"
    assert [entry.key for entry in store.list(keys.COMMITS)] == [keys.commit(1)]
    allowed: list[str] = []
    for what, attempt in FORBIDDEN.items():
        try:
            attempt(replica)
        except Unauthorized:
            continue
        allowed.append(what)
    assert allowed == []
    for spent in (b"1", b"2"):
        store.replace("spent/batch-0.json", spent)
    for key in DELETED:
        store.delete(key)
        assert store.read(key) is None


@pytest.mark.parametrize("place", [on_aws, on_google], ids=["aws", "google"])
def test_replica_makes_the_run_that_goes_on_beside_its_mirror(place: Callable[..., Iterator[Replica]]) -> None:
    for replica in place(goes_on=True):
        mirror, run = replica.store(), replica.store(f"acme-runs/{PREFIX}{keys.GOES_ON}")
        assert mirror.create(keys.vote(0, OTHERS), b"1")
        assert not mirror.create(keys.vote(0, OTHERS), b"2")
        for key in (keys.RUN, keys.member(OTHERS, 1), keys.commit(1), keys.checkpoint_manifest(1)):
            assert run.read(key) is None
            assert run.create(key, b"1")
        for body in (b"1", b"2"):
            run.replace(keys.heartbeat(OTHERS), body)
        run.delete(keys.checkpoint_manifest(1))
        for attempt in (
            lambda run=run: run.replace(keys.commit(1), b"2"),
            lambda run=run: run.delete(keys.commit(1)),
            lambda mirror=mirror: mirror.replace(keys.vote(0, OTHERS), b"2"),
            lambda replica=replica: replica.store(OTHER_RUN).read(keys.RUN),
        ):
            with pytest.raises(Unauthorized):
                attempt()


@pytest.mark.parametrize("prefix", ["", "runs/*", "runs/$x"])
def test_prefix_that_would_widen_the_rights_is_refused(prefix: str) -> None:
    with pytest.raises(Invalid, match="must not be empty or contain"):
        mirror_policy(bucket_arn="arn:aws:s3:::acme-runs", prefix=prefix)
    with pytest.raises(Invalid, match="must not be empty or contain"):
        mirror_rules(prefix)
