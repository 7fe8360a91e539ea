"""The project as the code under test reaches it, with jobs that a test drives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.session import Google

if TYPE_CHECKING:
    from skerry.testing.google.sandbox import GoogleSandbox


@pytest.fixture
def sandbox(google_sandbox: GoogleSandbox) -> GoogleSandbox:
    return google_sandbox


@pytest.fixture
def google(sandbox: GoogleSandbox) -> Google:
    return Google(FakeClock(), sandbox.environment)
