"""Google credentials for a replica on AWS with its store in Cloud Storage.

The container's AWS keys sign a GetCallerIdentity request; Google's STS accepts the signed request as proof of the role
and returns a token (workload identity federation). A refusal is Unauthorized and names the role; an unavailable service
is Retryable. Errors contain no secret. google-auth is imported on the first exchange.
Sources: IAM (Google), "Configure Workload Identity Federation with AWS"; RFC 8693.
"""

from __future__ import annotations

import datetime as dt
import http.client
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import GOOGLE_AUDIENCE
from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.credentials.aws_container import container_credentials
from skerry.runtime.store.credentials.aws_signature import aws_endpoint
from skerry.runtime.store.credentials.aws_sts_xml import parse_sts_response
from skerry.runtime.store.credentials.cache import CredentialCache, TemporaryCredentials
from skerry.runtime.store.credentials.find_aws_keys import keys_of_job
from skerry.runtime.store.credentials.http import (
    google_auth_transport,
    google_error_text,
    host_of,
    invalid_fields,
    redact,
    send_request,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import GCSCredential

    from skerry.runtime.clock import Clock

SCOPES: Final = ["https://www.googleapis.com/auth/devstorage.read_write"]

_GOOGLE_STS: Final = "https://sts.googleapis.com/"
_GRANT_TYPE: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_SUBJECT_TYPE: Final = "urn:ietf:params:aws:token-type:aws4_request"
_TOKEN_TYPE: Final = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105  a kind of token
_CALLER_IDENTITY: Final = "Action=GetCallerIdentity&Version=2011-06-15"
# A region that every account has, for jobs without one in the environment.
_DEFAULT_REGION: Final = "us-east-1"
_PROVIDER: Final = re.compile(
    r"//(iam\.googleapis\.com/projects/\d+/locations/global/workloadIdentityPools/[a-z0-9-]+)/providers/([a-z0-9-]+)"
)


def google_from_aws(environment: Mapping[str, str], clock: Clock | None = None) -> GoogleFromAws | None:
    """The provider that the launcher's variable selects; None without it. Raises Invalid if it is no provider."""
    audience = environment.get(GOOGLE_AUDIENCE)
    if not audience:
        return None
    if _PROVIDER.fullmatch(audience) is None:
        raise Invalid(
            f"not a workload identity provider: {GOOGLE_AUDIENCE}={audience!r}; write "
            "//iam.googleapis.com/projects/NUMBER/locations/global/workloadIdentityPools/POOL/providers/PROVIDER"
        )
    return GoogleFromAws(audience, environment, clock or SystemClock())


class _TokenResponse(BaseModel):
    """The fields of Google's response that are used; neither its repr nor its errors contain a secret."""

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)

    access_token: Annotated[str, Field(min_length=1, repr=False)]
    expires_in: Annotated[int, Field(gt=0)]


class GoogleFromAws:
    """An obstore credential provider: tokens of the identity that a Google pool gives to this AWS job."""

    # See AwsWebIdentity.
    refresh_threshold: ClassVar = dt.timedelta(days=1)

    def __init__(self, audience: str, environment: Mapping[str, str], clock: Clock) -> None:
        self._audience = audience
        self._caller = _AwsCaller(environment)
        base = environment.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STS") or _GOOGLE_STS
        self._url = f"{base.rstrip('/')}/v1/token"
        self._cache = CredentialCache(self._fetch, clock)

    def __call__(self) -> GCSCredential:
        """A valid token. Raises Unauthorized, Retryable or Invalid."""
        token, expires_at = self._cache.current()
        return {"token": token, "expires_at": expires_at}

    def principal(self) -> str:
        """The federated subject as the bucket's policies name it. Raises as a call does."""
        pool = self._audience.partition("/providers/")[0]
        self._cache.current()  # raises if Google refuses this job
        return f"principal:{pool}/subject/{self._caller.fetch_arn()}"

    def _fetch(self) -> TemporaryCredentials[str]:
        try:
            from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415  a fifth of a second; few need it
            from google.oauth2 import sts  # noqa: PLC0415  same
        except ImportError as error:
            raise Invalid(f"{GOOGLE_AUDIENCE} needs google-auth: pip install 'skerry[runtime]'") from error
        client: Any = sts.Client(self._url)
        try:
            response = client.exchange_token(
                google_auth_transport,
                _GRANT_TYPE,
                self._caller.signed_proof(self._audience),
                _SUBJECT_TYPE,
                audience=self._audience,
                scopes=SCOPES,
                requested_token_type=_TOKEN_TYPE,
            )
            token = _TokenResponse.model_validate(response)
        except GoogleAuthError as error:
            raise self._refusal(google_error_text(error)) from None
        except ValidationError as error:
            raise Retryable(f"invalid response of {host_of(self._url)}: fields={invalid_fields(error)}") from None
        except ValueError:
            raise Retryable(f"the response of {host_of(self._url)} is not JSON") from None
        return TemporaryCredentials(credentials=token.access_token, life_s=float(token.expires_in))

    def _refusal(self, reason: str) -> SkerryError:
        try:
            arn = self._caller.fetch_arn()
        except SkerryError as error:
            arn = f"unknown ({error})"
        return Unauthorized(
            f"Google refuses this job: audience={self._audience} job={arn}: {redact(reason)}; check that pool and "
            "provider exist and are enabled, that the provider's account is the job's, and that its condition accepts "
            "this role (assertion.arn, attribute.aws_role)"
        )


class _AwsCaller:
    """This job's identity on AWS: a GetCallerIdentity request signed with its keys.

    google-auth has its own source of keys, which knows the environment and EC2, but no container.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises Invalid if the environment has no source of AWS keys."""
        self._environment = environment
        self._region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
        if container_credentials(environment) is None and not environment.get("AWS_ACCESS_KEY_ID"):
            raise Invalid(
                f"this job has no AWS role, and {GOOGLE_AUDIENCE} is for a job on AWS: neither "
                "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI nor AWS_CONTAINER_CREDENTIALS_FULL_URI is set; give the job a "
                "role"
            )

    def signed_proof(self, audience: str) -> str:
        """The signed request in Google's encoding; valid for this audience only, which the signature covers."""
        signed = self._sign({"x-goog-cloud-target-resource": audience})
        headers = [{"key": name, "value": value} for name, value in signed["headers"].items()]
        return quote(json.dumps({"url": signed["url"], "method": signed["method"], "headers": headers}))

    def fetch_arn(self) -> str:
        """The ARN of this job on AWS. Raises Unauthorized or Retryable."""
        base = aws_endpoint(self._environment, "sts", self._region)
        ca_bundle = self._environment.get("AWS_CA_BUNDLE")
        url = f"{base}?{_CALLER_IDENTITY}"
        response = send_request("POST", url, self._sign({})["headers"], b"", ca_bundle=ca_bundle)
        arn = parse_sts_response(response.body, base).get("Arn")
        if response.status != http.client.OK or not arn:
            raise Unauthorized(f"AWS does not identify this job: host={host_of(base)} status={response.status}")
        return arn

    def _sign(self, headers: Mapping[str, str]) -> Mapping[str, Any]:
        """The url, method and headers, signed for AWS's own address even if the request is sent elsewhere."""
        from google.auth import aws  # noqa: PLC0415  see GoogleFromAws

        signer: Any = aws.RequestSigner(self._region)
        keys = keys_of_job(self._environment)
        if keys is None:
            raise Retryable("this job has lost its AWS role")
        credentials = aws.AwsSecurityCredentials(keys.name, keys.secret, keys.session)
        url = f"{aws_endpoint({}, 'sts', self._region)}?{_CALLER_IDENTITY}"
        return signer.get_request_options(credentials, url, "POST", additional_headers=headers)
