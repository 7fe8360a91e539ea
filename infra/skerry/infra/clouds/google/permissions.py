"""Which permissions these credentials lack, asked of the project itself. Asks, changes nothing.

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
"""What whoever applies a run whose store is here needs."""
ACCOUNTS: Final = (
    "iam.serviceAccounts.actAs",
    "iam.serviceAccounts.create",
    "iam.serviceAccounts.delete",
    "iam.serviceAccounts.get",
    "iam.serviceAccounts.list",
)
"""What it takes besides to start jobs that act as accounts of the run."""
POOLS: Final = tuple(
    f"iam.workloadIdentityPool{kind}.{verb}"
    for kind in ("s", "Providers")
    for verb in ("create", "delete", "get", "list", "undelete", "update")
)
"""What it takes besides to let jobs of AWS in."""
REPOSITORIES: Final = (
    *(f"artifactregistry.repositories.{verb}" for verb in ("create", "delete", "get", "list", "update")),
    "artifactregistry.dockerimages.list",
    "artifactregistry.packages.delete",
    "artifactregistry.packages.list",
)
"""What it takes besides to make the image's repository."""


def lacking(google: Google, permissions: Sequence[str]) -> list[str]:
    """Those that nobody gave on the project, in order; what is given on a single resource is not seen."""
    wanted = sorted(set(permissions))
    given: set[str] = set()
    for start in range(0, len(wanted), _AT_ONCE):
        body = {"permissions": wanted[start : start + _AT_ONCE]}
        path = f"v3/projects/{google.project}:testIamPermissions"
        given |= set(google.call("cloudresourcemanager", "POST", path, body=body).get("permissions", ()))
    return [one for one in wanted if one not in given]
