"""Keys of a container's role: fetched from the platform and renewed, through both implementations of S3."""

from __future__ import annotations

import datetime as dt
import json
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import pytest
from tests.kit.stores import VERBS
from tests.runtime.store.credentials.key_server import KeyServer
from tests.support.clocks import FakeClock
from tests.support.s3server import Rule, S3Server

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.store import Store
from skerry.runtime.store.credentials.aws_container import ContainerCredentials, container_credentials
from skerry.runtime.store.fsspec_store import open_fsspec_store
from skerry.runtime.store.obstore_clients import BOTOCORE_VALIDITY, open_cloud_store
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAILED = r"cannot fetch this container's credentials: host=127\.0\.0\.1"

OpenBucket: TypeAlias = Callable[[Mapping[str, str]], Store]
"""Opens the bucket with these variables and no others of AWS."""


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture
def keys() -> Iterator[KeyServer]:
    with KeyServer() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_other_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    # boto3 must not ask a metadata server; obstore asks one that does not exist.
    variables = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}
    files = dict.fromkeys(["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"], str(tmp_path / "absent"))
    for name, value in (variables | files | {"AWS_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)


# A botocore session takes a second to create; tests of equal behaviour use one client.
both = pytest.mark.parametrize("client", ["obstore", pytest.param("s3fs", marks=pytest.mark.slow)])


@pytest.fixture
def client() -> str:
    """The one of tests that are not for both."""
    return "obstore"


@pytest.fixture
def open_bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch, prefix: str, client: str) -> OpenBucket:
    def connect(environment: Mapping[str, str]) -> Store:
        environment = {"AWS_ENDPOINT_URL": server.endpoint, **environment}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if client == "obstore":
            return open_cloud_store("s3", "bucket", prefix, environment=environment)
        return open_fsspec_store("s3", "bucket", prefix)

    return connect


@both
def test_keys_are_renewed_before_they_expire(open_bucket: OpenBucket, server: S3Server, keys: KeyServer) -> None:
    """Both clients renew within minutes of the stated end, so no request is refused."""
    clock = SystemClock()
    keys.life_s = 60.0
    store = open_bucket(keys.environment)

    def used_three() -> bool | None:
        store.replace("a", b"body")
        # All keys but the newest have expired.
        server.expired.update(dict.fromkeys(list(server.used)[:-1], 400))
        return True if len(server.used) >= 3 else None

    assert wait_until(clock, used_three, clock.now() + 10.0, Backoff(first=0.02, cap=0.1))


@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize(
    ("client", "verb"), [*(("obstore", verb) for verb in VERBS), pytest.param("s3fs", "create", marks=pytest.mark.slow)]
)
def test_expired_keys_are_renewed(
    open_bucket: OpenBucket, server: S3Server, keys: KeyServer, verb: str, status: int
) -> None:
    """The keys state one hour; the store refuses them earlier (revoked, or clocks differ)."""
    keys.token = "for this job only"  # noqa: S105  not a secret
    store = Retrying(open_bucket(keys.environment), FakeClock())
    store.create("a", b"body")
    server.expired[keys.keys[-1]] = status
    VERBS[verb](store)
    assert list(server.used) == keys.keys == ["key-1", "key-2"]
    assert store.usage.retries == 1


def test_platform_that_fails_or_returns_expired_keys_is_retried(
    open_bucket: OpenBucket, server: S3Server, keys: KeyServer
) -> None:
    clock = FakeClock()
    store = Retrying(open_bucket(keys.environment), clock)
    store.create("a", b"body")
    server.expired.update({f"key-{number}": 400 for number in range(1, 5)})
    keys.status = 500

    def recover() -> None:
        if len(clock.pauses) > 3:
            keys.status = 200

    clock.on_pause = recover
    assert store.read("a") == b"body"
    assert len(clock.pauses) > 6
    assert list(server.used) == [f"key-{number}" for number in range(1, 6)]


@both
def test_expired_keys_of_the_environment_are_unauthorized(open_bucket: OpenBucket, server: S3Server) -> None:
    borrowed = {"AWS_ACCESS_KEY_ID": "borrowed", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "session"}
    store = open_bucket(borrowed)
    store.create("a", b"body")
    server.expired["borrowed"] = 400
    with pytest.raises(Unauthorized, match=r"expired .* cannot be renewed: .*; give the job a role"):
        store.read("a")


@both
def test_refused_keys_are_fetched_anew_once(
    open_bucket: OpenBucket, server: S3Server, keys: KeyServer, client: str
) -> None:
    """fsspec keeps the keys until they expire."""
    store = open_bucket(keys.environment)
    store.create("a", b"body")
    server.faults.set(Rule("403", times=1_000_000))
    for call in VERBS.values():
        with pytest.raises(Unauthorized, match="refuses these credentials"):
            call(store)
    assert len(keys.keys) == (2 if client == "obstore" else 1)


@pytest.mark.parametrize("has_platform", [False, True])
def test_job_without_keys_is_unauthorized(open_bucket: OpenBucket, keys: KeyServer, *, has_platform: bool) -> None:
    """A platform refuses the token of another job."""
    keys.token = "another job's"  # noqa: S105  not a secret
    environment = keys.environment | {"AWS_CONTAINER_AUTHORIZATION_TOKEN": "mine"}
    with pytest.raises(Unauthorized, match="no credentials in the environment"):
        open_bucket(environment if has_platform else {}).create("a", b"body")


@both
def test_profile_that_is_renewed_by_hand_is_read_again(
    open_bucket: OpenBucket, server: S3Server, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    text = "[islands]\naws_access_key_id = {}\naws_secret_access_key = something\naws_session_token = for an hour\n"
    file.write_text(text.format("old"))
    clock = FakeClock()
    store = Retrying(open_bucket({"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": "islands"}), clock)
    store.create("a", b"body")
    server.expired["old"] = 400

    def log_in() -> None:
        if len(clock.pauses) == 3:
            file.write_text(text.format("new"))

    clock.on_pause = log_in
    assert store.read("a") == b"body"
    assert list(server.used) == ["old", "new"]


def test_botocore_keys_are_cached_no_longer_than_they_are_valid() -> None:
    """obstore's adapter would cache them for half an hour."""
    from botocore.credentials import RefreshableCredentials  # noqa: PLC0415  slow

    def fail() -> None:
        raise OSError("botocore must renew these keys")

    end = dt.datetime.now(dt.UTC) + BOTOCORE_VALIDITY - dt.timedelta(seconds=5)
    with pytest.raises(OSError, match="must renew"):
        RefreshableCredentials("key", "secret", "token", end, fail, "test").get_frozen_credentials()


# The provider.


def provider_of(environment: Mapping[str, str]) -> ContainerCredentials:
    provider = container_credentials(environment)
    assert provider is not None
    return provider


def test_token_file_is_read_for_each_request(keys: KeyServer, tmp_path: Path) -> None:
    provider = provider_of(keys.environment | {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token")})
    for number, token in enumerate(["first", "second"], start=1):
        keys.token = token
        (tmp_path / "token").write_text(f"{token}\n")
        assert provider()["access_key_id"] == f"key-{number}"


def test_relative_address_is_on_the_platforms_host() -> None:
    provider = provider_of({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/x"})
    assert provider.url == "http://169.254.170.2/v2/credentials/x"
    assert container_credentials({}) is None


@pytest.mark.parametrize("url", ["http://keys.example.com/role", "ftp://127.0.0.2x/role", "file:///etc/passwd"])
def test_unencrypted_address_of_another_machine_is_invalid(url: str) -> None:
    with pytest.raises(Invalid, match="use https or an address of this machine"):
        ContainerCredentials(url, token=None, token_file=None)


FIELDS = {"AccessKeyId": "hunter2", "SecretAccessKey": "hunter2", "Token": "hunter2", "Expiration": None}
WRONG_FIELDS = [
    ("Expiration", 1790000000),
    ("Expiration", "2026-01-01T00:00:00"),
    ("Expiration", "soon"),
    ("AccessKeyId", None),
    ("AccessKeyId", ""),
    ("SecretAccessKey", 7),
    ("Token", ["x"]),
]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (" ", ""),
        ("[]", ""),
        ('{"AccessKeyId": "k"}', ""),
        ('{"SecretAccessKey": "hunter2", "Expi', ""),
        ("[" * 60_000, ""),
        ("{" * 60_000 + " " * 60_000, "larger than 65536 bytes"),
        (" " * 70_000 + "{}", "larger than 65536 bytes"),
        *((json.dumps(FIELDS | {field: value}), f"invalid fields={field}") for field, value in WRONG_FIELDS),
    ],
)
def test_malformed_response_is_an_error_without_its_content(keys: KeyServer, body: str, words: str) -> None:
    keys.body = body
    with pytest.raises(OSError, match=f"{FAILED}.*{words}") as raised:
        provider_of(keys.environment)()
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("token", "port", "words"), [("hunter2", 1, "Connection refused"), ("hunter2\nhunter2", None, "ValueError")]
)
def test_failed_request_is_an_error_without_the_token(
    keys: KeyServer, tmp_path: Path, token: str, port: int | None, words: str
) -> None:
    (tmp_path / "token").write_text(token)
    environment = keys.environment | {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token")}
    if port is not None:  # no process listens there
        environment["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"http://127.0.0.1:{port}/role"
    with pytest.raises(OSError, match=f"{FAILED}.*{words}") as raised:
        provider_of(environment)()
    assert "hunter2" not in str(raised.value)


def test_end_in_another_time_zone_is_converted_to_utc(keys: KeyServer) -> None:
    """obstore accepts only UTC."""
    keys.body = json.dumps(FIELDS | {"Expiration": "2026-01-01T02:00:00+02:00"})
    expires_at = provider_of(keys.environment)()["expires_at"]
    assert repr(expires_at) == repr(dt.datetime(2026, 1, 1, tzinfo=dt.UTC))


@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"],
    ids=["status", "headers", "body"],
)
def test_response_that_arrives_byte_by_byte_times_out(head: bytes) -> None:
    """Each byte arrives within the time-out of a read; the whole response does not."""
    unsent = list(b'{"AccessKeyId": "key", "SecretAccessKey": "s"}'.ljust(9999))  # minutes, on a busy machine too
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(head)
                while unsent:
                    connection.sendall(bytes([unsent.pop(0)]))
                    stopped.wait(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/role"
        with pytest.raises(OSError, match=rf"{FAILED}.*incomplete response after 0\.25 s"):
            ContainerCredentials(url, token=None, token_file=None, timeout_s=0.25)()
        assert unsent, "the server had more to send"
        stopped.set()
        thread.join()
