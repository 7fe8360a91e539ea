"""Cloud Storage's XML API as object_store speaks it, and that what is not in its tables is refused."""

from __future__ import annotations

import http.client
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, UnauthenticatedError
from tests.testing.google.kit import bind, gcs, make_account, make_bucket, token_of

from skerry.runtime.clock import SystemClock
from skerry.testing.google import GoogleSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from obstore.store import GCSStore
    from tests.support.clocks import FakeClock

MIB = 1 << 20


@pytest.fixture
def store(google: GoogleSandbox) -> GCSStore:
    make_bucket(google)
    return gcs(google)


def raw(google: GoogleSandbox, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(google.endpoint).netloc)
    try:
        connection.request(method, path, body=body, headers={"Authorization": f"Bearer {google.token}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_object_is_read_whole_and_in_ranges_with_its_generation(google: GoogleSandbox, store: GCSStore) -> None:
    created = obstore.put(store, "runs/a b/ä", b"0123456789", use_multipart=False)
    result = obstore.get(store, "runs/a b/ä")
    assert bytes(result.bytes()) == b"0123456789"
    assert result.meta["version"] == created["version"] == obstore.head(store, "runs/a b/ä")["version"]
    assert bytes(obstore.get_range(store, "runs/a b/ä", start=2, end=5)) == b"234"
    assert bytes(obstore.get(store, "runs/a b/ä", options={"range": {"suffix": 3}}).bytes()) == b"789"
    assert bytes(obstore.get(store, "runs/a b/ä", options={"range": {"offset": 7}}).bytes()) == b"789"
    with pytest.raises(GenericError, match="416"):
        obstore.get_range(store, "runs/a b/ä", start=10, end=12)
    assert google.violations == []


def test_create_of_existing_and_swap_of_changed_object_are_refused(store: GCSStore) -> None:
    first = obstore.put(store, "a", b"1", mode="create", use_multipart=False)
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a", b"2", mode="create", use_multipart=False)
    second = obstore.put(store, "a", b"3", mode=first, use_multipart=False)
    assert second["version"] != first["version"]
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.put(store, "a", b"4", mode=first, use_multipart=False)
    assert bytes(obstore.get(store, "a").bytes()) == b"3"


class LettingOthers(SystemClock):
    """Delays each reader of the time, so that other writers run between a read and a write."""

    def now(self) -> float:
        self.pause(0.002)
        return super().now()


@pytest.fixture
def contended() -> Iterator[GCSStore]:
    with GoogleSandbox(clock=LettingOthers()) as running:
        make_bucket(running)
        yield gcs(running)


def test_racing_swaps_of_one_generation_have_one_winner(contended: GCSStore) -> None:
    """Creates are raced by the store's own suite."""
    store = contended
    seen = obstore.put(store, "a", b"0", use_multipart=False)
    start = threading.Barrier(8)
    won: list[int] = []

    def swap(number: int) -> None:
        start.wait()
        try:
            obstore.put(store, "a", str(number).encode() * 1000, mode=seen, use_multipart=False)
        except obstore.exceptions.PreconditionError:
            return
        won.append(number)

    threads = [threading.Thread(target=swap, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert bytes(obstore.get(store, "a").bytes()) == str(won[0]).encode() * 1000


def test_multipart_upload_is_one_object_with_a_minimum_part_size(google: GoogleSandbox, store: GCSStore) -> None:
    body = bytes(range(256)) * (48 << 10)
    obstore.put(store, "large", body, use_multipart=True, chunk_size=5 * MIB)
    assert bytes(obstore.get(store, "large").bytes()) == body
    with pytest.raises(GenericError, match="EntityTooSmall"):
        obstore.put(store, "small", body, use_multipart=True, chunk_size=MIB)
    assert google.violations == []


def test_copies_have_generations_of_their_own(store: GCSStore) -> None:
    created = obstore.put(store, "a", b"1", use_multipart=False)
    obstore.copy(store, "a", "b/c")
    assert obstore.head(store, "b/c")["version"] != created["version"]
    with pytest.raises(AlreadyExistsError):
        obstore.copy(store, "a", "b/c", overwrite=False)


def test_listings_go_in_the_order_of_names_over_pages(google: GoogleSandbox, store: GCSStore) -> None:
    names = sorted(f"runs/{number % 7}/{number:04d}" for number in range(1105))
    for name in names:
        obstore.put(store, name, b"", use_multipart=False)
    google.calls.clear()
    result = [meta["path"] for page in obstore.list(store, "runs", chunk_size=5000) for meta in page]
    assert result == names
    assert len(google.calls) == 2, "a page has a thousand at most"
    after = [meta["path"] for page in obstore.list(store, "runs", offset=names[99]) for meta in page]
    assert after == names[100:]
    folders = obstore.list_with_delimiter(store, "runs")
    assert folders["common_prefixes"] == [f"runs/{number}" for number in range(7)]
    assert list(folders["objects"]) == []
    assert google.violations == []


def test_folders_are_listed_over_pages_without_repeats(google: GoogleSandbox, store: GCSStore) -> None:
    for name in ("a/1", "a/2", "b", "c/1", "c/2", "d"):
        obstore.put(store, name, b"", use_multipart=False)
    response: list[str] = []
    token = ""
    while True:
        path = f"/bucket?list-type=2&delimiter=%2F&max-keys=1{token}"
        status, body = raw(google, "GET", path, {})
        assert status == 200
        response.append(body.partition("<Key>")[2].partition("<")[0] or body.partition("<Prefix>")[2][:40])
        if "<IsTruncated>true" not in body:
            break
        token = "&continuation-token=" + body.partition("<NextContinuationToken>")[2].partition("<")[0].replace(
            "/", "%2F"
        )
    assert len(response) == 4


@pytest.mark.parametrize(
    ("method", "path", "headers", "message"),
    [
        ("PUT", "/bucket/a", {"x-goog-if-generation-mach": "0"}, "unknown header x-goog-if-generation-mach"),
        ("PUT", "/bucket/a", {"If-None-Match": "*"}, "unknown header if-none-match"),
        ("PUT", "/bucket/a?generation=0", {}, "unknown parameter generation"),
        ("GET", "/bucket?list-type=2&startafter=a", {}, "unknown parameter startafter"),
        ("PUT", "/bucket", {}, "no such method: PUT of a bucket"),
    ],
)
def test_unknown_header_parameter_or_method_is_refused(
    google: GoogleSandbox, store: GCSStore, method: str, path: str, headers: dict[str, str], message: str
) -> None:
    del store
    status, body = raw(google, method, path, headers)
    assert status == 400
    assert message in body
    assert message in google.violations[0]
    assert google.objects.buckets["bucket"].objects == {}


def test_requests_need_the_permissions_of_the_tokens_owner(google: GoogleSandbox, store: GCSStore) -> None:
    obstore.put(store, "runs/a/x", b"1", use_multipart=False)
    email = make_account(google)
    foreign = gcs(google, token_of(google, email))
    with pytest.raises(PermissionDeniedError, match=r"replica-0@.*storage\.objects\.get"):
        obstore.get(foreign, "runs/a/x")
    bind(google, "roles/storage.objectCreator", f"serviceAccount:{email}")
    obstore.put(foreign, "runs/a/y", b"1", mode="create", use_multipart=False)
    with pytest.raises(PermissionDeniedError, match=r"storage\.objects\.delete"):
        obstore.put(foreign, "runs/a/y", b"2", use_multipart=False)
    with pytest.raises(GenericError, match=r"objects\.list"):
        list(obstore.list(foreign, "runs"))
    with pytest.raises(UnauthenticatedError):
        obstore.get(gcs(google, "made-up"), "runs/a/x")


@pytest.fixture
def limited(clock: FakeClock) -> Iterator[GoogleSandbox]:
    with GoogleSandbox(object_rate=True, clock=clock) as running:
        make_bucket(running)
        yield running


def test_object_accepts_one_write_or_delete_a_second(limited: GoogleSandbox, clock: FakeClock) -> None:
    store = gcs(limited)
    obstore.put(store, "a", b"1", use_multipart=False)
    obstore.put(store, "b", b"1", use_multipart=False)
    with pytest.raises(GenericError, match=r"429.*SlowDown"):
        obstore.put(store, "a", b"2", use_multipart=False)
    with pytest.raises(GenericError, match="429"):
        obstore.delete(store, "a")
    clock.advance(1.0)
    obstore.put(store, "a", b"2", use_multipart=False)
    clock.advance(0.99)
    with pytest.raises(GenericError, match="429"):
        obstore.put(store, "a", b"3", use_multipart=False)
    assert bytes(obstore.get(store, "a").bytes()) == b"2"
