"""Fixtures for the machine's parts: a Docker engine, the base image, the replica image, docker-registry.

Without them the tests are skipped, and say how to have them. SKERRY_TEST_DOCKER=required makes that a failure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from skerry.infra.local.docker_engine import Engine
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Invalid, SkerryError
from skerry.testing.both_clouds import Clouds
from skerry.testing.google import GoogleSandbox
from skerry.testing.plugin import skerry_containers, skerry_registry, skerry_sandbox
from skerry.testing.registry import Registry
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["skerry_containers", "skerry_registry", "skerry_sandbox"]

ROOT: Final = Path(__file__).parents[2]
BASE: Final = "skerry-base:bookworm"
IMAGE: Final = "skerry:cpu"
# Of one container's or one run's way to where it shall come; two cores import torch in 4 s for each replica.
DEADLINE_S: Final = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.slow)


def lacking(what: str) -> None:
    if os.environ.get("SKERRY_TEST_DOCKER") == "required":
        pytest.fail(what)
    pytest.skip(what)


def until(condition: Callable[[], object]) -> None:
    clock = SystemClock()
    wait_until(clock, lambda: condition() or None, clock.now() + DEADLINE_S, Backoff(first=0.1, cap=0.5))


@pytest.fixture(scope="session")
def engine() -> Engine:
    try:
        return Engine()
    except SkerryError as error:
        lacking(f"no Docker engine ({error}); as root: scripts/image engine --install")
        raise


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """The smallest image with a Python."""
    if not engine.images.has(BASE):
        lacking(f"no image {BASE}; as root: scripts/image base")
    return BASE


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The replica image of this checkout."""
    if not engine.images.has(IMAGE):
        lacking(f"no image {IMAGE}; as root: scripts/image base && scripts/image build --variant cpu")
    return IMAGE


@pytest.fixture(scope="session")
def registry() -> Iterator[str]:
    """The address of an empty registry."""
    try:
        item = Registry()
    except Invalid as error:
        lacking(str(error))
        raise
    with item:
        yield item.address


@pytest.fixture
def aws(skerry_registry: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """An account that checks every right: what a plan grants must be enough."""
    with Sandbox(containers=True, enforce_iam=True, registry=_needed(skerry_registry)) as created:
        _surround(monkeypatch, created.environment)
        yield created


@pytest.fixture
def google(skerry_registry: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleSandbox]:
    """A project that refuses what Google does not know, and two writes of one object within a second."""
    with GoogleSandbox(containers=True, object_rate=True, registry=_needed(skerry_registry)) as created:
        _surround(monkeypatch, created.environment)
        yield created
        assert created.violations == []


@pytest.fixture
def clouds(aws: Sandbox, google: GoogleSandbox) -> Clouds:
    """Both, and each knows the other."""
    return Clouds(aws=aws, google=google)


def _needed(registry: str | None) -> str:
    if registry is None:
        lacking("no docker-registry; as root: apt-get install --no-install-recommends docker-registry")
    return registry or ""


def _surround(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
