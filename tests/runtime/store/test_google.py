"""The bucket engine against the sandbox's Cloud Storage: rights, tokens, and the rate of writes besides the suite."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from tests.infra.testing.google.ground import bind, make_account, make_bucket
from tests.runtime.store.conformance import StoreConformance
from tests.support.clocks import FakeClock

from skerry.infra.testing.google import GoogleSandbox
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.runtime.store.clients import cloud_store
from skerry.runtime.store.machine import MachineToken, machine_token
from skerry.runtime.store.probe import probe
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.runtime.store.cloud import ObjectStore

NUMBERS = itertools.count()
OBJECTS = "projects/_/buckets/bucket/objects"
LISTING = 'api.getAttribute("storage.googleapis.com/objectListPrefix", "")'


@pytest.fixture(scope="module")
def shared() -> Iterator[GoogleSandbox]:
    with GoogleSandbox() as running:
        make_bucket(running)
        yield running


@pytest.fixture
def google() -> Iterator[GoogleSandbox]:
    with GoogleSandbox() as running:
        make_bucket(running)
        yield running
        assert running.violations == []


@pytest.fixture
def prefix() -> str:
    return f"runs/{next(NUMBERS)}/"


class TestGoogle(StoreConformance):
    @pytest.fixture
    def store(self, shared: GoogleSandbox, prefix: str) -> ObjectStore:
        return cloud_store("gs", "bucket", prefix, environment=shared.environment)

    @pytest.fixture
    def peek(self, shared: GoogleSandbox, prefix: str) -> Callable[[str], bytes | None]:
        def look(key: str) -> bytes | None:
            found = shared.objects.buckets["bucket"].objects.get(prefix + key)
            return None if found is None else found.data

        return look


def test_the_suite_asked_for_nothing_that_google_does_not_know(shared: GoogleSandbox) -> None:
    assert shared.violations == []


def as_replica(google: GoogleSandbox, prefix: str = "runs/a/") -> ObjectStore:
    """The store as a job sees it that runs as an account of its own."""
    return cloud_store("gs", "bucket", prefix, environment=google.acting_as(make_account(google)))


def allowed(
    google: GoogleSandbox, role: str = "roles/storage.objectUser", expression: str | None = None
) -> ObjectStore:
    """The same, and the account may."""
    store = as_replica(google)
    bind(google, role, "serviceAccount:replica-0@skerry-sandbox.iam.gserviceaccount.com", expression)
    return store


def test_a_job_acts_as_its_own_account_and_no_more(google: GoogleSandbox) -> None:
    store = as_replica(google)
    for call in (
        lambda: store.read("a"),
        lambda: store.create("a", b""),
        lambda: store.replace("a", b""),
        lambda: store.list(""),
        lambda: store.delete("a"),
    ):
        with pytest.raises(Unauthorized, match=r"replica-0@.*does not have storage\.objects\."):
            call()


def test_a_condition_on_the_prefix_keeps_a_replica_in_its_run(google: GoogleSandbox) -> None:
    starts = f'resource.name.startsWith("{OBJECTS}/runs/a/") || {LISTING}.startsWith("runs/a/")'
    store = allowed(google, expression=starts)
    assert store.create("mine", b"x")
    assert [entry.key for entry in store.list("")] == ["mine"]
    others = cloud_store(
        "gs", "bucket", "runs/b/", environment=google.acting_as("replica-0@skerry-sandbox.iam.gserviceaccount.com")
    )
    for call in (lambda: others.read("mine"), lambda: others.create("mine", b"x"), lambda: others.list("")):
        with pytest.raises(Unauthorized):
            call()


@pytest.mark.parametrize("first", ["condition", "rights"])
def test_without_the_right_to_delete_nothing_is_replaced_and_a_create_that_lost_says_so(
    google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(google.objects, "rights_first", first == "rights")
    store = allowed(google, "roles/storage.objectCreator")
    bind(google, "roles/storage.objectViewer", "serviceAccount:replica-0@skerry-sandbox.iam.gserviceaccount.com")
    assert store.create("a", b"first")
    with pytest.raises(Unauthorized, match=r"storage\.objects\.delete"):
        store.replace("a", b"second")
    assert store.create("a", b"second") is False
    assert bytes(store.read("a") or b"") == b"first"


# Tokens.


def test_a_token_that_ended_early_is_asked_for_anew(google: GoogleSandbox) -> None:
    """An administrator ended it, or clocks differ: Google says 401 and no more."""
    store = Retrying(allowed(google), FakeClock())
    store.create("a", b"body")
    google.principals.expire()
    assert store.read("a") == b"body"
    assert store.usage.retries == 1


def test_a_token_is_renewed_before_it_ends(google: GoogleSandbox) -> None:
    """obstore asks for another within minutes of the end, so nobody meets a refusal."""
    google.machines.token_s = 60
    store = allowed(google)
    clock = SystemClock()

    def renewed_twice() -> bool | None:
        store.replace("a", b"body")
        return True if len([path for path in google.machines.asked if path.endswith("/token")]) > 2 else None

    assert wait_until(clock, renewed_twice, clock.now() + 10.0, Backoff(first=0.02, cap=0.1))
    assert {call.status for call in google.calls if call.name == "storage.objects.insert"} == {200}


def test_a_token_is_asked_for_once_while_it_lasts(google: GoogleSandbox) -> None:
    store = allowed(google)
    for _ in range(5):
        store.replace("a", b"body")
    assert len([path for path in google.machines.asked if path.endswith("/token")]) == 1


def test_a_token_that_never_was_good_is_told_at_once(google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google.accounts, "token", lambda *_: "made up")
    clock = FakeClock()
    with pytest.raises(Unauthorized, match="refuses these credentials"):
        Retrying(allowed(google), clock).read("a")
    assert clock.pauses == []


def test_an_account_that_was_deleted_is_told_after_one_more_look(google: GoogleSandbox) -> None:
    store = Retrying(allowed(google), FakeClock())
    store.create("a", b"body")
    google.call("DELETE", "/v1/projects/-/serviceAccounts/replica-0@skerry-sandbox.iam.gserviceaccount.com")
    with pytest.raises(Retryable, match="no credentials in the environment, and none from this machine's role"):
        store.read("a")


def test_no_metadata_server_is_told_at_once(google: GoogleSandbox) -> None:
    told = {**google.acting_as("anybody@example.com"), "GCE_METADATA_HOST": "127.0.0.1:1"}
    clock = FakeClock()
    with pytest.raises(Unauthorized, match=r"none from this machine's role.*127\.0\.0\.1:1"):
        Retrying(cloud_store("gs", "bucket", "runs/a/", environment=told), clock).read("a")
    assert clock.pauses == []


def test_a_machine_without_an_account_is_told_at_once(google: GoogleSandbox) -> None:
    clock = FakeClock()
    told = google.acting_as("nobody@skerry-sandbox.iam.gserviceaccount.com")
    store = Retrying(cloud_store("gs", "bucket", "runs/a/", environment=told), clock)
    with pytest.raises(Unauthorized, match=r"none from this machine's role.*status code: 404"):
        store.read("a")
    assert clock.pauses == []


def test_without_the_variable_nobody_is_asked() -> None:
    assert machine_token({}) is None
    assert isinstance(machine_token({"GCE_METADATA_HOST": "metadata"}), MachineToken)


@pytest.mark.parametrize("body", ["[]", "{}", '{"access_token": "", "expires_in": 1}', '{"access_token": "hunter2"}'])
def test_an_answer_that_is_none_is_told_without_what_it_said(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = MachineToken("metadata")
    monkeypatch.setattr(ask, "_ask", body.encode)
    with pytest.raises(OSError, match="no token: host=metadata") as raised:
        ask()
    assert "hunter2" not in str(raised.value)


def test_a_missing_bucket_is_named(google: GoogleSandbox) -> None:
    store = cloud_store("gs", "nowhere", "runs/a/", environment=google.environment)
    for call in (lambda: store.read("a"), lambda: store.create("a", b""), lambda: store.list("")):
        with pytest.raises(Invalid, match="no such bucket: gs://nowhere"):
            call()


# One write a second of one name.


@pytest.fixture
def clock() -> FakeClock:
    """One that the sandbox and who waits for it have in common."""
    return FakeClock()


@pytest.fixture
def slow(clock: FakeClock) -> Iterator[GoogleSandbox]:
    with GoogleSandbox(object_rate=True, clock=clock) as running:
        make_bucket(running)
        yield running


def test_a_second_write_within_a_second_is_tried_again_until_it_goes_through(
    slow: GoogleSandbox, clock: FakeClock
) -> None:
    store = Retrying(cloud_store("gs", "bucket", "runs/a/", environment=slow.environment), clock)
    began = clock.now()
    for beat in range(3):
        store.replace("heartbeats/a.json", str(beat).encode())
    assert store.read("heartbeats/a.json") == b"2"
    assert 2.0 <= clock.now() - began < 5.0
    statuses = [call.status for call in slow.calls if call.name == "storage.objects.insert"]
    assert statuses.count(200) == 3
    assert statuses.count(429) == store.usage.retries == len(clock.pauses) > 0


def test_other_names_are_not_held_up_and_a_create_that_lost_is_no_write(slow: GoogleSandbox) -> None:
    store = cloud_store("gs", "bucket", "runs/a/", environment=slow.environment)
    for number in range(20):
        assert store.create(f"payloads/{number}", b"x")
    assert store.create("payloads/0", b"y") is False
    with pytest.raises(Retryable, match="the store is busy"):
        store.replace("payloads/0", b"y")
    with pytest.raises(Retryable, match="the store is busy"):
        store.delete("payloads/0")


def test_the_start_up_probe_passes(slow: GoogleSandbox, clock: FakeClock) -> None:
    store = Retrying(cloud_store("gs", "bucket", "runs/a/", environment=slow.environment), clock)
    probe(store, clock)
    assert list(store.list("")) == []


def test_what_was_deleted_is_not_kept(google: GoogleSandbox) -> None:
    store = cloud_store("gs", "bucket", "runs/a/", environment=google.environment)
    store.replace("a", b"1")
    store.replace("a", b"2")
    store.delete("a")
    assert google.objects.buckets["bucket"].deleted == []


# A run.


@pytest.mark.slow
def test_two_replicas_train_as_accounts_of_their_own_and_end_with_the_same_bits(google: GoogleSandbox) -> None:
    from tests.support.managers import Island, commits, receipts, together  # noqa: PLC0415  imports torch

    def island(number: int) -> Island:
        name = f"replica-{number}"
        email = make_account(google, name)
        bind(google, "roles/storage.objectUser", f"serviceAccount:{email}")
        store = Retrying(cloud_store("gs", "bucket", "runs/a/", environment=google.acting_as(email)), SystemClock())
        return Island(store, name, seed=number)

    islands = [island(0), island(1)]
    together([lambda one=one: one.train(2) for one in islands])
    store = cloud_store("gs", "bucket", "runs/a/", environment=google.environment)
    assert len(commits(store)) == 2
    assert len({receipt.state for receipt in receipts(store, 1).values()}) == 1
    writers = {call.caller for call in google.calls if call.name == "storage.objects.insert"}
    assert writers == {f"serviceAccount:replica-{one}@skerry-sandbox.iam.gserviceaccount.com" for one in (0, 1)}
