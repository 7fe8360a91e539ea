"""Pytest fixtures that start a sandbox per test. Only a fixture imports moto or an SDK, not this module."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING, Final

import pytest

from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.testing.both_clouds import Clouds
    from skerry.testing.google import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

DOCKER: Final = "SKERRY_TEST_DOCKER"
"""If set to "required", tests that need Docker fail instead of being skipped."""
# Variables that lead a client to a real cloud or to the user's credentials.
_AWS: Final = ("AWS_",)
_GOOGLE: Final = ("CLOUDSDK_", "GCE_", "GCLOUD_", "GOOGLE_", "STORAGE_EMULATOR_HOST")


@pytest.fixture
def skerry_sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """An empty AWS account, in the environment of this test; its jobs are driven by the test, no Docker is needed."""
    yield from _sandbox(monkeypatch, containers=False, registry=None)


@pytest.fixture
def skerry_containers(monkeypatch: pytest.MonkeyPatch, skerry_registry: str | None) -> Iterator[Sandbox]:
    """An empty AWS account whose Batch jobs are containers of this machine's Docker; skipped without one."""
    yield from _sandbox(monkeypatch, containers=True, registry=skerry_registry)


@pytest.fixture
def skerry_google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleSandbox]:
    """An empty Google project, in the environment of this test; its jobs are driven by the test, without Docker."""
    yield from _google(monkeypatch, containers=False, registry=None)


@pytest.fixture
def skerry_google_containers(monkeypatch: pytest.MonkeyPatch, skerry_registry: str | None) -> Iterator[GoogleSandbox]:
    """An empty Google project whose Vertex jobs are containers of this machine's Docker; skipped without one."""
    yield from _google(monkeypatch, containers=True, registry=skerry_registry)


@pytest.fixture
def skerry_clouds(skerry_sandbox: Sandbox, skerry_google: GoogleSandbox) -> Clouds:
    """Both sandboxes, connected: Google's STS verifies AWS identities with this account."""
    from skerry.testing.both_clouds import Clouds  # noqa: PLC0415  imports both

    return Clouds(aws=skerry_sandbox, google=skerry_google)


@pytest.fixture
def skerry_clouds_containers(skerry_containers: Sandbox, skerry_google_containers: GoogleSandbox) -> Clouds:
    """Both sandboxes with containers, which reach both."""
    from skerry.testing.both_clouds import Clouds  # noqa: PLC0415  imports both

    return Clouds(aws=skerry_containers, google=skerry_google_containers)


@pytest.fixture(scope="session")
def skerry_registry() -> Iterator[str | None]:
    """host:port of a registry that plays ECR in all tests of a session; None without docker-registry."""
    from skerry.infra.local.docker_engine import Engine  # noqa: PLC0415  loaded only for tests with Docker
    from skerry.testing.docker_registry_process import PROGRAM, Registry  # noqa: PLC0415

    try:
        Engine()
    except SkerryError as error:
        _skip_or_fail(str(error))
    if shutil.which(PROGRAM) is None:
        yield None
        return
    with Registry() as registry:
        yield registry.address


def _sandbox(monkeypatch: pytest.MonkeyPatch, *, containers: bool, registry: str | None) -> Iterator[Sandbox]:
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        pytest.fail("the AWS sandbox needs moto's server; run pip install 'skerry[testing]'")
    from skerry.testing.sandbox import Sandbox  # noqa: PLC0415  imports moto, a second and a half

    _unset(monkeypatch, _AWS)
    with Sandbox(containers=containers, registry=registry) as sandbox:
        for name, value in sandbox.environment.items():
            monkeypatch.setenv(name, value)
        yield sandbox


def _google(monkeypatch: pytest.MonkeyPatch, *, containers: bool, registry: str | None) -> Iterator[GoogleSandbox]:
    if importlib.util.find_spec("googleapiclient") is None or importlib.util.find_spec("werkzeug") is None:
        pytest.fail("the Google sandbox needs google-api-python-client; run pip install 'skerry[testing]'")
    from skerry.testing.google import GoogleSandbox  # noqa: PLC0415  imports the server

    _unset(monkeypatch, _GOOGLE)
    with GoogleSandbox(containers=containers, registry=registry) as sandbox:
        for name, value in sandbox.environment.items():
            monkeypatch.setenv(name, value)
        yield sandbox


def _unset(monkeypatch: pytest.MonkeyPatch, prefixes: tuple[str, ...]) -> None:
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)


def _skip_or_fail(reason: str) -> None:
    if os.environ.get(DOCKER) == "required":
        pytest.fail(reason)
    pytest.skip(reason)
