"""A small S3 server of our own: honest about conditions, fast enough to measure with, and faulty on demand.

Loopback, threads, bodies in memory. A conditional put looks and writes under one lock, so of racing creates exactly one
wins; moto looks and writes apart. No signatures are checked. Used in process (`S3Server`) or as one of its own:

    python tests/support/s3server.py --port 0        prints its port, serves until killed
    PUT /_control/faults  [{"kind": "503", "times": 2}]    replaces the rules       GET /_control/requests    counts
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import mmap
import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from typing import TYPE_CHECKING, Final, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from io import BufferedReader

Kind = Literal["400", "403", "409", "429", "500", "503", "reset", "reset_after_commit", "truncate", "stall", "latency"]

CONTROL: Final = "_control"
# Below this a bytearray is cheaper than a mapping; above, a mapping with huge pages spares the page faults.
MAPPED_BYTES: Final = 1 << 20
CODES: Final = {
    "400": "RequestTimeout",
    "403": "AccessDenied",
    "409": "ConditionalRequestConflict",
    "429": "TooManyRequests",
    "500": "InternalError",
    "503": "SlowDown",
}


@dataclasses.dataclass
class Rule:
    """One fault: what goes wrong, for which requests (any part of the key; a listing has none), how often.

    409, 403, 429, 500, 503: answered without doing anything. reset: the connection dies before. reset_after_commit: it
    dies after the write. truncate: half of the announced body. stall, latency: `seconds` without a byte, then a reset
    or the normal answer.
    """

    kind: Kind
    method: str = ""
    key: str = ""
    times: int = 1
    chance: float = 1.0
    seconds: float = 60.0


class Faults:
    """The rules in force. Thread-safe; chances come from one seeded source."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._rules: list[Rule] = []

    def set(self, *rules: Rule) -> None:
        """Replace all rules."""
        with self._lock:
            self._rules = [dataclasses.replace(rule) for rule in rules]

    def take(self, method: str, key: str) -> Rule | None:
        """The first rule that fits this request; it is used up by one."""
        with self._lock:
            for rule in self._rules:
                fits = rule.times > 0 and rule.method in {"", method} and rule.key in key
                if fits and (rule.chance >= 1 or self._random.random() < rule.chance):
                    rule.times -= 1
                    return rule
        return None


@dataclasses.dataclass(frozen=True)
class Request:
    """A parsed request with its whole body."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Sequence[memoryview]


@dataclasses.dataclass(frozen=True)
class Response:
    """A status, headers and a body in parts; HEAD announces the body and leaves it out."""

    status: int
    headers: Sequence[tuple[str, str]] = ()
    body: Sequence[memoryview] = ()


@dataclasses.dataclass(frozen=True)
class Stored:
    """One version of an object; never changed, so a reader may go on while it is replaced."""

    serial: int
    parts: Sequence[memoryview]
    size: int
    modified: float

    @property
    def tag(self) -> str:
        """Its ETag, quoted."""
        return f'"{self.serial:032x}"'


class _Gone(Exception):  # noqa: N818  the end of a connection is no error
    """The client closed the connection, or we are to."""


class S3Server:
    """Serve until `stop`; usable as a context manager.

    page_keys: most keys in one page of a listing. honours_conditions: False makes the broken server that a probe must
    refuse. buckets: the ones that exist; None means any. expired: access keys that have run out, and the status that
    tells so (S3 says 400, some others 403); used: the keys of all requests, in order of their first.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        page_keys: int = 1000,
        honours_conditions: bool = True,
        buckets: frozenset[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.faults = Faults(seed)
        self.requests: Counter[str] = Counter()
        self.stopping = threading.Event()
        self.expired: dict[str, int] = {}
        self.used: dict[str, None] = {}
        self.buckets = buckets
        self._page_keys = page_keys
        self._honours_conditions = honours_conditions
        self._lock = threading.Lock()
        self._serial = itertools.count(1)
        self._objects: dict[tuple[str, str], Stored] = {}
        self._uploads: dict[str, dict[int, Stored]] = {}
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1."""
        return self._listener.getsockname()[1]

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every connection and stall, and free the port."""
        self.stopping.set()
        # A blocked accept or recv ends only by shutdown, not by close.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.shutdown(socket.SHUT_RDWR)

    def peek(self, bucket: str, key: str) -> bytes | None:
        """What is stored, behind every client's back."""
        with self._lock:
            found = self._objects.get((bucket, key))
        return None if found is None else b"".join(found.parts)

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            with connection.makefile("rb") as reader:
                while not self.stopping.is_set():
                    self._exchange(connection, reader)
        except (_Gone, OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
                connection.close()

    def _exchange(self, connection: socket.socket, reader: BufferedReader) -> None:
        """One request and its answer, or the fault that is due."""
        method, target, headers = _read_head(reader)
        url = urlsplit(target)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        fault = self.faults.take(method, key) if bucket != CONTROL else None
        if fault is not None and fault.kind in {"stall", "latency"}:
            self.stopping.wait(fault.seconds)
        if fault is not None and fault.kind in {"stall", "reset"}:
            _reset(connection)
        body = _read_body(connection, reader, headers) if method in {"PUT", "POST"} else []
        request = Request(method, bucket, key, dict(parse_qsl(url.query, keep_blank_values=True)), headers, body)
        if fault is not None and fault.kind in CODES:
            response = refusal(int(fault.kind), CODES[fault.kind])
        else:
            response = self.answer(request)
        with self._lock:
            self.requests[method] += 1
        if fault is not None and fault.kind == "reset_after_commit":
            _reset(connection)
        _write(connection, method, response, halved=fault is not None and fault.kind == "truncate")

    def answer(self, request: Request) -> Response:
        """What S3 would say. Conditions are checked and writes made under one lock."""
        if request.bucket == CONTROL:
            return self._control(request)
        if (refused := self._not_let_in(request)) is not None:
            return refused
        match request.method:
            case "GET" | "HEAD":
                return self._get(request) if request.key else self._list(request)
            case "PUT":
                return self._put(request)
            case "DELETE":
                return self._delete(request)
            case _:
                return self._post(request)

    def _not_let_in(self, request: Request) -> Response | None:
        key = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
        if key is not None:
            self.used.setdefault(key[1])
            if key[1] in self.expired:
                return refusal(self.expired[key[1]], "ExpiredToken")
        if self.buckets is not None and request.bucket not in self.buckets:
            return refusal(404, "NoSuchBucket")
        return None

    def refused(self, headers: Mapping[str, str], found: Stored | None) -> Response | None:
        """The refusal of a write whose condition does not hold; None lets it through. Called under the lock."""
        if not self._honours_conditions:
            return None
        if headers.get("if-none-match") == "*" and found is not None:
            return refusal(412, "PreconditionFailed")
        if "if-match" in headers and (found is None or headers["if-match"] not in {"*", found.tag}):
            return refusal(404, "NoSuchKey") if found is None else refusal(412, "PreconditionFailed")
        return None

    def describe(self, stored: Stored) -> list[tuple[str, str]]:
        """The headers that tell a version."""
        return [("ETag", stored.tag), ("Last-Modified", formatdate(stored.modified, usegmt=True))]

    def _put(self, request: Request) -> Response:
        if not request.key:  # a new bucket: every one exists already
            return Response(200)
        return self._put_part(request) if "partNumber" in request.query else self._store(request, request.body)

    def _store(self, request: Request, parts: Sequence[memoryview]) -> Response:
        stored = self._version(parts)
        with self._lock:
            refused = self.refused(request.headers, self._objects.get((request.bucket, request.key)))
            if refused is not None:
                return refused
            self._objects[request.bucket, request.key] = stored
        return Response(200, self.describe(stored))

    def _version(self, parts: Sequence[memoryview]) -> Stored:
        return Stored(next(self._serial), parts, sum(part.nbytes for part in parts), time.time())

    def _get(self, request: Request) -> Response:
        with self._lock:
            found = self._objects.get((request.bucket, request.key))
        if found is None:
            return refusal(404, "NoSuchKey")
        headers = [*self.describe(found), ("Accept-Ranges", "bytes"), ("Content-Type", "application/octet-stream")]
        start, stop, status = 0, found.size, 200
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if wanted is not None:
            start = int(wanted[1]) if wanted[1] else max(0, found.size - int(wanted[2]))
            stop = min(found.size, int(wanted[2]) + 1) if wanted[1] and wanted[2] else found.size
            if start >= found.size:
                return refusal(416, "InvalidRange")
            status = 206
            headers.append(("Content-Range", f"bytes {start}-{stop - 1}/{found.size}"))
        return Response(status, headers, _cut(found.parts, start, stop))

    def _delete(self, request: Request) -> Response:
        with self._lock:
            if "uploadId" in request.query:
                self._uploads.pop(request.query["uploadId"], None)
            else:
                self._objects.pop((request.bucket, request.key), None)
        return Response(204)

    def _post(self, request: Request) -> Response:
        text = b"".join(request.body).decode()
        if "uploads" in request.query:
            upload = f"{next(self._serial):032x}"
            with self._lock:
                self._uploads[upload] = {}
            return _xml(
                "InitiateMultipartUploadResult", f"<Key>{escape(request.key)}</Key><UploadId>{upload}</UploadId>"
            )
        if "uploadId" in request.query:
            return self._complete(request, [int(number) for number in re.findall(r"<PartNumber>(\d+)<", text)])
        if "delete" in request.query:
            keys = re.findall(r"<Key>(.*?)</Key>", text)
            with self._lock:
                for key in keys:
                    self._objects.pop((request.bucket, key.replace("&amp;", "&")), None)
            return _xml("DeleteResult", "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys))
        return refusal(501, "NotImplemented")

    def _put_part(self, request: Request) -> Response:
        part = self._version(request.body)
        with self._lock:
            upload = self._uploads.get(request.query["uploadId"])
            if upload is None:
                return refusal(404, "NoSuchUpload")
            upload[int(request.query["partNumber"])] = part
        return Response(200, [("ETag", part.tag)])

    def _complete(self, request: Request, numbers: Sequence[int]) -> Response:
        with self._lock:
            upload = self._uploads.get(request.query["uploadId"])
        if upload is None or any(number not in upload for number in numbers):
            return refusal(404, "NoSuchUpload")
        made = self._store(request, [view for number in numbers for view in upload[number].parts])
        if made.status != 200:
            return made
        with self._lock:
            self._uploads.pop(request.query["uploadId"], None)
        return _xml(
            "CompleteMultipartUploadResult", f"<Key>{escape(request.key)}</Key><ETag>{made.headers[0][1]}</ETag>"
        )

    def _list(self, request: Request) -> Response:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most = min(self._page_keys, int(query.get("max-keys", self._page_keys)))
        with self._lock:
            ours = ((key, stored) for (bucket, key), stored in self._objects.items() if bucket == request.bucket)
            found = dict(sorted((key, stored) for key, stored in ours if key.startswith(prefix) and key > after))
        return _listing(prefix, delimiter, most, found)

    def _control(self, request: Request) -> Response:
        if request.method == "PUT" and request.key == "faults":
            self.faults.set(*(Rule(**rule) for rule in json.loads(b"".join(request.body))))
            return Response(200)
        with self._lock:
            counts = json.dumps(self.requests).encode()
        return Response(200, [("Content-Type", "application/json")], [memoryview(counts)])


def _listing(prefix: str, delimiter: str, most: int, found: dict[str, Stored]) -> Response:
    """One page of ListObjectsV2; `found` is sorted, and its last named key is the continuation token."""
    contents: list[str] = []
    folders: list[str] = []
    last = ""
    for key, stored in found.items():
        rest = key[len(prefix) :]
        folder = prefix + rest.split(delimiter, 1)[0] + delimiter if delimiter and delimiter in rest else ""
        if folder and folders and folders[-1] == folder:
            last = key
            continue
        if len(contents) + len(folders) >= most:
            break
        last = key
        if folder:
            folders.append(folder)
        else:
            modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified><ETag>{stored.tag}</ETag>"
                f"<Size>{stored.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
    more = bool(found) and last != next(reversed(found))
    return _xml(
        "ListBucketResult",
        f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(contents) + len(folders)}</KeyCount><MaxKeys>{most}</MaxKeys>"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        + (f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else "")
        + "".join(contents)
        + "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders),
    )


def _xml(root: str, inside: str) -> Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inside}</{root}>'
    return Response(200, [("Content-Type", "application/xml")], [memoryview(text.encode())])


def refusal(status: int, code: str) -> Response:
    """An error as S3 words it."""
    text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Response(status, [("Content-Type", "application/xml")], [memoryview(text.encode())])


def _cut(parts: Iterable[memoryview], start: int, stop: int) -> list[memoryview]:
    """Views of the bytes [start, stop) of all parts."""
    views: list[memoryview] = []
    offset = 0
    for part in parts:
        if offset < stop and offset + part.nbytes > start:
            views.append(part[max(0, start - offset) : stop - offset])
        offset += part.nbytes
    return views


def _read_head(reader: BufferedReader) -> tuple[str, str, dict[str, str]]:
    line = reader.readline()
    if not line:
        raise _Gone
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers: dict[str, str] = {}
    while (line := reader.readline()) not in {b"\r\n", b""}:
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return method, target, headers


def _read_body(connection: socket.socket, reader: BufferedReader, headers: Mapping[str, str]) -> list[memoryview]:
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    framed = headers.get("x-amz-content-sha256", "").startswith("STREAMING")
    if not framed and headers.get("transfer-encoding") != "chunked":
        size = int(headers.get("content-length", 0))
        return [_read_exactly(reader, size)] if size else []
    parts: list[memoryview] = []
    while size := int(reader.readline().split(b";")[0], 16):
        parts.append(_read_exactly(reader, size))
        reader.readline()
    while reader.readline().strip():  # trailers: checksums, which are not checked
        pass
    return parts


def _read_exactly(reader: BufferedReader, size: int) -> memoryview:
    """`size` bytes, received straight into the memory that keeps them."""
    if size < MAPPED_BYTES:
        view = memoryview(bytearray(size))
    else:
        mapped = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(mapped)
    got = 0
    while got < size:
        count = reader.readinto(view[got:])
        if not count:
            raise _Gone
        got += count
    return view


def _write(connection: socket.socket, method: str, response: Response, *, halved: bool) -> None:
    size = sum(part.nbytes for part in response.body)
    head = [f"HTTP/1.1 {response.status} -", f"Date: {formatdate(usegmt=True)}", f"Content-Length: {size}"]
    head += [f"{name}: {value}" for name, value in response.headers]
    connection.sendall("\r\n".join([*head, "", ""]).encode("latin-1"))
    if method == "HEAD":
        return
    for part in _cut(response.body, 0, size // 2) if halved else response.body:
        connection.sendall(part)
    if halved:
        raise _Gone


def _reset(connection: socket.socket) -> None:
    """Make the close that follows a TCP reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise _Gone


def main() -> None:
    """Serve until killed; the first line of output is the port."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    server = S3Server(port=parser.parse_args().port)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.stopping.wait()


if __name__ == "__main__":
    main()
