"""moto 5.2.5 gives a web identity any role: it parses no token, checks no trust policy, and the role need not exist.

With rights enforced it refuses all, because such a request has no signature.
This shim parses a token of Google's (without checking its signature) and evaluates the role's trust policy with its
claims as AWS does: `sub`; `aud`, compared with the token's azp if it has one; `oaud`, its audience. A token of another
issuer needs an OIDC provider in the account with its audience, and a signature by the keys of the issuer.
Sources: IAM user guide, "Available keys for AWS OIDC federation"; STS API reference, AssumeRoleWithWebIdentity.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Any, Final

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.utils import utcnow
from moto.iam.exceptions import NotFoundException
from moto.iam.models import iam_backends
from moto.sts.responses import TokenResponse

from skerry.testing.aws.container_role_keys import trusts
from skerry.testing.aws.errors import error_response
from skerry.testing.token_issuer import verified_claims

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.aws.shims.patching import Patches

GOOGLE: Final = "accounts.google.com"
_ACTION: Final = "sts:AssumeRoleWithWebIdentity"
_SESSION: Final = re.compile(r"[\w+=,.@-]{2,64}", re.ASCII)
_SHORTEST_S, _LONGEST_S, _HOUR_S = 900, 43_200, 3600


class _StsRefusal(Exception):  # noqa: N818  named for what happened
    """An error response of STS."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.response: Final = error_response("sts", status, code, message)


def install(patches: Patches, issuers: Mapping[str, Mapping[str, Any]]) -> None:
    """Install the shim: check token and role before moto issues keys. issuers: the keys of each, by its URL."""

    def assume_role_with_web_identity(self: Any) -> Any:
        try:
            _check(self, issuers)
        except _StsRefusal as refused:
            status, content_type, body = refused.response
            return body.decode(), {"status": status, "Content-Type": content_type}
        return moto_assume(self)

    def authorize(self: Any, resource: str = "*") -> None:
        if self._get_action() != _ACTION.partition(":")[2]:
            moto_authorize(self, resource)

    moto_assume: Any = patches.replace(TokenResponse, "assume_role_with_web_identity", assume_role_with_web_identity)
    moto_authorize: Any = patches.replace(TokenResponse, "_authenticate_and_authorize_normal_action", authorize)


def _check(request: Any, issuers: Mapping[str, Mapping[str, Any]]) -> None:
    session = request._get_param("RoleSessionName") or ""  # noqa: SLF001
    duration_s = request._get_int_param("DurationSeconds", _HOUR_S)  # noqa: SLF001
    if _SESSION.fullmatch(session) is None:
        raise _invalid(f"Value '{session}' at 'roleSessionName' failed to satisfy constraint")
    if not _SHORTEST_S <= duration_s <= _LONGEST_S:
        raise _invalid(f"Value '{duration_s}' at 'durationSeconds' failed to satisfy constraint")
    principal, context = _identity(request._get_param("WebIdentityToken") or "", issuers)  # noqa: SLF001
    try:
        role: Any = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].get_role_by_arn(request._get_param("RoleArn"))  # noqa: SLF001
    except NotFoundException:
        role = None
    if role is None or not trusts(role, _ACTION, ("Federated", principal), context):
        raise _StsRefusal(403, "AccessDenied", f"Not authorized to perform {_ACTION}")
    if duration_s > int(role.max_session_duration or _HOUR_S):
        raise _invalid("The requested DurationSeconds exceeds the MaxSessionDuration set for this role.")


def _identity(token: str, issuers: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
    """Return the principal and the condition keys of a token. Raises _StsRefusal if it is not accepted."""
    try:
        header, middle, _ = (_segment(part) for part in token.split("."))
        claims: dict[str, Any] = json.loads(middle)
        json.loads(header)
        ends, issuer = dt.datetime.fromtimestamp(claims["exp"], dt.UTC), str(claims["iss"])
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        message = "The ID Token provided is not a valid JWT. (You may see this error if you sent an Access Token)"
        raise _not_valid(message) from error
    host = issuer.removeprefix("https://")
    arn = GOOGLE if host == GOOGLE else _provider(token, issuer, claims, issuers.get(issuer))
    now = utcnow().replace(tzinfo=dt.UTC)
    if ends <= now:
        seconds = int(now.timestamp()), int(ends.timestamp())
        message = "Token expired: current date/time {} must be before the expiration date/time {}".format(*seconds)
        raise _StsRefusal(400, "ExpiredTokenException", message)
    audience = _audiences(claims)[0]
    # Names of condition keys are compared in any case.
    return arn, {
        f"{host}:sub".lower(): str(claims.get("sub", "")),
        f"{host}:aud".lower(): str(claims.get("azp") or audience),
        f"{host}:oaud".lower(): audience,
    }


def _provider(token: str, issuer: str, claims: Mapping[str, Any], keys: Mapping[str, Any] | None) -> str:
    """The ARN of the account's OIDC provider of this issuer, by which the token is valid. Raises _StsRefusal."""
    providers = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].open_id_providers
    named = [(arn, each) for arn, each in providers.items() if each.url == issuer.removeprefix("https://")]
    if not named:
        raise _not_valid(f"No OpenIDConnect provider found in your account for {issuer}")
    arn, provider = named[0]
    if not set(_audiences(claims)) & set(provider.client_id_list):
        raise _not_valid("Incorrect token audience")
    if keys is None:
        raise _not_valid("Couldn't retrieve verification key from your identity provider")
    try:
        verified_claims(token, keys)
    except ValueError as error:
        raise _not_valid("The web identity token that was passed could not be validated by AWS") from error
    return str(arn)


def _audiences(claims: Mapping[str, Any]) -> list[str]:
    audience = claims.get("aud", "")
    return [str(each) for each in audience] if isinstance(audience, list) else [str(audience)]


def _not_valid(message: str) -> _StsRefusal:
    return _StsRefusal(400, "InvalidIdentityToken", message)


def _segment(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _invalid(message: str) -> _StsRefusal:
    return _StsRefusal(400, "ValidationError", f"1 validation error detected: {message}")
