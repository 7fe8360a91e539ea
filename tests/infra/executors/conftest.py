"""One AWS account and one project of Google's for a module; each test has a run of its own there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.batchplace import make_place, make_role
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.testing.google.sandbox import GoogleSandbox
from skerry.infra.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.batchplace import Place

_NEW_CLIENT = Aws._new_client


@pytest.fixture(scope="module")
def account() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def place(account: Sandbox) -> Place:
    """What jobs need; no test changes it. To make it takes longer than to use it."""
    account.client("s3").create_bucket(Bucket="acme")
    make_role(account, "trainer", "sagemaker.amazonaws.com")
    for name in ("replica", "execution"):
        make_role(account, name)
    return make_place(account)


@pytest.fixture
def aws(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Every executor makes its own clients, which are slow to make and hold no state of ours: one set for a module."""
    monkeypatch.setattr(Aws, "_new_client", lambda aws, *said: _made(tuple(sorted(aws._environment.items())), *said))
    place.sandbox.heal()
    place.sandbox.calls.clear()
    return place


@functools.cache
def _made(environment: tuple[tuple[str, str], ...], *said: Any) -> Any:
    return _NEW_CLIENT(Aws(FakeClock(), dict(environment)), *said)


@pytest.fixture(scope="module")
def project() -> Iterator[GoogleSandbox]:
    with GoogleSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def google(project: GoogleSandbox) -> Iterator[GoogleSandbox]:
    project.reset()
    yield project
    assert not project.violations
