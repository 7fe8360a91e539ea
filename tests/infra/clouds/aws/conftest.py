"""An AWS account in memory behind a real socket, so that its policies judge requests as AWS does."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

import pytest
from moto import settings
from moto.core.responses import ActionAuthenticatorMixin
from moto.server import ThreadedMotoServer
from tests.infra.clouds.aws.account import Account, Listener, environment
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.session import Aws
from skerry.testing.aws.shims import managed_policies, policy_conditions, s3_denials
from skerry.testing.aws.shims.patching import Patches

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Limited to a module, because the patches of moto affect all tests of the process."""
    patches = Patches()
    for shim in (policy_conditions, s3_denials, managed_policies):
        shim.install(patches)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()
    patches.undo()


@pytest.fixture
def account(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Account:
    with urllib.request.urlopen(f"{endpoint}/moto-api/reset", data=b"", timeout=10):  # noqa: S310  our own server
        pass

    def enforce() -> None:
        monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
        monkeypatch.setattr(ActionAuthenticatorMixin, "request_count", 0)

    return Account(endpoint=endpoint, enforce=enforce)


@pytest.fixture(scope="session")
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
def shared(endpoint: str, listener: Listener) -> Aws:
    """One session for all tests of a module, because creating clients is slow."""
    return Aws(FakeClock(), environment(endpoint), client_made=listener.client_made)


@pytest.fixture
def aws(shared: Aws, account: Account) -> Aws:
    del account  # empty from here on
    return shared


@pytest.fixture
def calls(listener: Listener) -> list[str]:
    listener.calls.clear()
    return listener.calls


@pytest.fixture
def cloud(aws: Aws) -> Aws:
    """The session that the handler suite uses."""
    return aws
