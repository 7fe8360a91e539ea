"""AWS credentials of a role that trusts an identity token: the exchange at STS, and tokens in a file of the platform.

A pod of a cluster has such a file, which the kubelet renews; the variables are those of AWS's own clients. obstore
would exchange it by HTTPS only, and report a refusal as a store without an answer. Here a refusal is Unauthorized and
lists the claims to compare; an unavailable service is Retryable. Errors contain no secret.
Sources: STS API reference, AssumeRoleWithWebIdentity; IAM user guide, "Create a role for OpenID Connect federation".
"""

from __future__ import annotations

import base64
import datetime as dt
import email.utils
import http.client
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import SLOT
from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.credentials.aws_signature import aws_endpoint
from skerry.runtime.store.credentials.aws_sts_xml import parse_sts_response
from skerry.runtime.store.credentials.cache import CredentialCache, TemporaryCredentials
from skerry.runtime.store.credentials.http import host_of, invalid_fields, redact, send_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import S3Credential

    from skerry.runtime.clock import Clock

# Every role allows one hour (more only if its owner allows it), a leaked key is worth little, a renewal costs nothing.
_LIFE_S: Final = 3600
# Error codes of STS that mean "try again"; their status is 400.
_BUSY: Final = ("IDPCommunicationError", "RequestLimitExceeded", "RequestThrottled", "Throttl", "Timeout")
# The claims that a trust policy of AWS compares, and the issuer.
_CLAIMS: Final = ("iss", "sub", "aud", "azp")
# A region that every account has, for jobs without one in the environment.
_DEFAULT_REGION: Final = "us-east-1"


class _RoleKeys(BaseModel):
    """The fields of STS's response that are used; neither its repr nor its errors contain a secret."""

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)

    access_key_id: Annotated[str, Field(alias="AccessKeyId", min_length=1)]
    secret_access_key: Annotated[str, Field(alias="SecretAccessKey", min_length=1, repr=False)]
    token: Annotated[str, Field(alias="SessionToken", min_length=1, repr=False)]
    expiration: Annotated[dt.datetime, Field(alias="Expiration")]
    arn: Annotated[str, Field(alias="Arn")]


class AwsWebIdentity(ABC):
    """An obstore credential provider: keys of a role that trusts an identity token of this job."""

    # Read by obstore, which asks again when less than this is left: always, so that the cache decides.
    refresh_threshold: ClassVar = dt.timedelta(days=1)

    def __init__(self, role: str, region: str, environment: Mapping[str, str], clock: Clock) -> None:
        self._role = role
        self.sts_url: Final = aws_endpoint(environment, "sts", region)
        self._ca_bundle = environment.get("AWS_CA_BUNDLE")
        slot = environment.get(SLOT) or "replica"
        # AWS writes this name into its records, and accepts no name of one character.
        self._session = slot if len(slot) > 1 else f"replica-{slot}"
        self._cache = CredentialCache(self._fetch, clock)

    def __call__(self) -> S3Credential:
        """Valid keys. Raises Unauthorized, Retryable or Invalid."""
        keys, expires_at = self._cache.current()
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.token,
            "expires_at": expires_at,
        }

    def principal(self) -> str:
        """The ARN of the assumed role. Raises as a call does."""
        return self._cache.current()[0].arn

    @abstractmethod
    def _fetch_identity_token(self) -> str: ...

    @abstractmethod
    def _facts(self) -> str:
        """The source of the token, for errors."""

    @abstractmethod
    def _trust(self, claims: Mapping[str, str]) -> str:
        """The principal that the role must trust, with these claims."""

    def _fetch(self) -> TemporaryCredentials[_RoleKeys]:
        token = self._fetch_identity_token()
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": self._role,
            "RoleSessionName": self._session,
            "DurationSeconds": str(_LIFE_S),
            "WebIdentityToken": token,
        }
        response = send_request("POST", self.sts_url, {}, urlencode(form).encode(), ca_bundle=self._ca_bundle)
        elements = parse_sts_response(response.body, self.sts_url)
        if response.status != http.client.OK:
            raise self._refusal(response.status, elements, _claims_of(token))
        try:
            keys = _RoleKeys.model_validate(elements)
        except ValidationError as error:
            fields = invalid_fields(error)
            raise Retryable(f"invalid response of {host_of(self.sts_url)}: fields={fields}") from None
        # By the clock of AWS: this machine's may be off.
        life_s = (_in_utc(keys.expiration) - _response_time(response.headers, keys.expiration)).total_seconds()
        return TemporaryCredentials(credentials=keys, life_s=life_s)

    def _refusal(self, status: int, elements: Mapping[str, str], claims: Mapping[str, str]) -> SkerryError:
        """The error for a refusal of STS. Quotes STS's message only if the code is not enough."""
        code = elements.get("Code", "")
        message = redact(elements.get("Message", "")) or "no reason given"
        facts = f"role={self._role} {self._facts()}"
        if any(busy in code for busy in _BUSY):
            return Retryable(f"{host_of(self.sts_url)} is busy ({code}): {facts}")
        match code:
            case "AccessDenied":
                return Unauthorized(
                    f"AWS does not let this job assume its role: {facts}; check that the role exists and trusts the "
                    f"{self._trust(claims)}"
                )
            case "ExpiredTokenException" | "ExpiredToken":
                return Unauthorized(f"AWS reports that this job's identity token has expired: {facts}; check claim exp")
            case "ValidationError":
                return Invalid(f"AWS rejects the request: {facts} session={self._session}: {message}")
            case _:
                return Unauthorized(f"AWS rejects this job's identity token ({code or status}): {facts}: {message}")


class AwsFromTokenFile(AwsWebIdentity):
    """Keys of a role that trusts the tokens in a file of the platform, which is read anew for each exchange."""

    def __init__(self, role: str, path: str, environment: Mapping[str, str], clock: Clock) -> None:
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
        super().__init__(role, region, environment, clock)
        self._path = path

    def _fetch_identity_token(self) -> str:
        try:
            return Path(self._path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Unauthorized(
                f"no identity token in {self._path}: {type(error).__name__}; check the volume of the pod, or the file"
            ) from None

    def _facts(self) -> str:
        return f"token={self._path}"

    def _trust(self, claims: Mapping[str, str]) -> str:
        return (
            f"OIDC provider of {claims['iss']} with the claims of this job's token: sub={claims['sub']} "
            f"aud={claims['aud']}"
        )


def aws_from_token_file(environment: Mapping[str, str], clock: Clock | None = None) -> AwsFromTokenFile | None:
    """The provider that the variables of AWS's own clients select; None unless file and role are named."""
    path, role = environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"), environment.get("AWS_ROLE_ARN")
    return AwsFromTokenFile(role, path, environment, clock or SystemClock()) if path and role else None


def _claims_of(token: str) -> dict[str, str]:
    """The claims of an identity token that AWS compares, for error texts: not secret, and not verified here."""
    try:
        payload = token.split(".")[1]
        claims: Any = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return {name: str(claims.get(name, "absent"))[:200] for name in _CLAIMS}
    except (ValueError, IndexError, AttributeError):
        return dict.fromkeys(_CLAIMS, "unreadable")


def _response_time(headers: Mapping[str, str], expiration: dt.datetime) -> dt.datetime:
    """The time of the response by the server's clock; without a Date header, one lifetime before the expiration."""
    try:
        return _in_utc(email.utils.parsedate_to_datetime(headers["Date"]))
    except (KeyError, TypeError, ValueError):
        return _in_utc(expiration) - dt.timedelta(seconds=_LIFE_S)


def _in_utc(time: dt.datetime) -> dt.datetime:
    return time if time.tzinfo else time.replace(tzinfo=dt.UTC)
