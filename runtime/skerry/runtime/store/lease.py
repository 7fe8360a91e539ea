"""Credentials that are lent for a time: kept while they hold, and asked for anew long before they end.

Asked at half their time, so that an outage as long goes unnoticed: while the old ones hold, a failure to get new ones
is nobody's business. Says nothing about whose they are or where they come from.
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

# A request that is signed with the last second of a key may arrive after it.
SPARE_S: Final = 10.0
# Between attempts to renew what still holds: each may keep a request waiting until it times out.
AGAIN_S: Final = 30.0


@dataclass(frozen=True, kw_only=True, repr=False)
class Lent(Generic[T]):
    """What was lent, and for how long. Without a repr: it holds secrets. life_s: as the lender counts it."""

    credentials: T
    life_s: float


class Lease(Generic[T]):
    """What was lent last, for half its time, and until its end if there is no other. Thread-safe.

    Time is the larger of what the two clocks say: one stands still while a machine sleeps, the other may be set back.
    """

    def __init__(self, ask: Callable[[], Lent[T]], clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._held: Lent[T] | None = None
        self._since = 0.0, 0.0
        self._again_at = 0.0

    def current(self) -> tuple[T, dt.datetime]:
        """Credentials that hold, and until when by this machine's clock. Raises what `ask` raises if there are none."""
        with self._lock:
            held, left_s = self._held, self._left_s()
            is_due = held is None or left_s <= held.life_s / 2
            if held is None or left_s <= 0 or (is_due and self._clock.now() >= self._again_at):
                held = self._renewed(held if left_s > 0 else None)
            return held.credentials, self._wall() + dt.timedelta(seconds=self._left_s())

    def _renewed(self, good: Lent[T] | None) -> Lent[T]:
        """New ones; or `good`, which still hold, where there are no others."""
        # Counted from before it was asked for: the answer may have taken a while.
        since = self._now()
        try:
            new = self._ask()
        except SkerryError:
            if good is None:
                raise
            self._again_at = self._clock.now() + AGAIN_S
            return good
        self._held, self._since = new, since
        return new

    def _left_s(self) -> float:
        if self._held is None:
            return 0.0
        gone_s = max(now - then for now, then in zip(self._now(), self._since, strict=True))
        return self._held.life_s - gone_s - SPARE_S

    def _now(self) -> tuple[float, float]:
        return self._clock.now(), self._wall().timestamp()

    def _wall(self) -> dt.datetime:
        return dt.datetime.fromisoformat(self._clock.utc_text())
