"""A Google project in memory, empty for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.testing.google import GoogleSandbox
from skerry.testing.plugin import skerry_clouds, skerry_google

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["clock", "google", "skerry_clouds", "skerry_google"]

EVERY = ("aiplatform", "artifactregistry", "cloudbilling", "iamcredentials", "sts")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def google(clock: FakeClock) -> Iterator[GoogleSandbox]:
    """Its time is the test's, and every service is enabled."""
    with GoogleSandbox(clock=clock) as running:
        running.enable(*(f"{name}.googleapis.com" for name in EVERY))
        yield running
