"""The rights on inputs of a spec: exactly the secrets and prefixes that it names, on both clouds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.infra.clouds.google.kit import wanted as wanted_on_google
from tests.infra.clouds.google.test_service_accounts import ACCOUNT

from skerry.infra.clouds.aws.policies import Statement
from skerry.infra.clouds.aws.secret_and_data_policies import input_policy
from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.replica_rules import MOST_OPERATORS, expression, operators
from skerry.infra.clouds.google.secret_and_data_bindings import Reader, input_bindings
from skerry.infra.clouds.google.secret_bindings import SecretBinding
from skerry.infra.spec.env_secrets_and_data import Inputs, Secret

ARN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"
PARAMETER = "arn:aws:ssm:eu-west-1:123456789012:parameter/team/key"
KEY = "arn:aws:kms:us-east-1:123456789012:key/abc"
STORE = ("google_bucket.store", "acme-runs")
MEMBER = ACCOUNT.ref("email", before="serviceAccount:")
READER = Reader(key=ACCOUNT.key, name=ACCOUNT.name, member=MEMBER, text="all replicas")


def on_google(name: str, key: str | None = None) -> Secret:
    return Secret(google_secret=name, key=key)


def test_policy_on_aws_names_these_secrets_only() -> None:
    secrets = {
        "TOKEN": Secret(aws_secretsmanager=ARN, key="hf", kms_key=KEY),
        "SAME": Secret(aws_secretsmanager=ARN),
        "OTHER": Secret(aws_ssm=PARAMETER),
        "MINE": Secret(environment="HF_TOKEN"),
    }
    statements = input_policy(Inputs(secrets=secrets), "aws")
    assert statements == (
        Statement(sid="ReadAwsSecretsmanager", actions=("secretsmanager:GetSecretValue",), resources=(ARN,)),
        Statement(sid="ReadAwsSsm", actions=("ssm:GetParameter",), resources=(PARAMETER,)),
        Statement(
            sid="DecryptSecrets0",
            actions=("kms:Decrypt",),
            resources=(KEY,),
            conditions={"StringEquals": {"kms:ViaService": ("secretsmanager.us-east-1.amazonaws.com",)}},
        ),
    )


def test_policy_on_aws_lists_and_reads_these_prefixes_only() -> None:
    data = {"corpus": "s3://acme-data/corpus", "more": "s3://acme-data/more", "all": "s3://whole", "gs": "gs://x/y"}
    statements = input_policy(Inputs(data=data), "aws-cn")
    assert {action for statement in statements for action in statement.actions} == {"s3:ListBucket", "s3:GetObject"}
    first, whole = "arn:aws-cn:s3:::acme-data", "arn:aws-cn:s3:::whole"
    assert [(statement.resources, statement.conditions) for statement in statements] == [
        ((first,), {"StringLike": {"s3:prefix": ("corpus/*", "more/*")}}),
        ((f"{first}/corpus/*", f"{first}/more/*"), {}),
        ((whole,), {"StringLike": {"s3:prefix": ("*",)}}),
        ((f"{whole}/*",), {}),
    ]


def test_no_inputs_need_no_rights() -> None:
    assert input_policy(Inputs(env={"A": "b"}), "aws") == ()
    assert list(input_bindings(Inputs(env={"A": "b"}), READER, None)) == []


def test_bindings_on_google_name_these_prefixes_only() -> None:
    data = {"corpus": "gs://acme-data/corpus", "own": "gs://acme-runs/data", "all": "gs://whole", "s3": "s3://x/y"}
    bindings = list(input_bindings(Inputs(data=data), READER, STORE))
    assert all(isinstance(binding, BucketBinding) for binding in bindings)
    by_bucket: dict[str, Any] = {str(getattr(binding, "bucket", "")): binding for binding in bindings}
    assert {bucket: binding.after for bucket, binding in by_bucket.items()} == {
        "acme-data": (),
        "acme-runs": (STORE[0],),
        "whole": (),
    }
    conditions = {bucket: expression(bucket, binding.rules[0]) for bucket, binding in by_bucket.items()}
    listing = 'api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith'
    assert conditions["acme-data"] == (
        'resource.name.startsWith("projects/_/buckets/acme-data/objects/corpus/") || ' + listing + '("corpus/")'
    )
    assert conditions["whole"] == (
        'resource.name.startsWith("projects/_/buckets/whole/objects/") || ' + listing + '("")'
    )
    assert {rule.role for binding in by_bucket.values() for rule in binding.rules} == {"roles/storage.objectViewer"}
    # The run's own binding in its bucket has the account's name.
    assert all(binding.name != ACCOUNT.name for binding in bindings)


def test_every_prefix_has_a_condition_of_its_own() -> None:
    data = {f"part_{number}": f"gs://acme-data/{number}" for number in range(15)}
    (binding,) = input_bindings(Inputs(data=data), READER, None)
    assert isinstance(binding, BucketBinding)
    assert len(binding.rules) == 15
    assert all(operators(expression("acme-data", rule)) <= MOST_OPERATORS for rule in binding.rules)


def test_secret_on_google_is_bound_once_whatever_its_versions() -> None:
    secrets = {
        "A": on_google("projects/acme/secrets/hf/versions/1"),
        "B": on_google("projects/acme/secrets/hf/versions/latest", key="x"),
        "C": on_google("projects/other/secrets/hf/versions/2"),
    }
    service, *bindings = input_bindings(Inputs(secrets=secrets), READER, None)
    assert service.name == "secretmanager.googleapis.com"
    assert [binding.secret for binding in bindings if isinstance(binding, SecretBinding)] == [
        "projects/acme/secrets/hf",
        "projects/other/secrets/hf",
    ]
    assert len({binding.address for binding in bindings}) == 2
    assert all(binding.needs() == {service.address, ACCOUNT.address} for binding in bindings)


@pytest.mark.parametrize("name", ["hf", "h" * 255])
def test_description_of_a_binding_keeps_its_owner(name: str) -> None:
    secrets = {"A": on_google(f"projects/acme/secrets/{name}/versions/1")}
    reader = replace(READER, key="a-group-with-a-name-of-40-characters-xx-1000")
    *_, binding = input_bindings(Inputs(secrets=secrets), reader, None)
    text = owner_labels.description(wanted_on_google(binding))
    assert len(text) <= 256
    assert owner_labels.of_description(text) is not None
