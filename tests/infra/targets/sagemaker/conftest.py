"""A sandbox whose training jobs a test drives, and the account as the code under test reaches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.clouds.aws.account import Listener, share_clients
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.session import Aws
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def account() -> Iterator[Sandbox]:
    """One sandbox for each module: starting it takes longer than using it."""
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
def shared(account: Sandbox, listener: Listener) -> Aws:
    return Aws(FakeClock(), {**account.environment, "AWS_MAX_ATTEMPTS": "1"}, client_made=listener.client_made)


@pytest.fixture
def sandbox(account: Sandbox) -> Sandbox:
    """Return the sandbox of the module, emptied."""
    account.reset()
    account.settling = 0
    return account


@pytest.fixture
def aws(shared: Aws, sandbox: Sandbox) -> Aws:
    """Return the shared session: creating clients takes longer than using them."""
    del sandbox
    return shared


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    share_clients(monkeypatch)


@pytest.fixture
def cloud(aws: Aws) -> Aws:
    """Return the session that the suite of all handlers uses."""
    return aws
