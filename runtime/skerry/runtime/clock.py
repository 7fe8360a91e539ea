"""Time, waiting and randomness. Only this module reads them; all others receive a `Clock`.

Liveness uses `now` (monotonic, local); safety never depends on time. `utc_text` is for human readers of a record.
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
    """Time, waiting and randomness, injected so that a simulation can control them. Thread-safe."""

    def now(self) -> float:
        """Seconds on a monotonic clock of this process; only differences are meaningful."""
        ...

    def utc_text(self) -> str:
        """The wall clock as ISO 8601, for people; never compared."""
        ...

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        """Waits for `seconds`, or until `wake` is set."""
        ...

    def fraction(self) -> float:
        """A random number in [0, 1), for jitter."""
        ...

    def nonce(self) -> str:
        """32 hex digits that no other call in any process returns."""
        ...


class SystemClock:
    """The clocks and the random source of this machine."""

    def __init__(self) -> None:
        self._random = SystemRandom()

    def now(self) -> float:
        """Monotonic seconds, independent of changes of the wall clock."""
        return time.monotonic()

    def utc_text(self) -> str:
        """The current time in UTC, to the millisecond."""
        return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        """Sleeps, or waits for the event."""
        if wake is not None:
            wake.wait(max(0.0, seconds))
        else:
            time.sleep(max(0.0, seconds))

    def fraction(self) -> float:
        """From the kernel's source, so that replicas that start together differ."""
        return self._random.random()

    def nonce(self) -> str:
        """128 bits from the kernel's source."""
        return secrets.token_hex(16)


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Pauses that grow from `first` to `cap` seconds by `factor`, each shortened at random by up to half.

    The jitter prevents replicas that failed together from retrying together.
    """

    first: float = 0.1
    cap: float = 10.0
    factor: float = 2.0

    def delay(self, attempt: int, clock: Clock) -> float:
        """Seconds before retry number `attempt`, counted from 0."""
        # The exponent is limited, because 2.0**1100 would overflow a float after hours of an outage.
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

    deadline: on the clock's `now` scale. Raises TimeoutError after it, when one last poll has returned None.
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
