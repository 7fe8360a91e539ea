"""Finds the permissions that these credentials lack on the project. Changes nothing.

Source: Resource Manager v3, projects.testIamPermissions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.clouds.google.session import Google

_AT_ONCE: Final = 100

HOME: Final = (
    "iam.workloadIdentityPools.list",
    "resourcemanager.projects.get",
    "serviceusage.services.enable",
    "serviceusage.services.get",
    "serviceusage.services.list",
    "storage.buckets.create",
    "storage.buckets.delete",
    "storage.buckets.get",
    "storage.buckets.getIamPolicy",
    "storage.buckets.setIamPolicy",
    "storage.buckets.update",
    "storage.objects.create",
    "storage.objects.delete",
    "storage.objects.get",
    "storage.objects.list",
)
"""Needed to apply a run with its store in this cloud."""
ACCOUNTS: Final = (
    "iam.serviceAccounts.actAs",
    "iam.serviceAccounts.create",
    "iam.serviceAccounts.delete",
    "iam.serviceAccounts.get",
    "iam.serviceAccounts.list",
)
"""Also needed to start jobs that act as the run's service accounts."""
POOLS: Final = tuple(
    f"iam.workloadIdentityPool{kind}.{verb}"
    for kind in ("s", "Providers")
    for verb in ("create", "delete", "get", "list", "undelete", "update")
)
"""Also needed to admit jobs from AWS."""
REPOSITORIES: Final = (
    *(f"artifactregistry.repositories.{verb}" for verb in ("create", "delete", "get", "list", "update")),
    "artifactregistry.dockerimages.list",
)
"""Also needed to create the image's repository."""


def lacking(google: Google, permissions: Sequence[str]) -> list[str]:
    """The missing permissions, sorted. Permissions that are granted on a single resource count as missing."""
    required = sorted(set(permissions))
    granted: set[str] = set()
    for start in range(0, len(required), _AT_ONCE):
        body = {"permissions": required[start : start + _AT_ONCE]}
        path = f"v3/projects/{google.project}:testIamPermissions"
        granted |= set(google.call("cloudresourcemanager", "POST", path, body=body).get("permissions", ()))
    return [permission for permission in required if permission not in granted]
