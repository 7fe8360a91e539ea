"""Clocks for tests: time moves only when a test or a pause moves it, or faster than it does."""

from __future__ import annotations

import datetime as dt
import random
from typing import TYPE_CHECKING

from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable


class FakeClock:
    """Time moves only by `pause` and `advance`; randomness is seeded. `on_pause` is called in every pause."""

    def __init__(self, seed: int = 0) -> None:
        self.time = 1000.0
        self.pauses: list[float] = []
        self.on_pause: Callable[[], None] = lambda: None
        self._random = random.Random(seed)

    def now(self) -> float:
        return self.time

    def utc_text(self) -> str:
        return f"2026-01-01T00:00:00.{int(self.time * 1000) % 1000:03d}+00:00"

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        if wake is None or not wake.is_set():
            self.pauses.append(seconds)
            self.time += seconds
            self.on_pause()

    def fraction(self) -> float:
        return self._random.random()

    def nonce(self) -> str:
        return f"{self._random.getrandbits(128):032x}"

    def advance(self, seconds: float) -> None:
        self.time += seconds


class FastClock(SystemClock):
    """A clock on which everything passes `times` as fast."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self._times = times

    def now(self) -> float:
        return super().now() * self._times

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        super().pause(seconds / self._times, wake)


class StandingClock(SystemClock):
    """Its time passes only by `advance`. Pauses last as long as on the system's clock, so that threads may wait."""

    def __init__(self) -> None:
        super().__init__()
        self._time = 1000.0

    def now(self) -> float:
        return self._time

    def advance(self, seconds: float) -> None:
        self._time += seconds


class WallClock(FakeClock):
    """A fake clock whose wall time begins today, moves with it, and can be set apart."""

    def __init__(self) -> None:
        super().__init__()
        self._start = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=self.time)

    def utc_text(self) -> str:
        return (self._start + dt.timedelta(seconds=self.time)).isoformat()

    def jump(self, seconds: float) -> None:
        """Moves the wall time only."""
        self._start += dt.timedelta(seconds=seconds)
