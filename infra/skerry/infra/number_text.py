"""Writes durations, sizes and counts for people. Pure."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """A time span with its two largest units: 48 s, 3 m 05 s, 7 h 12 m, 2 d 04 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{seconds:.1f} s" if 0 < seconds < 9.95 else f"{whole} s"
    for size, part, name, part_name in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part:02} {part_name}"
    raise AssertionError(whole)


def short_number(value: float) -> str:
    """A loss or similar number in at most six characters, if it is of common size."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 0.01 <= abs(value) < 100:
        return f"{value:.3f}"
    return f"{value:.3g}"


def size_text(size_bytes: float) -> str:
    """A size in bytes with its unit: 512 B, 12.3 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes:.0f} B"


def count_text(count: float) -> str:
    """A count in a few characters: 9,500, 41.2 k, 3.22 M."""
    for unit, factor, least in (("T", 1e12, 1e12), ("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if count >= least:
            return f"{count / factor:.3g} {unit}"
    return f"{count:,.0f}"
