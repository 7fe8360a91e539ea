"""A replica's store as the clouds in memory judge it: all calls of a replica are allowed, all others are denied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.clouds.aws import account as aws_kit
from tests.infra.clouds.aws.test_iam import ROLE
from tests.infra.clouds.aws.test_s3 import ONE as S3_BUCKET
from tests.infra.clouds.google import kit as google_kit
from tests.infra.clouds.google.test_gcs import ONE as GCS_BUCKET
from tests.infra.clouds.google.test_service_accounts import ACCOUNT
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.iam import Roles
from skerry.infra.clouds.aws.s3 import Buckets as S3Buckets
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.google.bucket_bindings import BucketBinding, BucketBindings
from skerry.infra.clouds.google.gcs import Buckets as GcsBuckets
from skerry.infra.clouds.google.replica_rules import replica_rules
from skerry.infra.clouds.google.service_accounts import ServiceAccounts
from skerry.infra.clouds.google.session import Google
from skerry.runtime.errors import Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.store import Store, open_store
from skerry.runtime.store.probe import probe
from skerry.testing.aws.container_role_keys import role_keys
from skerry.testing.google import GoogleSandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PREFIX: Final = "teams/tiny-gpt"
MINE: Final = "batch-0"
OTHERS: Final = "local-1"
DIGEST: Final = "0" * 32

CREATED: Final = (
    keys.member(MINE, 1),
    keys.payload(1, MINE, DIGEST),
    keys.contribution(1, 0, MINE),
    keys.decision(1, 0),
    keys.commit(1),
    keys.receipt(1, MINE),
    keys.checkpoint_part(1, DIGEST),
    keys.checkpoint_manifest(1),
    keys.checkpoint_part(1, DIGEST, keys.private_prefix(MINE)),
    keys.checkpoint_manifest(1, keys.private_prefix(MINE, 2)),
    keys.checkpoint_manifest(1, keys.unfinished_prefix(MINE)),
    keys.outcome(MINE, 1),
    keys.artifact(MINE, 1, 0, "sample.txt"),
    f"{keys.PROBE}{DIGEST}",
)
DELETED: Final = (
    keys.payload(1, MINE, DIGEST),
    keys.checkpoint_manifest(1),
    keys.checkpoint_part(1, DIGEST, keys.private_prefix(MINE)),
    keys.checkpoint_manifest(1, keys.unfinished_prefix(MINE)),
    f"{keys.PROBE}{DIGEST}",
)
OLD: Final = keys.payload(1, OTHERS, DIGEST)
EXISTING: Final = (
    keys.RUN,
    keys.code("0" * 64),
    keys.pin(1),
    keys.commit(0),
    keys.heartbeat(OTHERS),
    "state/00000001.json",
)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica's job. environment: of the job. operator: of its operator, with all rights."""

    scheme: str
    environment: Mapping[str, str]
    operator: Mapping[str, str]

    def store(self, place: str = f"acme-runs/{PREFIX}") -> Store:
        return opened(f"{self.scheme}://{place}", self.environment)


def opened(uri: str, environment: Mapping[str, str]) -> Store:
    return open_store(uri, clock=FakeClock(), deadline_s=20, environment=environment)


def fill(scheme: str, operator: Mapping[str, str]) -> None:
    """Write objects of the run, of another run, and of another bucket."""
    store = opened(f"{scheme}://acme-runs/{PREFIX}", operator)
    for key in (
        *EXISTING,
        keys.payload(1, OTHERS, DIGEST),
        keys.contribution(0, 0, MINE),
        keys.artifact(MINE, 0, 0, "a.txt"),
    ):
        assert store.create(key, b"1")
    for place in (f"acme-runs/{PREFIX}-2", f"another-bucket/{PREFIX}"):
        assert opened(f"{scheme}://{place}", operator).create(keys.RUN, b"1")


def on_aws() -> Iterator[Replica]:
    with Sandbox(enforce_iam=True, region=aws_kit.REGION) as sandbox:
        aws = Aws(FakeClock(), sandbox.environment)
        S3Buckets(aws).create(S3_BUCKET)
        role = Roles(aws).create(aws_kit.wanted(replace(ROLE, managed=())))
        region = {"CreateBucketConfiguration": {"LocationConstraint": aws_kit.REGION}}
        aws.call("s3", aws_kit.REGION, "create_bucket", Bucket="another-bucket", **region)
        fill("s3", sandbox.environment)
        given = role_keys(role["arn"], "replica", aws_kit.REGION)
        environment = {**sandbox.environment, **given}
        yield Replica(scheme="s3", environment=environment, operator=sandbox.environment)


def on_google(group: str | None) -> Iterator[Replica]:
    with GoogleSandbox() as sandbox:
        google = Google(FakeClock(), sandbox.environment)
        GcsBuckets(google).create(GCS_BUCKET)
        email = ServiceAccounts(google).create(google_kit.wanted(ACCOUNT))["email"]
        binding = BucketBinding(
            key="batch",
            name="skerry-tiny-gpt-batch",
            region="",
            bucket="acme-runs",
            member=f"serviceAccount:{email}",
            rules=replica_rules(prefix=PREFIX, slots=[MINE], group=group),
        )
        BucketBindings(google).create(google_kit.wanted(binding))
        body = {"name": "another-bucket", "location": "EUROPE-WEST4"}
        google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})
        fill("gs", sandbox.environment)
        yield Replica(scheme="gs", environment=sandbox.acting_as(email), operator=sandbox.environment)
        assert list(sandbox.violations) == []


@pytest.fixture(params=["aws", "google", "google group"])
def replica(request: pytest.FixtureRequest) -> Iterator[Replica]:
    """The run's bucket with something in it, and one replica's job."""
    match request.param:
        case "aws":
            yield from on_aws()
        case "google":
            yield from on_google(None)
        case _:
            yield from on_google(MINE.rpartition("-")[0])


def test_replica_store_works_with_its_permissions(replica: Replica) -> None:
    store = replica.store()
    probe(store, FakeClock())
    for key in EXISTING:
        assert bytes(store.read(key) or b"") == b"1"
    for key in CREATED:
        # A replica asks before it writes: what is not there must be absent, and not forbidden.
        assert store.read(key) is None
        assert store.create(key, b"mine")
        assert not store.create(key, b"again")
        assert bytes(store.read(key) or b"") == b"mine"
    for _ in range(2):
        store.replace(keys.heartbeat(MINE), b"beat")
    assert [entry.key for entry in store.list(keys.COMMITS)] == [keys.commit(0), keys.commit(1)]
    for folder in ("", keys.HEARTBEATS, keys.contributions_prefix(1, 0)):
        assert list(store.list(folder))
    for key in (*DELETED, *DELETED):
        store.delete(key)


FORBIDDEN: Final[dict[str, Callable[[Replica], object]]] = {
    "overwrite run.json": lambda job: job.store().replace(keys.RUN, b"x"),
    "create run.json": lambda job: job.store().create(keys.RUN, b"x"),
    "create code": lambda job: job.store().create(keys.code("1" * 64), b"x"),
    "overwrite a commit": lambda job: job.store().replace(keys.commit(0), b"x"),
    "overwrite its own contribution": lambda job: job.store().replace(keys.contribution(0, 0, MINE), b"x"),
    "delete a commit": lambda job: job.store().delete(keys.commit(0)),
    "delete its own contribution": lambda job: job.store().delete(keys.contribution(0, 0, MINE)),
    "delete another's payload": lambda job: job.store().delete(keys.payload(1, OTHERS, DIGEST)),
    "overwrite another's payload": lambda job: job.store().replace(keys.payload(1, OTHERS, DIGEST), b"x"),
    "send another's payload": lambda job: job.store().create(keys.payload(2, OTHERS, DIGEST), b"x"),
    "delete run.json": lambda job: job.store().delete(keys.RUN),
    "delete a pin": lambda job: job.store().delete(keys.pin(1)),
    "quarantine a record": lambda job: job.store().create(keys.quarantined(keys.commit(0), "0" * 64), b"x"),
    "pin a round": lambda job: job.store().create(keys.pin(2), b"x"),
    "take the state": lambda job: job.store().create("state/00000002.json", b"x"),
    "delete its own artifact": lambda job: job.store().delete(keys.artifact(MINE, 0, 0, "a.txt")),
    "overwrite its own artifact": lambda job: job.store().replace(keys.artifact(MINE, 0, 0, "a.txt"), b"x"),
    "save for another": lambda job: job.store().create(keys.artifact(OTHERS, 0, 0, "a.txt"), b"x"),
    "beat another's heart": lambda job: job.store().replace(keys.heartbeat(OTHERS), b"x"),
    "contribute for another": lambda job: job.store().create(keys.contribution(1, 0, OTHERS), b"x"),
    "fence another": lambda job: job.store().create(keys.member(OTHERS, 9), b"x"),
    "write another's private state": lambda job: job.store().create(
        keys.checkpoint_manifest(1, keys.private_prefix(OTHERS)), b"x"
    ),
    "delete another's private state": lambda job: job.store().delete(
        keys.checkpoint_manifest(1, keys.private_prefix(OTHERS))
    ),
    "read another run": lambda job: job.store(f"acme-runs/{PREFIX}-2").read(keys.RUN),
    "write to another run": lambda job: job.store(f"acme-runs/{PREFIX}-2").create(keys.heartbeat(MINE), b"x"),
    "list another run": lambda job: list(job.store(f"acme-runs/{PREFIX}-2").list("")),
    "list the whole bucket": lambda job: list(job.store("acme-runs/teams").list("")),
    "read another bucket": lambda job: job.store(f"another-bucket/{PREFIX}").read(keys.RUN),
    "list another bucket": lambda job: list(job.store(f"another-bucket/{PREFIX}").list("")),
    "write to another bucket": lambda job: job.store(f"another-bucket/{PREFIX}").create(keys.commit(1), b"x"),
}


def aws_call(service: str, operation: str, **parameters: Any) -> Callable[[Replica], object]:
    return lambda job: Aws(FakeClock(), job.environment).call(service, aws_kit.REGION, operation, **parameters)


FORBIDDEN_ON_AWS: Final = {
    "overwrite a checkpoint": lambda job: job.store().replace(keys.checkpoint_manifest(0), b"x"),
    "delete an old version": aws_call("s3", "delete_object", Bucket="acme-runs", Key=f"{PREFIX}/{OLD}", VersionId="1"),
    "change the bucket's policy": aws_call("s3", "delete_bucket_policy", Bucket="acme-runs"),
    "list roles": aws_call("iam", "list_roles"),
    "give itself rights": aws_call("iam", "put_role_policy", RoleName=ROLE.name, PolicyName="x", PolicyDocument="{}"),
    "start a job": aws_call("batch", "submit_job", jobName="xx", jobQueue="queue", jobDefinition="definition"),
}


def test_replica_permissions_allow_no_other_call(replica: Replica) -> None:
    attempts = FORBIDDEN | (FORBIDDEN_ON_AWS if replica.scheme == "s3" else {})
    done: list[str] = []
    for what, attempt in attempts.items():
        try:
            attempt(replica)
        except Unauthorized:
            continue
        done.append(what)
    assert done == []
