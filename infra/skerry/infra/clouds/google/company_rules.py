"""Applies the section `google` of a spec to the resources of a run. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.google.gcs import Bucket

if TYPE_CHECKING:
    from collections.abc import Collection

    from skerry.infra.provision.graph import Resource
    from skerry.infra.spec.model import Spec

_DAY_S: Final = 24 * 3600


def under_rules(resource: Resource, spec: Spec, keys: Collection[str]) -> Resource:
    """The resource as the rules demand it. Of a bucket that is the user's own a plan has a note if it differs."""
    del keys
    if isinstance(resource, Bucket):
        kept_s = (spec.google.undelete_days or 0) * _DAY_S
        return replace(resource, kms_key=spec.google.kms_key or "", soft_delete_s=kept_s)
    return resource


def problem_of(resource: Resource) -> str | None:
    """Returns why its cloud would refuse the resource under these rules; None if it would not."""
    if not isinstance(resource, Bucket) or resource.brought or not resource.kms_key:
        return None
    location = resource.kms_key.split("/")[3]
    if location.lower() == resource.region.lower():
        return None
    return (
        f"{resource.address}: {resource.name} is in {resource.region} and the key {resource.kms_key} in {location}; a "
        "bucket needs a key of its own location: name one at `google: kms_key`, or create the bucket yourself (`byo`)"
    )
