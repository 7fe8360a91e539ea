"""Stores objects of buckets with generations, preconditions and rights; the JSON and XML APIs share it.

Strongly consistent. Of any number of racing writers with a precondition one wins. Replacing an object needs the right
to delete it. With `limits_rate`, one name accepts one write per second.
Sources: Cloud Storage, "Request preconditions", "Consistency", "IAM permissions", "Quotas and limits".
"""

from __future__ import annotations

import base64
import bisect
import datetime as dt
import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.google.refusals import Refusal, absent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.google.access_tokens import Principal
    from skerry.testing.google.shared_state import Project

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
        """The MD5 hash that both APIs report."""
        return base64.b64encode(hashlib.md5(self.data, usedforsecurity=False).digest()).decode()

    @property
    def etag(self) -> str:
        """The ETag of the XML API; changes with each generation."""
        return f'"{self.generation:x}"'


@dataclass(frozen=True, kw_only=True)
class Preconditions:
    """Preconditions of a request. 0: the object must not exist."""

    generation: int | None = None
    generation_not: int | None = None
    metageneration: int | None = None
    metageneration_not: int | None = None

    def check(self, present: Object | None) -> None:
        """Raise Refusal (412) unless all hold; the callers here have no use of 304."""
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
    """An incomplete multipart upload."""

    bucket: str
    name: str
    content_type: str
    parts: dict[int, bytes] = field(default_factory=dict[int, bytes])


@dataclass(kw_only=True)
class Bucket:
    """One bucket: its JSON API resource, its objects, and soft-deleted objects with their end."""

    resource: dict[str, Any]
    objects: dict[str, Object] = field(default_factory=dict[str, Object])
    deleted: list[tuple[Object, dt.datetime]] = field(default_factory=list[tuple[Object, dt.datetime]])
    last_write: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def name(self) -> str:
        """The name of the bucket."""
        return str(self.resource["name"])

    @property
    def soft_delete(self) -> dt.timedelta:
        """The retention of deleted objects."""
        return dt.timedelta(seconds=int(self.resource["softDeletePolicy"]["retentionDurationSeconds"]))


class Objects:
    """The objects of all buckets. Callers hold the project's lock."""

    def __init__(self, project: Project, *, limits_rate: bool) -> None:
        """limits_rate: more than one write per second of one name is 429."""
        self._project = project
        self._limits_rate = limits_rate
        # Google documents the right to delete for overwriting, but not the order of this check and the precondition.
        self.rights_first = False
        self.buckets: dict[str, Bucket] = {}
        self.uploads: dict[str, Upload] = {}
        self._generation = 0

    def bucket(self, name: str) -> Bucket:
        """Return a bucket. Raises Refusal (404)."""
        bucket = self.buckets.get(name)
        if bucket is None:
            raise Refusal(404, "The specified bucket does not exist.", code_xml="NoSuchBucket")
        return bucket

    def read(self, principal: Principal, bucket: str, name: str, generation: int | None = None) -> Object:
        """Return an object. Raises Refusal."""
        container = self.bucket(bucket)
        self.check(principal, "storage.objects.get", bucket, name)
        stored = container.objects.get(name)
        if stored is None or generation not in {None, stored.generation}:
            raise self._absent(bucket, name)
        return stored

    def write(
        self,
        principal: Principal,
        bucket: str,
        name: str,
        data: bytes,
        *,
        content_type: str,
        preconditions: Preconditions,
        metadata: Mapping[str, str] | None = None,
    ) -> Object:
        """Write a new generation. Raises Refusal without any change."""
        container = self.bucket(bucket)
        self.check(principal, "storage.objects.create", bucket, name)
        present = container.objects.get(name)
        checks = [lambda: preconditions.check(present)]
        if present is not None:
            checks.append(lambda: self.check(principal, "storage.objects.delete", bucket, name))
        for check_ in reversed(checks) if self.rights_first else checks:
            check_()
        self._check_rate(container, name)
        if present is not None:
            self._soft_delete(container, present)
        written = Object(
            name=name,
            data=data,
            generation=self._next(),
            content_type=content_type,
            written=self._project.now(),
            metadata=metadata or {},
        )
        container.objects[name] = written
        return written

    def delete(
        self, principal: Principal, bucket: str, name: str, preconditions: Preconditions, generation: int | None = None
    ) -> None:
        """Delete an object. Raises Refusal, 404 if it is absent."""
        container = self.bucket(bucket)
        self.check(principal, "storage.objects.delete", bucket, name)
        present = container.objects.get(name)
        if present is None or generation not in {None, present.generation}:
            raise self._absent(bucket, name)
        preconditions.check(present)
        self._check_rate(container, name)
        self._soft_delete(container, container.objects.pop(name))

    def restore(self, principal: Principal, bucket: str, name: str, generation: int | None) -> Object:
        """Make a soft-deleted generation live again, under a new generation. Raises Refusal."""
        container = self.bucket(bucket)
        self.check(principal, "storage.objects.restore", bucket, name)
        self.purge(container)
        for stored, _ in container.deleted:
            if (stored.name, stored.generation) == (name, generation):
                if (live := container.objects.get(name)) is not None:
                    self._soft_delete(container, live)
                container.objects[name] = replace(stored, generation=self._next(), written=self._project.now())
                return container.objects[name]
        raise self._absent(bucket, name)

    def after(
        self, principal: Principal, bucket: str, prefix: str, start: str, *, included: bool = False
    ) -> list[Object]:
        """Return the objects with this prefix and a name after `start`, ordered by UTF-8."""
        container = self.bucket(bucket)
        self.check(principal, "storage.objects.list", bucket, list_prefix=prefix)
        names = sorted(container.objects, key=str.encode)
        first = (bisect.bisect_left if included else bisect.bisect_right)(names, start.encode(), key=str.encode)
        return [container.objects[name] for name in names[first:] if name.startswith(prefix)]

    def check(
        self, principal: Principal, permission: str, bucket: str, name: str | None = None, *, list_prefix: str = ""
    ) -> None:
        """Raise Refusal (403; 401 without a token) unless the bucket's or the project's policy allows it."""
        resource = f"projects/_/buckets/{bucket}"
        if name is None:
            context = {"resource.type": "storage.googleapis.com/Bucket", "resource.name": resource}
        else:
            full = f"{resource}/objects/{name}"
            context = {"resource.type": "storage.googleapis.com/Object", "resource.name": full}
        context |= {"resource.service": "storage.googleapis.com", LIST_PREFIX: list_prefix}
        if self._project.may(principal, permission, resource, context):
            return
        about = f"the Google Cloud Storage {'bucket' if name is None else 'object'}"
        anonymous = principal.name == "allUsers"
        raise Refusal(
            401 if anonymous else 403,
            f"{'Anonymous caller' if anonymous else principal.name.partition(':')[2]} does not have {permission} "
            f"access to {about}. Permission '{permission}' denied on resource (or it may not exist).",
            reason="required" if anonymous else "forbidden",
            code_xml="AuthenticationRequired" if anonymous else "AccessDenied",
        )

    def purge(self, bucket: Bucket) -> None:
        """Remove soft-deleted objects after their retention."""
        now = self._project.now()
        bucket.deleted = [(stored, until) for stored, until in bucket.deleted if until > now]

    def _check_rate(self, bucket: Bucket, name: str) -> None:
        now = self._project.clock.now()
        if self._limits_rate and now - bucket.last_write.get(name, -_WRITE_EVERY_S) < _WRITE_EVERY_S:
            raise Refusal(
                429,
                f"The object {bucket.name}/{name} exceeded the rate limit for object mutation operations (create, "
                "update, and delete). Please reduce your request rate. See "
                "https://cloud.google.com/storage/docs/gcs429.",
                reason="rateLimitExceeded",
                code_xml="SlowDown",
            )
        bucket.last_write[name] = now

    def _soft_delete(self, bucket: Bucket, removed: Object) -> None:
        if bucket.soft_delete:
            bucket.deleted.append((removed, self._project.now() + bucket.soft_delete))

    def _absent(self, bucket: str, name: str) -> Refusal:
        return absent(f"No such object: {bucket}/{name}")

    def _next(self) -> int:
        """Return microseconds since 1970, never the same twice."""
        self._generation = max(self._generation + 1, int(self._project.now().timestamp() * 1_000_000))
        return self._generation
