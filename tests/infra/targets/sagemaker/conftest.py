"""The account as the code under test reaches it, with training jobs that a test drives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.clouds.aws.account import Listener
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.session import Aws

if TYPE_CHECKING:
    from skerry.testing.sandbox import Sandbox


@pytest.fixture(scope="session")
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
def shared(aws_account: Sandbox, listener: Listener) -> Aws:
    """One session for each module: creating clients takes longer than using them."""
    return Aws(FakeClock(), {**aws_account.environment, "AWS_MAX_ATTEMPTS": "1"}, client_made=listener.client_made)


@pytest.fixture
def sandbox(aws_sandbox: Sandbox) -> Sandbox:
    return aws_sandbox


@pytest.fixture
def aws(shared: Aws, sandbox: Sandbox) -> Aws:
    del sandbox
    return shared


@pytest.fixture
def cloud(aws: Aws) -> Aws:
    """Return the session that the suite of all handlers uses."""
    return aws
