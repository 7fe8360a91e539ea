"""Reads the events that skerry has logged, out of pytest's `caplog`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def logged_events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    """The fields of every event with this name, in order."""
    return [record.fields for record in caplog.records if getattr(record, "event", "") == name]  # type: ignore[attr-defined]


def logged_levels(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and name of every event, in order."""
    return [(record.levelname, record.message.split()[0]) for record in caplog.records]
