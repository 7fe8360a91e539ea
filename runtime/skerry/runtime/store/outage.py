"""Whether a store answers at all, as every caller of one engine sees it, and what people are told about it.

An outage begins when a call fails that will be tried again, and ends when one goes through while no other is being
tried again. It is told when it begins, when it ends, and in between about once a minute: however many threads try, for
however long. A store that fails now and then is told once a minute too. Does no I/O but that.

A silence is another thing: a time in which nothing went through, of anybody, and something was tried. It begins when
the first call did that then failed, since a connection may hang for long before it fails. A call that goes through
when it is tried again ends a silence of a tenth of a second, whatever else is still being tried.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from skerry.runtime import events

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock

# Often enough to see that it goes on, rarely enough for an hour of it to fit a screen.
REMIND_S: Final = 60.0


class _Silence(NamedTuple):
    length_s: float
    ended: float


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
        self._heard_at = -math.inf
        self._silent_since: float | None = None
        # Each shorter than the one before: a longer one hides whatever those before it have hidden.
        self._silences: list[_Silence] = []

    @property
    def open(self) -> bool:
        """An outage has begun and not ended. Cheap: asked after every call."""
        return self._since is not None

    def steady_since(self, longer_than_s: float) -> float:
        """When the last silence of more than these seconds ended, on the clock; now, during such a one; else 0.

        Nobody could be heard before.
        """
        with self._lock:
            now = self._clock.now()
            if self._silent_since is not None and now - self._silent_since > longer_than_s:
                return now
            return next((one.ended for one in reversed(self._silences) if one.length_s > longer_than_s), 0.0)

    def began(self, verb: str, key: str, error: Exception, asked: float) -> None:
        """A call failed for the first time, and will be tried again. asked: when it began."""
        with self._lock:
            self._failing += 1
            if self._since is None:
                self._since, self._retries, self._is_told = self._clock.now(), 0, False
            self._heard_nothing(asked)
        self._tell(verb, key, error)

    def goes_on(self, verb: str, key: str, error: Exception, asked: float) -> None:
        """A call that is being tried again failed again. asked: when this attempt began."""
        with self._lock:
            self._retries += 1
            self._heard_nothing(asked)
        self._tell(verb, key, error)

    def went_through(self, verb: str, key: str, *, at_last: bool) -> None:
        """A call succeeded; at_last: after it had failed before. Cheap without an outage: called after every call."""
        self._heard_at = now = self._clock.now()
        if not self.open:
            return
        with self._lock:
            self._failing -= at_last
            self._retries += at_last
            # Others may still wait for their next attempt: that it works is known from the first that succeeds.
            self._end_silence(now)
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

    def _heard_nothing(self, asked: float) -> None:
        if self._silent_since is None and self._heard_at < asked:
            self._silent_since = asked

    def _end_silence(self, now: float) -> None:
        if self._silent_since is None:
            return
        length_s, self._silent_since = now - self._silent_since, None
        while self._silences and self._silences[-1].length_s <= length_s:
            self._silences.pop()
        self._silences.append(_Silence(length_s, now))

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
