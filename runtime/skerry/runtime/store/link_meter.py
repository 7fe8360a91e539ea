"""Measures the link between a replica and its store from the reads that it makes anyway. Does no I/O."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from typing import Final, NamedTuple

BULK_BYTES: Final = 64 << 10
"""A smaller answer takes as long as its round trip, a larger one as long as its bytes."""
LEAST_BYTES: Final = 1 << 20
"""The rate of fewer bytes than this is not known."""


class LinkSpeed(NamedTuple):
    """bytes_per_s: of all reads that run at once, together. request_s: from a small request to its answer."""

    bytes_per_s: float
    request_s: float


class LinkMeter:
    """The last reads of a store: 256 large ones, which are some rounds, and 64 small ones. Thread-safe."""

    def __init__(self) -> None:
        """Nothing is measured yet."""
        self._lock = threading.Lock()
        self._large: deque[tuple[float, float, int]] = deque(maxlen=256)
        self._small_s: deque[float] = deque(maxlen=64)

    def record(self, began: float, ended: float, size: int) -> None:
        """Note a read that was answered, by the same clock as the others."""
        with self._lock:
            if size < BULK_BYTES:
                self._small_s.append(ended - began)
            else:
                self._large.append((began, ended, size))

    @property
    def speed(self) -> LinkSpeed | None:
        """Of the last reads; None if they were too few."""
        with self._lock:
            large, small_s = sorted(self._large), list(self._small_s)
        moved, busy_s, until = sum(size for _, _, size in large), 0.0, float("-inf")
        for began, ended, _ in large:  # the time in which at least one of them was under way
            busy_s += max(0.0, ended - max(began, until))
            until = max(until, ended)
        if moved < LEAST_BYTES or busy_s <= 0 or not small_s:
            return None
        return LinkSpeed(moved / busy_s, statistics.median(small_s))
