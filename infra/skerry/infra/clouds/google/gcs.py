"""The bucket that holds a run: one resource with all that makes it safe, and the only one whose content matters.

Nobody from outside, rights by IAM alone, no older versions and no soft-deleted objects, which would be paid for: every
round's payloads would be kept a week. Nothing of a run expires by age; see `clouds.aws.storage`. What decides cannot be
overwritten by replicas, since to overwrite takes the right to delete; see `policies`.
Sources: the discovery document of storage v1; Cloud Storage, "Soft delete", "Object Lifecycle Management".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from skerry.infra.clouds.google import marks
from skerry.infra.clouds.google.session import Absent, Disabled, waited
from skerry.infra.clouds.handling import VISIBLE_S, check_owner, differing, each
from skerry.infra.graph import Life, Resource
from skerry.infra.handler import Condition, Held, Seen
from skerry.runtime.errors import Conflict, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.graph import Json, Value
    from skerry.infra.handler import Made, Wanted

ENFORCED: Final = "enforced"

# Cloud Storage, "IAM conditions": they need uniform bucket-level access.
NOT_UNIFORM: Final = (
    "its rights cannot be bound to prefixes as long as it has rights by object: "
    "`gcloud storage buckets update gs://{} --uniform-bucket-level-access`"
)
_REMEDY: Final = "if it is yours, say `byo: {bucket: true}`, else write another bucket at `store`"
# Ten listings, 10,000 objects: enough to say that there is much.
_COUNTED_PAGES: Final = 10
_AT_ONCE: Final = 1000
# The JSON API deletes one object with each request.
_STREAMS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Bucket(Resource):
    """A bucket. Outputs: name, region.

    region: its location, in lower case. expire_days: prefixes whose objects go by age. further_rules: always as it is
    here; it is a setting so that a rule of somebody else's is seen, and undone.
    """

    KIND: ClassVar[str] = "google_bucket"
    LIFE: ClassVar[Life] = Life.DATA
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})

    uniform_access: bool = True
    public_access_prevention: str = ENFORCED
    versioning: bool = False
    soft_delete_s: int = 0
    abort_uploads_days: int = 1
    expire_days: Mapping[str, int] = field(default_factory=dict[str, int])
    further_rules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Look:
    """A bucket at a glance. owner: the run that asks, another, or None. uniform: all rights are of the whole bucket."""

    region: str
    owner: str | None
    uniform: bool = True


# Which part of a bucket each setting is in.
_PARTS: Final = {
    "uniform_access": "iamConfiguration",
    "public_access_prevention": "iamConfiguration",
    "versioning": "versioning",
    "soft_delete_s": "softDeletePolicy",
    "abort_uploads_days": "lifecycle",
    "expire_days": "lifecycle",
    "further_rules": "lifecycle",
}


def create_request(wanted: Wanted) -> dict[str, Any]:
    """The body of buckets.insert: all of it at once, with its marks."""
    about = {"name": wanted.name, "location": wanted.resource.region.upper(), "storageClass": "STANDARD"}
    return {**about, "labels": marks.labels(wanted), **parts(wanted)}


def patch_request(wanted: Wanted, changed: Collection[str]) -> dict[str, Any]:
    """The body of buckets.patch: only the parts that hold a changed setting."""
    touched = {_PARTS[name] for name in changed if name in _PARTS}
    return {name: part for name, part in parts(wanted).items() if name in touched}


def parts(wanted: Wanted) -> dict[str, Any]:
    """What a bucket is told, by its parts."""
    settings = wanted.settings
    return {
        "iamConfiguration": {
            "uniformBucketLevelAccess": {"enabled": settings["uniform_access"]},
            "publicAccessPrevention": settings["public_access_prevention"],
        },
        "versioning": {"enabled": settings["versioning"]},
        # A number of 64 bits is a string in JSON.
        "softDeletePolicy": {"retentionDurationSeconds": str(settings["soft_delete_s"])},
        "lifecycle": {"rule": _rules(settings)},
    }


class Buckets:
    """Makes buckets. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. A bucket's name is one in all of Google's clouds."""
        seen = self._read(wanted)
        if seen is None:
            try:
                self._call("POST", "storage/v1/b", create_request(wanted), {"project": self._google.project})
            except Conflict as error:
                try:
                    seen = self._read(wanted)
                except Unauthorized:
                    seen = None
                if seen is None:
                    text = f"the bucket name {wanted.name} is taken by another project; {_REMEDY}"
                    raise Conflict(text) from error
        deadline = self._google.clock.now() + VISIBLE_S
        what = f"the bucket {wanted.name} can be seen"
        found = seen or waited(self._google.clock, what, deadline, lambda: self._read(wanted))
        check_owner(found, wanted, "bucket", _REMEDY)
        return self.update(wanted, differing(wanted, found))

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Only the parts that hold a changed setting are written."""
        if request := patch_request(wanted, changed):
            self._call("PATCH", _path(wanted.name), request)
        return _outputs(wanted.name, wanted.resource.region)

    def delete(self, made: Made) -> None:
        """See Handler.delete. Raises Conflict while there is anything in it."""
        try:
            held = self.held(made)
            if held.objects:
                raise Conflict(
                    f"the bucket {made.name} holds {held}: it is left; `skerry destroy --data` deletes them and it"
                )
            self._call("DELETE", _path(made.name))
        except Disabled:
            raise
        except Absent:
            return
        what, deadline = f"the bucket {made.name} is gone", self._google.clock.now() + VISIBLE_S
        waited(self._google.clock, what, deadline, lambda: True if self._told(made.name) is None else None)

    def held(self, made: Made, prefix: str = "") -> Held:
        """What is in it, counted up to some 10,000 objects."""
        count, size = 0, 0
        with suppress(Absent):
            for number, page in enumerate(self._versions(made.name, prefix)):
                if number == _COUNTED_PAGES:
                    return Held(objects=count, size_bytes=size, more=True)
                count += len(page)
                size += sum(int(entry.get("size", 0)) for entry in page)
        return Held(objects=count, size_bytes=size)

    def empty(self, made: Made, prefix: str = "", progress: Callable[[Held], None] = lambda _held: None) -> Held:
        """Delete all objects and their versions; gone already is success. The bucket stays.

        prefix: only what begins with it. progress: told after every thousand. Uploads that were cut short are no
        objects; they go by age, or with the bucket.
        """
        count, size = 0, 0
        with suppress(Absent):
            # From the start every time: what was listed is gone when the next page is asked for.
            while page := next(self._versions(made.name, prefix), None):
                self._delete_all(made.name, page)
                count += len(page)
                size += sum(int(entry.get("size", 0)) for entry in page)
                progress(Held(objects=count, size_bytes=size))
        return Held(objects=count, size_bytes=size)

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. A run's bucket is the one that its URI names, wherever it is."""
        del regions
        scheme, _, rest = run.partition("://")
        name = rest.partition("/")[0]
        told = self._told(name) if scheme == "gs" and name else None
        mark = None if told is None else marks.of_labels(told.get("labels", {}))
        if told is not None and mark is not None and mark.owner(run) == run:
            region = _region(told)
            yield marks.found(Bucket, mark, name=name, region=region, outputs=_outputs(name, region))

    def look(self, name: str, run: str) -> Look | None:
        """Whose it is and where; None if nobody has it. Raises Unauthorized if it is hidden."""
        told = self._told(name)
        if told is None:
            return None
        uniform = bool(_settings(told)["uniform_access"])
        return Look(region=_region(told), owner=_owner(told, run), uniform=uniform)

    def _read(self, wanted: Wanted) -> Seen | None:
        told = self._told(wanted.name)
        if told is None:
            return None
        settings = _settings(told)
        # One of the run's own is mended.
        unfit = wanted.resource.brought and not settings["uniform_access"]
        return Seen(
            outputs=_outputs(wanted.name, _region(told)),
            settings={"region": _region(told), **settings},
            owner=_owner(told, wanted.run),
            condition=Condition.BROKEN if unfit else Condition.READY,
            detail=NOT_UNIFORM.format(wanted.name) if unfit else "",
        )

    def _told(self, name: str) -> dict[str, Any] | None:
        """What Google says of it; None if nobody has such a bucket."""
        try:
            return self._call("GET", _path(name))
        except Absent:
            return None
        except Unauthorized as error:
            raise Unauthorized(
                f"the bucket {name} exists, and these credentials may not look at it: it is another project's, or the "
                f"permission storage.buckets.get is missing; {_REMEDY}"
            ) from error

    def _versions(self, name: str, prefix: str) -> Iterator[list[dict[str, Any]]]:
        """Objects and their older versions, a thousand at a time."""
        query = {"prefix": prefix, "versions": "true", "maxResults": str(_AT_ONCE)}
        query |= {"fields": "items(name,generation,size),nextPageToken"}
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


def _path(bucket: str) -> str:
    return f"storage/v1/b/{quote(bucket, safe='')}"


def _outputs(name: str, region: str) -> dict[str, str]:
    return {"name": name, "region": region}


def _region(told: Mapping[str, Any]) -> str:
    return str(told.get("location", "")).lower()


def _owner(told: Mapping[str, Any], run: str) -> str | None:
    mark = marks.of_labels(told.get("labels", {}))
    return None if mark is None else mark.owner(run)


def _settings(told: Mapping[str, Any]) -> dict[str, Json]:
    access: Mapping[str, Any] = told.get("iamConfiguration", {})
    return {
        "uniform_access": bool(access.get("uniformBucketLevelAccess", {}).get("enabled")),
        "public_access_prevention": str(access.get("publicAccessPrevention", "inherited")),
        "versioning": bool(told.get("versioning", {}).get("enabled")),
        "soft_delete_s": int(told.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0)),
        **_of_rules(told.get("lifecycle", {}).get("rule", [])),
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
    """The settings that a lifecycle tells; a rule that is not exactly one of ours is a further one."""
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
