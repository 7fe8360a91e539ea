"""Cloud Storage's XML API, which object_store uses: objects, listings and multipart uploads.

Headers and parameters are checked with the tables of "XML API reference"; unknown ones are refused, so that a misspelt
precondition is not ignored.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass, field, replace
from email.utils import format_datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote
from xml.etree import ElementTree as ET  # parses only requests of this machine's own clients
from xml.sax.saxutils import escape

from skerry.testing.google.refusals import Refusal
from skerry.testing.google.storage_objects import Object, Objects, Preconditions, Upload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.testing.google.access_tokens import Principal

# "Request headers" of the XML API reference, and HTTP's own headers.
_HEADERS: Final = frozenset(
    {
        "accept",
        "accept-encoding",
        "authorization",
        "cache-control",
        "connection",
        "content-length",
        "content-type",
        "date",
        "expect",
        "host",
        "range",
        "te",
        "traceparent",
        "transfer-encoding",
        "user-agent",
        "x-goog-copy-source",
        "x-goog-if-generation-match",
        "x-goog-if-metageneration-match",
    }
)
# By HTTP method and whether the request is for an object.
_PARAMETERS: Final[Mapping[tuple[str, bool], frozenset[str]]] = {
    ("GET", False): frozenset(
        {"continuation-token", "delimiter", "encoding-type", "list-type", "max-keys", "prefix", "start-after"}
    ),
    ("HEAD", False): frozenset(),
    ("GET", True): frozenset({"generation"}),
    ("HEAD", True): frozenset({"generation"}),
    ("PUT", True): frozenset({"partNumber", "uploadId"}),
    ("POST", True): frozenset({"uploads", "uploadId"}),
    ("DELETE", True): frozenset({"generation", "uploadId"}),
}
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)|bytes=-(\d+)")
_PAGE: Final = 1000
_SMALLEST_PART: Final = 5 << 20


@dataclass(frozen=True, kw_only=True)
class XmlRequest:
    """One request of the XML API. name: of the object; None is the bucket. headers: by lower-case name."""

    http: str
    bucket: str
    name: str | None
    query: Mapping[str, Sequence[str]]
    headers: Mapping[str, str]
    body: bytes
    principal: Principal

    @property
    def method(self) -> str:
        """The corresponding method of the JSON API."""
        if self.name is None:
            return "storage.objects.list" if self.http == "GET" else f"storage.xml.{self.http}"
        if "uploads" in self.query or "uploadId" in self.query:
            return f"storage.multipartUploads.{self.http.lower()}"
        verbs = {"GET": "get", "HEAD": "get", "PUT": "insert", "DELETE": "delete"}
        return f"storage.objects.{verbs.get(self.http, self.http)}"

    def by(self, principal: Principal) -> XmlRequest:
        """Return the request with this principal."""
        return replace(self, principal=principal)

    def problems(self) -> list[str]:
        """Return the problems of the request."""
        unknown_headers = [f"unknown header {name}" for name in self.headers if name not in _HEADERS]
        allowed = _PARAMETERS.get((self.http, self.name is not None))
        if allowed is None:
            return [f"no such method: {self.http} of {'a bucket' if self.name is None else 'an object'}"]
        return unknown_headers + [f"unknown parameter {name}" for name in self.query if name not in allowed]


@dataclass(frozen=True, kw_only=True)
class XmlResponse:
    """A response: status, headers and body."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


class StorageXml:
    """The XML API over the objects of a project."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def handle(self, request: XmlRequest) -> XmlResponse:
        """Handle a request without problems. Raises Refusal."""
        if request.name is None:
            return self._list(request) if request.http == "GET" else self._head_bucket(request)
        if "uploads" in request.query or "uploadId" in request.query:
            return self._upload(request, request.name)
        match request.http:
            case "GET" | "HEAD":
                return self._get(request, request.name)
            case "PUT":
                return self._put(request, request.name)
            case _:
                self._objects.delete(
                    request.principal,
                    request.bucket,
                    request.name,
                    _preconditions(request),
                    _generation(request),
                )
                return XmlResponse(status=204)

    def _head_bucket(self, request: XmlRequest) -> XmlResponse:
        self._objects.bucket(request.bucket)
        self._objects.check(request.principal, "storage.buckets.get", request.bucket)
        return XmlResponse()

    def _get(self, request: XmlRequest, name: str) -> XmlResponse:
        stored = self._objects.read(request.principal, request.bucket, name, _generation(request))
        _preconditions(request).check(stored)
        headers = _object_headers(stored)
        if "range" not in request.headers:
            return XmlResponse(headers=headers, body=stored.data)
        span = _byte_range(request.headers["range"], len(stored.data))
        if span is None:
            raise Refusal(416, "The requested range cannot be satisfied.", code_xml="InvalidRange")
        start, stop = span
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(stored.data)}"
        return XmlResponse(status=206, headers=headers, body=stored.data[start:stop])

    def _put(self, request: XmlRequest, name: str) -> XmlResponse:
        if (source := request.headers.get("x-goog-copy-source")) is not None:
            bucket, _, source_name = unquote(source).lstrip("/").partition("/")
            copied = self._objects.read(request.principal, bucket, source_name)
            written = self._write(request, name, copied.data, copied.content_type)
            return XmlResponse(headers=_object_headers(written), body=b"<?xml version='1.0'?><CopyObjectResult/>")
        written = self._write(
            request, name, request.body, request.headers.get("content-type", "application/octet-stream")
        )
        return XmlResponse(headers=_object_headers(written))

    def _write(self, request: XmlRequest, name: str, data: bytes, content_type: str) -> Object:
        return self._objects.write(
            request.principal,
            request.bucket,
            name,
            data,
            content_type=content_type,
            preconditions=_preconditions(request),
        )

    def _list(self, request: XmlRequest) -> XmlResponse:
        query = {key: values[0] for key, values in request.query.items()}
        if query.get("list-type") != "2" or query.get("encoding-type", "url") != "url":
            raise Refusal(400, "the sandbox supports only list-type=2", code_xml="InvalidArgument")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start = query.get("continuation-token", "").removeprefix("after:") or query.get("start-after", "")
        objects = self._objects.after(request.principal, request.bucket, prefix, start)
        size = min(int(query.get("max-keys", _PAGE)), _PAGE)
        contents: list[str] = []
        prefixes: dict[str, None] = {}
        last = ""
        for stored in objects:
            head, cut, _ = stored.name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            folder = prefix + head + cut
            if cut and (folder in prefixes or folder <= start):
                last = stored.name
                continue
            if len(contents) + len(prefixes) == size:
                break
            last = stored.name
            if cut:
                prefixes[folder] = None
            else:
                contents.append(_listing_entry(stored))
        is_cut = bool(objects) and last != objects[-1].name
        text = "".join(
            [
                "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>",
                f"<Name>{request.bucket}</Name><Prefix>{escape(prefix)}</Prefix>",
                f"<KeyCount>{len(contents) + len(prefixes)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>",
                f"<NextContinuationToken>after:{escape(last)}</NextContinuationToken>" if is_cut else "",
                *contents,
                *(f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>" for prefix in prefixes),
                "</ListBucketResult>",
            ]
        )
        return XmlResponse(headers={"Content-Type": "application/xml; charset=UTF-8"}, body=text.encode())

    def _upload(self, request: XmlRequest, name: str) -> XmlResponse:
        objects, principal = self._objects, request.principal
        if "uploads" in request.query:
            objects.bucket(request.bucket)
            objects.check(principal, "storage.multipartUploads.create", request.bucket, name)
            number = f"upload-{len(objects.uploads) + 1}"
            content_type = request.headers.get("content-type", "application/octet-stream")
            objects.uploads[number] = Upload(bucket=request.bucket, name=name, content_type=content_type)
            return _xml_response(
                f"<InitiateMultipartUploadResult><Bucket>{request.bucket}</Bucket><Key>{escape(name)}</Key>"
                f"<UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            )
        number = request.query["uploadId"][0]
        upload = objects.uploads.get(number)
        if upload is None or (upload.bucket, upload.name) != (request.bucket, name):
            raise Refusal(404, "The requested upload was not found.", code_xml="NoSuchUpload")
        match request.http:
            case "PUT":
                objects.check(principal, "storage.multipartUploads.create", request.bucket, name)
                part = int(request.query["partNumber"][0])
                upload.parts[part] = request.body
                return XmlResponse(headers={"ETag": _part_etag(part, request.body)})
            case "DELETE":
                objects.check(principal, "storage.multipartUploads.abort", request.bucket, name)
                del objects.uploads[number]
                return XmlResponse(status=204)
            case _:
                return self._complete(request, name, number, upload)

    def _complete(self, request: XmlRequest, name: str, number: str, upload: Upload) -> XmlResponse:
        parts = [
            (int(part.findtext("PartNumber", "0")), part.findtext("ETag", ""))
            for part in ET.fromstring(request.body).iter("Part")  # noqa: S314  this machine's own clients
        ]
        for part, etag in parts:
            if part not in upload.parts or _part_etag(part, upload.parts[part]) != etag:
                raise Refusal(400, "One or more of the specified parts could not be found.", code_xml="InvalidPart")
        if any(len(upload.parts[part]) < _SMALLEST_PART for part, _ in parts[:-1]):
            raise Refusal(400, "Your proposed upload is smaller than the minimum allowed.", code_xml="EntityTooSmall")
        data = b"".join(upload.parts[part] for part, _ in parts)
        written = self._write(request, name, data, upload.content_type)
        del self._objects.uploads[number]
        response = _xml_response(
            f"<CompleteMultipartUploadResult><ETag>{escape(written.etag)}</ETag></CompleteMultipartUploadResult>"
        )
        return XmlResponse(headers={**response.headers, **_object_headers(written)}, body=response.body)


def _xml_response(text: str) -> XmlResponse:
    body = f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()
    return XmlResponse(headers={"Content-Type": "application/xml; charset=UTF-8"}, body=body)


def _object_headers(stored: Object) -> dict[str, str]:
    return {
        "Content-Type": stored.content_type,
        "ETag": stored.etag,
        "Last-Modified": format_datetime(stored.written.astimezone(dt.UTC), usegmt=True),
        "Accept-Ranges": "bytes",
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": "1",
        "x-goog-stored-content-length": str(len(stored.data)),
    }


def _listing_entry(stored: Object) -> str:
    written = stored.written.astimezone(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return (
        f"<Contents><Key>{escape(stored.name)}</Key><Generation>{stored.generation}</Generation>"
        f"<MetaGeneration>1</MetaGeneration><LastModified>{written}</LastModified>"
        f"<ETag>{escape(stored.etag)}</ETag><Size>{len(stored.data)}</Size></Contents>"
    )


def _part_etag(part: int, data: bytes) -> str:
    return f'"{part}-{len(data)}"'


def _byte_range(text: str, size: int) -> tuple[int, int] | None:
    """Return [start, stop) of a Range header; None if it is beyond the end."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise Refusal(400, f"invalid range: {text}", code_xml="InvalidArgument")
    if match[3] is not None:
        start, stop = max(0, size - int(match[3])), size
    else:
        start, stop = int(match[1]), min(size, int(match[2]) + 1) if match[2] else size
    return (start, stop) if start < stop else None


def _preconditions(request: XmlRequest) -> Preconditions:
    def number(name: str) -> int | None:
        return int(request.headers[name]) if name in request.headers else None

    return Preconditions(
        generation=number("x-goog-if-generation-match"), metageneration=number("x-goog-if-metageneration-match")
    )


def _generation(request: XmlRequest) -> int | None:
    return int(request.query["generation"][0]) if "generation" in request.query else None
