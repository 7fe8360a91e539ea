"""The Cloud Storage bucket that holds a run, with all settings that make it safe.

No public access, permissions by IAM only, no old versions. Soft-deleted objects cost money, because every round's
payloads are stored for a week or longer, so there are none unless the spec asks for them (`undelete_days`). Nothing of
a run expires by age; see `clouds.aws.s3`. Replicas cannot overwrite decisions, commits or receipts, because overwriting
needs the permission to delete; see `policies`.
Sources: the discovery document of storage v1; Cloud Storage, "Soft delete", "Object Lifecycle Management".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.session import Disabled
from skerry.infra.clouds.handler_helpers import (
    BUCKET_REMEDY,
    Absent,
    BucketLook,
    bucket_of,
    check_empty,
    check_owner,
    count_contents,
    delete_contents,
    differing,
    each,
    wait_deleted,
    wait_visible,
)
from skerry.infra.provision.graph import Life, Resource
from skerry.infra.provision.handler import Condition, Contents, Observed
from skerry.runtime.errors import Conflict, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.graph import Json, Value
    from skerry.infra.provision.handler import Desired, StateRecord

ENFORCED: Final = "enforced"

# Cloud Storage, "IAM conditions": they need uniform bucket-level access.
NOT_UNIFORM: Final = (
    "permissions cannot be limited to prefixes while the bucket has permissions by object; run "
    "`gcloud storage buckets update gs://{} --uniform-bucket-level-access`"
)
_AT_ONCE: Final = 1000
# The JSON API deletes one object with each request.
_STREAMS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Bucket(Resource):
    """A bucket. Outputs: name, region.

    region: its location, in lower case. expire_days: prefixes with objects that expire by age. further_rules: constant;
    it is a setting so that another user's rule is found and removed. kms_key: the name of the key that encrypts; ""
    leaves it as it is.
    """

    KIND: ClassVar[str] = "google_bucket"
    LIFE: ClassVar[Life] = Life.DATA
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})
    PROTECTS: ClassVar[frozenset[str]] = frozenset({"uniform_access"})
    DEMANDED: ClassVar[frozenset[str]] = frozenset({"kms_key"})

    uniform_access: bool = True
    public_access_prevention: str = ENFORCED
    versioning: bool = False
    soft_delete_s: int = 0
    abort_uploads_days: int = 1
    expire_days: Mapping[str, int] = field(default_factory=dict[str, int])
    further_rules: tuple[str, ...] = ()
    kms_key: str = ""


# The part of a bucket that each setting is in.
_PARTS: Final = {
    "uniform_access": "iamConfiguration",
    "public_access_prevention": "iamConfiguration",
    "versioning": "versioning",
    "soft_delete_s": "softDeletePolicy",
    "abort_uploads_days": "lifecycle",
    "expire_days": "lifecycle",
    "further_rules": "lifecycle",
    "kms_key": "encryption",
}


def create_request(desired: Desired) -> dict[str, Any]:
    """The body of buckets.insert: all parts, and its labels."""
    about = {"name": desired.name, "location": desired.resource.region.upper(), "storageClass": "STANDARD"}
    return {**about, "labels": owner_labels.labels(desired), **parts(desired)}


def patch_request(desired: Desired, changed: Collection[str]) -> dict[str, Any]:
    """The body of buckets.patch: only the parts with a changed setting."""
    touched = {_PARTS[name] for name in changed if name in _PARTS}
    return {name: part for name, part in parts(desired).items() if name in touched}


def parts(desired: Desired) -> dict[str, Any]:
    """The parts of a bucket, by field."""
    settings = desired.settings
    return {
        "iamConfiguration": {
            "uniformBucketLevelAccess": {"enabled": settings["uniform_access"]},
            "publicAccessPrevention": settings["public_access_prevention"],
        },
        "versioning": {"enabled": settings["versioning"]},
        # A 64-bit number is a string in JSON.
        "softDeletePolicy": {"retentionDurationSeconds": str(settings["soft_delete_s"])},
        "lifecycle": {"rule": _rules(settings)},
        **({"encryption": {"defaultKmsKeyName": key}} if (key := settings["kms_key"]) else {}),
    }


class Buckets:
    """Creates buckets. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Bucket names are unique in all of Google Cloud."""
        seen = self._read(desired)
        if seen is None:
            try:
                self._call("POST", "storage/v1/b", create_request(desired), {"project": self._google.project})
            except Conflict as error:
                try:
                    seen = self._read(desired)
                except Unauthorized:
                    seen = None
                if seen is None:
                    text = f"the bucket name {desired.name} belongs to another project; {BUCKET_REMEDY}"
                    raise Conflict(text) from error
        seen = seen or wait_visible(self._google.clock, f"the bucket {desired.name}", lambda: self._read(desired))
        check_owner(seen, desired, "bucket", BUCKET_REMEDY)
        return self.update(desired, differing(desired, seen))

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Writes only the parts with a changed setting."""
        if request := patch_request(desired, changed):
            self._call("PATCH", _path(desired.name), request)
        return _outputs(desired.name, desired.resource.region)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete. Raises Conflict unless it is empty."""
        try:
            check_empty("bucket", record.name, self.contents(record))
            self._call("DELETE", _path(record.name))
        except Disabled:
            raise
        except Absent:
            return
        name = record.name
        wait_deleted(self._google.clock, f"the bucket {name}", lambda: self._row(name))

    def contents(self, record: StateRecord, prefix: str = "") -> Contents:
        """See DataHandler.contents."""
        return count_contents(self._versions(record.name, prefix), "size")

    def key(self, _record: StateRecord) -> str:
        """See BucketHandler.key. The service agent of Cloud Storage uses the key, so replicas need no right on it."""
        return ""

    def empty(
        self, record: StateRecord, prefix: str = "", progress: Callable[[Contents], None] = lambda _deleted: None
    ) -> Contents:
        """See DataHandler.empty. Absent is success. The bucket stays. progress: called after every page.

        Unfinished uploads are not objects; they expire by age, or are deleted with the bucket.
        """
        return delete_contents(
            lambda: next(self._versions(record.name, prefix), None),
            lambda page: self._delete_all(record.name, page),
            "size",
            progress,
        )

    def undelete(self, record: StateRecord, prefix: str, since: datetime) -> Contents:
        """See BucketHandler.undelete. Of several deleted generations the one that was live then is restored."""
        query = {"prefix": prefix, "softDeleted": "true", "maxResults": str(_AT_ONCE)}
        query |= {"fields": "items(name,generation,size,timeCreated,softDeleteTime),nextPageToken"}
        restored = [
            entry
            for page in self._pages(record.name, query)
            for entry in page
            if _time(entry["timeCreated"]) < since <= _time(entry["softDeleteTime"])
        ]
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="google") as pool:
            list(pool.map(functools.partial(self._restore_object, record.name), restored))
        return Contents(objects=len(restored), size_bytes=sum(int(entry["size"]) for entry in restored))

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. The run's bucket is the one in its URI, in any region."""
        del regions
        name = bucket_of(run, "gs") or ""
        row = (self._row(name) if name else None) or {}
        mark = owner_labels.of_labels(row.get("labels", {}))
        if mark is not None and mark.owner(run) == run:
            region = _region(row)
            yield owner_labels.owned_record(Bucket, mark, name=name, region=region, outputs=_outputs(name, region))

    def region_of(self, name: str, _expected: str) -> str | None:
        """See BucketHandler.region_of."""
        row = self._row(name)
        return None if row is None else _region(row)

    def look(self, name: str, run: str) -> BucketLook | None:
        """Owner and region of a bucket; None if it does not exist. Raises Unauthorized. run: of the caller."""
        row = self._row(name)
        if row is None:
            return None
        uniform = bool(_settings(row)["uniform_access"])
        return BucketLook(region=_region(row), owner=_owner(row, run), uniform=uniform)

    def _read(self, desired: Desired) -> Observed | None:
        row = self._row(desired.name)
        if row is None:
            return None
        settings = _settings(row)
        key = str(row.get("encryption", {}).get("defaultKmsKeyName", ""))
        # The run's own bucket is corrected by an update.
        unfit = desired.resource.brought and not settings["uniform_access"]
        return Observed(
            outputs=_outputs(desired.name, _region(row)),
            settings={"region": _region(row), **settings, "kms_key": key if desired.settings["kms_key"] else ""},
            owner=_owner(row, desired.run),
            condition=Condition.BROKEN if unfit else Condition.READY,
            detail=NOT_UNIFORM.format(desired.name) if unfit else "",
        )

    def _row(self, name: str) -> dict[str, Any] | None:
        """The bucket as Google returns it; None if it does not exist."""
        try:
            return self._call("GET", _path(name))
        except Absent:
            return None
        except Unauthorized as error:
            raise Unauthorized(
                f"the bucket {name} exists, and these credentials cannot read it: it is in another project, or the "
                f"permission storage.buckets.get is missing; {BUCKET_REMEDY}"
            ) from error

    def _versions(self, name: str, prefix: str) -> Iterator[list[dict[str, Any]]]:
        """Objects and their older versions, a thousand at a time."""
        query = {"prefix": prefix, "versions": "true", "maxResults": str(_AT_ONCE)}
        return self._pages(name, query | {"fields": "items(name,generation,size),nextPageToken"})

    def _pages(self, name: str, query: Mapping[str, str]) -> Iterator[list[dict[str, Any]]]:
        query = dict(query)
        while True:
            page = self._call("GET", f"{_path(name)}/o", query=query)
            if page.get("items"):
                yield page["items"]
            if not page.get("nextPageToken"):
                return
            query |= {"pageToken": str(page["nextPageToken"])}

    def _delete_all(self, bucket: str, page: Sequence[Mapping[str, Any]]) -> None:
        with ThreadPoolExecutor(_STREAMS, thread_name_prefix="google") as pool:
            list(pool.map(functools.partial(self._delete_object, bucket), page))

    def _restore_object(self, bucket: str, entry: Mapping[str, Any]) -> None:
        path = f"{_path(bucket)}/o/{quote(str(entry['name']), safe='')}/restore"
        self._call("POST", path, query={"generation": str(entry["generation"])})

    def _delete_object(self, bucket: str, entry: Mapping[str, Any]) -> None:
        generation = {"generation": str(entry["generation"])}
        with suppress(Absent):
            self._call("DELETE", f"{_path(bucket)}/o/{quote(str(entry['name']), safe='')}", query=generation)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Json] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        return self._google.call("storage", method, path, body=body, query=query)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _path(bucket: str) -> str:
    return f"storage/v1/b/{quote(bucket, safe='')}"


def _outputs(name: str, region: str) -> dict[str, str]:
    return {"name": name, "region": region}


def _region(row: Mapping[str, Any]) -> str:
    return str(row.get("location", "")).lower()


def _owner(row: Mapping[str, Any], run: str) -> str | None:
    mark = owner_labels.of_labels(row.get("labels", {}))
    return None if mark is None else mark.owner(run)


def _settings(row: Mapping[str, Any]) -> dict[str, Json]:
    access: Mapping[str, Any] = row.get("iamConfiguration", {})
    return {
        "uniform_access": bool(access.get("uniformBucketLevelAccess", {}).get("enabled")),
        "public_access_prevention": str(access.get("publicAccessPrevention", "inherited")),
        "versioning": bool(row.get("versioning", {}).get("enabled")),
        "soft_delete_s": int(row.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0)),
        **_of_rules(row.get("lifecycle", {}).get("rule", [])),
    }


def _rules(settings: Mapping[str, Value]) -> list[dict[str, Any]]:
    days_by_prefix = settings["expire_days"]
    expiring = sorted(days_by_prefix.items()) if isinstance(days_by_prefix, Mapping) else []
    return [
        {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": settings["abort_uploads_days"]}},
        *(
            {"action": {"type": "Delete"}, "condition": {"age": days, "matchesPrefix": [prefix]}}
            for prefix, days in expiring
        ),
    ]


def _of_rules(rules: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    """The settings in a lifecycle configuration; a rule that differs from ours is a further one."""
    abort_days = 0
    expire_days: dict[str, Json] = {}
    further: list[Json] = []
    for rule in rules:
        kind, condition = str(rule["action"]["type"]), dict(rule.get("condition", {}))
        prefixes: Sequence[str] = condition.get("matchesPrefix", ())
        if kind == "AbortIncompleteMultipartUpload" and set(condition) == {"age"}:
            abort_days = int(condition["age"])
        elif kind == "Delete" and set(condition) == {"age", "matchesPrefix"} and len(prefixes) == 1:
            expire_days[prefixes[0]] = int(condition["age"])
        else:
            further.append(f"{kind} where {', '.join(f'{name} is {condition[name]}' for name in sorted(condition))}")
    return {"abort_uploads_days": abort_days, "expire_days": expire_days, "further_rules": further}
