"""The bucket store against the sandbox's Cloud Storage: rights, tokens and the write rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kit.stores import VERBS
from tests.support.clocks import FakeClock
from tests.testing.google.kit import bind, make_account, make_bucket

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.runtime.store.obstore_clients import open_cloud_store
from skerry.runtime.store.retrying import Retrying
from skerry.testing.google import GoogleSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.runtime.store.obstore_store import ObjectStore

ACCOUNT = "replica-0@skerry-sandbox.iam.gserviceaccount.com"
OBJECTS = "projects/_/buckets/bucket/objects"
LISTING = 'api.getAttribute("storage.googleapis.com/objectListPrefix", "")'


@pytest.fixture
def google() -> Iterator[GoogleSandbox]:
    with GoogleSandbox() as running:
        make_bucket(running)
        yield running
        assert running.violations == []


def open_gs(environment: Mapping[str, str], prefix: str = "runs/a/", bucket: str = "bucket") -> ObjectStore:
    return open_cloud_store("gs", bucket, prefix, environment=environment)


def open_as_replica(google: GoogleSandbox, *roles: str, condition: str | None = None) -> ObjectStore:
    """The store for a job with its own service account, which may read and write objects unless roles are given."""
    store = open_gs(google.acting_as(make_account(google)))
    for role in roles or ("objectUser",):
        bind(google, f"roles/storage.{role}", f"serviceAccount:{ACCOUNT}", condition)
    return store


def token_requests(google: GoogleSandbox) -> int:
    return len([path for path in google.machines.paths if path.endswith("/token")])


def write_statuses(google: GoogleSandbox) -> list[int]:
    return [call.status for call in google.calls if call.name == "storage.objects.insert"]


# Rights.


def test_condition_on_the_prefix_restricts_a_replica_to_its_run(google: GoogleSandbox) -> None:
    condition = f'resource.name.startsWith("{OBJECTS}/runs/a/") || {LISTING}.startsWith("runs/a/")'
    store = open_as_replica(google, condition=condition)
    assert store.create("mine", b"x")
    assert [entry.key for entry in store.list("")] == ["mine"]
    other = open_gs(google.acting_as(ACCOUNT), "runs/b/")
    for call in VERBS.values():
        with pytest.raises(Unauthorized, match=r"replica-0@.*does not have storage\.objects\."):
            call(other)


@pytest.mark.parametrize("rights_first", [False, True])
def test_account_without_delete_rights_creates_and_cannot_replace(
    google: GoogleSandbox,
    monkeypatch: pytest.MonkeyPatch,
    rights_first: bool,  # noqa: FBT001
) -> None:
    """Cloud Storage may check the right to overwrite before or after the condition of a create."""
    monkeypatch.setattr(google.objects, "rights_first", rights_first)
    store = open_as_replica(google, "objectCreator", "objectViewer")
    assert store.create("a", b"first")
    with pytest.raises(Unauthorized, match=r"storage\.objects\.delete"):
        store.replace("a", b"second")
    tokens = token_requests(google)
    assert store.create("a", b"second") is False
    assert store.read("a") == b"first"
    assert token_requests(google) == tokens, "a lost create says nothing against the credentials"


@pytest.mark.parametrize("verb", ["read", "create", "list"])
def test_missing_bucket_is_named(google: GoogleSandbox, verb: str) -> None:
    with pytest.raises(Invalid, match="no such bucket: gs://nowhere"):
        VERBS[verb](open_gs(google.environment, bucket="nowhere"))


# Tokens.


def test_token_is_fetched_once_and_again_after_it_was_revoked(google: GoogleSandbox) -> None:
    store = Retrying(open_as_replica(google), FakeClock())
    for _ in range(5):
        store.replace("a", b"body")
    assert token_requests(google) == 1
    google.principals.expire()
    assert store.read("a") == b"body"
    assert store.usage.retries == 1


def test_token_is_renewed_before_it_expires(google: GoogleSandbox) -> None:
    google.machines.token_s = 60
    store = open_as_replica(google)
    clock = SystemClock()

    def renewed_twice() -> bool | None:
        store.replace("a", b"body")
        return True if token_requests(google) > 2 else None

    assert wait_until(clock, renewed_twice, clock.now() + 10.0, Backoff(first=0.02, cap=0.1))
    assert set(write_statuses(google)) == {200}


def test_unknown_token_is_unauthorized(google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google.accounts, "token", lambda *_: "made up")
    with pytest.raises(Unauthorized, match="refuses these credentials"):
        open_as_replica(google).read("a")


def test_deleted_account_is_retryable_after_a_success(google: GoogleSandbox) -> None:
    store = Retrying(open_as_replica(google), FakeClock())
    store.create("a", b"body")
    google.call("DELETE", f"/v1/projects/-/serviceAccounts/{ACCOUNT}")
    with pytest.raises(Retryable, match="no credentials in the environment, and none from this machine's role"):
        store.read("a")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"GCE_METADATA_HOST": "127.0.0.1:1"}, r"127\.0\.0\.1:1"), ({}, "status code: 404")],
    ids=["no metadata server", "no service account"],
)
def test_machine_without_a_token_is_unauthorized(google: GoogleSandbox, change: dict[str, str], words: str) -> None:
    store = open_gs(google.acting_as("absent@skerry-sandbox.iam.gserviceaccount.com") | change)
    with pytest.raises(Unauthorized, match=rf"none from this machine's role.*{words}"):
        store.read("a")


# One write per second and object.


def test_second_write_within_a_second_is_retried_unless_it_is_a_create() -> None:
    clock = FakeClock()  # of the sandbox and of the store that waits for it
    with GoogleSandbox(object_rate=True, clock=clock) as google:
        make_bucket(google)
        store = Retrying(open_gs(google.environment), clock)
        for number in range(20):
            assert store.create(f"payloads/{number}", b"x")
        assert store.create("payloads/0", b"y") is False
        assert clock.pauses == []
        began = clock.now()
        for beat in range(3):
            store.replace("heartbeats/a.json", str(beat).encode())
        store.delete("heartbeats/a.json")
        assert 3.0 <= clock.now() - began < 7.0
        assert write_statuses(google).count(429) > 0
        assert store.usage.retries == len(clock.pauses) > write_statuses(google).count(429)


# A run.


@pytest.mark.slow
def test_two_replicas_with_own_accounts_end_with_the_same_state(google: GoogleSandbox) -> None:
    from tests.kit.managers import Island, commits, receipts, together  # noqa: PLC0415  imports torch

    def island(number: int) -> Island:
        name = f"replica-{number}"
        email = make_account(google, name)
        bind(google, "roles/storage.objectUser", f"serviceAccount:{email}")
        return Island(Retrying(open_gs(google.acting_as(email)), SystemClock()), name, seed=number)

    islands = [island(0), island(1)]
    together([lambda island=island: island.train(2) for island in islands])
    store = open_gs(google.environment)
    assert len(commits(store)) == 2
    assert len({receipt.state for receipt in receipts(store, 1).values()}) == 1
    writers = {call.caller for call in google.calls if call.name == "storage.objects.insert"}
    assert writers == {f"serviceAccount:replica-{number}@skerry-sandbox.iam.gserviceaccount.com" for number in (0, 1)}
