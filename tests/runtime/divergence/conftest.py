"""Captures the events of replicas that differ."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Log records of skerry, from level INFO up."""
    caplog.set_level(logging.INFO, logger="skerry")
    return caplog
