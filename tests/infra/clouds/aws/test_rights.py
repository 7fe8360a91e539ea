"""The role of a replica as AWS judges it: all calls of a replica are allowed, all others denied."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.clouds.aws.account import REGION, Account, environment, wanted
from tests.infra.clouds.aws.test_iam import ROLE
from tests.infra.clouds.aws.test_s3 import ONE
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.iam import Roles
from skerry.infra.clouds.aws.s3 import Buckets
from skerry.infra.clouds.aws.session import Aws
from skerry.runtime.errors import Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.store import open_store
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable

RUN: Final = "teams/tiny-gpt"
MINE: Final = "batch-0"
OTHERS: Final = "batch-1"
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
    f"{keys.PROBE}{DIGEST}",
)
DELETED: Final = (
    keys.payload(1, OTHERS, DIGEST),
    keys.checkpoint_manifest(1),
    keys.checkpoint_part(1, DIGEST, keys.private_prefix(MINE)),
    keys.checkpoint_manifest(1, keys.unfinished_prefix(MINE)),
    f"{keys.PROBE}{DIGEST}",
)
THERE: Final = (
    keys.RUN,
    keys.code("0" * 64),
    keys.pin(1),
    keys.commit(0),
    keys.heartbeat(OTHERS),
    "state/00000001.json",
)


@pytest.fixture
def role(aws: Aws, account: Account) -> dict[str, str]:
    """The run's bucket with something in it, and the environment of one replica's job."""
    Buckets(aws).create(ONE)
    outputs = Roles(aws).create(wanted(replace(ROLE, managed=())))
    region = {"CreateBucketConfiguration": {"LocationConstraint": REGION}}
    aws.call("s3", REGION, "create_bucket", Bucket="another-bucket", **region)
    for key in (*THERE, keys.payload(1, OTHERS, DIGEST)):
        aws.call("s3", REGION, "put_object", Bucket="acme-runs", Key=f"{RUN}/{key}", Body=b"1", IfNoneMatch="*")
    aws.call("s3", REGION, "put_object", Bucket="acme-runs", Key="teams/tiny-gpt-2/run.json", Body=b"1")
    session = aws.call("sts", "", "assume_role", RoleArn=outputs["arn"], RoleSessionName="replica")["Credentials"]
    account.enforce()
    keys_of_it = {
        "AWS_ACCESS_KEY_ID": session["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": session["SecretAccessKey"],
        "AWS_SESSION_TOKEN": session["SessionToken"],
    }
    return environment(account.endpoint, **keys_of_it)


@pytest.fixture
def replica(role: dict[str, str]) -> Aws:
    return Aws(FakeClock(), role)


def ask(aws: Aws, operation: str, key: str = "", **more: Any) -> dict[str, Any]:
    where = {"Bucket": "acme-runs"} | ({"Key": f"{RUN}/{key}"} if key else {})
    return aws.call("s3", REGION, operation, **where | more)


def test_replica_store_works_with_its_role(role: dict[str, str]) -> None:
    store = open_store(f"s3://acme-runs/{RUN}", clock=FakeClock(), deadline_s=20, environment=role)
    probe(store, FakeClock())
    for key in THERE:
        assert bytes(store.read(key) or b"") == b"1"
    for key in CREATED:
        assert store.read(key) is None
        assert store.create(key, b"mine")
        assert not store.create(key, b"again")
        assert bytes(store.read(key) or b"") == b"mine"
    for _ in range(2):
        store.replace(keys.heartbeat(MINE), b"beat")
    assert [entry.key for entry in store.list(keys.COMMITS)] == [keys.commit(0), keys.commit(1)]
    for folder in ("", keys.HEARTBEATS, keys.contributions_prefix(1, 0)):
        assert list(store.list(folder))
    for key in DELETED:
        store.delete(key)
        store.delete(key)
    with pytest.raises(Unauthorized):
        store.replace(keys.commit(0), b"another")
    with pytest.raises(Unauthorized):
        store.create(keys.heartbeat(OTHERS), b"dead")
    with pytest.raises(Unauthorized):
        store.delete(keys.commit(0))


FORBIDDEN: Final[dict[str, Callable[[Aws], object]]] = {
    "overwrite run.json": lambda aws: ask(aws, "put_object", keys.RUN, Body=b"x"),
    "create run.json": lambda aws: ask(aws, "put_object", keys.RUN, Body=b"x", IfNoneMatch="*"),
    "overwrite a commit": lambda aws: ask(aws, "put_object", keys.commit(0), Body=b"x"),
    "overwrite a checkpoint": lambda aws: ask(aws, "put_object", keys.checkpoint_manifest(0), Body=b"x"),
    "overwrite its own contribution": lambda aws: ask(aws, "put_object", keys.contribution(0, 0, MINE), Body=b"x"),
    "delete a commit": lambda aws: ask(aws, "delete_object", keys.commit(0)),
    "delete its own contribution": lambda aws: ask(aws, "delete_object", keys.contribution(0, 0, MINE)),
    "delete run.json": lambda aws: ask(aws, "delete_object", keys.RUN),
    "delete a pin": lambda aws: ask(aws, "delete_object", keys.pin(1)),
    "pin a round": lambda aws: ask(aws, "put_object", keys.pin(2), Body=b"x", IfNoneMatch="*"),
    "upload code": lambda aws: ask(aws, "put_object", keys.code("1" * 64), Body=b"x", IfNoneMatch="*"),
    "take the state": lambda aws: ask(aws, "put_object", "state/00000002.json", Body=b"x", IfNoneMatch="*"),
    "beat another's heart": lambda aws: ask(aws, "put_object", keys.heartbeat(OTHERS), Body=b"x"),
    "contribute for another": lambda aws: ask(
        aws, "put_object", keys.contribution(1, 0, OTHERS), Body=b"x", IfNoneMatch="*"
    ),
    "fence another": lambda aws: ask(aws, "put_object", keys.member(OTHERS, 9), Body=b"x", IfNoneMatch="*"),
    "send another's payload": lambda aws: ask(
        aws, "put_object", keys.payload(1, OTHERS, DIGEST), Body=b"x", IfNoneMatch="*"
    ),
    "delete another's private state": lambda aws: ask(
        aws, "delete_object", keys.checkpoint_manifest(1, keys.private_prefix(OTHERS))
    ),
    "read another run": lambda aws: ask(aws, "get_object", Key="teams/tiny-gpt-2/run.json"),
    "write to another run": lambda aws: ask(
        aws, "put_object", Key="teams/tiny-gpt-2/heartbeats/batch-0.json", Body=b"x"
    ),
    "list another run": lambda aws: ask(aws, "list_objects_v2", Prefix="teams/tiny-gpt-2/"),
    "list the whole bucket": lambda aws: ask(aws, "list_objects_v2"),
    "list another bucket": lambda aws: ask(aws, "list_objects_v2", Bucket="another-bucket", Prefix=f"{RUN}/"),
    "write to another bucket": lambda aws: ask(
        aws, "put_object", keys.commit(1), Bucket="another-bucket", Body=b"x", IfNoneMatch="*"
    ),
    "change the bucket's policy": lambda aws: ask(aws, "delete_bucket_policy"),
    "list roles": lambda aws: aws.call("iam", "", "list_roles"),
    "give itself rights": lambda aws: aws.call(
        "iam", "", "put_role_policy", RoleName=ROLE.name, PolicyName="x", PolicyDocument="{}"
    ),
    "start a job": lambda aws: aws.call(
        "batch", REGION, "submit_job", jobName="xx", jobQueue="queue", jobDefinition="definition"
    ),
}


def test_replica_role_allows_no_other_call(replica: Aws) -> None:
    done: list[str] = []
    for what, attempt in FORBIDDEN.items():
        try:
            attempt(replica)
        except Unauthorized as error:
            assert "lack the permission" in str(error)  # noqa: PT017  each is asked, and all that is wrong is told at once
            continue
        done.append(what)
    assert done == []
