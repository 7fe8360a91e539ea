"""Cloud Storage by its XML API, which object_store speaks: objects, listings and multipart uploads.

Headers and parameters are checked against the tables of "XML API reference": what is not in them is refused, so that
a precondition that is misspelt does not pass as none.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass, field, replace
from email.utils import format_datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote
from xml.etree import ElementTree as ET  # what this machine's own clients send
from xml.sax.saxutils import escape

from skerry.infra.testing.google.objects import Object, Objects, Preconditions, Upload
from skerry.infra.testing.google.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.testing.google.principals import Principal

# "Request headers" of the XML API reference, and what HTTP itself brings.
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
# By request: PUT of an object and so on; a * is any value.
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
    """One request of the XML API. name: the object's; None is the bucket itself. headers: by lower-case name."""

    http: str
    bucket: str
    name: str | None
    query: Mapping[str, Sequence[str]]
    headers: Mapping[str, str]
    body: bytes
    principal: Principal

    @property
    def method(self) -> str:
        """As the JSON API calls the same."""
        if self.name is None:
            return "storage.objects.list" if self.http == "GET" else f"storage.xml.{self.http}"
        if "uploads" in self.query or "uploadId" in self.query:
            return f"storage.multipartUploads.{self.http.lower()}"
        verbs = {"GET": "get", "HEAD": "get", "PUT": "insert", "DELETE": "delete"}
        return f"storage.objects.{verbs.get(self.http, self.http)}"

    def by(self, principal: Principal) -> XmlRequest:
        """The same, as somebody's."""
        return replace(self, principal=principal)

    def wrong(self) -> list[str]:
        """What this request must not be, in words."""
        found = [f"unknown header {name}" for name in self.headers if name not in _HEADERS]
        allowed = _PARAMETERS.get((self.http, self.name is not None))
        if allowed is None:
            return [f"no such method: {self.http} of {'a bucket' if self.name is None else 'an object'}"]
        return found + [f"unknown parameter {name}" for name in self.query if name not in allowed]


@dataclass(frozen=True, kw_only=True)
class XmlAnswer:
    """Status, headers and body."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


class XmlFace:
    """The XML API over the objects of a project."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def carry_out(self, asked: XmlRequest) -> XmlAnswer:
        """The answer to a request that is good by the tables. Raises Refusal."""
        if asked.name is None:
            return self._list(asked) if asked.http == "GET" else self._head_bucket(asked)
        if "uploads" in asked.query or "uploadId" in asked.query:
            return self._upload(asked, asked.name)
        match asked.http:
            case "GET" | "HEAD":
                return self._get(asked, asked.name)
            case "PUT":
                return self._put(asked, asked.name)
            case _:
                self._objects.delete(
                    asked.principal, asked.bucket, asked.name, _preconditions(asked), _generation(asked)
                )
                return XmlAnswer(status=204)

    def _head_bucket(self, asked: XmlRequest) -> XmlAnswer:
        self._objects.bucket(asked.bucket)
        self._objects.check(asked.principal, "storage.buckets.get", asked.bucket)
        return XmlAnswer()

    def _get(self, asked: XmlRequest, name: str) -> XmlAnswer:
        found = self._objects.read(asked.principal, asked.bucket, name, _generation(asked))
        _preconditions(asked).check(found)
        headers = _described(found)
        if "range" not in asked.headers:
            return XmlAnswer(headers=headers, body=found.data)
        span = _span(asked.headers["range"], len(found.data))
        if span is None:
            raise Refusal(416, "The requested range cannot be satisfied.", code_xml="InvalidRange")
        start, stop = span
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(found.data)}"
        return XmlAnswer(status=206, headers=headers, body=found.data[start:stop])

    def _put(self, asked: XmlRequest, name: str) -> XmlAnswer:
        if (source := asked.headers.get("x-goog-copy-source")) is not None:
            bucket, _, of = unquote(source).lstrip("/").partition("/")
            copied = self._objects.read(asked.principal, bucket, of)
            made = self._write(asked, name, copied.data, copied.content_type)
            return XmlAnswer(headers=_described(made), body=b"<?xml version='1.0'?><CopyObjectResult/>")
        made = self._write(asked, name, asked.body, asked.headers.get("content-type", "application/octet-stream"))
        return XmlAnswer(headers=_described(made))

    def _write(self, asked: XmlRequest, name: str, data: bytes, content_type: str) -> Object:
        return self._objects.write(
            asked.principal,
            asked.bucket,
            name,
            data,
            content_type=content_type,
            preconditions=_preconditions(asked),
        )

    def _list(self, asked: XmlRequest) -> XmlAnswer:
        query = {key: values[0] for key, values in asked.query.items()}
        if query.get("list-type") != "2" or query.get("encoding-type", "url") != "url":
            raise Refusal(400, "this sandbox lists with list-type=2", code_xml="InvalidArgument")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start = query.get("continuation-token", "").removeprefix("after:") or query.get("start-after", "")
        found = self._objects.after(asked.principal, asked.bucket, prefix, start)
        size = min(int(query.get("max-keys", _PAGE)), _PAGE)
        contents: list[str] = []
        prefixes: dict[str, None] = {}
        last = ""
        for one in found:
            head, cut, _ = one.name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            folder = prefix + head + cut
            if cut and (folder in prefixes or folder <= start):
                last = one.name
                continue
            if len(contents) + len(prefixes) == size:
                break
            last = one.name
            if cut:
                prefixes[folder] = None
            else:
                contents.append(_listed(one))
        is_cut = bool(found) and last != found[-1].name
        text = "".join(
            [
                "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>",
                f"<Name>{asked.bucket}</Name><Prefix>{escape(prefix)}</Prefix>",
                f"<KeyCount>{len(contents) + len(prefixes)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>",
                f"<NextContinuationToken>after:{escape(last)}</NextContinuationToken>" if is_cut else "",
                *contents,
                *(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in prefixes),
                "</ListBucketResult>",
            ]
        )
        return XmlAnswer(headers={"Content-Type": "application/xml; charset=UTF-8"}, body=text.encode())

    def _upload(self, asked: XmlRequest, name: str) -> XmlAnswer:
        objects, who = self._objects, asked.principal
        if "uploads" in asked.query:
            objects.bucket(asked.bucket)
            objects.check(who, "storage.multipartUploads.create", asked.bucket, name)
            number = f"upload-{len(objects.uploads) + 1}"
            kind = asked.headers.get("content-type", "application/octet-stream")
            objects.uploads[number] = Upload(bucket=asked.bucket, name=name, content_type=kind)
            return _said(
                f"<InitiateMultipartUploadResult><Bucket>{asked.bucket}</Bucket><Key>{escape(name)}</Key>"
                f"<UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            )
        number = asked.query["uploadId"][0]
        upload = objects.uploads.get(number)
        if upload is None or (upload.bucket, upload.name) != (asked.bucket, name):
            raise Refusal(404, "The requested upload was not found.", code_xml="NoSuchUpload")
        match asked.http:
            case "PUT":
                objects.check(who, "storage.multipartUploads.create", asked.bucket, name)
                part = int(asked.query["partNumber"][0])
                upload.parts[part] = asked.body
                return XmlAnswer(headers={"ETag": _part_etag(part, asked.body)})
            case "DELETE":
                objects.check(who, "storage.multipartUploads.abort", asked.bucket, name)
                del objects.uploads[number]
                return XmlAnswer(status=204)
            case _:
                return self._complete(asked, name, number, upload)

    def _complete(self, asked: XmlRequest, name: str, number: str, upload: Upload) -> XmlAnswer:
        wanted = [
            (int(part.findtext("PartNumber", "0")), part.findtext("ETag", ""))
            for part in ET.fromstring(asked.body).iter("Part")  # noqa: S314  this machine's own clients
        ]
        for part, etag in wanted:
            if part not in upload.parts or _part_etag(part, upload.parts[part]) != etag:
                raise Refusal(400, "One or more of the specified parts could not be found.", code_xml="InvalidPart")
        if any(len(upload.parts[part]) < _SMALLEST_PART for part, _ in wanted[:-1]):
            raise Refusal(400, "Your proposed upload is smaller than the minimum allowed.", code_xml="EntityTooSmall")
        data = b"".join(upload.parts[part] for part, _ in wanted)
        made = self._write(asked, name, data, upload.content_type)
        del self._objects.uploads[number]
        answer = _said(
            f"<CompleteMultipartUploadResult><ETag>{escape(made.etag)}</ETag></CompleteMultipartUploadResult>"
        )
        return XmlAnswer(headers={**answer.headers, **_described(made)}, body=answer.body)


def _said(text: str) -> XmlAnswer:
    body = f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()
    return XmlAnswer(headers={"Content-Type": "application/xml; charset=UTF-8"}, body=body)


def _described(one: Object) -> dict[str, str]:
    return {
        "Content-Type": one.content_type,
        "ETag": one.etag,
        "Last-Modified": format_datetime(one.written.astimezone(dt.UTC), usegmt=True),
        "Accept-Ranges": "bytes",
        "x-goog-generation": str(one.generation),
        "x-goog-metageneration": "1",
        "x-goog-stored-content-length": str(len(one.data)),
    }


def _listed(one: Object) -> str:
    written = one.written.astimezone(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return (
        f"<Contents><Key>{escape(one.name)}</Key><Generation>{one.generation}</Generation>"
        f"<MetaGeneration>1</MetaGeneration><LastModified>{written}</LastModified>"
        f"<ETag>{escape(one.etag)}</ETag><Size>{len(one.data)}</Size></Contents>"
    )


def _part_etag(part: int, data: bytes) -> str:
    return f'"{part}-{len(data)}"'


def _span(text: str, size: int) -> tuple[int, int] | None:
    """[start, stop) of a Range; None if nothing of it is there."""
    found = _RANGE.fullmatch(text)
    if found is None:
        raise Refusal(400, f"cannot read this range: {text}", code_xml="InvalidArgument")
    if found[3] is not None:
        start, stop = max(0, size - int(found[3])), size
    else:
        start, stop = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
    return (start, stop) if start < stop else None


def _preconditions(asked: XmlRequest) -> Preconditions:
    def number(name: str) -> int | None:
        return int(asked.headers[name]) if name in asked.headers else None

    return Preconditions(
        generation=number("x-goog-if-generation-match"), metageneration=number("x-goog-if-metageneration-match")
    )


def _generation(asked: XmlRequest) -> int | None:
    return int(asked.query["generation"][0]) if "generation" in asked.query else None
