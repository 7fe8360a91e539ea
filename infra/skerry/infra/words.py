"""Times as people type them, 90s or 24h, parsed in one place. A number without its unit is refused. Does no I/O."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

UNITS: Final = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
DURATION_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(ms|s|m|h|d)$"
# Longer than any cloud lets a job live, and far from what timedelta cannot hold.
LONGEST: Final = timedelta(days=365)

_SHAPE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([^\s0-9.]*)")


def parse_duration(text: object) -> timedelta:
    """The time that `text` says. Raises ValueError that says what to write."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError("must be a time with its unit, like 60s")  # noqa: TRY004  pydantic turns ValueError into a problem
    match = _SHAPE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError("must be a time with its unit, like 60s")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"has no unit ({number}s are seconds, {number}m minutes, {number}h hours)")
    if unit not in UNITS:
        raise ValueError(f"has an unknown unit {unit!r} (the units are {', '.join(UNITS)})")
    # Compared as plain numbers: a timedelta that is far too long cannot be made.
    if len(number) > 12 or float(number) * UNITS[unit].total_seconds() > LONGEST.total_seconds():
        raise ValueError(f"must be at most {LONGEST.days}d")
    return float(number) * UNITS[unit]


def format_duration(value: timedelta) -> str:
    """The shortest text that `parse_duration` reads as `value`, in the largest unit that divides it."""
    unit = next((name for name, size in reversed(UNITS.items()) if value % size == timedelta()), "ms")
    return f"{value / UNITS[unit]:g}{unit}"
