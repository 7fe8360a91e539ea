"""The objects of an S3 bucket below a prefix, with their old versions and delete markers: deleted, or brought back.

Source: S3 user guide, "Working with delete markers" and "Deleting object versions from a versioning-enabled bucket".
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.handler_helpers import Absent, delete_contents
from skerry.infra.provision.handler import Contents
from skerry.runtime.errors import Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from skerry.infra.clouds.aws.session import Aws

# The most that one request lists or deletes.
_AT_ONCE: Final = 1000


@dataclass(frozen=True, kw_only=True)
class S3Objects:
    """The objects of a bucket whose keys begin with `prefix`. region: the bucket's."""

    aws: Aws
    region: str
    bucket: str
    prefix: str

    def versions(self) -> Iterator[list[dict[str, Any]]]:
        """Objects with their versions and delete markers, a thousand at a time."""
        following: dict[str, Any] = {}
        while True:
            where = {"Bucket": self.bucket, "Prefix": self.prefix, "MaxKeys": _AT_ONCE, **following}
            page = self.aws.call("s3", self.region, "list_object_versions", **where)
            entries: list[dict[str, Any]] = [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
            if entries:
                yield entries
            if not page.get("IsTruncated"):
                return
            following = {"KeyMarker": page["NextKeyMarker"]}
            if page.get("NextVersionIdMarker"):
                following["VersionIdMarker"] = page["NextVersionIdMarker"]

    def delete(self, progress: Callable[[Contents], None]) -> Contents:
        """Delete all, also uploads that were never completed. progress: called after every page."""
        deleted = delete_contents(lambda: next(self.versions(), None), self._delete_all, "Size", progress)
        where = {"Bucket": self.bucket, "Prefix": self.prefix}
        with suppress(Absent):
            uploads = self.aws.pages("s3", self.region, "list_multipart_uploads", "Uploads", **where)
            for upload in list(uploads):
                self._abort(str(upload["Key"]), str(upload["UploadId"]))
        return deleted

    def undelete(self, since: datetime) -> Contents:
        """Bring back what was there at `since`: what is newer than the old version goes for good."""
        by_key: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for page in self.versions():
            for entry in page:
                by_key[str(entry["Key"])].append(entry)
        newer: list[dict[str, Any]] = []
        sizes: list[int] = []
        for entries in by_key.values():
            then = max((item for item in entries if item["LastModified"] < since), key=_modified, default=None)
            later = [item for item in entries if item["LastModified"] >= since]
            if later and then is not None and "Size" in then:  # a marker has none
                newer += later
                sizes.append(int(then["Size"]))
        for first in range(0, len(newer), _AT_ONCE):
            self._delete_all(newer[first : first + _AT_ONCE])
        return Contents(objects=len(sizes), size_bytes=sum(sizes))

    def _delete_all(self, entries: Sequence[dict[str, Any]]) -> None:
        objects = [{"Key": str(entry["Key"]), "VersionId": str(entry["VersionId"])} for entry in entries]
        batch = {"Objects": objects, "Quiet": True}
        response = self.aws.call("s3", self.region, "delete_objects", Bucket=self.bucket, Delete=batch)
        for error in response.get("Errors", []):
            reason = f"{error.get('Code')}: {error.get('Message')}"
            message = f"cannot delete s3://{self.bucket}/{error.get('Key')}: {reason}"
            raise (Unauthorized if error.get("Code") == "AccessDenied" else Retryable)(message)

    def _abort(self, key: str, upload: str) -> None:
        with suppress(Absent):
            self.aws.call("s3", self.region, "abort_multipart_upload", Bucket=self.bucket, Key=key, UploadId=upload)


def _modified(entry: Mapping[str, Any]) -> datetime:
    return entry["LastModified"]
