"""Cloud Storage by its JSON API: buckets, their policies, and what an operator does with objects.

Source: the REST reference of Cloud Storage. Rules that a new bucket gets from Google: soft delete for seven days,
public access prevention inherited, uniform access off. Bucket names are the world's: some belong to others.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.google.objects import Bucket, Objects, Preconditions
from skerry.infra.testing.google.project import paged
from skerry.infra.testing.google.refusals import Refusal, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.google.objects import Object
    from skerry.infra.testing.google.project import Asked, Handler, Project

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
# First parts of paths that are not a bucket's on this server.
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
    """The JSON API. taken: names that belong to somebody else."""

    def __init__(self, project: Project, objects: Objects) -> None:
        self._project = project
        self._objects = objects
        self.taken: set[str] = set()

    def handlers(self) -> dict[str, Handler]:
        """By method."""
        return {
            "storage.buckets.insert": self._insert,
            "storage.buckets.get": self._get,
            "storage.buckets.list": self._list,
            "storage.buckets.patch": self._patch,
            "storage.buckets.delete": self._delete,
            "storage.buckets.getIamPolicy": self._get_policy,
            "storage.buckets.setIamPolicy": self._set_policy,
            "storage.buckets.testIamPermissions": self._test,
            "storage.objects.list": self._list_objects,
            "storage.objects.get": self._get_object,
            "storage.objects.delete": self._delete_object,
        }

    def _insert(self, asked: Asked) -> Mapping[str, Any]:
        name = str(asked.body.get("name", ""))
        if _NAME.fullmatch(name) is None or "google" in name or name in RESERVED:
            raise Refusal(400, f"Invalid bucket name: '{name}'", reason="invalid")
        if not self._project.is_mine(asked.one("project") or ""):
            raise Refusal(403, f"no such project: {asked.one('project')}")
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
        told: dict[str, Any] = {
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
        told["locationType"] = "region" if "-" in asked.body.get("location", "US") else "multi-region"
        _put(told, asked.body, now)
        told["location"] = str(told["location"]).upper()
        self._objects.buckets[name] = Bucket(told=told)
        return _shown(told)

    def _get(self, asked: Asked) -> Mapping[str, Any]:
        self._objects.check(asked.principal, "storage.buckets.get", asked.names["bucket"])
        return _shown(self._bucket(asked).told)

    def _list(self, asked: Asked) -> Mapping[str, Any]:
        if not self._project.is_mine(asked.one("project") or ""):
            raise Refusal(403, f"no such project: {asked.one('project')}")
        prefix = asked.one("prefix") or ""
        every = [_shown(one.told) for name, one in sorted(self._objects.buckets.items()) if name.startswith(prefix)]
        found, token = paged(every, asked.number("maxResults"), asked.one("pageToken"), most=1000)
        told: dict[str, Any] = {"kind": "storage#buckets"}
        return told | ({"items": found} if found else {}) | ({"nextPageToken": token} if token else {})

    def _patch(self, asked: Asked) -> Mapping[str, Any]:
        bucket = self._bucket(asked)
        self._check_metageneration(asked, bucket)
        if changed := sorted(_READ_ONLY & asked.body.keys()):
            raise invalid(f"cannot be changed: {', '.join(changed)}", *changed)
        if asked.body.get("location", bucket.told["location"]).upper() != bucket.told["location"]:
            raise Refusal(400, "The location of a bucket cannot be changed.", reason="invalid")
        if asked.body.get("name", bucket.name) != bucket.name:
            raise Refusal(400, "The name of a bucket cannot be changed.", reason="invalid")
        _put(bucket.told, asked.body, self._project.text())
        bucket.told["metageneration"] = str(int(bucket.told["metageneration"]) + 1)
        return _shown(bucket.told)

    def _delete(self, asked: Asked) -> Mapping[str, Any]:
        bucket = self._bucket(asked)
        self._check_metageneration(asked, bucket)
        if bucket.objects:
            raise Refusal(409, "The bucket you tried to delete is not empty.", reason="conflict")
        del self._objects.buckets[bucket.name]
        self._project.policies.forget(_resource(bucket.name))
        return {}

    def _get_policy(self, asked: Asked) -> Mapping[str, Any]:
        bucket = self._bucket(asked)
        return self._policy(bucket.name, asked.number("optionsRequestedPolicyVersion"))

    def _set_policy(self, asked: Asked) -> Mapping[str, Any]:
        bucket = self._bucket(asked)
        access = bucket.told["iamConfiguration"].get("uniformBucketLevelAccess", {})
        if not access.get("enabled") and any("condition" in one for one in asked.body.get("bindings", ())):
            raise Refusal(
                412,
                "Cannot set IAM policy with conditions: uniform bucket-level access is not enabled for the bucket.",
            )
        self._project.policies.put(_resource(bucket.name), asked.body, stale=412)
        return self._policy(bucket.name, 3)

    def _policy(self, name: str, version: int | None) -> Mapping[str, Any]:
        told = self._project.policies.told(_resource(name), version)
        return {"kind": "storage#policy", "resourceId": _resource(name), **told}

    def _test(self, asked: Asked) -> Mapping[str, Any]:
        name = self._bucket(asked).name
        found: list[str] = []
        for permission in asked.query.get("permissions", ()):
            try:
                self._objects.check(asked.principal, permission, name)
            except Refusal:
                continue
            found.append(permission)
        told: dict[str, Any] = {"kind": "storage#testIamPermissionsResponse"}
        return told | ({"permissions": found} if found else {})

    def _list_objects(self, asked: Asked) -> Mapping[str, Any]:
        if unknown := sorted(asked.query.keys() & {"matchGlob", "filter", "endOffset", "includeTrailingDelimiter"}):
            raise Refusal(501, f"this sandbox lists without {', '.join(unknown)}")
        bucket, prefix = self._bucket(asked), asked.one("prefix") or ""
        start = asked.one("startOffset") or ""
        current = self._objects.after(asked.principal, bucket.name, prefix, start, included=True)
        if asked.one("softDeleted") == "true":
            self._objects.purge(bucket)
            every = [_object(bucket.name, one) for one, _ in bucket.deleted if one.name.startswith(prefix)]
            prefixes: list[str] = []
        else:
            every, prefixes = _folded(bucket.name, current, prefix, asked.one("delimiter"))
        found, token = paged(every, asked.number("maxResults"), asked.one("pageToken"), most=1000)
        return {
            "kind": "storage#objects",
            **({"items": found} if found else {}),
            **({"prefixes": prefixes} if prefixes else {}),
            **({"nextPageToken": token} if token else {}),
        }

    def _get_object(self, asked: Asked) -> Mapping[str, Any]:
        bucket, name = asked.names["bucket"], asked.names["object"]
        found = self._objects.read(asked.principal, bucket, name, asked.number("generation"))
        _preconditions(asked).check(found)
        if asked.one("alt") == "media":
            return {"media": found}
        return _object(bucket, found)

    def _delete_object(self, asked: Asked) -> Mapping[str, Any]:
        self._objects.delete(
            asked.principal,
            asked.names["bucket"],
            asked.names["object"],
            _preconditions(asked),
            asked.number("generation"),
        )
        return {}

    def _bucket(self, asked: Asked) -> Bucket:
        return self._objects.bucket(asked.names["bucket"])

    def _check_metageneration(self, asked: Asked, bucket: Bucket) -> None:
        wanted = asked.number("ifMetagenerationMatch")
        if wanted is not None and wanted != int(bucket.told["metageneration"]):
            raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")


def _put(told: dict[str, Any], change: Mapping[str, Any], now: str) -> None:
    """Patch semantics: objects are merged, null removes, lists are replaced. Raises Refusal before anything changes."""
    kept: Mapping[str, Any] = change.get("softDeletePolicy") or {}
    soft = kept.get("retentionDurationSeconds")
    if soft is not None and int(soft) != 0 and not _SOFT[0] <= int(soft) <= _SOFT[1]:
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
    _merge(told, change)
    told["updated"] = now


def _merge(told: dict[str, Any], change: Mapping[str, Any]) -> None:
    for name, value in change.items():
        if value is None:
            told.pop(name, None)
        elif isinstance(value, dict):
            _merge(told.setdefault(name, {}), value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            told[name] = value


def _check_lifecycle(lifecycle: Mapping[str, Any] | None) -> None:
    for rule in (lifecycle or {}).get("rule", ()):
        if rule.get("action", {}).get("type") not in {"Delete", "SetStorageClass", "AbortIncompleteMultipartUpload"}:
            raise Refusal(400, f"Invalid lifecycle action: {rule.get('action')}", reason="invalid")
        if not rule.get("condition"):
            raise Refusal(400, "A lifecycle rule has at least one condition.", reason="invalid")


def _is_label(value: str) -> bool:
    return re.fullmatch(r"[a-z0-9_-]{0,63}", value) is not None


def _shown(told: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is empty; with defaults that Google tells; uniform access with its lock's time."""
    access = dict(told["iamConfiguration"])
    uniform = dict(access.get("uniformBucketLevelAccess") or {"enabled": False})
    access["uniformBucketLevelAccess"] = access["bucketPolicyOnly"] = uniform
    access.setdefault("publicAccessPrevention", "inherited")
    etag = base64.b64encode(f"\x08{told['metageneration']}".encode()).decode()
    return {**told, "iamConfiguration": access, "etag": etag}


def _object(bucket: str, one: Object) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{one.name}/{one.generation}",
        "name": one.name,
        "bucket": bucket,
        "generation": str(one.generation),
        "metageneration": "1",
        "contentType": one.content_type,
        "size": str(len(one.data)),
        "md5Hash": one.md5,
        "etag": one.etag.strip('"'),
        "timeCreated": one.written.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "updated": one.written.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "storageClass": "STANDARD",
        **({"metadata": dict(one.metadata)} if one.metadata else {}),
    }


def _folded(
    bucket: str, found: list[Object], prefix: str, delimiter: str | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Objects, and what lies below a delimiter as prefixes."""
    if not delimiter:
        return [_object(bucket, one) for one in found], []
    shown: list[dict[str, Any]] = []
    prefixes: dict[str, None] = {}
    for one in found:
        head, cut, _ = one.name[len(prefix) :].partition(delimiter)
        if cut:
            prefixes[prefix + head + cut] = None
        else:
            shown.append(_object(bucket, one))
    return shown, list(prefixes)


def _preconditions(asked: Asked) -> Preconditions:
    return Preconditions(
        generation=asked.number("ifGenerationMatch"),
        generation_not=asked.number("ifGenerationNotMatch"),
        metageneration=asked.number("ifMetagenerationMatch"),
        metageneration_not=asked.number("ifMetagenerationNotMatch"),
    )


def _resource(bucket: str) -> str:
    return f"projects/_/buckets/{bucket}"
