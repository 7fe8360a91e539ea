"""The bucket engine against servers of ours: the whole suite, and what each kind of fault means at this seam."""

from __future__ import annotations

import base64
import itertools
import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.runtime.store.conformance import FOREIGN, KEYS, StoreConformance, put
from tests.support import s3server
from tests.support.gcsserver import GcsServer
from tests.support.s3server import Rule, S3Server

from skerry.runtime.errors import Ambiguous, Invalid, Retryable, Unauthorized
from skerry.runtime.store import Span
from skerry.runtime.store.clients import LOOPBACK, REMOTE, cloud_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.s3server import Kind

    from skerry.runtime.store.cloud import ObjectStore

NUMBERS = itertools.count()
# One listing page holds this many keys: the suite's listings need several.
PAGE_KEYS = 3


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(page_keys=PAGE_KEYS, buckets=frozenset({"bucket"})) as running:
        yield running


@pytest.fixture(scope="module")
def gcs() -> Iterator[GcsServer]:
    with GcsServer(page_keys=PAGE_KEYS) as running:
        yield running


@pytest.fixture
def prefix() -> str:
    """A folder of the bucket that no other test uses."""
    return f"runs/{next(NUMBERS)}/"


@pytest.fixture
def store(server: S3Server, prefix: str) -> Iterator[ObjectStore]:
    yield s3(server, prefix)
    server.faults.set()


def s3(server: S3Server, prefix: str, *, bucket: str = "bucket", stall_s: float = 5.0) -> ObjectStore:
    return cloud_store("s3", bucket, prefix, environment=environment(server), stall_s=stall_s)


def environment(server: S3Server) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "nobody"}


class TestS3(StoreConformance):
    @pytest.fixture
    def store(self, server: S3Server, prefix: str) -> ObjectStore:
        return s3(server, prefix)

    @pytest.fixture
    def peek(self, server: S3Server, prefix: str) -> Callable[[str], bytes | None]:
        return lambda key: server.peek("bucket", prefix + key)


class TestGcs(StoreConformance):
    @pytest.fixture
    def store(self, gcs: GcsServer, prefix: str) -> ObjectStore:
        return cloud_store("gs", "bucket", prefix, environment={"STORAGE_EMULATOR_HOST": gcs.endpoint})

    @pytest.fixture
    def peek(self, gcs: GcsServer, prefix: str) -> Callable[[str], bytes | None]:
        return lambda key: gcs.peek("bucket", prefix + key)


def test_without_a_prefix_keys_stand_at_the_top_of_the_bucket() -> None:
    with S3Server(page_keys=PAGE_KEYS) as own:
        store = s3(own, "")
        for key in KEYS:
            store.create(key, key.encode())
            assert own.peek("bucket", key) == key.encode()
        for prefix in ("", "a", "a/", "b"):
            assert [entry.key for entry in store.list(prefix)] == [key for key in KEYS if key.startswith(prefix)]


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "read": lambda store: store.read("a"),
    "create": lambda store: store.create("a", b"body"),
    "replace": lambda store: store.replace("a", b"body"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("a"),
}


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("kind", ["503", "429", "400"])
def test_a_busy_store_has_done_nothing(store: ObjectStore, server: S3Server, kind: Kind, verb: str) -> None:
    server.faults.set(Rule(kind))
    with pytest.raises(Retryable, match=f"busy: {verb} key=") as raised:
        CALLS[verb](store)
    assert not isinstance(raised.value, Ambiguous)


@pytest.mark.parametrize("verb", CALLS)
def test_a_refusal_of_the_credentials_is_unauthorized(store: ObjectStore, server: S3Server, verb: str) -> None:
    server.faults.set(Rule("403"))
    with pytest.raises(Unauthorized, match="credentials"):
        CALLS[verb](store)


@pytest.mark.parametrize("verb", CALLS)
def test_a_bucket_that_does_not_exist_is_named(server: S3Server, prefix: str, verb: str) -> None:
    store = s3(server, prefix, bucket="no-such-bucket")
    with pytest.raises(Invalid, match="no such bucket: s3://no-such-bucket/"):
        CALLS[verb](store)


@pytest.mark.parametrize("verb", CALLS)
def test_a_stalled_request_ends_within_its_time_out(server: S3Server, prefix: str, verb: str) -> None:
    store = s3(server, prefix, stall_s=0.1)
    server.faults.set(Rule("stall", seconds=30.0))
    with pytest.raises(Ambiguous if verb == "create" else Retryable):
        CALLS[verb](store)
    server.faults.set()


@pytest.mark.parametrize("kind", ["500", "reset", "reset_after_commit"])
def test_a_create_without_a_clear_answer_is_ambiguous(
    store: ObjectStore, server: S3Server, prefix: str, kind: Kind
) -> None:
    server.faults.set(Rule(kind))
    with pytest.raises(Ambiguous, match="no clear answer"):
        store.create("a", b"body")
    assert server.peek("bucket", f"{prefix}a") == (b"body" if kind == "reset_after_commit" else None)


def test_a_conflict_with_nothing_written_is_a_false_that_only_the_wrapper_resolves(
    store: ObjectStore, server: S3Server, prefix: str
) -> None:
    server.faults.set(Rule("409"))
    assert store.create("a", b"body") is False
    assert server.peek("bucket", f"{prefix}a") is None


def test_a_conflict_of_two_replaces_is_retryable(store: ObjectStore, server: S3Server) -> None:
    server.faults.set(Rule("409"))
    with pytest.raises(Retryable, match="conflict"):
        store.replace("a", b"body")


@pytest.mark.parametrize("lands", [False, True])
def test_a_truncated_body_is_never_handed_out(store: ObjectStore, server: S3Server, lands: bool) -> None:  # noqa: FBT001
    store.create("a", b"x" * (3 << 20))
    server.faults.set(Rule("truncate", "GET"))
    with pytest.raises(Retryable):
        store.read("a", Span(0, 3 << 20), memoryview(bytearray(3 << 20)) if lands else None)


def test_a_server_that_is_not_there_is_retryable(prefix: str) -> None:
    with S3Server() as gone:
        store = s3(gone, prefix)
    with pytest.raises(Retryable, match="no clear answer"):
        store.read("a")


def test_a_listing_passes_by_older_and_newer_neighbours() -> None:
    with S3Server(page_keys=100) as many:
        store = s3(many, "runs/")
        for number in range(600):
            store.create(f"exchanges/{number:08d}-0000.json", b"")
        before = many.requests["GET"]
        assert [entry.key for entry in store.list("exchanges/00000300-")] == ["exchanges/00000300-0000.json"]
        # All of them would be six pages; obstore asks for the page after the first while that is looked at.
        assert many.requests["GET"] - before <= 2


def test_a_writer_killed_in_mid_upload_leaves_nothing_visible(
    store: ObjectStore, server: S3Server, prefix: str
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as dying:
        dying.sendall(f"PUT /bucket/{prefix}a HTTP/1.1\r\nContent-Length: 2000\r\n\r\n".encode() + b"x" * 1000)
        dying.shutdown(socket.SHUT_WR)
        assert dying.recv(1) == b""
    assert list(store.list("")) == []
    assert store.create("a", b"whole") is True


def test_a_large_body_goes_out_as_one_put(store: ObjectStore, server: S3Server) -> None:
    before = server.requests["PUT"], server.requests["POST"]
    store.create("payloads/a", [b"x" * (4 << 20)] * 5)
    store.replace("payloads/b", b"x" * (20 << 20))
    assert (server.requests["PUT"] - before[0], server.requests["POST"] - before[1]) == (2, 0)


def test_a_store_on_this_machine_is_polled_more_often(server: S3Server) -> None:
    assert s3(server, "").profile == LOOPBACK
    remote = {"AWS_ENDPOINT_URL": "https://objects.example.com", "AWS_ACCESS_KEY_ID": "nobody"}
    assert cloud_store("s3", "bucket", "", environment=remote).profile == REMOTE
    assert cloud_store("s3", "bucket", "", environment={"AWS_ACCESS_KEY_ID": "nobody"}).profile == REMOTE


def test_a_bucket_without_order_is_refused() -> None:
    with pytest.raises(Invalid, match="general purpose bucket"):
        cloud_store("s3", "bucket--usw2-az1--x-s3", "", environment={})


def test_an_endpoint_for_s3_goes_before_the_one_for_every_service(server: S3Server, prefix: str) -> None:
    told = {**environment(server), "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3": server.endpoint}
    assert cloud_store("s3", "bucket", prefix, environment=told).create("a", b"")


def test_keys_of_a_profile_are_found_through_boto3(
    server: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[islands]\naws_access_key_id = somebody\naws_secret_access_key = something\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "islands")
    store = cloud_store("s3", "bucket", prefix, environment={"AWS_ENDPOINT_URL": server.endpoint})
    assert store.create("a", b"body")


def test_credentials_that_are_nowhere_are_told_at_once(
    server: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "absent"))
    # boto3 must not ask a metadata server, and obstore asks one that is not there.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    store = cloud_store("s3", "bucket", prefix, environment={"AWS_ENDPOINT_URL": server.endpoint})
    with pytest.raises(Unauthorized, match="no credentials in the environment"):
        store.create("a", b"body")


def test_azure_is_reached_by_its_connection_string(prefix: str) -> None:
    # A server of S3 is no server of Azure: that it was asked, and with what, is what counts here.
    with S3Server() as server:
        key = base64.b64encode(b"secret").decode()
        text = f"AccountName=account;AccountKey={key};BlobEndpoint={server.endpoint}/account"
        store = cloud_store("az", "container", prefix, environment={"AZURE_STORAGE_CONNECTION_STRING": text})
        store.create("a", b"body")
        assert server.peek("account", f"container/{prefix}a") == b"body"


def test_the_server_runs_as_a_process_of_its_own(prefix: str) -> None:
    script = Path(s3server.__file__)
    with subprocess.Popen([sys.executable, script, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
            told = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "nobody"}
            store = cloud_store("s3", "bucket", prefix, environment=told)
            assert store.create("a", b"body")
            rules = json.dumps([{"kind": "503", "method": "GET"}]).encode()
            request = urllib.request.Request(f"{endpoint}/_control/faults", rules, method="PUT")  # noqa: S310  loopback
            with urllib.request.urlopen(request) as answer:  # noqa: S310
                assert answer.status == 200
            with pytest.raises(Retryable, match="busy"):
                store.read("a")
            assert store.read("a") == b"body"
        finally:
            process.kill()


def test_what_no_key_can_name_is_in_no_listing(store: ObjectStore, server: S3Server, prefix: str) -> None:
    """Made in a console or by another tool, and no call of ours could take it: a reader would end with Invalid."""
    store.create("heartbeats/r-1.json", b"{}")
    for name in FOREIGN:
        put(server, f"{prefix}heartbeats/{name}")
    assert [entry.key for entry in store.list("heartbeats/")] == ["heartbeats/r-1.json"]
    assert [entry.key for entry in store.list("")] == ["heartbeats/r-1.json"]
