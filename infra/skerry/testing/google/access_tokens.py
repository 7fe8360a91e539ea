"""Issues access tokens and finds the principal of each. A token ends after its lifetime or with its service account."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.testing.google.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.clock import Clock

TOKEN_S: Final = 3599
"""The lifetime that the metadata server and STS report for a new token."""
_BEARER: Final = re.compile(r"Bearer (\S+)")


@dataclass(frozen=True, kw_only=True)
class Principal:
    """A principal. name: as in a policy, `serviceAccount:replica@...`. sets: other members that include it.

    grants: permissions on all resources; None is every permission, as of an owner.
    """

    name: str
    sets: frozenset[str] = frozenset()
    grants: frozenset[str] | None = frozenset()

    @property
    def members(self) -> frozenset[str]:
        """All members of policies that match this principal."""
        return self.sets | {self.name, "allUsers", "allAuthenticatedUsers"}


ANONYMOUS: Final = Principal(name="allUsers")


@dataclass(kw_only=True)
class _Token:
    principal: Principal
    until: float
    is_alive: Callable[[], bool] = field(default=lambda: True)


class Principals:
    """All tokens of a sandbox. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens: dict[str, _Token] = {}
        self._lock = threading.Lock()

    def token(
        self, principal: Principal, lifetime_s: float = TOKEN_S, is_alive: Callable[[], bool] = lambda: True
    ) -> str:
        """Issue a token. is_alive: called at every use; False ends the token."""
        token = f"ya29.{self._clock.nonce()}"
        with self._lock:
            self._tokens[token] = _Token(principal=principal, until=self._clock.now() + lifetime_s, is_alive=is_alive)
        return token

    def change(self, token: str, principal: Principal) -> None:
        """Give the token to another principal."""
        with self._lock:
            self._tokens[token].principal = principal

    def expire(self) -> None:
        """Expire every token with a lifetime now: the next request with such a token is 401."""
        with self._lock:
            for token in self._tokens.values():
                if token.until < math.inf:
                    token.until = self._clock.now()

    def principal_of(self, authorization: str) -> Principal:
        """Return the principal of an Authorization header; ANONYMOUS without one. Raises Refusal (401)."""
        if not authorization:
            return ANONYMOUS
        match = _BEARER.fullmatch(authorization)
        with self._lock:
            token = None if match is None else self._tokens.get(match[1])
            if token is not None and token.until > self._clock.now() and token.is_alive():
                return token.principal
        raise Refusal(
            401,
            "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other "
            "valid authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project.",
            reason="authError",
        )
