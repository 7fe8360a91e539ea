"""Applies the section `aws` of a spec to the resources of a run. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import Statement, service_name
from skerry.infra.clouds.aws.s3 import Bucket

if TYPE_CHECKING:
    from skerry.infra.provision.graph import Resource
    from skerry.infra.spec.model import Spec

# The inline policies of roles that read and write the bucket of a run, or of a mirror.
_OF_BUCKETS: Final = {"run", "mirrors"}


def under_rules(resource: Resource, spec: Spec) -> Resource:
    """The resource as the rules demand it; one that is the user's own is unchanged."""
    rules = spec.aws
    if isinstance(resource, Role) and not resource.brought:
        policies = dict(resource.policies)
        if rules.kms_key is not None and _OF_BUCKETS & policies.keys():
            policies["key"] = (_key_statement(rules.kms_key),)
        return replace(resource, boundary=rules.permissions_boundary or "", path=rules.role_path, policies=policies)
    if isinstance(resource, Bucket) and not resource.brought and rules.kms_key is not None:
        return replace(resource, encryption=rules.kms_key)
    return resource


def _key_statement(key: str) -> Statement:
    """Lets replicas use the key for objects of S3 only: reading needs Decrypt, and so does a multipart upload."""
    _, partition, _, region, *_ = key.split(":")
    return Statement(
        sid="UseKey",
        actions=("kms:Decrypt", "kms:GenerateDataKey"),
        resources=(key,),
        conditions={"StringEquals": {"kms:ViaService": (service_name("s3", region, partition),)}},
    )
