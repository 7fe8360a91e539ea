"""The cache of temporary credentials: renewal at half of the lifetime, failures and clocks that jump."""

from __future__ import annotations

import datetime as dt

import pytest
from tests.support.clocks import WallClock

from skerry.runtime.errors import Retryable, SkerryError, Unauthorized
from skerry.runtime.store.credentials.cache import MARGIN_S, RETRY_INTERVAL_S, CredentialCache, TemporaryCredentials

HOUR = 3600.0
DAY = 24 * HOUR


class Issuer:
    """Issues key 1, 2, ... for one hour each, or raises `error`."""

    def __init__(self) -> None:
        self.clock = WallClock()
        self.cache = CredentialCache(self.fetch, self.clock)
        self.requests = 0
        self.error: SkerryError | None = None

    def fetch(self) -> TemporaryCredentials[int]:
        self.requests += 1
        if self.error is not None:
            raise self.error
        return TemporaryCredentials(credentials=self.requests, life_s=HOUR)

    def current(self) -> int:
        return self.cache.current()[0]


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


def test_credentials_are_never_expired_and_rarely_renewed_for_days(issuer: Issuer) -> None:
    expiry: dict[int, float] = {}
    for _ in range(int(3 * DAY / 420)):
        key = issuer.current()
        assert expiry.setdefault(key, issuer.clock.now() + HOUR) > issuer.clock.now()
        issuer.clock.advance(420.0)
    assert issuer.requests == 3 * 24 * 60 // 35 + 1, "at the first call after half an hour"


def test_end_is_by_the_wall_clock_with_a_margin(issuer: Issuer) -> None:
    issuer.current()
    issuer.clock.advance(600.0)
    _, end = issuer.cache.current()
    assert end - dt.datetime.fromisoformat(issuer.clock.utc_text()) == dt.timedelta(seconds=HOUR - 600.0 - MARGIN_S)


@pytest.mark.parametrize(
    ("monotonic_s", "wall_s"),
    [(0.0, HOUR), (HOUR, -HOUR), (HOUR, -DAY)],
    ids=["the machine slept", "the wall clock stopped", "the wall clock was set back"],
)
def test_credentials_are_renewed_when_either_clock_passes_their_end(
    issuer: Issuer, monotonic_s: float, wall_s: float
) -> None:
    assert issuer.current() == 1
    issuer.clock.advance(monotonic_s)
    issuer.clock.jump(wall_s)
    assert [issuer.current(), issuer.current()] == [2, 2]


@pytest.mark.parametrize("error", [Retryable("unavailable"), Unauthorized("refused")])
def test_failed_renewal_is_retried_while_the_old_credentials_are_valid(issuer: Issuer, error: SkerryError) -> None:
    issuer.current()
    issuer.error = error
    issuer.clock.advance(HOUR / 2)
    for _ in range(int((HOUR / 2 - 20) / 5)):
        assert issuer.current() == 1
        issuer.clock.advance(5.0)
    attempts = issuer.requests - 1
    assert (HOUR / 2 - 20) / RETRY_INTERVAL_S - 1 <= attempts <= (HOUR / 2) / RETRY_INTERVAL_S + 1
    issuer.clock.advance(20.0)
    with pytest.raises(type(error), match=str(error)) as raised:
        issuer.current()
    assert issuer.requests == attempts + 2
    # obstore copies the source lines of a traceback into its text, in which the store searches for error codes.
    assert "fetch" not in [entry.name for entry in raised.traceback]
    assert raised.value.__cause__ is None
    issuer.error = None
    assert issuer.current() == issuer.requests


def test_renewal_succeeds_after_one_failure(issuer: Issuer) -> None:
    issuer.current()
    issuer.clock.advance(HOUR / 2)
    issuer.error = Retryable("unavailable")
    assert issuer.current() == 1
    issuer.error = None
    issuer.clock.advance(RETRY_INTERVAL_S)
    assert issuer.current() == 3
