"""The bucket store against test servers: the conformance suite, and the meaning of each kind of fault."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.kit.stores import VERBS
from tests.runtime.store.conformance import KEYS, StoreConformance, put_foreign
from tests.support import s3server
from tests.support.gcsserver import GcsServer
from tests.support.s3server import Rule, S3Server

from skerry.runtime.errors import Ambiguous, Invalid, Retryable, Unauthorized
from skerry.runtime.store import Span
from skerry.runtime.store.obstore_clients import LOOPBACK, REMOTE, open_cloud_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime.store.conformance import Peek
    from tests.support.s3server import Kind

    from skerry.runtime.store.obstore_store import ObjectStore

# One listing page has this many keys, so that the suite's listings need several.
PAGE_KEYS = 3
FIXED_KEYS = {"AWS_ACCESS_KEY_ID": "test-key"}

pytestmark = pytest.mark.usefixtures("aws_keys")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(page_keys=PAGE_KEYS, buckets=frozenset({"bucket"})) as running:
        yield running


@pytest.fixture(scope="module")
def gcs() -> Iterator[GcsServer]:
    with GcsServer(page_keys=PAGE_KEYS) as running:
        yield running


@pytest.fixture
def store(server: S3Server, prefix: str) -> Iterator[ObjectStore]:
    yield open_s3(server, prefix)
    server.faults.set()


def open_s3(server: S3Server, prefix: str, *, bucket: str = "bucket", stall_s: float = 5.0) -> ObjectStore:
    environment = FIXED_KEYS | {"AWS_ENDPOINT_URL": server.endpoint}
    return open_cloud_store("s3", bucket, prefix, environment=environment, stall_s=stall_s)


class TestS3(StoreConformance):
    @pytest.fixture
    def store(self, server: S3Server, prefix: str) -> ObjectStore:
        return open_s3(server, prefix)

    @pytest.fixture
    def peek(self, server: S3Server, prefix: str) -> Peek:
        return lambda key: server.peek("bucket", prefix + key)


class TestGcs(StoreConformance):
    @pytest.fixture
    def store(self, gcs: GcsServer, prefix: str) -> ObjectStore:
        return open_cloud_store("gs", "bucket", prefix, environment={"STORAGE_EMULATOR_HOST": gcs.endpoint})

    @pytest.fixture
    def peek(self, gcs: GcsServer, prefix: str) -> Peek:
        return lambda key: gcs.peek("bucket", prefix + key)


def test_store_without_a_prefix_uses_the_whole_bucket() -> None:
    with S3Server(page_keys=PAGE_KEYS) as own:
        store = open_s3(own, "")
        for key in KEYS:
            store.create(key, key.encode())
            assert own.peek("bucket", key) == key.encode()
        for prefix in ("", "a", "a/", "b"):
            assert [entry.key for entry in store.list(prefix)] == [key for key in KEYS if key.startswith(prefix)]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["503", "429", "400"])
def test_busy_store_is_retryable_and_not_ambiguous(store: ObjectStore, server: S3Server, kind: Kind, verb: str) -> None:
    server.faults.set(Rule(kind))
    with pytest.raises(Retryable, match=f"busy: {verb} key=") as raised:
        VERBS[verb](store)
    assert not isinstance(raised.value, Ambiguous)


@pytest.mark.parametrize("verb", VERBS)
def test_refused_credentials_are_unauthorized(store: ObjectStore, server: S3Server, verb: str) -> None:
    server.faults.set(Rule("403"))
    with pytest.raises(Unauthorized, match="credentials"):
        VERBS[verb](store)


@pytest.mark.parametrize("verb", VERBS)
def test_missing_bucket_is_named(server: S3Server, prefix: str, verb: str) -> None:
    store = open_s3(server, prefix, bucket="no-such-bucket")
    with pytest.raises(Invalid, match="no such bucket: s3://no-such-bucket/"):
        VERBS[verb](store)


@pytest.mark.parametrize("verb", VERBS)
def test_stalled_request_ends_within_its_time_out(server: S3Server, prefix: str, verb: str) -> None:
    store = open_s3(server, prefix, stall_s=0.1)
    server.faults.set(Rule("stall", seconds=30.0))
    with pytest.raises(Ambiguous if verb == "create" else Retryable):
        VERBS[verb](store)
    server.faults.set()


@pytest.mark.parametrize("kind", ["500", "reset", "reset_after_commit"])
def test_create_without_a_clear_answer_is_ambiguous(
    store: ObjectStore, server: S3Server, prefix: str, kind: Kind
) -> None:
    server.faults.set(Rule(kind))
    with pytest.raises(Ambiguous, match="no clear answer"):
        store.create("a", b"body")
    assert server.peek("bucket", f"{prefix}a") == (b"body" if kind == "reset_after_commit" else None)


def test_create_returns_false_for_a_conflict_that_wrote_nothing(
    store: ObjectStore, server: S3Server, prefix: str
) -> None:
    server.faults.set(Rule("409"))
    assert store.create("a", b"body") is False
    assert server.peek("bucket", f"{prefix}a") is None


def test_conflict_of_two_replaces_is_retryable(store: ObjectStore, server: S3Server) -> None:
    server.faults.set(Rule("409"))
    with pytest.raises(Retryable, match="conflict"):
        store.replace("a", b"body")


@pytest.mark.parametrize("has_buffer", [False, True])
def test_truncated_body_is_never_returned(store: ObjectStore, server: S3Server, has_buffer: bool) -> None:  # noqa: FBT001
    store.create("a", b"x" * (3 << 20))
    server.faults.set(Rule("truncate", "GET"))
    with pytest.raises(Retryable):
        store.read("a", Span(0, 3 << 20), memoryview(bytearray(3 << 20)) if has_buffer else None)


def test_unreachable_server_is_retryable(prefix: str) -> None:
    with S3Server() as stopped:
        store = open_s3(stopped, prefix)
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


def test_interrupted_upload_leaves_nothing_visible(store: ObjectStore, server: S3Server, prefix: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as dying:
        dying.sendall(f"PUT /bucket/{prefix}a HTTP/1.1\r\nContent-Length: 2000\r\n\r\n".encode() + b"x" * 1000)
        dying.shutdown(socket.SHUT_WR)
        assert dying.recv(1) == b""
    assert list(store.list("")) == []
    assert store.create("a", b"whole") is True


def test_large_body_is_sent_as_one_put(store: ObjectStore, server: S3Server) -> None:
    before = server.requests["PUT"], server.requests["POST"]
    store.create("payloads/a", [b"x" * (4 << 20)] * 5)
    store.replace("payloads/b", b"x" * (20 << 20))
    assert (server.requests["PUT"] - before[0], server.requests["POST"] - before[1]) == (2, 0)


def test_names_that_are_no_keys_are_not_listed(store: ObjectStore, server: S3Server, prefix: str) -> None:
    store.create("heartbeats/r-1.json", b"{}")
    put_foreign(server, f"{prefix}heartbeats/")
    for listed in ("heartbeats/", ""):
        assert [entry.key for entry in store.list(listed)] == ["heartbeats/r-1.json"]


# The environment.


def test_store_on_this_machine_has_the_loopback_profile(server: S3Server) -> None:
    assert open_s3(server, "").profile == LOOPBACK
    for environment in (FIXED_KEYS, FIXED_KEYS | {"AWS_ENDPOINT_URL": "https://objects.example.com"}):
        assert open_cloud_store("s3", "bucket", "", environment=environment).profile == REMOTE


def test_directory_bucket_is_refused() -> None:
    with pytest.raises(Invalid, match="general purpose bucket"):
        open_cloud_store("s3", "bucket--usw2-az1--x-s3", "", environment={})


def test_endpoint_of_s3_has_precedence_over_the_general_one(server: S3Server, prefix: str) -> None:
    environment = FIXED_KEYS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3": server.endpoint}
    assert open_cloud_store("s3", "bucket", prefix, environment=environment).create("a", b"")


def test_keys_of_a_profile_are_read_by_boto3(
    server: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[islands]\naws_access_key_id = profile-key\naws_secret_access_key = profile-secret\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "islands")
    store = open_cloud_store("s3", "bucket", prefix, environment={"AWS_ENDPOINT_URL": server.endpoint})
    assert store.create("a", b"body")


def test_missing_credentials_are_unauthorized(
    server: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "absent"))
    # boto3 must not ask a metadata server; obstore asks one that does not exist.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    store = open_cloud_store("s3", "bucket", prefix, environment={"AWS_ENDPOINT_URL": server.endpoint})
    with pytest.raises(Unauthorized, match="no credentials in the environment"):
        store.create("a", b"body")


def test_azure_is_reached_by_its_connection_string(prefix: str) -> None:
    # The server does not speak Azure's protocol; the test only checks the address and the body of the request.
    with S3Server() as server:
        key = base64.b64encode(b"secret").decode()
        text = f"AccountName=account;AccountKey={key};BlobEndpoint={server.endpoint}/account"
        store = open_cloud_store("az", "container", prefix, environment={"AZURE_STORAGE_CONNECTION_STRING": text})
        store.create("a", b"body")
        assert server.peek("account", f"container/{prefix}a") == b"body"


def test_s3_server_runs_as_a_separate_process(prefix: str) -> None:
    script = Path(s3server.__file__)
    with subprocess.Popen([sys.executable, script, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
            store = open_cloud_store("s3", "bucket", prefix, environment=FIXED_KEYS | {"AWS_ENDPOINT_URL": endpoint})
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
