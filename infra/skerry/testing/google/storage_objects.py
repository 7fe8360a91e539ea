"""The objects of a bucket: generations, preconditions, and who may touch them; what both of its faces stand on.

Strongly consistent. Of any number of racing writers with a precondition one wins. Replacing an object needs the right
to delete it. One name takes one write a second, if the sandbox is told so.
Sources: Cloud Storage, "Request preconditions", "Consistency", "IAM permissions", "Quotas and limits".
"""

from __future__ import annotations

import base64
import bisect
import datetime as dt
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.google.refusals import Refusal, absent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.google.principals import Principal
    from skerry.infra.testing.google.project import Project

LIST_PREFIX: Final = "api:storage.googleapis.com/objectListPrefix"
_WRITE_EVERY_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Object:
    """One generation of an object."""

    name: str
    data: bytes
    generation: int
    content_type: str
    written: dt.datetime
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def md5(self) -> str:
        """As both faces tell it."""
        return base64.b64encode(hashlib.md5(self.data, usedforsecurity=False).digest()).decode()

    @property
    def etag(self) -> str:
        """As the XML API tells it; changes with each generation."""
        return f'"{self.generation:x}"'


@dataclass(frozen=True, kw_only=True)
class Preconditions:
    """What must be so for a request to be carried out. 0: there is no such object."""

    generation: int | None = None
    generation_not: int | None = None
    metageneration: int | None = None
    metageneration_not: int | None = None

    def check(self, present: Object | None) -> None:
        """Raises Refusal (412; 304 is not known to the callers here)."""
        generation = 0 if present is None else present.generation
        metageneration = 0 if present is None else 1
        if (
            self.generation not in {None, generation}
            or self.generation_not == generation
            or self.metageneration not in {None, metageneration}
            or self.metageneration_not == metageneration
        ):
            raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")


@dataclass(kw_only=True)
class Upload:
    """A multipart upload that is not complete."""

    bucket: str
    name: str
    content_type: str
    parts: dict[int, bytes] = field(default_factory=dict[int, bytes])


@dataclass(kw_only=True)
class Bucket:
    """One bucket: what the JSON API tells of it, its objects, and those that are soft-deleted."""

    told: dict[str, Any]
    objects: dict[str, Object] = field(default_factory=dict[str, Object])
    deleted: list[tuple[Object, dt.datetime]] = field(default_factory=list[tuple[Object, dt.datetime]])
    wrote: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.told["name"])

    @property
    def soft_delete_s(self) -> int:
        """For how long what was deleted is kept, and billed."""
        return int(self.told["softDeletePolicy"]["retentionDurationSeconds"])


class Objects:
    """The objects of all buckets. Callers hold the project's lock."""

    def __init__(self, project: Project, *, limits_rate: bool) -> None:
        """limits_rate: more than one write a second of one name is 429."""
        self._project = project
        self._limits_rate = limits_rate
        # Google's pages name the right to delete for overwriting, and not whether the condition is looked at before.
        self.rights_first = False
        self.buckets: dict[str, Bucket] = {}
        self.uploads: dict[str, Upload] = {}
        self._generation = 0

    def bucket(self, name: str) -> Bucket:
        """Raises Refusal (404)."""
        found = self.buckets.get(name)
        if found is None:
            raise Refusal(404, "The specified bucket does not exist.", code_xml="NoSuchBucket")
        return found

    def read(self, who: Principal, bucket: str, name: str, generation: int | None = None) -> Object:
        """Raises Refusal: without the right to list, one that is absent is told as forbidden."""
        one = self.bucket(bucket)
        self.check(who, "storage.objects.get", bucket, name)
        found = one.objects.get(name)
        if found is None or generation not in {None, found.generation}:
            raise self._no_such(bucket, name)
        return found

    def write(
        self,
        who: Principal,
        bucket: str,
        name: str,
        data: bytes,
        *,
        content_type: str,
        preconditions: Preconditions,
        metadata: Mapping[str, str] | None = None,
    ) -> Object:
        """Make a generation. Raises Refusal; then nothing has changed."""
        one = self.bucket(bucket)
        self.check(who, "storage.objects.create", bucket, name)
        present = one.objects.get(name)
        looks = [lambda: preconditions.check(present)]
        if present is not None:
            looks.append(lambda: self.check(who, "storage.objects.delete", bucket, name))
        for look in reversed(looks) if self.rights_first else looks:
            look()
        self._take_turn(one, name)
        if present is not None:
            self._keep(one, present)
        made = Object(
            name=name,
            data=data,
            generation=self._next(),
            content_type=content_type,
            written=self._project.now(),
            metadata=metadata or {},
        )
        one.objects[name] = made
        return made

    def delete(
        self, who: Principal, bucket: str, name: str, preconditions: Preconditions, generation: int | None = None
    ) -> None:
        """Raises Refusal: 404 for one that is absent."""
        one = self.bucket(bucket)
        self.check(who, "storage.objects.delete", bucket, name)
        present = one.objects.get(name)
        if present is None or generation not in {None, present.generation}:
            raise self._no_such(bucket, name)
        preconditions.check(present)
        self._take_turn(one, name)
        self._keep(one, one.objects.pop(name))

    def after(self, who: Principal, bucket: str, prefix: str, start: str, *, included: bool = False) -> list[Object]:
        """All objects with this prefix whose names come after `start`, in the order of their UTF-8."""
        one = self.bucket(bucket)
        self.check(who, "storage.objects.list", bucket, list_prefix=prefix)
        names = sorted(one.objects, key=str.encode)
        found = (bisect.bisect_left if included else bisect.bisect_right)(names, start.encode(), key=str.encode)
        return [one.objects[name] for name in names[found:] if name.startswith(prefix)]

    def check(
        self, who: Principal, permission: str, bucket: str, name: str | None = None, *, list_prefix: str = ""
    ) -> None:
        """Raises Refusal (403; 401 for nobody) unless the bucket's policy, or the project's, allows it."""
        resource = f"projects/_/buckets/{bucket}"
        if name is None:
            context = {"resource.type": "storage.googleapis.com/Bucket", "resource.name": resource}
        else:
            full = f"{resource}/objects/{name}"
            context = {"resource.type": "storage.googleapis.com/Object", "resource.name": full}
        context |= {"resource.service": "storage.googleapis.com", LIST_PREFIX: list_prefix}
        if self._project.may(who, permission, resource, context):
            return
        about = f"the Google Cloud Storage {'bucket' if name is None else 'object'}"
        anonymous = who.name == "allUsers"
        raise Refusal(
            401 if anonymous else 403,
            f"{'Anonymous caller' if anonymous else who.name.partition(':')[2]} does not have {permission} access to "
            f"{about}. Permission '{permission}' denied on resource (or it may not exist).",
            reason="required" if anonymous else "forbidden",
            code_xml="AuthenticationRequired" if anonymous else "AccessDenied",
        )

    def purge(self, bucket: Bucket) -> None:
        """Drop what was soft-deleted long enough ago."""
        now = self._project.now()
        bucket.deleted = [(one, at) for one, at in bucket.deleted if at > now]

    def _take_turn(self, bucket: Bucket, name: str) -> None:
        now = self._project.clock.now()
        if self._limits_rate and now - bucket.wrote.get(name, -_WRITE_EVERY_S) < _WRITE_EVERY_S:
            raise Refusal(
                429,
                f"The object {bucket.name}/{name} exceeded the rate limit for object mutation operations (create, "
                "update, and delete). Please reduce your request rate. See "
                "https://cloud.google.com/storage/docs/gcs429.",
                reason="rateLimitExceeded",
                code_xml="SlowDown",
            )
        bucket.wrote[name] = now

    def _keep(self, bucket: Bucket, gone: Object) -> None:
        if bucket.soft_delete_s:
            bucket.deleted.append((gone, self._project.now() + dt.timedelta(seconds=bucket.soft_delete_s)))

    def _no_such(self, bucket: str, name: str) -> Refusal:
        return absent(f"No such object: {bucket}/{name}")

    def _next(self) -> int:
        """Microseconds since 1970, and never the same twice."""
        self._generation = max(self._generation + 1, int(self._project.now().timestamp() * 1_000_000))
        return self._generation
