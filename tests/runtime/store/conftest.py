"""Fixtures for tests of stores."""

from __future__ import annotations

import itertools

import pytest

_NUMBERS = itertools.count()


@pytest.fixture
def prefix() -> str:
    """A prefix of the bucket that no other test uses."""
    return f"runs/{next(_NUMBERS)}/"


@pytest.fixture
def aws_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed AWS keys in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
