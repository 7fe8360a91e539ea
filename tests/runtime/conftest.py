"""Stops the managers that a test has left open."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _stopped_managers() -> Iterator[None]:
    yield
    kit = sys.modules.get("tests.kit.managers")  # not imported here: many tests need no torch
    if kit is not None:
        kit.stop_managers()
