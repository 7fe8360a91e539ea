"""Applies the section `aws` of a spec to the resources of a run. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import Statement, service_name
from skerry.infra.clouds.aws.s3 import AES, Bucket

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from skerry.infra.provision.graph import Resource
    from skerry.infra.spec.model import Spec

# The inline policies of roles that read and write the bucket of a run, or of a mirror.
_OF_BUCKETS: Final = {"run", "replica", "mirrors"}


def under_rules(resource: Resource, spec: Spec, keys: Collection[str]) -> Resource:
    """The resource as the rules demand it. Of a bucket that is the user's own a plan has a note if it differs.

    keys: that encrypt the buckets now. Replicas may use these too: objects under a key are readable with that key only.
    """
    rules = spec.aws
    usable = sorted({*keys, *(() if rules.kms_key is None else (rules.kms_key,))})
    if isinstance(resource, Role) and not resource.brought:
        policies = dict(resource.policies)
        if usable and _OF_BUCKETS & policies.keys():
            policies["key"] = (_key_statement(usable),)
        return replace(resource, boundary=rules.permissions_boundary or "", path=rules.role_path, policies=policies)
    if isinstance(resource, Bucket):
        key, days = rules.kms_key or resource.encryption, rules.undelete_days or 0
        return replace(resource, encryption=key, versioning=days > 0, undelete_days=days)
    return resource


def problem_of(resource: Resource) -> str | None:
    """Returns why its cloud would refuse the resource under these rules; None if it would not."""
    if not isinstance(resource, Bucket) or resource.brought or resource.encryption == AES:
        return None
    region = resource.encryption.split(":")[3]
    if region == resource.region:
        return None
    return (
        f"{resource.address}: {resource.name} is in {resource.region} and the key {resource.encryption} in {region}; a "
        "bucket needs a key of its own region: name one at `aws: kms_key`, or create the bucket yourself (`byo`)"
    )


def _key_statement(keys: Sequence[str]) -> Statement:
    """Lets replicas use the keys for objects of S3 only: reading needs Decrypt, and so does a multipart upload."""
    services = {service_name("s3", region, partition) for _, partition, _, region, *_ in (k.split(":") for k in keys)}
    return Statement(
        sid="UseKey",
        actions=("kms:Decrypt", "kms:GenerateDataKey"),
        resources=tuple(keys),
        conditions={"StringEquals": {"kms:ViaService": tuple(sorted(services))}},
    )
