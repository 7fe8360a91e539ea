"""Caches temporary credentials and renews them after half of their lifetime.

Renewing early hides an outage of the issuer: if a renewal fails while the old credentials are still valid, they stay in
use and the renewal is tried again. Knows nothing of where the credentials come from.
"""

from __future__ import annotations

import datetime as dt
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.clock import Clock

T = TypeVar("T")

# A request signed in the last second of a key may arrive after its end.
MARGIN_S: Final = 10.0
# Between attempts to renew credentials that are still valid: each may delay a request until it times out.
RETRY_INTERVAL_S: Final = 30.0


@dataclass(frozen=True, kw_only=True, repr=False)
class TemporaryCredentials(Generic[T]):
    """Credentials and their lifetime by the issuer's clock. Has no repr because it contains secrets."""

    credentials: T
    life_s: float


class CredentialCache(Generic[T]):
    """Calls `fetch` when no valid credentials exist, and to renew them at half of their lifetime. Thread-safe.

    Elapsed time is the larger of two clocks' answers: the monotonic clock stops while a machine sleeps, and the wall
    clock may be set back.
    """

    def __init__(self, fetch: Callable[[], TemporaryCredentials[T]], clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._cached: TemporaryCredentials[T] | None = None
        self._fetched_at = 0.0, 0.0
        self._retry_at = 0.0

    def current(self) -> tuple[T, dt.datetime]:
        """Valid credentials and their end by this machine's clock. Raises the error of `fetch` if none are valid.

        The error is raised anew: obstore copies the traceback's source lines into its own text, which is searched.
        """
        try:
            with self._lock:
                credentials = self._renew_if_due().credentials
                return credentials, self._wall_time() + dt.timedelta(seconds=self._remaining_s())
        except SkerryError as error:
            raise type(error)(str(error)) from None

    def _renew_if_due(self) -> TemporaryCredentials[T]:
        cached, remaining_s = self._cached, self._remaining_s()
        is_valid = cached is not None and remaining_s > 0
        if cached is not None and is_valid and (remaining_s > cached.life_s / 2 or self._clock.now() < self._retry_at):
            return cached
        # Lifetime is counted from before the request, which may take a while.
        started_at = self._both_clocks()
        try:
            renewed = self._fetch()
        except SkerryError:
            if cached is None or not is_valid:
                raise
            self._retry_at = self._clock.now() + RETRY_INTERVAL_S
            return cached
        self._cached, self._fetched_at = renewed, started_at
        return renewed

    def _remaining_s(self) -> float:
        if self._cached is None:
            return 0.0
        elapsed_s = max(now - then for now, then in zip(self._both_clocks(), self._fetched_at, strict=True))
        return self._cached.life_s - elapsed_s - MARGIN_S

    def _both_clocks(self) -> tuple[float, float]:
        return self._clock.now(), self._wall_time().timestamp()

    def _wall_time(self) -> dt.datetime:
        return dt.datetime.fromisoformat(self._clock.utc_text())
