"""Parses and formats times and sizes with units, like 90s or 60GiB.

A number without a unit is an error. Does no I/O.
"""

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
# Longer than any cloud lets a job run, and small enough for timedelta.
LONGEST: Final = timedelta(days=365)

SIZES: Final = {
    "MB": 10**6,
    "MiB": 1 << 20,
    "GB": 10**9,
    "GiB": 1 << 30,
    "TB": 10**12,
    "TiB": 1 << 40,
}
SIZE_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(MB|MiB|GB|GiB|TB|TiB)$"
# More than any machine or bucket of a run holds, and exact as a float.
LARGEST: Final = 1 << 50

_SHAPE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([^\s0-9.]*)")


def parse_duration(text: object) -> timedelta:
    """Return the time in `text`. Raises ValueError with what to write."""
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
    # Compared as numbers, because a timedelta that is too long raises.
    if len(number) > 12 or float(number) * UNITS[unit].total_seconds() > LONGEST.total_seconds():
        raise ValueError(f"must be at most {LONGEST.days}d")
    return float(number) * UNITS[unit]


def format_duration(value: timedelta) -> str:
    """Return the shortest text that `parse_duration` reads as `value`, in the largest unit that divides it."""
    unit = next((name for name, size in reversed(UNITS.items()) if value % size == timedelta()), "ms")
    return f"{value / UNITS[unit]:g}{unit}"


def parse_size(text: object) -> int:
    """Return the bytes in `text`. Raises ValueError with what to write."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError("must be a size with its unit, like 60GiB")  # noqa: TRY004  pydantic turns ValueError into a problem
    match = _SHAPE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError("must be a size with its unit, like 60GiB")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"has no unit ({number}MiB are mebibytes, {number}GiB gibibytes)")
    if unit not in SIZES:
        raise ValueError(f"has an unknown unit {unit!r} (the units are {', '.join(SIZES)})")
    if len(number) > 12 or float(number) * SIZES[unit] > LARGEST:
        raise ValueError(f"must be at most {format_size(LARGEST)}")
    return round(float(number) * SIZES[unit])


def format_size(size_bytes: int) -> str:
    """Return a text that `parse_size` reads as `size_bytes`, in the largest binary unit that divides it."""
    for unit in ("TiB", "GiB", "MiB"):
        if size_bytes % SIZES[unit] == 0 and size_bytes:
            return f"{size_bytes // SIZES[unit]}{unit}"
    # A size in a decimal unit, or with a fraction.
    return next(
        (f"{size_bytes // size}{unit}" for unit, size in (("GB", 10**9), ("MB", 10**6)) if size_bytes % size == 0),
        f"{size_bytes / SIZES['MiB']:.3f}MiB",
    )


def matches(pattern: str, text: str) -> bool:
    """Return whether the whole of `text` matches `pattern`."""
    return re.fullmatch(pattern, text) is not None
