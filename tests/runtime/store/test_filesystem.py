from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from tests.runtime.store.conformance import FOREIGN, StoreConformance, put
from tests.support.clocks import FakeClock
from tests.support.s3server import Rule, S3Server

from skerry.runtime.errors import Ambiguous, Invalid, Retryable, Unauthorized
from skerry.runtime.store.filesystem import REFUSED, FsspecStore, filesystem_store
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.s3server import Kind

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(page_keys=3, buckets=frozenset({"bucket"})) as running:
        yield running


@pytest.fixture(scope="module")
def shared(server: S3Server) -> Iterator[FsspecStore]:
    """One file system for the module: each one keeps a session of its own until the process ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        patch.setenv("AWS_REGION", "us-east-1")
        yield filesystem_store("s3", "bucket", "")


@pytest.fixture
def prefix() -> str:
    return f"runs/{next(NUMBERS)}/"


@pytest.fixture
def store(shared: FsspecStore, server: S3Server, prefix: str) -> Iterator[FsspecStore]:
    yield FsspecStore("fsspec+s3://bucket", shared._filesystem, f"bucket/{prefix}", shared._errors[1:])
    server.faults.set()


class TestS3fs(StoreConformance):
    @pytest.fixture
    def store(self, shared: FsspecStore, prefix: str) -> FsspecStore:
        return FsspecStore("fsspec+s3://bucket", shared._filesystem, f"bucket/{prefix}", shared._errors[1:])

    @pytest.fixture
    def peek(self, server: S3Server, prefix: str) -> Callable[[str], bytes | None]:
        return lambda key: server.peek("bucket", prefix + key)


@pytest.mark.parametrize("protocol", [*REFUSED, "sftp"])
def test_a_protocol_whose_create_is_not_proved_is_refused_with_the_reason(protocol: str) -> None:
    with pytest.raises(Invalid, match=rf"fsspec\+{protocol}:// cannot hold a run: .*(write|prove)"):
        filesystem_store(protocol, "bucket", "")


@pytest.mark.parametrize("kind", ["500", "reset"])
def test_a_create_without_a_clear_answer_is_ambiguous(store: FsspecStore, server: S3Server, kind: Kind) -> None:
    server.faults.set(Rule(kind, times=9))
    with pytest.raises(Ambiguous, match="no clear answer"):
        store.create("a", b"body")


def test_a_repeat_inside_the_http_client_that_meets_its_own_success_is_resolved(
    store: FsspecStore, server: S3Server
) -> None:
    # aiohttp sends a PUT again by itself when a kept connection dies: the engine hears 412 about its own object.
    store.create("warm", b"")
    server.faults.set(Rule("reset_after_commit"))
    assert Retrying(store, FakeClock()).create("a", b"body") is True


@pytest.mark.parametrize("kind", ["503", "409"])
def test_a_busy_store_has_done_nothing(store: FsspecStore, server: S3Server, prefix: str, kind: Kind) -> None:
    server.faults.set(Rule(kind))
    with pytest.raises(Retryable, match="busy"):
        store.create("a", b"body")
    assert server.peek("bucket", f"{prefix}a") is None


def test_a_truncated_body_is_never_handed_out(store: FsspecStore, server: S3Server) -> None:
    store.create("a", b"x" * 100_000)
    server.faults.set(Rule("truncate", "GET"))
    with pytest.raises(Retryable):
        store.read("a")


def test_what_no_key_can_name_is_in_no_listing(store: FsspecStore, server: S3Server, prefix: str) -> None:
    store.create("heartbeats/r-1.json", b"{}")
    for name in FOREIGN:
        put(server, f"{prefix}heartbeats/{name}")
    assert [entry.key for entry in store.list("heartbeats/")] == ["heartbeats/r-1.json"]


def test_a_refusal_of_the_credentials_is_unauthorized(store: FsspecStore, server: S3Server) -> None:
    server.faults.set(Rule("403"))
    with pytest.raises(Unauthorized):
        store.read("a")


def test_a_bucket_that_does_not_exist_is_named(shared: FsspecStore) -> None:
    store = FsspecStore("fsspec+s3://absent", shared._filesystem, "absent/", shared._errors[1:])
    with pytest.raises(Invalid, match="no such bucket"):
        store.create("a", b"")
    with pytest.raises(Invalid, match="no such bucket"):
        store.read("a")
