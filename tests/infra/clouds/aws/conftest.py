"""An AWS account in memory behind a real socket, which judges requests by its policies; empty for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.clouds.aws.account import REGION, Listener
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.session import Aws
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(region=REGION) as running:
        yield running


@pytest.fixture
def account(sandbox: Sandbox) -> Mapping[str, str]:
    """The environment of the account's operator."""
    sandbox.reset()
    return {**sandbox.environment, "AWS_MAX_ATTEMPTS": "1"}


@pytest.fixture(scope="session")
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
def shared(sandbox: Sandbox, listener: Listener) -> Aws:
    """One session for all tests of a module, because creating clients is slow."""
    return Aws(FakeClock(), {**sandbox.environment, "AWS_MAX_ATTEMPTS": "1"}, client_made=listener.client_made)


@pytest.fixture
def aws(shared: Aws, account: Mapping[str, str]) -> Aws:
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
