"""Signs identity tokens as the issuer of a cluster does, and verifies them for a cloud that trusts the issuer.

The key is an RSA key of this process, of which the issuer publishes the public part. Source: OpenID Connect Core, "ID
Token"; Kubernetes, "ServiceAccount token volume projection".
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet, RSAKey

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALGORITHM: Final = "RS256"
_BITS: Final = 2048


class TokenIssuer:
    """One issuer. url: the claim `iss`, at which nothing listens; a cloud that trusts it gets `keys` from a test."""

    def __init__(self, url: str) -> None:
        self.url: Final = url

    @property
    def keys(self) -> Mapping[str, Any]:
        """The public keys, as a JSON Web Key Set."""
        return {"keys": [self._key.as_dict(private=False)]}

    def token(self, claims: Mapping[str, Any]) -> str:
        """Sign a token with these claims."""
        header = {"alg": _ALGORITHM, "kid": self._key.kid}
        return jwt.encode(header, {"iss": self.url, **claims}, self._key, algorithms=[_ALGORITHM])

    @functools.cached_property
    def _key(self) -> RSAKey:
        return RSAKey.generate_key(_BITS, auto_kid=True)


def verified_claims(token: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the claims of a token that one of these keys has signed. Raises ValueError for any other text."""
    try:
        return dict(jwt.decode(token, KeySet.import_key_set(keys), algorithms=[_ALGORITHM]).claims)  # pyright: ignore[reportArgumentType]
    except JoseError as error:
        raise ValueError(str(error)) from error
