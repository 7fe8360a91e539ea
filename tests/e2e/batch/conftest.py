"""What these tests need of a machine: a Docker engine, the base image, the replica image, docker-registry.

Without them the tests are skipped, and say how to have them. SKERRY_TEST_DOCKER=required makes that a failure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from skerry.infra.engine import Engine
from skerry.infra.testing.plugin import skerry_containers, skerry_registry, skerry_sandbox
from skerry.runtime.errors import SkerryError

__all__ = ["skerry_containers", "skerry_registry", "skerry_sandbox"]

BASE: Final = "skerry-base:bookworm"
IMAGE: Final = "skerry:cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.slow)


def lacking(what: str) -> None:
    if os.environ.get("SKERRY_TEST_DOCKER") == "required":
        pytest.fail(what)
    pytest.skip(what)


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
