"""Maps methods to the permissions they need. Source: "IAM permissions reference"."""

from __future__ import annotations

import re
from typing import Final

_EXCEPTIONS: Final = {
    "storage.buckets.insert": "storage.buckets.create",
    "artifactregistry.projects.locations.repositories.dockerImages.list": "artifactregistry.dockerimages.list",
    "artifactregistry.projects.locations.repositories.packages.list": "artifactregistry.packages.list",
    "artifactregistry.projects.locations.repositories.packages.delete": "artifactregistry.packages.delete",
    "serviceusage.services.batchEnable": "serviceusage.services.enable",
    "logging.entries.list": "logging.logEntries.list",
    "logging.entries.write": "logging.logEntries.create",
    "secretmanager.projects.secrets.addVersion": "secretmanager.versions.add",
    "cloudbilling.projects.getBillingInfo": "resourcemanager.projects.get",
    "cloudresourcemanager.projects.get": "resourcemanager.projects.get",
    "cloudresourcemanager.projects.getIamPolicy": "resourcemanager.projects.getIamPolicy",
    "cloudresourcemanager.projects.setIamPolicy": "resourcemanager.projects.setIamPolicy",
}
# Checked by their handlers for a specific resource, or not checked at all.
_NOT_HERE: Final = re.compile(
    r"storage\.objects\..*|storage\.multipartUploads\..*|storage\.buckets\.get|iamcredentials\..*|"
    r"secretmanager\..*\.versions\.access|.*\.testIamPermissions|.*\.operations\..*|sts\..*"
)
_VERBS: Final = {"patch": "update"}
_PARENTS: Final = re.compile(r"\.(projects|locations)(?=\.)")


def permission_for(method: str) -> str | None:
    """Return the permission on the project or the resource; None if the handler checks it, or if none is needed."""
    if method in _EXCEPTIONS:
        return _EXCEPTIONS[method]
    if _NOT_HERE.fullmatch(method) is not None:
        return None
    short = _PARENTS.sub("", _PARENTS.sub("", method)).replace("Pools.providers.", "PoolProviders.")
    head, _, verb = short.rpartition(".")
    return f"{head}.{_VERBS.get(verb, verb)}"
