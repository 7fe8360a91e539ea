"""The permissions of Google's predefined roles that this project's specs use.

Source: "IAM roles for Cloud Storage" and "IAM basic and predefined roles reference", November 2026. Left out are
permissions of features that this project does not use (folders, anywhere caches, contexts), and those on projects.
"""

from __future__ import annotations

from typing import Final

from skerry.testing.google.refusals import invalid

_UPLOADS: Final = {"abort", "create", "list", "listParts"}


def _objects(*verbs: str) -> set[str]:
    return {f"storage.objects.{verb}" for verb in verbs}


def _uploads(*verbs: str) -> set[str]:
    return {f"storage.multipartUploads.{verb}" for verb in verbs}


_BUCKETS: Final = {f"storage.buckets.{verb}" for verb in ("create", "delete", "get", "getIamPolicy", "list")} | {
    "storage.buckets.setIamPolicy",
    "storage.buckets.update",
}
_ALL_OBJECTS: Final = _objects(
    "create", "delete", "get", "getIamPolicy", "list", "overrideUnlockedRetention", "restore", "setIamPolicy"
) | _objects("setRetention", "update")
_REPOSITORY: Final = {f"artifactregistry.repositories.{verb}" for verb in ("get", "list", "downloadArtifacts")}
_ACCOUNT: Final = {"iam.serviceAccounts.get", "iam.serviceAccounts.list"}

ROLES: Final[dict[str, frozenset[str]]] = {
    name: frozenset(permissions)
    for name, permissions in {
        "roles/aiplatform.user": {f"aiplatform.customJobs.{verb}" for verb in ("cancel", "create", "get", "list")}
        | {"aiplatform.customJobs.delete"},
        "roles/artifactregistry.reader": _REPOSITORY,
        "roles/artifactregistry.writer": _REPOSITORY | {"artifactregistry.repositories.uploadArtifacts"},
        "roles/iam.serviceAccountOpenIdTokenCreator": {"iam.serviceAccounts.getOpenIdToken"},
        "roles/iam.serviceAccountTokenCreator": _ACCOUNT
        | {f"iam.serviceAccounts.{verb}" for verb in ("getAccessToken", "getOpenIdToken", "signBlob", "signJwt")},
        "roles/iam.serviceAccountUser": {*_ACCOUNT, "iam.serviceAccounts.actAs"},
        "roles/iam.workloadIdentityUser": _ACCOUNT
        | {"iam.serviceAccounts.getAccessToken", "iam.serviceAccounts.getOpenIdToken"},
        "roles/logging.logWriter": {"logging.logEntries.create", "logging.logEntries.route"},
        "roles/logging.viewer": {"logging.logEntries.list", "logging.logs.list"},
        "roles/secretmanager.secretAccessor": {"secretmanager.versions.access"},
        "roles/storage.admin": _BUCKETS | _ALL_OBJECTS | _uploads(*_UPLOADS),
        "roles/storage.bucketViewer": {"storage.buckets.get", "storage.buckets.list"},
        "roles/storage.legacyBucketOwner": _BUCKETS - {"storage.buckets.create", "storage.buckets.delete"}
        | _objects("create", "delete", "list", "restore", "setRetention")
        | _uploads(*_UPLOADS),
        "roles/storage.legacyBucketReader": {"storage.buckets.get"} | _objects("list") | _uploads("list"),
        "roles/storage.legacyBucketWriter": {"storage.buckets.get"}
        | _objects("create", "delete", "list", "restore", "setRetention")
        | _uploads(*_UPLOADS),
        "roles/storage.legacyObjectOwner": _objects("get", "getIamPolicy", "setIamPolicy", "setRetention", "update")
        | _objects("overrideUnlockedRetention"),
        "roles/storage.legacyObjectReader": _objects("get"),
        "roles/storage.objectAdmin": _ALL_OBJECTS | _uploads(*_UPLOADS),
        "roles/storage.objectCreator": _objects("create") | _uploads("abort", "create", "listParts"),
        "roles/storage.objectUser": _objects("create", "delete", "get", "list", "restore", "update")
        | _uploads(*_UPLOADS),
        "roles/storage.objectViewer": _objects("get", "list"),
    }.items()
}


def permissions_of(role: str) -> frozenset[str]:
    """Return a role's permissions. Raises Refusal for an unknown role."""
    if role not in ROLES:
        raise invalid(f"Role {role} is not supported for this resource.", "policy.bindings.role")
    return ROLES[role]
