"""A project of Google Cloud in memory behind a real socket, empty for each test; unknown requests fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import Listener
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.session import Google
from skerry.testing.google import GoogleSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICES = ("aiplatform", "artifactregistry", "cloudresourcemanager", "iam", "iamcredentials", "logging", "sts")


@pytest.fixture(scope="module")
def shared() -> Iterator[GoogleSandbox]:
    with GoogleSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared: GoogleSandbox) -> Iterator[GoogleSandbox]:
    shared.reset()
    shared.restrict(None)
    shared.settling = 0
    shared.enable(*(f"{name}.googleapis.com" for name in SERVICES))
    yield shared
    assert list(shared.violations) == []


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def google(sandbox: GoogleSandbox, listener: Listener) -> Google:
    return Google(FakeClock(), sandbox.environment, heard=listener.heard)


@pytest.fixture
def cloud(google: Google) -> Google:
    """The session that the handler suite uses."""
    return google
