"""Applies the section `google` of a spec to the resources of a run. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from skerry.infra.clouds.google.gcs import Bucket

if TYPE_CHECKING:
    from skerry.infra.provision.graph import Resource
    from skerry.infra.spec.model import Spec


def under_rules(resource: Resource, spec: Spec) -> Resource:
    """The resource as the rules demand it; one that is the user's own is unchanged."""
    key = spec.google.kms_key
    if isinstance(resource, Bucket) and not resource.brought and key is not None:
        return replace(resource, kms_key=key)
    return resource
