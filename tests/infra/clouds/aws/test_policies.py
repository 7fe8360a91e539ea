"""Policy documents of AWS: the trust of roles, the denials of buckets, and the comparison of documents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.infra.clouds.aws.account import ACCOUNT
from tests.infra.clouds.aws.test_iam import ROLE
from tests.infra.clouds.test_replica_access import ARN, PREFIX, policy
from tests.infra.kit import plain

from skerry.infra.clouds.aws.policies import (
    DECISIVE,
    bucket_policy,
    document,
    normal,
    replica_policy,
    statements_of,
    text_of,
    trust_service,
)
from skerry.infra.provision.graph import Ref, refs
from skerry.runtime.errors import Invalid


def test_only_the_run_is_listed() -> None:
    (listing,) = [statement for statement in policy() if "s3:ListBucket" in statement.actions]
    assert listing.resources == (ARN,)
    assert listing.conditions == {"StringLike": {"s3:prefix": (f"{PREFIX}/*",)}}


def test_no_other_action_or_bucket_is_allowed() -> None:
    verbs = ("ListBucket", "GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")
    assert {action for statement in policy() for action in statement.actions} == {f"s3:{verb}" for verb in verbs}
    assert all(str(resource).startswith(ARN) for statement in policy() for resource in statement.resources)


@pytest.mark.parametrize("service", ["ecs-tasks.amazonaws.com", "batch.amazonaws.com", "sagemaker.amazonaws.com"])
def test_service_trust_is_limited_to_the_account(service: str) -> None:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": [service]},
        "Action": ["sts:AssumeRole"],
        "Condition": {"StringEquals": {"aws:SourceAccount": [ACCOUNT]}},
    }
    written = plain(document([trust_service(service, ACCOUNT)]))
    assert written == {"Version": "2012-10-17", "Statement": [statement]}


def test_ec2_trust_has_no_account_condition() -> None:
    (statement,) = plain(document([trust_service("ec2.amazonaws.com", ACCOUNT)]))["Statement"]
    assert "Condition" not in statement
    assert statement["Principal"] == {"Service": ["ec2.amazonaws.com"]}


def test_bucket_policy_only_denies() -> None:
    tls, creates = bucket_policy(ARN, tls_only=True, protected=DECISIVE)
    assert (tls.effect, creates.effect) == ("Deny", "Deny")
    assert tls.principal == creates.principal == {"AWS": ("*",)}
    assert (tls.actions, tls.resources) == (("s3:*",), (ARN, f"{ARN}/*"))
    assert tls.conditions == {"Bool": {"aws:SecureTransport": ("false",)}}
    assert creates.actions == ("s3:PutObject",)
    assert creates.conditions == {"Null": {"s3:if-none-match": ("true",)}}
    folders = ("commits", "exchanges", "contributions", "receipts", "failover")
    assert creates.resources == tuple(f"{ARN}/*/{folder}/*" for folder in folders)


def test_document_with_a_reference_cannot_be_sent() -> None:
    arn = Ref(address="aws_bucket.store", output="arn")
    waiting = document(replica_policy(bucket_arn=arn, prefix=PREFIX, slots=["batch-1"], group=None))
    assert {str(ref) for ref in refs(waiting)} >= {"${aws_bucket.store.arn}", f"${{aws_bucket.store.arn}}/{PREFIX}/*"}
    with pytest.raises(Invalid, match=r"before this is known: \(arn of aws_bucket.store\)"):
        text_of(waiting)


@pytest.mark.parametrize(
    ("first", "other", "same"),
    [
        ({"Action": "s3:GetObject"}, {"Action": ["s3:GetObject"]}, True),
        ({"Action": ["a:B", "c:D"]}, {"Action": ["c:D", "a:B"]}, True),
        ({"Principal": "*"}, {"Principal": {"AWS": ["*"]}}, True),
        ({"Condition": {"Bool": {"x": True}}}, {"Condition": {"Bool": {"x": ["true"]}}}, True),
        ({}, {"Sid": "", "Condition": {}}, True),
        ({"Action": "s3:GetObject"}, {"NotAction": "s3:GetObject"}, False),
        ({"Action": "s3:GetObject"}, {"Action": "s3:GetObject", "NotResource": "x"}, False),
        ({"Effect": "Allow"}, {"Effect": "Deny"}, False),
        ({"Principal": {"AWS": "x"}}, {"Principal": {"Service": "x"}}, False),
        ({"Condition": {"Bool": {"x": "true"}}}, {"Condition": {"BoolIfExists": {"x": "true"}}}, False),
    ],
)
def test_statements_are_compared_by_their_meaning(
    first: dict[str, Any],
    other: dict[str, Any],
    same: bool,  # noqa: FBT001  a column of the table
) -> None:
    parsed, other_parsed = (statements_of({"Statement": statement}) for statement in (first, other))
    assert parsed
    assert (normal(parsed) == normal(other_parsed)) is same


def test_parsed_document_equals_the_settings() -> None:
    written = json.loads(text_of(document(ROLE.policies["replica"])))
    assert statements_of(written) == plain(ROLE.settings()["policies"])["replica"]
