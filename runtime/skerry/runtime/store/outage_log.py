"""Tracks outages of a store over all threads and wrappers that use it, and logs them.

An outage begins when a call fails that will be retried. It ends when a call succeeds while no other call is being
retried. It is logged at its beginning and end, and once a minute in between, however many threads retry; a store that
fails now and then is logged at most once a minute.

A gap is an interval in which requests were sent and none succeeded. It begins when the first failing request was sent,
because a connection may hang for long before it fails. A success of any call ends it, even while others still retry.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from skerry.runtime import structured_logging

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock

# Often enough to see that the outage continues, rarely enough that an hour of log lines fits a screen.
REMIND_S: Final = 60.0


class _Gap(NamedTuple):
    length_s: float
    ended_at: float


class OutageTracker:
    """The failing calls of one store. Thread-safe. `sent_at` is the time at which an attempt began."""

    def __init__(self, uri: str, clock: Clock) -> None:
        self._uri = uri
        self._clock = clock
        self._lock = threading.Lock()
        self._retrying_calls = 0
        self._began_at: float | None = None
        self._retries = 0
        self._is_logged = False
        self._logged_at: float | None = None
        self._succeeded_at = -math.inf
        self._gap_began_at: float | None = None
        # Each is shorter than the one before: a new gap removes all shorter ones, which it outlasts in any query.
        self._gaps: list[_Gap] = []

    @property
    def is_open(self) -> bool:
        """True from the beginning to the end of an outage. Cheap, because it is read after every call."""
        return self._began_at is not None

    def reachable_since(self, longer_than_s: float) -> float:
        """The end of the last gap of more than `longer_than_s`; the current time during one; 0 without such a gap."""
        with self._lock:
            now = self._clock.now()
            if self._gap_began_at is not None and now - self._gap_began_at > longer_than_s:
                return now
            return next((gap.ended_at for gap in reversed(self._gaps) if gap.length_s > longer_than_s), 0.0)

    def record_first_failure(self, verb: str, key: str, error: Exception, sent_at: float) -> None:
        """A call failed for the first time and will be retried."""
        with self._lock:
            self._retrying_calls += 1
            if self._began_at is None:
                self._began_at, self._retries, self._is_logged = self._clock.now(), 0, False
            self._begin_gap(sent_at)
        self._log(verb, key, error)

    def record_failed_retry(self, verb: str, key: str, error: Exception, sent_at: float) -> None:
        """A retry failed and will be repeated."""
        with self._lock:
            self._retries += 1
            self._begin_gap(sent_at)
        self._log(verb, key, error)

    def record_success(self, verb: str, key: str, *, was_retried: bool) -> None:
        """A call succeeded. Cheap without an outage, because it is called after every call."""
        self._succeeded_at = now = self._clock.now()
        if not self.is_open:
            return
        with self._lock:
            self._retrying_calls -= was_retried
            self._retries += was_retried
            self._end_gap(now)
            if self._began_at is None or self._retrying_calls:
                return
            waited_s, self._began_at = now - self._began_at, None
            if not self._is_logged:
                return
            retries = self._retries
        fields = {"uri": self._uri, "verb": verb, "key": key, "waited_s": waited_s, "retries": retries}
        structured_logging.emit("store_recovered", fields)

    def record_abort(self) -> None:
        """A call that was being retried is aborted, which does not end the outage."""
        with self._lock:
            self._retrying_calls -= 1

    def _begin_gap(self, sent_at: float) -> None:
        if self._gap_began_at is None and self._succeeded_at < sent_at:
            self._gap_began_at = sent_at

    def _end_gap(self, now: float) -> None:
        if self._gap_began_at is None:
            return
        length_s, self._gap_began_at = now - self._gap_began_at, None
        while self._gaps and self._gaps[-1].length_s <= length_s:
            self._gaps.pop()
        self._gaps.append(_Gap(length_s, now))

    def _log(self, verb: str, key: str, error: Exception) -> None:
        with self._lock:
            now = self._clock.now()
            if self._logged_at is not None and now - self._logged_at < REMIND_S:
                return
            level = logging.INFO if self._is_logged else logging.WARNING
            self._logged_at, self._is_logged = now, True
            fields = {
                "uri": self._uri,
                "verb": verb,
                "key": key,
                "error": str(error),
                "waited_s": 0.0 if self._began_at is None else now - self._began_at,
                "retries": self._retries,
            }
        structured_logging.emit("store_retry", fields, level=level)
