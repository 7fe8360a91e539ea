"""Passes the credentials of a session with a cloud to the client of a store, so that both are the same principal."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.runtime.clock import Clock

# boto3 renews keys at least ten minutes before their end, google-auth tokens almost four.
_VALIDITY: Final = dt.timedelta(minutes=3)


class StoreCredentials:
    """An obstore credential provider: the credentials of a session, which renews them in time. Thread-safe.

    fetch: returns valid ones in the form of obstore, without their end.
    """

    # Read by obstore, which asks again when less than this is left: before every request, so that the session decides.
    refresh_threshold: ClassVar = dt.timedelta(days=1)

    def __init__(self, fetch: Callable[[], Mapping[str, str | None]], clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock

    def __call__(self) -> Any:
        """Valid credentials. Raises Unauthorized, Retryable or Invalid.

        The error is raised anew: obstore copies the traceback's source lines into its own text, which is searched.
        """
        try:
            credentials = self._fetch()
        except SkerryError as error:
            raise type(error)(str(error)) from None
        return {**credentials, "expires_at": dt.datetime.fromisoformat(self._clock.utc_text()) + _VALIDITY}
