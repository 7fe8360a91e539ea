"""Whether a store answers at all, as every caller of one engine sees it, and what people are told about it.

An outage begins when a call fails that will be tried again, and ends when one goes through while no other is being
tried again. It is told when it begins, when it ends, and in between about once a minute: however many threads try, for
however long. A store that fails now and then is told once a minute too. Does no I/O but that.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from skerry.runtime import events

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock

# Often enough to see that it goes on, rarely enough for an hour of it to fit a screen.
REMIND_S: Final = 60.0


class Outage:
    """The failing calls of one engine, from all threads and all its wrappers. Thread-safe."""

    def __init__(self, uri: str, clock: Clock) -> None:
        self._uri = uri
        self._clock = clock
        self._lock = threading.Lock()
        self._failing = 0
        self._since: float | None = None
        self._retries = 0
        self._is_told = False
        self._told_at: float | None = None
        self._steady_since: float | None = 0.0

    @property
    def open(self) -> bool:
        """An outage has begun and not ended. Cheap: asked after every call."""
        return self._since is not None

    @property
    def steady_since(self) -> float:
        """Since when calls go through, on the clock; now, as long as none does. Earlier silence proves nothing."""
        with self._lock:
            return self._clock.now() if self._steady_since is None else self._steady_since

    def began(self, verb: str, key: str, error: Exception) -> None:
        """A call failed for the first time, and will be tried again."""
        with self._lock:
            self._failing += 1
            if self._since is None:
                self._since, self._retries, self._is_told = self._clock.now(), 0, False
                self._steady_since = None
        self._tell(verb, key, error)

    def goes_on(self, verb: str, key: str, error: Exception) -> None:
        """A call that is being tried again failed again."""
        with self._lock:
            self._retries += 1
        self._tell(verb, key, error)

    def went_through(self, verb: str, key: str, *, at_last: bool) -> None:
        """A call succeeded; at_last: after it had failed before."""
        with self._lock:
            self._failing -= at_last
            self._retries += at_last
            now = self._clock.now()
            # Others may still wait for their next attempt: that it works is known from the first that succeeds.
            self._steady_since = now if self._steady_since is None else self._steady_since
            if self._since is None or self._failing:
                return
            waited, self._since = now - self._since, None
            if not self._is_told:
                return
            retries = self._retries
        fields = {"uri": self._uri, "verb": verb, "key": key, "waited_s": waited, "retries": retries}
        events.emit("store_recovered", fields)

    def gave_up(self) -> None:
        """A call that was being tried again is given up: that ends no outage."""
        with self._lock:
            self._failing -= 1

    def _tell(self, verb: str, key: str, error: Exception) -> None:
        with self._lock:
            now = self._clock.now()
            if self._told_at is not None and now - self._told_at < REMIND_S:
                return
            level = logging.INFO if self._is_told else logging.WARNING
            self._told_at, self._is_told = now, True
            waited = 0.0 if self._since is None else now - self._since
            fields = {
                "uri": self._uri,
                "verb": verb,
                "key": key,
                "error": str(error),
                "waited_s": waited,
                "retries": self._retries,
            }
        events.emit("store_retry", fields, level=level)
