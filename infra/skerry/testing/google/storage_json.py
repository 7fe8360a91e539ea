"""Cloud Storage's JSON API: buckets, their policies, and an operator's requests for objects.

A new bucket has Google's defaults: soft delete for seven days, inherited public access prevention, no uniform access.
Bucket names are global: some belong to other projects. Source: the REST reference of Cloud Storage.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.google.refusals import Refusal, invalid
from skerry.testing.google.shared_state import page_of
from skerry.testing.google.storage_objects import Bucket, Objects, Preconditions

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

    from skerry.testing.google.shared_state import Handler, Project, SandboxRequest
    from skerry.testing.google.storage_objects import Object

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
# First path segments that are not buckets on this server.
RESERVED: Final = frozenset({"storage", "upload", "download", "v1", "v2", "v3", "computeMetadata"})
_WEEK_S: Final = 7 * 24 * 3600
_SOFT: Final = (_WEEK_S, 90 * 24 * 3600)
_READ_ONLY: Final = frozenset(
    {
        "etag",
        "generation",
        "id",
        "kind",
        "metageneration",
        "owner",
        "projectNumber",
        "selfLink",
        "timeCreated",
        "updated",
    }
)


class Buckets:
    """The JSON API. taken: bucket names that belong to other projects."""

    def __init__(self, project: Project, objects: Objects) -> None:
        self._project = project
        self._objects = objects
        self.taken: set[str] = set()

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by method id."""
        return {
            "storage.buckets.insert": self._insert,
            "storage.buckets.get": self._get,
            "storage.buckets.list": self._list,
            "storage.buckets.patch": self._patch,
            "storage.buckets.delete": self._delete,
            "storage.buckets.getIamPolicy": self._get_policy,
            "storage.buckets.setIamPolicy": self._set_policy,
            "storage.buckets.testIamPermissions": self._test_permissions,
            "storage.objects.list": self._list_objects,
            "storage.objects.get": self._get_object,
            "storage.objects.delete": self._delete_object,
            "storage.objects.restore": self._restore_object,
        }

    def _insert(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = str(request.body.get("name", ""))
        if _NAME.fullmatch(name) is None or "google" in name or name in RESERVED:
            raise Refusal(400, f"Invalid bucket name: '{name}'", reason="invalid")
        if not self._project.is_mine(request.parameter("project") or ""):
            raise Refusal(403, f"no such project: {request.parameter('project')}")
        if not self._project.is_paid:
            raise Refusal(
                403, "The billing account for the owning project is disabled in state absent", reason="accountDisabled"
            )
        if name in self._objects.buckets:
            raise Refusal(409, "Your previous request to create the named bucket succeeded and you already own it.")
        if name in self.taken:
            raise Refusal(
                409,
                "The requested bucket name is not available. The bucket namespace is shared by all users of the "
                "system. Please select a different name and try again.",
            )
        now = self._project.text()
        resource: dict[str, Any] = {
            "kind": "storage#bucket",
            "id": name,
            "name": name,
            "selfLink": f"https://www.googleapis.com/storage/v1/b/{name}",
            "projectNumber": self._project.number,
            "metageneration": "1",
            "location": "US",
            "storageClass": "STANDARD",
            "timeCreated": now,
            "updated": now,
            "iamConfiguration": {},
            "softDeletePolicy": {"retentionDurationSeconds": str(_WEEK_S)},
        }
        resource["locationType"] = "region" if "-" in request.body.get("location", "US") else "multi-region"
        _put(resource, request.body, now)
        resource["location"] = str(resource["location"]).upper()
        self._objects.buckets[name] = Bucket(resource=resource)
        return _shown(resource)

    def _get(self, request: SandboxRequest) -> Mapping[str, Any]:
        self._objects.check(request.principal, "storage.buckets.get", request.names["bucket"])
        return _shown(self._bucket(request).resource)

    def _list(self, request: SandboxRequest) -> Mapping[str, Any]:
        if not self._project.is_mine(request.parameter("project") or ""):
            raise Refusal(403, f"no such project: {request.parameter('project')}")
        prefix = request.parameter("prefix") or ""
        every = [
            _shown(bucket.resource) for name, bucket in sorted(self._objects.buckets.items()) if name.startswith(prefix)
        ]
        page = page_of(request, "items", every, most=1000, size_parameter="maxResults")
        return {"kind": "storage#buckets", **page}

    def _patch(self, request: SandboxRequest) -> Mapping[str, Any]:
        bucket = self._bucket(request)
        self._check_metageneration(request, bucket)
        if changed := sorted(_READ_ONLY & request.body.keys()):
            raise invalid(f"cannot be changed: {', '.join(changed)}", *changed)
        if request.body.get("location", bucket.resource["location"]).upper() != bucket.resource["location"]:
            raise Refusal(400, "The location of a bucket cannot be changed.", reason="invalid")
        if request.body.get("name", bucket.name) != bucket.name:
            raise Refusal(400, "The name of a bucket cannot be changed.", reason="invalid")
        _put(bucket.resource, request.body, self._project.text())
        bucket.resource["metageneration"] = str(int(bucket.resource["metageneration"]) + 1)
        return _shown(bucket.resource)

    def _delete(self, request: SandboxRequest) -> Mapping[str, Any]:
        bucket = self._bucket(request)
        self._check_metageneration(request, bucket)
        if bucket.objects:
            raise Refusal(409, "The bucket you tried to delete is not empty.", reason="conflict")
        del self._objects.buckets[bucket.name]
        self._project.policies.forget(_resource_name(bucket.name))
        return {}

    def _get_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        bucket = self._bucket(request)
        return self._policy(bucket.name, request.int_parameter("optionsRequestedPolicyVersion"))

    def _set_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        bucket = self._bucket(request)
        access = bucket.resource["iamConfiguration"].get("uniformBucketLevelAccess", {})
        if not access.get("enabled") and any("condition" in binding for binding in request.body.get("bindings", ())):
            raise Refusal(
                412,
                "Cannot set IAM policy with conditions: uniform bucket-level access is not enabled for the bucket.",
            )
        self._project.policies.write(_resource_name(bucket.name), request.body, stale=412)
        return self._policy(bucket.name, 3)

    def _policy(self, name: str, version: int | None) -> Mapping[str, Any]:
        policy = self._project.policies.read(_resource_name(name), version)
        return {"kind": "storage#policy", "resourceId": _resource_name(name), **policy}

    def _test_permissions(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = self._bucket(request).name
        allowed: list[str] = []
        for permission in request.query.get("permissions", ()):
            try:
                self._objects.check(request.principal, permission, name)
            except Refusal:
                continue
            allowed.append(permission)
        response: dict[str, Any] = {"kind": "storage#testIamPermissionsResponse"}
        return response | ({"permissions": allowed} if allowed else {})

    def _list_objects(self, request: SandboxRequest) -> Mapping[str, Any]:
        if unknown := sorted(request.query.keys() & {"matchGlob", "filter", "endOffset", "includeTrailingDelimiter"}):
            raise Refusal(501, f"the sandbox does not support listing with {', '.join(unknown)}")
        bucket, prefix = self._bucket(request), request.parameter("prefix") or ""
        start = request.parameter("startOffset") or ""
        live_objects = self._objects.after(request.principal, bucket.name, prefix, start, included=True)
        if request.parameter("softDeleted") == "true":
            self._objects.purge(bucket)
            every = [
                {**_object(bucket.name, item), "softDeleteTime": _instant(until - bucket.soft_delete)}
                for item, until in bucket.deleted
                if item.name.startswith(prefix)
            ]
            prefixes: list[str] = []
        else:
            every, prefixes = _folded(bucket.name, live_objects, prefix, request.parameter("delimiter"))
        page = page_of(request, "items", every, most=1000, size_parameter="maxResults")
        return {"kind": "storage#objects", **page, **({"prefixes": prefixes} if prefixes else {})}

    def _get_object(self, request: SandboxRequest) -> Mapping[str, Any]:
        bucket, name = request.names["bucket"], request.names["object"]
        stored = self._objects.read(request.principal, bucket, name, request.int_parameter("generation"))
        _preconditions(request).check(stored)
        if request.parameter("alt") == "media":
            return {"media": stored}
        return _object(bucket, stored)

    def _delete_object(self, request: SandboxRequest) -> Mapping[str, Any]:
        self._objects.delete(
            request.principal,
            request.names["bucket"],
            request.names["object"],
            _preconditions(request),
            request.int_parameter("generation"),
        )
        return {}

    def _restore_object(self, request: SandboxRequest) -> Mapping[str, Any]:
        bucket, name = request.names["bucket"], request.names["object"]
        generation = request.int_parameter("generation")
        return _object(bucket, self._objects.restore(request.principal, bucket, name, generation))

    def _bucket(self, request: SandboxRequest) -> Bucket:
        return self._objects.bucket(request.names["bucket"])

    def _check_metageneration(self, request: SandboxRequest, bucket: Bucket) -> None:
        expected = request.int_parameter("ifMetagenerationMatch")
        if expected is not None and expected != int(bucket.resource["metageneration"]):
            raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")


def _put(resource: dict[str, Any], change: Mapping[str, Any], now: str) -> None:
    """Apply a patch: objects are merged, null removes, lists are replaced. Raises Refusal before any change."""
    soft_delete: Mapping[str, Any] = change.get("softDeletePolicy") or {}
    retention = soft_delete.get("retentionDurationSeconds")
    if retention is not None and int(retention) != 0 and not _SOFT[0] <= int(retention) <= _SOFT[1]:
        raise Refusal(400, "softDeletePolicy: the retention duration is 0, or between 7 and 90 days", reason="invalid")
    configuration: Mapping[str, Any] = change.get("iamConfiguration") or {}
    access = configuration.get("publicAccessPrevention")
    if access not in {None, "enforced", "inherited", "unspecified"}:
        raise Refusal(400, f"Invalid value for public access prevention: {access}", reason="invalid")
    labels: Mapping[str, str | None] = change.get("labels") or {}
    for name, value in labels.items():
        if value is not None and (not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name) or not _is_label(value)):
            raise Refusal(400, f"Invalid label: {name}={value}", reason="invalid")
    _check_lifecycle(change.get("lifecycle"))
    _merge(resource, change)
    resource["updated"] = now


def _merge(resource: dict[str, Any], change: Mapping[str, Any]) -> None:
    for name, value in change.items():
        if value is None:
            resource.pop(name, None)
        elif isinstance(value, dict):
            _merge(resource.setdefault(name, {}), value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            resource[name] = value


def _check_lifecycle(lifecycle: Mapping[str, Any] | None) -> None:
    for rule in (lifecycle or {}).get("rule", ()):
        if rule.get("action", {}).get("type") not in {"Delete", "SetStorageClass", "AbortIncompleteMultipartUpload"}:
            raise Refusal(400, f"Invalid lifecycle action: {rule.get('action')}", reason="invalid")
        if not rule.get("condition"):
            raise Refusal(400, "A lifecycle rule has at least one condition.", reason="invalid")


def _is_label(value: str) -> bool:
    return re.fullmatch(r"[a-z0-9_-]{0,63}", value) is not None


def _shown(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resource with the defaults that Google reports."""
    access = dict(resource["iamConfiguration"])
    uniform = dict(access.get("uniformBucketLevelAccess") or {"enabled": False})
    access["uniformBucketLevelAccess"] = access["bucketPolicyOnly"] = uniform
    access.setdefault("publicAccessPrevention", "inherited")
    etag = base64.b64encode(f"\x08{resource['metageneration']}".encode()).decode()
    return {**resource, "iamConfiguration": access, "etag": etag}


def _object(bucket: str, stored: Object) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{stored.name}/{stored.generation}",
        "name": stored.name,
        "bucket": bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "contentType": stored.content_type,
        "size": str(len(stored.data)),
        "md5Hash": stored.md5,
        "etag": stored.etag.strip('"'),
        "timeCreated": _instant(stored.written),
        "updated": _instant(stored.written),
        "storageClass": "STANDARD",
        **({"metadata": dict(stored.metadata)} if stored.metadata else {}),
    }


def _instant(time: dt.datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _folded(
    bucket: str, objects: list[Object], prefix: str, delimiter: str | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the objects, and as prefixes those with a delimiter in the rest of their name."""
    if not delimiter:
        return [_object(bucket, stored) for stored in objects], []
    shown: list[dict[str, Any]] = []
    prefixes: dict[str, None] = {}
    for stored in objects:
        head, cut, _ = stored.name[len(prefix) :].partition(delimiter)
        if cut:
            prefixes[prefix + head + cut] = None
        else:
            shown.append(_object(bucket, stored))
    return shown, list(prefixes)


def _preconditions(request: SandboxRequest) -> Preconditions:
    return Preconditions(
        generation=request.int_parameter("ifGenerationMatch"),
        generation_not=request.int_parameter("ifGenerationNotMatch"),
        metageneration=request.int_parameter("ifMetagenerationMatch"),
        metageneration_not=request.int_parameter("ifMetagenerationNotMatch"),
    )


def _resource_name(bucket: str) -> str:
    return f"projects/_/buckets/{bucket}"
