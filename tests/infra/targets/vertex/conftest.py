"""A project of Google's in memory, in this process: jobs do what a test says; else as strict as Google."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.session import Google
from skerry.testing.google.sandbox import GoogleSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def one_sandbox() -> Iterator[GoogleSandbox]:
    """One for all tests: each finds it empty."""
    with GoogleSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(one_sandbox: GoogleSandbox) -> Iterator[GoogleSandbox]:
    one_sandbox.reset()
    one_sandbox.jobs.refuse(None)
    yield one_sandbox
    assert not one_sandbox.violations


@pytest.fixture
def google(sandbox: GoogleSandbox) -> Google:
    return Google(FakeClock(), sandbox.environment)
