"""AWS credentials for a replica on Google Cloud with its store in S3.

The machine's Google identity token is exchanged at AWS STS for one hour as a role that trusts the token's claims. A
refusal is Unauthorized and lists the claims to compare; an unavailable service is Retryable. Errors contain no secret.
Sources: STS API reference, AssumeRoleWithWebIdentity; IAM user guide, "Available keys for AWS OIDC federation";
Compute Engine, "Verify VM identity".
"""

from __future__ import annotations

import base64
import datetime as dt
import email.utils
import http.client
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import AWS_AUDIENCE, AWS_ROLE, SLOT
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

_METADATA_HOST: Final = "metadata.google.internal"
IDENTITY_PATH: Final = "/computeMetadata/v1/instance/service-accounts/default/identity"

_ROLE: Final = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+")
# Error codes of STS that mean "try again"; their status is 400.
_BUSY: Final = ("IDPCommunicationError", "RequestLimitExceeded", "RequestThrottled", "Throttl", "Timeout")
# The claims that a trust policy of AWS compares.
_CLAIMS: Final = ("sub", "aud", "azp")


def aws_from_google(environment: Mapping[str, str], clock: Clock | None = None) -> AwsFromGoogle | None:
    """The provider that the launcher's variables select; None without them. Raises Invalid if they are incomplete."""
    role = environment.get(AWS_ROLE)
    if not role:
        return None
    if _ROLE.fullmatch(role) is None:
        raise Invalid(f"not the ARN of a role: {AWS_ROLE}={role!r}; write arn:aws:iam::ACCOUNT:role/NAME")
    audience, region = environment.get(AWS_AUDIENCE), environment.get("AWS_REGION")
    for name, value in {AWS_AUDIENCE: audience, "AWS_REGION": region}.items():
        if not value:
            raise Invalid(f"{AWS_ROLE} is set and {name} is not; set both for a role of another cloud")
    return AwsFromGoogle(role, audience or "", region or "", environment, clock or SystemClock())


class _RoleKeys(BaseModel):
    """The fields of STS's response that are used; neither its repr nor its errors contain a secret."""

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)

    access_key_id: Annotated[str, Field(alias="AccessKeyId", min_length=1)]
    secret_access_key: Annotated[str, Field(alias="SecretAccessKey", min_length=1, repr=False)]
    token: Annotated[str, Field(alias="SessionToken", min_length=1, repr=False)]
    expiration: Annotated[dt.datetime, Field(alias="Expiration")]
    arn: Annotated[str, Field(alias="Arn")]


class AwsFromGoogle:
    """An obstore credential provider: keys of a role that trusts this machine's service account."""

    # Read by obstore, which asks again when less than this is left: always, so that the cache decides.
    refresh_threshold: ClassVar = dt.timedelta(days=1)

    def __init__(self, role: str, audience: str, region: str, environment: Mapping[str, str], clock: Clock) -> None:
        self._role = role
        self._audience = audience
        self.sts_url: Final = aws_endpoint(environment, "sts", region)
        self._ca_bundle = environment.get("AWS_CA_BUNDLE")
        self._metadata_host = environment.get("GCE_METADATA_HOST") or _METADATA_HOST
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

    def _fetch_identity_token(self) -> str:
        url = f"http://{self._metadata_host}{IDENTITY_PATH}?audience={quote(self._audience, safe='')}&format=standard"
        response = send_request("GET", url, {"Metadata-Flavor": "Google"}, None, use_proxy=False)
        token = response.body.decode("ascii", errors="replace").strip()
        if response.status != http.client.OK or token.count(".") != 2:
            raise Unauthorized(
                f"no identity token from {self._metadata_host}: status={response.status}; {AWS_ROLE} is for a job on "
                "Google Cloud; give the job a service account"
            )
        return token

    def _refusal(self, status: int, elements: Mapping[str, str], claims: Mapping[str, str]) -> SkerryError:
        """The error for a refusal of STS. Quotes STS's message only if the code is not enough."""
        code = elements.get("Code", "")
        message = redact(elements.get("Message", "")) or "no reason given"
        facts = f"role={self._role} audience={self._audience}"
        if any(busy in code for busy in _BUSY):
            return Retryable(f"{host_of(self.sts_url)} is busy ({code}): {facts}")
        match code:
            case "AccessDenied":
                return Unauthorized(
                    f"AWS does not let this job assume its role: {facts}; check that the role exists and trusts the "
                    "federated principal accounts.google.com with the claims of this job's token: "
                    f"accounts.google.com:sub={claims['sub']}, :oaud={claims['aud']}, :aud={claims['azp']}"
                )
            case "ExpiredTokenException" | "ExpiredToken":
                return Unauthorized(f"AWS reports that this job's identity token has expired: {facts}; check claim exp")
            case "ValidationError":
                return Invalid(f"AWS rejects the request: {facts} session={self._session}: {message}")
            case _:
                return Unauthorized(f"AWS rejects this job's identity token ({code or status}): {facts}: {message}")


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
