"""The permissions of replicas on the inputs in their spec: exactly these secrets, and these prefixes of buckets. Pure.

Sources: Secrets Manager user guide, "Authentication and access control"; Systems Manager user guide, "Restricting
access to Parameter Store parameters"; KMS developer guide, "kms:ViaService".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.policies import Statement, service_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.spec.env_secrets_and_data import Inputs

_S3: Final = "s3://"
_ACTIONS: Final = {"aws_secretsmanager": "secretsmanager:GetSecretValue", "aws_ssm": "ssm:GetParameter"}


def input_policy(inputs: Inputs, partition: str) -> tuple[Statement, ...]:
    """The statements for the data and the secrets of a group; empty without any."""
    return (*_data(inputs.data, partition), *_secrets(inputs))


def buckets_of(inputs: Inputs) -> tuple[str, ...]:
    """The buckets in S3 that hold data of a group, in the order of the spec."""
    return tuple(dict.fromkeys(bucket for bucket, _ in _places(inputs.data)))


def _data(data: Mapping[str, str], partition: str) -> Iterator[Statement]:
    prefixes: dict[str, list[str]] = {}
    for bucket, prefix in _places(data):
        prefixes.setdefault(bucket, []).append(f"{prefix}/*" if prefix else "*")
    for number, (bucket, patterns) in enumerate(prefixes.items()):
        arn, listed = f"arn:{partition}:s3:::{bucket}", tuple(dict.fromkeys(patterns))
        yield Statement(
            sid=f"ListData{number}",
            actions=("s3:ListBucket",),
            resources=(arn,),
            conditions={"StringLike": {"s3:prefix": listed}},
        )
        resources = tuple(f"{arn}/{pattern}" for pattern in listed)
        yield Statement(sid=f"ReadData{number}", actions=("s3:GetObject",), resources=resources)


def _places(data: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The bucket and the prefix of each entry in S3."""
    for uri in data.values():
        if uri.startswith(_S3):
            bucket, _, prefix = uri.removeprefix(_S3).partition("/")
            yield bucket, prefix


def _secrets(inputs: Inputs) -> Iterator[Statement]:
    for source, action in _ACTIONS.items():
        names = dict.fromkeys(secret.name for secret in inputs.secrets.values() if secret.source == source)
        if names:
            sid = f"Read{''.join(part.capitalize() for part in source.split('_'))}"
            yield Statement(sid=sid, actions=(action,), resources=tuple(names))
    # A key is used only through the service that stores the secret.
    services: dict[str, set[str]] = {}
    for secret in inputs.secrets.values():
        if secret.kms_key is not None:
            _, partition, service, region, *_ = secret.name.split(":")
            services.setdefault(secret.kms_key, set()).add(service_name(service, region, partition))
    for number, (key, names) in enumerate(services.items()):
        via = {"StringEquals": {"kms:ViaService": tuple(sorted(names))}}
        yield Statement(sid=f"DecryptSecrets{number}", actions=("kms:Decrypt",), resources=(key,), conditions=via)
