"""Policy documents: each permission, and the limits of IAM."""

from __future__ import annotations

import fnmatch
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.clouds.aws.account import ACCOUNT, check_golden
from tests.infra.kit import plain

from skerry.infra.clouds.aws.policies import (
    INLINE_LIMIT,
    Statement,
    bucket_policy,
    decisive,
    document,
    normal,
    replica_policy,
    statements_of,
    text_of,
    trust_service,
)
from skerry.infra.provision.graph import Ref, refs
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Sequence

BUCKET = "arn:aws:s3:::acme-runs"
PREFIX = "teams/tiny-gpt"
DIGEST = "0" * 32

OF_A_SLOT = [
    keys.member("batch-1", 3),
    keys.payload(7, "batch-1", DIGEST),
    keys.contribution(7, 2, "batch-1"),
    keys.receipt(7, "batch-1"),
    keys.outcome("batch-1", 3),
    keys.checkpoint_part(7, DIGEST, keys.private_prefix("batch-1")),
    keys.checkpoint_manifest(7, keys.private_prefix("batch-1", 3)),
    keys.checkpoint_part(7, DIGEST, keys.unfinished_prefix("batch-1")),
]
SHARED = [
    keys.decision(7, 2),
    keys.commit(7),
    keys.checkpoint_part(7, DIGEST),
    keys.checkpoint_manifest(7),
    f"{keys.PROBE}{DIGEST}",
]
NEVER = [keys.RUN, keys.code("0" * 64), keys.pin(7), "state/00000001.json", "state/00000001/000001.json"]


def policy(*, slots: Sequence[str] = ("batch-1",), group: str | None = None) -> tuple[Statement, ...]:
    return replica_policy(bucket_arn=BUCKET, prefix=PREFIX, slots=slots, group=group)


def allowing(statements: Sequence[Statement], action: str, key: str) -> list[Statement]:
    """The statements that allow it, by their patterns alone."""
    return [
        statement
        for statement in statements
        if action in statement.actions
        and any(fnmatch.fnmatchcase(f"{BUCKET}/{PREFIX}/{key}", str(pattern)) for pattern in statement.resources)
    ]


@pytest.mark.parametrize("key", [*OF_A_SLOT, *SHARED])
def test_replica_creates_and_never_overwrites(key: str) -> None:
    for statements in (policy(), policy(slots=["batch-0", "batch-1"], group="batch")):
        statements_found = allowing(statements, "s3:PutObject", key)
        assert statements_found
        assert all(first.conditions == {"Null": {"s3:if-none-match": ("false",)}} for first in statements_found)
        assert allowing(statements, "s3:GetObject", key)
        is_bulk = key.startswith((keys.PAYLOADS, keys.PRIVATE, keys.UNFINISHED, keys.CHECKPOINTS))
        assert bool(allowing(statements, "s3:AbortMultipartUpload", key)) is is_bulk


def test_only_the_own_heartbeat_is_replaced() -> None:
    (statements_found,) = allowing(policy(), "s3:PutObject", keys.heartbeat("batch-1"))
    assert not statements_found.conditions
    assert [first for first in policy() if "s3:PutObject" in first.actions and not first.conditions] == [
        statements_found
    ]


@pytest.mark.parametrize("key", NEVER)
def test_replica_cannot_write_operator_objects(key: str) -> None:
    for action in ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"):
        assert not allowing(policy(), action, key)
    assert allowing(policy(), "s3:GetObject", key)


@pytest.mark.parametrize("key", [key.replace("batch-1", "batch-2") for key in OF_A_SLOT])
@pytest.mark.parametrize("action", ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"])
def test_replica_cannot_write_or_delete_objects_of_another_slot(action: str, key: str) -> None:
    # Any replica may collect payloads.
    if not (action == "s3:DeleteObject" and key.startswith(keys.PAYLOADS)):
        assert not allowing(policy(), action, key)


def test_slot_name_with_the_same_prefix_is_another_slot() -> None:
    for key in (keys.heartbeat("batch-10"), keys.contribution(7, 2, "batch-10"), keys.member("batch-10", 1)):
        assert not allowing(policy(), "s3:PutObject", key)


@pytest.mark.parametrize("slot", ["batch-0", "batch-1023"])
def test_group_role_covers_only_its_own_slots(slot: str) -> None:
    statements = policy(slots=["batch-0", "batch-1023"], group="batch")
    assert allowing(statements, "s3:PutObject", keys.heartbeat(slot))
    assert not allowing(statements, "s3:PutObject", keys.heartbeat(f"big{slot}"))


def test_garbage_collection_cannot_delete_records() -> None:
    deleted = {
        key
        for key in (*OF_A_SLOT, *SHARED, *NEVER, keys.heartbeat("batch-1"))
        if allowing(policy(), "s3:DeleteObject", key)
    }
    assert {key.partition("/")[0] for key in deleted} == {
        "payloads", "checkpoints", "probe", "private", "unfinished",
    }  # fmt: skip


def test_only_the_run_is_listed() -> None:
    (listing,) = [first for first in policy() if "s3:ListBucket" in first.actions]
    assert listing.resources == (BUCKET,)
    assert listing.conditions == {"StringLike": {"s3:prefix": (f"{PREFIX}/*",)}}


def test_no_other_action_is_allowed() -> None:
    actions = {action for first in policy() for action in first.actions}
    assert actions == {
        "s3:ListBucket",
        "s3:GetObject",
        "s3:PutObject",
        "s3:DeleteObject",
        "s3:AbortMultipartUpload",
    }
    assert all(str(resource).startswith(BUCKET) for statement in policy() for resource in statement.resources)


@pytest.mark.parametrize("group", [None, "a" * 58])
def test_policy_of_the_longest_names_fits_iam(group: str | None) -> None:
    slot = f"{'a' * 58}-1023"
    longest = replica_policy(bucket_arn=f"arn:aws-us-gov:s3:::{'b' * 63}", prefix="p" * 200, slots=[slot], group=group)
    assert len(text_of(document(longest))) < INLINE_LIMIT


@pytest.mark.parametrize(
    ("prefix", "slots"), [("", ["a"]), ("runs/*", ["a"]), ("runs/${x}", ["a"]), ("runs", []), ("runs", ["*"])]
)
def test_special_characters_in_prefix_or_slot_are_refused(prefix: str, slots: list[str]) -> None:
    with pytest.raises(Invalid):
        replica_policy(bucket_arn=BUCKET, prefix=prefix, slots=slots, group=None)


def test_policies_equal_the_golden_files() -> None:
    check_golden("replica_policy", document(policy()))
    check_golden("group_policy", document(policy(slots=["batch-0", "batch-1"], group="batch")))


@pytest.mark.parametrize("service", ["ecs-tasks.amazonaws.com", "batch.amazonaws.com", "sagemaker.amazonaws.com"])
def test_service_trust_is_limited_to_the_account(service: str) -> None:
    written = plain(document([trust_service(service, ACCOUNT)]))
    assert written == {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": [service]},
                "Action": ["sts:AssumeRole"],
                "Condition": {"StringEquals": {"aws:SourceAccount": [ACCOUNT]}},
            }
        ],
    }


def test_ec2_trust_has_no_account_condition() -> None:
    (statement,) = plain(document([trust_service("ec2.amazonaws.com", ACCOUNT)]))["Statement"]
    assert "Condition" not in statement
    assert statement["Principal"] == {"Service": ["ec2.amazonaws.com"]}


def test_bucket_policy_only_denies() -> None:
    tls, creates = bucket_policy(BUCKET, tls_only=True, protected=decisive(PREFIX))
    assert (tls.effect, creates.effect) == ("Deny", "Deny")
    assert tls.principal == creates.principal == {"AWS": ("*",)}
    assert (tls.actions, tls.resources) == (("s3:*",), (BUCKET, f"{BUCKET}/*"))
    assert tls.conditions == {"Bool": {"aws:SecureTransport": ("false",)}}
    assert creates.actions == ("s3:PutObject",)
    assert creates.conditions == {"Null": {"s3:if-none-match": ("true",)}}
    assert creates.resources == tuple(
        f"{BUCKET}/{PREFIX}/{folder}/*" for folder in ("commits", "exchanges", "contributions", "receipts")
    )


def test_document_with_a_reference_cannot_be_sent() -> None:
    arn = Ref(address="aws_bucket.store", output="arn")
    waiting = document(replica_policy(bucket_arn=arn, prefix=PREFIX, slots=["batch-1"], group=None))
    assert {str(ref) for ref in refs(waiting)} >= {"${aws_bucket.store.arn}", f"${{aws_bucket.store.arn}}/{PREFIX}/*"}
    with pytest.raises(Invalid, match="unresolved reference"):
        text_of(waiting)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"Action": "s3:GetObject"}, {"Action": ["s3:GetObject"]}),
        ({"Action": ["a:B", "c:D"]}, {"Action": ["c:D", "a:B"]}),
        ({"Principal": "*"}, {"Principal": {"AWS": ["*"]}}),
        ({"Condition": {"Bool": {"x": True}}}, {"Condition": {"Bool": {"x": ["true"]}}}),
        ({}, {"Sid": "", "Condition": {}}),
    ],
)
def test_equivalent_statements_are_equal(first: dict[str, Any], other: dict[str, Any]) -> None:
    assert same(first, other)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"Action": "s3:GetObject"}, {"NotAction": "s3:GetObject"}),
        ({"Action": "s3:GetObject"}, {"Action": "s3:GetObject", "NotResource": "x"}),
        ({"Effect": "Allow"}, {"Effect": "Deny"}),
        ({"Principal": {"AWS": "x"}}, {"Principal": {"Service": "x"}}),
        ({"Condition": {"Bool": {"x": "true"}}}, {"Condition": {"BoolIfExists": {"x": "true"}}}),
    ],
)
def test_different_statements_are_not_equal(first: dict[str, Any], other: dict[str, Any]) -> None:
    assert not same(first, other)


def same(first: dict[str, Any], other: dict[str, Any]) -> bool:
    parsed, other_parsed = (statements_of({"Statement": statement}) for statement in (first, other))
    assert parsed
    return normal(parsed) == normal(other_parsed)


def test_parsed_document_equals_the_settings() -> None:
    from tests.infra.clouds.aws.test_iam import ROLE  # noqa: PLC0415

    written = json.loads(text_of(document(ROLE.policies["replica"])))
    settings = ROLE.settings()["policies"]
    assert isinstance(settings, dict)
    assert statements_of(written) == plain(settings["replica"])
