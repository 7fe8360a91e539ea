"""The store over fsspec: the conformance suite through s3fs, and the meaning of each fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.runtime.store.conformance import StoreConformance, put_foreign
from tests.support.clocks import FakeClock
from tests.support.s3server import Rule, S3Server

from skerry.runtime.errors import Ambiguous, Invalid, Retryable, Unauthorized
from skerry.runtime.store.fsspec_store import REFUSED, FsspecStore, open_fsspec_store
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime.store.conformance import Peek
    from tests.support.s3server import Kind


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(page_keys=3, buckets=frozenset({"bucket"})) as running:
        yield running


@pytest.fixture(scope="module")
def shared(server: S3Server) -> Iterator[FsspecStore]:
    """One session for the module, because each one stays open until the process ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test-key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        patch.setenv("AWS_REGION", "us-east-1")
        yield open_fsspec_store("s3", "bucket", "")


@pytest.fixture
def store(shared: FsspecStore, server: S3Server, prefix: str) -> Iterator[FsspecStore]:
    yield shared.below("fsspec+s3://bucket", f"bucket/{prefix}")
    server.faults.set()


class TestS3fs(StoreConformance):
    @pytest.fixture
    def store(self, shared: FsspecStore, prefix: str) -> FsspecStore:
        return shared.below("fsspec+s3://bucket", f"bucket/{prefix}")

    @pytest.fixture
    def peek(self, server: S3Server, prefix: str) -> Peek:
        return lambda key: server.peek("bucket", prefix + key)


@pytest.mark.parametrize("protocol", [*REFUSED, "sftp"])
def test_untested_protocol_is_refused_with_the_reason(protocol: str) -> None:
    with pytest.raises(Invalid, match=rf"cannot use fsspec\+{protocol}:// for a run: .*(write|test)"):
        open_fsspec_store(protocol, "bucket", "")


@pytest.mark.parametrize(
    ("kind", "times", "error", "words"),
    [
        ("500", 9, Ambiguous, "no clear answer"),
        ("reset", 9, Ambiguous, "no clear answer"),
        ("503", 1, Retryable, "busy"),
        ("409", 1, Retryable, "busy"),
        ("403", 1, Unauthorized, "refuses"),
    ],
)
def test_fault_of_a_create_is_translated(
    store: FsspecStore, server: S3Server, prefix: str, kind: Kind, times: int, error: type[Exception], words: str
) -> None:
    server.faults.set(Rule(kind, times=times))
    with pytest.raises(error, match=words):
        store.create("a", b"body")
    assert server.peek("bucket", f"{prefix}a") is None


def test_create_repeated_by_the_http_client_is_resolved(store: FsspecStore, server: S3Server) -> None:
    # aiohttp repeats a PUT when a kept connection dies: the store then gets a 412 for its own object.
    store.create("warm", b"")
    server.faults.set(Rule("reset_after_commit"))
    assert Retrying(store, FakeClock()).create("a", b"body") is True


def test_truncated_body_is_never_returned(store: FsspecStore, server: S3Server) -> None:
    store.create("a", b"x" * 100_000)
    server.faults.set(Rule("truncate", "GET"))
    with pytest.raises(Retryable):
        store.read("a")


def test_names_that_are_no_keys_are_not_listed(store: FsspecStore, server: S3Server, prefix: str) -> None:
    store.create("heartbeats/r-1.json", b"{}")
    put_foreign(server, f"{prefix}heartbeats/")
    assert [entry.key for entry in store.list("heartbeats/")] == ["heartbeats/r-1.json"]


def test_missing_bucket_is_named(shared: FsspecStore) -> None:
    store = shared.below("fsspec+s3://absent", "absent/")
    for call in (lambda: store.create("a", b""), lambda: store.read("a")):
        with pytest.raises(Invalid, match="no such bucket"):
            call()
