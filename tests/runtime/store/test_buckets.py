"""Stores in buckets, over obstore and over s3fs: the meaning of each fault, and the environment."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from tests.kit.stores import VERBS
from tests.runtime.store.conformance import KEYS
from tests.support import s3server
from tests.support.clocks import FakeClock
from tests.support.s3server import Kind, Rule, S3Server

from skerry.runtime.errors import Ambiguous, Invalid, Retryable, Unauthorized
from skerry.runtime.store import Span, Store, obstore_clients
from skerry.runtime.store.fsspec_store import REFUSED, FsspecStore, open_fsspec_store
from skerry.runtime.store.obstore_clients import LOOPBACK, REMOTE, open_cloud_store
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from skerry.runtime.store.obstore_store import ObjectStore

FIXED_KEYS = {"AWS_ACCESS_KEY_ID": "test-key"}
# Names that a bucket accepts and that are no keys.
FOREIGN = ["r-1 (copy).json", "r-1.json~", "ä.json", "a+b.json", "sub folder/r-1.json"]

pytestmark = pytest.mark.usefixtures("aws_keys")
both = pytest.mark.parametrize("client", ["obstore", "s3fs"])


def open_s3(server: S3Server, prefix: str = "", *, bucket: str = "bucket", stall_s: float = 5.0) -> ObjectStore:
    environment = FIXED_KEYS | {"AWS_ENDPOINT_URL": server.endpoint}
    return open_cloud_store("s3", bucket, prefix, environment=environment, stall_s=stall_s)


@pytest.fixture
def client() -> str:
    """The one of tests that do not say otherwise."""
    return "obstore"


@pytest.fixture
def store(s3: S3Server, prefix: str, client: str, request: pytest.FixtureRequest) -> Store:
    if client == "obstore":
        return open_s3(s3, prefix)
    session: FsspecStore = request.getfixturevalue("session")
    return session.below("fsspec+s3://bucket", f"bucket/{prefix}")


FAULTS = [
    *(("obstore", kind, verb, Retryable, f"busy: {verb} key=") for kind in ("503", "429", "400") for verb in VERBS),
    *(("obstore", "403", verb, Unauthorized, "credentials") for verb in VERBS),
    *(("obstore", "skew", verb, Retryable, "clock differs") for verb in VERBS),
    *(("obstore", kind, "create", Ambiguous, "no clear answer") for kind in ("500", "reset", "reset_after_commit")),
    ("obstore", "409", "replace", Retryable, "conflict"),
    *(("s3fs", kind, "create", Ambiguous, "no clear answer") for kind in ("500", "reset")),
    *(("s3fs", kind, "create", Retryable, "busy") for kind in ("503", "409")),
    ("s3fs", "403", "create", Unauthorized, "refuses"),
    *(("s3fs", "skew", verb, Retryable, "clock differs") for verb in VERBS),
]


@pytest.mark.parametrize(("client", "kind", "verb", "error", "words"), FAULTS)
def test_fault_is_translated_and_the_call_succeeds_after_it(
    store: Store, s3: S3Server, prefix: str, kind: Kind, verb: str, error: type[Exception], words: str
) -> None:
    s3.faults.set(Rule(kind, times=9))
    with pytest.raises(error, match=words) as raised:
        VERBS[verb](store)
    assert type(raised.value) is error, "an error is ambiguous only if the write may have happened"
    assert s3.peek("bucket", f"{prefix}b") == (b"body" if kind == "reset_after_commit" else None)
    s3.faults.set()
    VERBS[verb](store)
    assert s3.peek("bucket", f"{prefix}b") == (b"body" if verb == "create" else None)


def test_create_returns_false_for_a_conflict_that_wrote_nothing(store: Store, s3: S3Server, prefix: str) -> None:
    s3.faults.set(Rule("409"))
    assert store.create("a", b"body") is False
    assert s3.peek("bucket", f"{prefix}a") is None


@pytest.mark.parametrize("verb", VERBS)
def test_stalled_request_ends_within_its_time_out(s3: S3Server, prefix: str, verb: str) -> None:
    store = open_s3(s3, prefix, stall_s=0.1)
    s3.faults.set(Rule("stall", seconds=30.0))
    with pytest.raises(Ambiguous if verb == "create" else Retryable):
        VERBS[verb](store)


@pytest.mark.parametrize(
    ("client", "verb"), [*(("obstore", verb) for verb in VERBS), ("s3fs", "create"), ("s3fs", "read")]
)
def test_missing_bucket_is_named(s3: S3Server, session: FsspecStore, client: str, verb: str) -> None:
    store = open_s3(s3, bucket="absent") if client == "obstore" else session.below("fsspec+s3://absent", "absent/")
    with pytest.raises(Invalid, match=r"no such bucket: .*s3://absent"):
        VERBS[verb](store)


@both
@pytest.mark.parametrize("has_buffer", [False, True])
def test_truncated_body_is_never_returned(store: Store, s3: S3Server, has_buffer: bool) -> None:  # noqa: FBT001
    store.create("a", b"x" * (3 << 20))
    s3.faults.set(Rule("truncate", "GET"))
    with pytest.raises(Retryable):
        store.read("a", Span(0, 3 << 20), memoryview(bytearray(3 << 20)) if has_buffer else None)


@both
def test_names_that_are_no_keys_are_not_listed(store: Store, s3: S3Server, prefix: str) -> None:
    store.create("heartbeats/r-1.json", b"{}")
    for name in FOREIGN:
        url = f"{s3.endpoint}/bucket/{quote(f'{prefix}heartbeats/{name}')}"
        with urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method="PUT")) as response:  # noqa: S310
            assert response.status == 200
    for listed in ("heartbeats/", ""):
        assert [entry.key for entry in store.list(listed)] == ["heartbeats/r-1.json"]


@pytest.mark.parametrize("client", ["s3fs"])
def test_create_repeated_by_the_http_client_is_resolved(store: Store, s3: S3Server) -> None:
    # aiohttp repeats a PUT when a kept connection dies: the store then gets a 412 for its own object.
    store.create("warm", b"")
    s3.faults.set(Rule("reset_after_commit"))
    assert Retrying(store, FakeClock()).create("a", b"body") is True


@pytest.mark.parametrize("protocol", [*REFUSED, "sftp"])
def test_untested_protocol_is_refused_with_the_reason(protocol: str) -> None:
    with pytest.raises(Invalid, match=rf"cannot use fsspec\+{protocol}:// for a run: .*(write|test)"):
        open_fsspec_store(protocol, "bucket", "")


def test_store_without_a_prefix_uses_the_whole_bucket() -> None:
    with S3Server(page_keys=3) as own:
        store = open_s3(own)
        for key in KEYS:
            store.create(key, key.encode())
            assert own.peek("bucket", key) == key.encode()
        for prefix in ("", "a", "a/", "b"):
            assert [entry.key for entry in store.list(prefix)] == [key for key in KEYS if key.startswith(prefix)]


def test_unreachable_server_is_retryable() -> None:
    with S3Server() as stopped:
        store = open_s3(stopped)
    with pytest.raises(Retryable, match="no clear answer"):
        store.read("a")


def test_listing_fetches_no_older_or_newer_neighbours() -> None:
    with S3Server(page_keys=100) as many:
        store = open_s3(many, "runs/")
        for number in range(600):
            store.create(f"exchanges/{number:08d}-0000.json", b"")
        before = many.requests["GET"]
        assert [entry.key for entry in store.list("exchanges/00000300-")] == ["exchanges/00000300-0000.json"]
        # All of them would be six pages; obstore requests the second page while the first is processed.
        assert many.requests["GET"] - before <= 2


def test_interrupted_upload_leaves_nothing_visible(store: Store, s3: S3Server, prefix: str) -> None:
    with socket.create_connection(("127.0.0.1", s3.port)) as dying:
        dying.sendall(f"PUT /bucket/{prefix}a HTTP/1.1\r\nContent-Length: 2000\r\n\r\n".encode() + b"x" * 1000)
        dying.shutdown(socket.SHUT_WR)
        assert dying.recv(1) == b""
    assert list(store.list("")) == []
    assert store.create("a", b"whole") is True


def test_large_body_is_sent_as_one_put(store: Store, s3: S3Server) -> None:
    before = s3.requests["PUT"], s3.requests["POST"]
    store.create("payloads/a", [b"x" * (4 << 20)] * 5)
    store.replace("payloads/b", b"x" * (20 << 20))
    assert (s3.requests["PUT"] - before[0], s3.requests["POST"] - before[1]) == (2, 0)


# The environment.


def test_store_on_this_machine_has_the_loopback_profile(server: S3Server) -> None:
    assert open_s3(server).profile == LOOPBACK
    for environment in (FIXED_KEYS, FIXED_KEYS | {"AWS_ENDPOINT_URL": "https://objects.example.com"}):
        assert open_cloud_store("s3", "bucket", "", environment=environment).profile == REMOTE


def test_directory_bucket_is_refused() -> None:
    with pytest.raises(Invalid, match="general purpose bucket"):
        open_cloud_store("s3", "bucket--usw2-az1--x-s3", "", environment={})


@pytest.mark.parametrize(
    ("region", "domain"),
    [
        ("us-east-1", None),
        ("us-gov-west-1", None),
        ("cn-north-1", "amazonaws.com.cn"),
        ("cn-northwest-1", "amazonaws.com.cn"),
        ("eusc-de-east-1", "amazonaws.eu"),
    ],
)
@pytest.mark.parametrize("named", ["AWS_REGION", "AWS_DEFAULT_REGION", "SKERRY_BUCKET_REGION_0"])
def test_region_of_another_domain_has_its_endpoint(
    monkeypatch: pytest.MonkeyPatch, region: str, domain: str | None, named: str
) -> None:
    opened: list[dict[str, str]] = []
    real = obstore_clients.S3Store
    monkeypatch.setattr(
        obstore_clients, "S3Store", lambda **options: opened.append(options["config"]) or real(**options)
    )
    environment = FIXED_KEYS | {named: f"bucket={region}" if named.startswith("SKERRY") else region}
    store = open_cloud_store("s3", "bucket", "", environment=environment)
    assert store.profile == REMOTE
    expected = None if domain is None else f"https://s3.{region}.{domain}"
    assert (opened[0]["region"], opened[0].get("endpoint")) == (region, expected)
    opened.clear()
    open_cloud_store("s3", "bucket", "", environment=environment | {"AWS_ENDPOINT_URL": "https://s3.example"})
    assert opened[0]["endpoint"] == "https://s3.example"


def test_endpoint_of_s3_has_precedence_over_the_general_one(server: S3Server, prefix: str) -> None:
    environment = FIXED_KEYS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3": server.endpoint}
    assert open_cloud_store("s3", "bucket", prefix, environment=environment).create("a", b"")


def test_azure_is_reached_by_its_connection_string() -> None:
    # The server does not speak Azure's protocol; the test only checks the address and the body of the request.
    with S3Server() as server:
        key = base64.b64encode(b"secret").decode()
        text = f"AccountName=account;AccountKey={key};BlobEndpoint={server.endpoint}/account"
        store = open_cloud_store("az", "container", "run/", environment={"AZURE_STORAGE_CONNECTION_STRING": text})
        store.create("a", b"body")
        assert server.peek("account", "container/run/a") == b"body"


def test_s3_server_runs_as_a_separate_process() -> None:
    command = [sys.executable, str(Path(s3server.__file__)), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
            store = open_cloud_store("s3", "bucket", "", environment=FIXED_KEYS | {"AWS_ENDPOINT_URL": endpoint})
            assert store.create("a", b"body")
            rules = json.dumps([{"kind": "503", "method": "GET"}]).encode()
            request = urllib.request.Request(f"{endpoint}/_control/faults", rules, method="PUT")  # noqa: S310  loopback
            with urllib.request.urlopen(request) as response:  # noqa: S310
                assert response.status == 200
            with pytest.raises(Retryable, match="busy"):
                store.read("a")
            assert store.read("a") == b"body"
        finally:
            process.kill()
