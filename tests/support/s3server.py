"""A small S3 server for tests: honours conditional writes, is fast enough for benchmarks, and fails on demand.

Loopback, threads, bodies in memory. A conditional put checks and writes under one lock, so exactly one of racing
creates wins; moto checks and writes separately. No multipart uploads; signatures are not checked. Used in process
(`S3Server`) or as a separate process:

    python tests/support/s3server.py --port 0        prints its port and serves until killed
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
from bisect import bisect_left, insort
from collections import Counter
from email.utils import formatdate
from typing import TYPE_CHECKING, Final, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from io import BufferedReader

Kind = Literal[
    "400", "403", "skew", "409", "429", "500", "503", "reset", "reset_after_commit", "truncate", "stall", "latency"
]

CONTROL: Final = "_control"
# Below this size a bytearray is cheaper than a mapping; above, a mapping with huge pages saves page faults.
MAPPED_BYTES: Final = 1 << 20
CODES: Final = {
    "400": (400, "RequestTimeout"),
    "403": (403, "AccessDenied"),
    "skew": (403, "RequestTimeTooSkewed"),
    "409": (409, "ConditionalRequestConflict"),
    "429": (429, "TooManyRequests"),
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
}


@dataclasses.dataclass
class Rule:
    """One fault: its kind, the requests it applies to (by any part of the key; a listing has none), and how often.

    400 to 503: this status, without any effect; skew: the 403 for a wrong clock. reset: the connection is reset before
    the request, reset_after_commit: after the write. truncate: half of the announced body. stall, latency: no byte for
    `seconds`, then a reset or the normal response.
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
        """Replaces all rules."""
        with self._lock:
            self._rules = [dataclasses.replace(rule) for rule in rules]

    def take(self, method: str, key: str) -> Rule | None:
        """The first rule that matches this request; its remaining count is reduced."""
        with self._lock:
            for rule in self._rules:
                matches = rule.times > 0 and rule.method in {"", method} and rule.key in key
                if matches and (rule.chance >= 1 or self._random.random() < rule.chance):
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
    """A status, headers and a body in parts; a response to HEAD announces the body without sending it."""

    status: int
    headers: Sequence[tuple[str, str]] = ()
    body: Sequence[memoryview] = ()


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """One version of an object; immutable, so a reader may continue while it is replaced."""

    serial: int
    parts: Sequence[memoryview]
    size: int
    modified: float

    @property
    def tag(self) -> str:
        """Its ETag, quoted."""
        return f'"{self.serial:032x}"'


class _ConnectionEnd(Exception):  # noqa: N818  the end of a connection is no error
    """The client closed the connection, or the server must."""


class S3Server:
    """Serves until `stop`; a context manager.

    page_keys: most keys in one page of a listing. honours_conditions: False for a server that ignores conditions.
    buckets: the existing ones; None means any. expired: access keys that have expired, with the status of the refusal
    (S3 uses 400, some others 403). used: the access keys of all requests, in order of first use.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        page_keys: int = 1000,
        honours_conditions: bool = True,
        host: str = "127.0.0.1",
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
        self._objects: dict[tuple[str, str], StoredObject] = {}
        self._names: list[tuple[str, str]] = []  # of _objects, sorted: a listing reads one page of them
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server((host, port), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """The port on 127.0.0.1."""
        return self._listener.getsockname()[1]

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends every connection and stall, and releases the port."""
        self.stopping.set()
        # A blocked accept or recv ends only by shutdown, not by close.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.shutdown(socket.SHUT_RDWR)

    def peek(self, bucket: str, key: str) -> bytes | None:
        """The stored bytes, read without a client."""
        with self._lock:
            stored = self._objects.get((bucket, key))
        return None if stored is None else b"".join(stored.parts)

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
        except (_ConnectionEnd, OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
                connection.close()

    def _exchange(self, connection: socket.socket, reader: BufferedReader) -> None:
        """Serves one request, or applies the fault that is due."""
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
        response = refusal(*CODES[fault.kind]) if fault is not None and fault.kind in CODES else self.answer(request)
        with self._lock:
            self.requests[method] += 1
        if fault is not None and fault.kind == "reset_after_commit":
            _reset(connection)
        _write(connection, method, response, halved=fault is not None and fault.kind == "truncate")

    def answer(self, request: Request) -> Response:
        """The response of S3. Conditions are checked and writes made under one lock."""
        if request.bucket == CONTROL:
            return self._control(request)
        if (refused := self.check_access(request)) is not None:
            return refused
        match request.method:
            case "GET" | "HEAD":
                return self._get(request) if request.key else self._list(request)
            case "PUT":
                return self._put(request)
            case "DELETE":
                return self._delete(request)
            case _:
                return refusal(501, "NotImplemented")

    def check_access(self, request: Request) -> Response | None:
        """The refusal of a request with expired keys or to a missing bucket; None accepts it."""
        credential = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
        if credential is not None:
            key = credential[1]
            self.used.setdefault(key)
            if key in self.expired:
                return refusal(self.expired[key], "ExpiredToken")
        if self.buckets is not None and request.bucket not in self.buckets:
            return refusal(404, "NoSuchBucket")
        return None

    def check_condition(self, headers: Mapping[str, str], existing: StoredObject | None) -> Response | None:
        """The refusal of a write whose condition does not hold; None accepts it. Called under the lock."""
        if not self._honours_conditions:
            return None
        if headers.get("if-none-match") == "*" and existing is not None:
            return refusal(412, "PreconditionFailed")
        return None

    def describe(self, stored: StoredObject) -> list[tuple[str, str]]:
        """The headers that identify a version."""
        return [("ETag", stored.tag), ("Last-Modified", formatdate(stored.modified, usegmt=True))]

    def _put(self, request: Request) -> Response:
        if not request.key:  # a new bucket: every bucket exists already
            return Response(200)
        size = sum(part.nbytes for part in request.body)
        stored = StoredObject(next(self._serial), request.body, size, time.time())
        with self._lock:
            refused = self.check_condition(request.headers, self._objects.get((request.bucket, request.key)))
            if refused is not None:
                return refused
            name = request.bucket, request.key
            if name not in self._objects:
                insort(self._names, name)
            self._objects[name] = stored
        return Response(200, self.describe(stored))

    def _get(self, request: Request) -> Response:
        with self._lock:
            stored = self._objects.get((request.bucket, request.key))
        if stored is None:
            return refusal(404, "NoSuchKey")
        headers = [*self.describe(stored), ("Accept-Ranges", "bytes"), ("Content-Type", "application/octet-stream")]
        start, stop, status = 0, stored.size, 200
        requested = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if requested is not None:
            start = int(requested[1]) if requested[1] else max(0, stored.size - int(requested[2]))
            stop = min(stored.size, int(requested[2]) + 1) if requested[1] and requested[2] else stored.size
            if start >= stored.size:
                return refusal(416, "InvalidRange")
            status = 206
            headers.append(("Content-Range", f"bytes {start}-{stop - 1}/{stored.size}"))
        return Response(status, headers, _cut(stored.parts, start, stop))

    def _delete(self, request: Request) -> Response:
        name = request.bucket, request.key
        with self._lock:
            if self._objects.pop(name, None) is not None:
                del self._names[bisect_left(self._names, name)]
        return Response(204)

    def _list(self, request: Request) -> Response:
        query = request.query
        prefix = query.get("prefix", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        limit = min(self._page_keys, int(query.get("max-keys", self._page_keys)))
        with self._lock:
            first = bisect_left(self._names, (request.bucket, max(prefix, after)))
            names = map(self._names.__getitem__, range(first, len(self._names)))
            matches = itertools.takewhile(lambda name: name[0] == request.bucket and name[1].startswith(prefix), names)
            page = itertools.islice((name for name in matches if name[1] > after), limit + 1)
            objects = [(name[1], self._objects[name]) for name in page]
        return _listing(prefix, limit, objects)

    def _control(self, request: Request) -> Response:
        if request.method == "PUT" and request.key == "faults":
            self.faults.set(*(Rule(**rule) for rule in json.loads(b"".join(request.body))))
            return Response(200)
        with self._lock:
            counts = json.dumps(self.requests).encode()
        return Response(200, [("Content-Type", "application/json")], [memoryview(counts)])


def _listing(prefix: str, limit: int, objects: list[tuple[str, StoredObject]]) -> Response:
    """One page of ListObjectsV2; its last key is the continuation token."""
    page = objects[:limit]
    is_truncated = len(page) < len(objects)
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso_time(stored.modified)}</LastModified>"
        f"<ETag>{stored.tag}</ETag><Size>{stored.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for key, stored in page
    )
    token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if is_truncated else ""
    return _xml(
        "ListBucketResult",
        f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
        f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>{token}{contents}",
    )


def _iso_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def _xml(root: str, inside: str) -> Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inside}</{root}>'
    return Response(200, [("Content-Type", "application/xml")], [memoryview(text.encode())])


def refusal(status: int, code: str) -> Response:
    """An error response of S3."""
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
        raise _ConnectionEnd
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
    """`size` bytes, received directly into the memory that stores them."""
    if size < MAPPED_BYTES:
        view = memoryview(bytearray(size))
    else:
        mapped = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(mapped)
    filled = 0
    while filled < size:
        count = reader.readinto(view[filled:])
        if not count:
            raise _ConnectionEnd
        filled += count
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
        raise _ConnectionEnd


def _reset(connection: socket.socket) -> None:
    """Ends the connection with a TCP reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise _ConnectionEnd


def main() -> None:
    """Serves until killed; the first line of output is the port."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    options = parser.parse_args()
    server = S3Server(port=options.port, host=options.host)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.stopping.wait()


if __name__ == "__main__":
    main()
