"""Who asks: tokens and whose they are. A token ends after its time, or with its service account."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.infra.testing.google.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.clock import Clock

TOKEN_S: Final = 3599
"""What the metadata server and STS say of a fresh token."""
_BEARER: Final = re.compile(r"Bearer (\S+)")


@dataclass(frozen=True, kw_only=True)
class Principal:
    """name: as a policy's member names it, `serviceAccount:replica@...`. sets: other members that it is one of.

    grants: permissions that it has everywhere; None is all of them, as an owner's.
    """

    name: str
    sets: frozenset[str] = frozenset()
    grants: frozenset[str] | None = frozenset()

    @property
    def members(self) -> frozenset[str]:
        """As which a policy may name it."""
        return self.sets | {self.name, "allUsers", "allAuthenticatedUsers"}


NOBODY: Final = Principal(name="allUsers")


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
        """A new token. is_alive: asked at every use; it ends with its account."""
        token = f"ya29.{self._clock.nonce()}"
        with self._lock:
            self._tokens[token] = _Token(principal=principal, until=self._clock.now() + lifetime_s, is_alive=is_alive)
        return token

    def change(self, token: str, principal: Principal) -> None:
        """From now on this token is another's."""
        with self._lock:
            self._tokens[token].principal = principal

    def expire(self) -> None:
        """End every token that ever ends, now: the next request with one is 401."""
        with self._lock:
            for token in self._tokens.values():
                if token.until < math.inf:
                    token.until = self._clock.now()

    def asking(self, authorization: str) -> Principal:
        """Whose token that header holds; nobody without one. Raises Refusal (401) for one that is none, or ended."""
        if not authorization:
            return NOBODY
        found = _BEARER.fullmatch(authorization)
        with self._lock:
            token = None if found is None else self._tokens.get(found[1])
            if token is not None and token.until > self._clock.now() and token.is_alive():
                return token.principal
        raise Refusal(
            401,
            "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other "
            "valid authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project.",
            reason="authError",
        )
