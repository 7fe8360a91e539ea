"""The only place that reads time or randomness. Everything else is given a Clock.

Liveness uses `now` (monotonic, local); safety never depends on time. `utc_text` is for people reading a record.
"""

from __future__ import annotations

import datetime as dt
import secrets
import time
from dataclasses import dataclass
from random import SystemRandom
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

T = TypeVar("T")


class Clock(Protocol):
    """Time, waiting and randomness, injected so that a simulation can own all three. Thread-safe."""

    def now(self) -> float:
        """Seconds on a monotonic clock of this process; only differences mean something."""
        ...

    def utc_text(self) -> str:
        """The wall clock as ISO 8601, for people; never compared."""
        ...

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        """Let `seconds` go by, or less if `wake` is set meanwhile."""
        ...

    def fraction(self) -> float:
        """A random number in [0, 1), for jitter."""
        ...

    def nonce(self) -> str:
        """32 hex digits that no other call anywhere returns."""
        ...


class SystemClock:
    """The machine's own clocks and random source."""

    def __init__(self) -> None:
        self._random = SystemRandom()

    def now(self) -> float:
        """Monotonic seconds; survives changes of the wall clock."""
        return time.monotonic()

    def utc_text(self) -> str:
        """Now, in UTC, to the millisecond."""
        return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        """Sleep in the kernel, or wait on the event."""
        if wake is not None:
            wake.wait(max(0.0, seconds))
        else:
            time.sleep(max(0.0, seconds))

    def fraction(self) -> float:
        """From the kernel's source, so that replicas started together differ."""
        return self._random.random()

    def nonce(self) -> str:
        """128 bits from the kernel's source."""
        return secrets.token_hex(16)


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Waits that grow from `first` to `cap` seconds by `factor`, each shortened at random by up to half.

    Jitter keeps replicas that failed together from retrying together.
    """

    first: float = 0.1
    cap: float = 10.0
    factor: float = 2.0

    def delay(self, attempt: int, clock: Clock) -> float:
        """Seconds before attempt number `attempt` (0 is the first repeat)."""
        # The exponent is capped: 2.0**1100 overflows a float after hours of an outage.
        full = min(self.cap, self.first * self.factor ** min(attempt, 60))
        return full * (0.5 + clock.fraction() / 2)


def wait_until(
    clock: Clock,
    condition: Callable[[], T | None],
    deadline: float,
    backoff: Backoff,
    wake: threading.Event | None = None,
) -> T:
    """The first value of `condition` that is not None, polled with growing pauses.

    deadline: on the clock's own `now` scale. Raises TimeoutError once it is past and one last look gave None.
    """
    attempt = 0
    while True:
        value = condition()
        if value is not None:
            return value
        left = deadline - clock.now()
        if left <= 0:
            raise TimeoutError("deadline passed while waiting")
        clock.pause(min(left, backoff.delay(attempt, clock)), wake)
        attempt += 1
