"""Keys that run out while a run goes on: renewed where a role gives them, told where nothing can; both ways to S3."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import pytest
from obstore.auth.boto3 import Boto3CredentialProvider
from tests.support.clocks import FakeClock
from tests.support.keyserver import KeyServer
from tests.support.s3server import Rule, S3Server

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.store import container
from skerry.runtime.store.clients import BOTOCORE_KEEPS, cloud_store
from skerry.runtime.store.container import ContainerCredentials, container_credentials
from skerry.runtime.store.filesystem import filesystem_store
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from skerry.runtime.store import Store

NUMBERS = itertools.count()


class Opens(Protocol):
    """Opens one bucket with the given variables, and no others about AWS."""

    def __call__(self, told: dict[str, str]) -> Store: ...


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing about AWS from outside, and no server that gives keys to this machine."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def opens(server: S3Server, monkeypatch: pytest.MonkeyPatch, way: str) -> Opens:
    def one(told: dict[str, str]) -> Store:
        told = {"AWS_ENDPOINT_URL": server.endpoint, **told}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        prefix = f"runs/{next(NUMBERS)}/"
        if way == "obstore":
            return cloud_store("s3", "bucket", prefix, environment=told)
        return filesystem_store("s3", "bucket", prefix)

    return one


# Each session of botocore takes a second to make; what does not differ is tried on one way.
both = pytest.mark.parametrize("way", ["obstore", pytest.param("s3fs", marks=pytest.mark.slow)])
fast = pytest.mark.parametrize("way", ["obstore"])

VERBS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("a"),
    "create": lambda store: store.create("b", b"body"),
    "replace": lambda store: store.replace("a", b"body"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("a"),
}


@both
def test_keys_of_a_container_are_renewed_before_they_run_out(opens: Opens, server: S3Server) -> None:
    """Within minutes of the time they say, both clients ask for others, so nobody meets a refusal."""
    clock = SystemClock()
    with KeyServer(lasts_s=60.0) as keys:
        store = opens(keys.environment)

        def used_three() -> bool | None:
            store.replace("a", b"body")
            # All keys but the newest have run out.
            server.expired.update(dict.fromkeys(list(server.used)[:-1], 400))
            return True if len(server.used) >= 3 else None

        assert wait_until(clock, used_three, clock.now() + 10.0, Backoff(first=0.02, cap=0.1))


@both
def test_keys_that_run_out_early_are_asked_for_anew(opens: Opens, server: S3Server) -> None:
    """They said an hour, and a client keeps them for so long; the store says otherwise (an administrator, a skew)."""
    with KeyServer(only_for="for this job only") as keys:
        store = Retrying(opens(keys.environment), FakeClock())
        store.create("a", b"body")
        server.expired["key-1"] = 400
        assert store.create("b", b"body")
        assert list(server.used) == keys.keys == ["key-1", "key-2"]
        assert store.usage.retries == 1


@fast
@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_survives_keys_that_run_out(opens: Opens, server: S3Server, verb: str, status: int) -> None:
    with KeyServer() as keys:
        store = Retrying(opens(keys.environment), FakeClock())
        store.create("a", b"body")
        server.expired[keys.keys[-1]] = status
        assert len(keys.keys) == 1
        VERBS[verb](store)
        assert list(server.used) == keys.keys == ["key-1", "key-2"]
        assert store.usage.retries == 1


@fast
def test_a_role_that_gives_the_same_expired_keys_is_an_outage_not_a_refusal(opens: Opens, server: S3Server) -> None:
    with KeyServer() as keys:
        store = Retrying(opens(keys.environment), FakeClock())
        store.create("a", b"body")
        server.expired.update({f"key-{number}": 400 for number in range(1, 5)})
        assert store.read("a") == b"body"
        assert list(server.used) == [f"key-{number}" for number in range(1, 6)]


@fast
def test_a_role_that_does_not_answer_for_a_while_is_an_outage(opens: Opens, server: S3Server) -> None:
    with KeyServer() as keys:
        clock = FakeClock()
        store = Retrying(opens(keys.environment), clock)
        store.create("a", b"body")
        server.expired["key-1"] = 400
        keys.status = 500

        def comes_back() -> None:
            if len(clock.pauses) > 3:
                keys.status = 200

        clock.on_pause = comes_back
        assert store.read("a") == b"body"
        assert len(clock.pauses) > 3


@both
def test_keys_in_the_environment_that_run_out_are_told_at_once(opens: Opens, server: S3Server) -> None:
    told = {"AWS_ACCESS_KEY_ID": "borrowed", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "for an hour"}
    clock = FakeClock()
    store = Retrying(opens(told), clock)
    store.create("a", b"body")
    server.expired["borrowed"] = 400
    with pytest.raises(
        Unauthorized, match="run out, and keys in the environment cannot be renewed; give the job a role"
    ):
        store.read("a")
    assert clock.pauses == []


@both
def test_a_refusal_is_not_taken_for_keys_that_ran_out(opens: Opens, server: S3Server) -> None:
    with KeyServer() as keys:
        clock = FakeClock()
        store = Retrying(opens(keys.environment), clock)
        store.create("a", b"body")
        server.faults.set(Rule("403", times=1_000_000))
        for call in VERBS.values():
            with pytest.raises(Unauthorized, match="refuses these credentials"):
                call(store)
        assert len(keys.keys) == 1
        assert clock.pauses == []


@fast
def test_a_container_that_may_not_have_keys_is_told_at_once(opens: Opens) -> None:
    with KeyServer(only_for="another job's") as keys:
        told = keys.environment | {"AWS_CONTAINER_AUTHORIZATION_TOKEN": "mine"}
        clock = FakeClock()
        with pytest.raises(Unauthorized):
            Retrying(opens(told), clock).create("a", b"body")
        assert clock.pauses == []


@both
def test_a_profile_that_was_renewed_by_hand_is_read_again(opens: Opens, server: S3Server, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    text = "[islands]\naws_access_key_id = {}\naws_secret_access_key = something\naws_session_token = for an hour\n"
    file.write_text(text.format("old"))
    clock = FakeClock()
    store = Retrying(opens({"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": "islands"}), clock)
    store.create("a", b"body")
    server.expired["old"] = 400

    def somebody_logs_in() -> None:
        if len(clock.pauses) == 3:
            file.write_text(text.format("new"))

    clock.on_pause = somebody_logs_in
    assert store.read("a") == b"body"
    assert list(server.used) == ["old", "new"]


def test_keys_from_botocore_are_not_kept_beyond_what_botocore_promises() -> None:
    """It renews keys ten minutes before their end; the adapter would keep what it got for half an hour."""
    import botocore.credentials  # noqa: PLC0415  slow

    assert BOTOCORE_KEEPS.total_seconds() <= botocore.credentials.RefreshableCredentials._mandatory_refresh_timeout
    assert "ttl" in Boto3CredentialProvider.__init__.__kwdefaults__


def test_a_token_file_is_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    with KeyServer(only_for="first") as keys:
        told = keys.environment | {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(file)}
        ask = container_credentials(told)
        assert ask is not None
        assert ask()["access_key_id"] == "key-1"
        keys.only_for = "second"
        file.write_text("second\n")
        assert ask()["access_key_id"] == "key-2"


def test_a_relative_address_is_asked_of_the_platform() -> None:
    ask = container_credentials({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/x"})
    assert ask is not None
    assert ask._url.geturl() == "http://169.254.170.2/v2/credentials/x"
    assert container_credentials({}) is None


@pytest.mark.parametrize("url", ["http://keys.example.com/role", "ftp://127.0.0.2x/role", "file:///etc/passwd"])
def test_keys_do_not_travel_in_the_open(url: str) -> None:
    with pytest.raises(Invalid, match="https or this machine's own"):
        ContainerCredentials(url, token=None, token_file=None)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"AccessKeyId": "k"}', b'{"SecretAccessKey": "hunter2", "Expi'])
def test_an_answer_that_is_none_is_told_without_what_it_said(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with KeyServer() as keys:
        monkeypatch.setattr(keys, "answer", lambda _: body or b" ")
        ask = container_credentials(keys.environment)
        assert ask is not None
        with pytest.raises(OSError, match="credentials did not come: host=127") as raised:
            ask()
        assert "hunter2" not in str(raised.value)


def test_no_answer_names_the_host_and_not_the_token() -> None:
    with KeyServer(only_for="hunter2") as keys:
        told = keys.environment
    ask = container_credentials(told)
    assert ask is not None
    with pytest.raises(OSError, match="credentials did not come: host=127") as raised:
        ask()
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Expiration", 1790000000),
        ("Expiration", "2026-01-01T00:00:00"),
        ("Expiration", "soon"),
        ("AccessKeyId", None),
        ("AccessKeyId", ""),
        ("SecretAccessKey", 7),
        ("Token", ["x"]),
    ],
)
def test_a_field_that_is_none_is_named_without_what_it_said(
    field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "AccessKeyId": "hunter2",
        "SecretAccessKey": "hunter2",
        "Token": "hunter2",
        "Expiration": None,
        field: value,
    }
    with KeyServer() as keys:
        monkeypatch.setattr(keys, "answer", lambda _: json.dumps(told).encode())
        ask = container_credentials(keys.environment)
        assert ask is not None
        with pytest.raises(
            OSError, match=f"credentials did not come: host=127.0.0.1: its answer has no good {field}"
        ) as raised:
            ask()
        assert "hunter2" not in str(raised.value)


def test_a_time_in_another_zone_is_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client takes a time in UTC only, and says that the credentials are none."""
    told = {"AccessKeyId": "k", "SecretAccessKey": "s", "Token": None, "Expiration": "2026-01-01T02:00:00+02:00"}
    with KeyServer() as keys:
        monkeypatch.setattr(keys, "answer", lambda _: json.dumps(told).encode())
        ask = container_credentials(keys.environment)
        assert ask is not None
        until = ask()["expires_at"]
    assert until == dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    assert until is not None
    assert until.tzinfo is dt.UTC


@pytest.mark.parametrize("body", [b"[" * 60_000, b"{" * 60_000 + b" " * 60_000, b" " * 70_000 + b"{}"])
def test_an_answer_of_any_size_is_refused_in_words(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with KeyServer() as keys:
        monkeypatch.setattr(keys, "answer", lambda _: body)
        ask = container_credentials(keys.environment)
        assert ask is not None
        with pytest.raises(OSError, match="credentials did not come: host=127") as raised:
            ask()
    assert ("more than 65536 bytes" in str(raised.value)) == (len(body) > 65536)


@pytest.mark.parametrize("part", ["status", "headers", "body"])
def test_an_answer_that_comes_byte_by_byte_is_given_up(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes within the time limit of a read; the whole does not."""
    monkeypatch.setattr(container, "_TIMEOUT_S", 0.25)
    whole = {
        "status": b"",
        "headers": b"HTTP/1.1 200 OK\r\n",
        "body": b"HTTP/1.1 200 OK\r\nContent-Length: 45\r\n\r\n",
    }
    slow = b'{"AccessKeyId": "key", "SecretAccessKey": "s"}'
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(whole[part])
                for byte in slow:
                    connection.sendall(bytes([byte]))
                    gone.wait(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        ask = ContainerCredentials(f"http://127.0.0.1:{server.getsockname()[1]}/role", token=None, token_file=None)
        with pytest.raises(OSError, match=r"credentials did not come: host=127.*no whole answer in 0\.25 s"):
            ask()
        assert thread.is_alive(), "it had more to say"
        gone.set()
        thread.join()


def test_a_token_that_cannot_be_sent_is_not_told(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hunter2\nhunter2")
    with KeyServer() as keys:
        ask = container_credentials(keys.environment | {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(file)})
        assert ask is not None
        with pytest.raises(OSError, match=r"credentials did not come: host=127\.0\.0\.1: ValueError") as raised:
            ask()
    assert "hunter2" not in str(raised.value)
