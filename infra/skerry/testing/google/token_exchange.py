"""Security Token Service: exchanges an AWS identity, or a token of an OIDC issuer, for a token of this project.

The subject token of AWS is a signed GetCallerIdentity request; this server sends it to the configured AWS endpoint and
uses the response. That of an issuer is verified with its keys.
Sources: "Workload Identity Federation with AWS" and "with Kubernetes", REST reference of sts.token, google.auth.aws,
RFC 8693.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET  # moto's own answers

from skerry.testing.google import cel
from skerry.testing.google.access_tokens import TOKEN_S, Principal
from skerry.testing.token_issuer import verified_claims

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.google.identity_pools import PoolRecord, Pools
    from skerry.testing.google.shared_state import Project

_GRANT: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_REQUESTED: Final = "urn:ietf:params:oauth:token-type:access_token"
_SUBJECT: Final = "urn:ietf:params:aws:token-type:aws4_request"
_JWT: Final = "urn:ietf:params:oauth:token-type:jwt"
_AUDIENCE: Final = re.compile(
    r"//iam\.googleapis\.com/projects/(\d+)/locations/global/workloadIdentityPools/([a-z0-9-]+)/providers/([a-z0-9-]+)"
)
# google-auth requests the last if the token is only used to impersonate a service account.
_SCOPES: Final = tuple(f"https://www.googleapis.com/auth/{scope}" for scope in ("cloud-platform", "devstorage.", "iam"))
_STS: Final = re.compile(r"sts(\.[a-z0-9-]+)?\.amazonaws\.com")
_SIGNED: Final = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/,]+)/(\d{8})/([^/]+)/sts/aws4_request, ?"
                            r"SignedHeaders=([a-z0-9;-]+), ?Signature=[0-9a-f]{64}")  # fmt: skip
_MAX_AGE: Final = dt.timedelta(minutes=15)
_LONGEST_SUBJECT: Final = 127
_TIMEOUT_S: Final = 10
# moto's response for an unknown key.
_UNKNOWN_USER: Final = ":user/moto"
# Google's mapping for a provider without one.
_DEFAULT_MAPPING: Final = {
    "google.subject": "assertion.arn",
    "attribute.aws_role": "assertion.arn.contains('assumed-role') ? assertion.arn.extract('{account_arn}assumed-role/')"
    " + 'assumed-role/' + assertion.arn.extract('assumed-role/{role_name}/') : assertion.arn",
}


class ExchangeRefusal(Exception):  # noqa: N818  named for what happened
    """A refused exchange, in the format of RFC 6749."""

    def __init__(self, http: int, error: str, description: str) -> None:
        super().__init__(description)
        self.http: Final = http
        self.body: Final = json.dumps({"error": error, "error_description": description}).encode()


class Exchange:
    """The endpoint at /v1/token. aws: the endpoint of AWS's STS; None refuses its identities.

    issuers: the keys of the issuers of tokens, by their URLs.
    """

    def __init__(self, project: Project, pools: Pools, aws: str | None) -> None:
        self._project = project
        self._pools = pools
        self.aws = aws
        self.issuers: Final[dict[str, Mapping[str, Any]]] = {}

    def token(self, form: Mapping[str, str]) -> dict[str, Any]:
        """The answer to one exchange. Takes the project's lock itself, and not while it asks AWS. Raises Rejected."""
        for name, expected in (("grant_type", _GRANT), ("requested_token_type", _REQUESTED)):
            if form.get(name) != expected:
                raise ExchangeRefusal(400, "invalid_request", f"{name} is not {expected}: {form.get(name)}")
        kind = form.get("subject_token_type")
        if kind not in {_SUBJECT, _JWT}:
            raise ExchangeRefusal(400, "invalid_request", f"the sandbox exchanges only {_SUBJECT} and {_JWT}")
        if not any(scope.startswith(_SCOPES) for scope in form.get("scope", "").split()):
            raise ExchangeRefusal(400, "invalid_scope", f"scope: {form.get('scope')}")
        audience = form.get("audience", "")
        with self._project.lock:
            provider, pool = self._provider(audience, "aws" if kind == _SUBJECT else "oidc")
        subject = form.get("subject_token", "")
        if kind == _SUBJECT:
            assertion = self._caller(subject, audience)
            if assertion["account"] != provider.resource["aws"]["accountId"]:
                raise ExchangeRefusal(
                    400, "invalid_grant", "The AWS account of the subject token is not the provider's."
                )
        else:
            assertion = self._claims(provider.resource["oidc"], subject, audience)
        with self._project.lock:
            principal = self._principal(provider, pool, assertion)
            token = self._project.principals.token(principal)
        return {
            "access_token": token,
            "issued_token_type": _REQUESTED,
            "token_type": "Bearer",
            "expires_in": TOKEN_S,
        }

    def _provider(self, audience: str, kind: str) -> tuple[PoolRecord, str]:
        match = _AUDIENCE.fullmatch(audience)
        if match is None:
            raise ExchangeRefusal(400, "invalid_request", f"Invalid value for audience: {audience}")
        if match[1] != self._project.number or (provider := self._pools.usable(match[2], match[3])) is None:
            raise ExchangeRefusal(
                400, "invalid_target", f"The target service indicated by the audience is invalid: {audience}"
            )
        if kind not in provider.resource:
            raise ExchangeRefusal(400, "invalid_grant", f"the provider is not of type {kind}")
        return provider, match[2]

    def _claims(self, oidc: Mapping[str, Any], token: str, audience: str) -> dict[str, str]:
        """Return the claims of a token of the provider's issuer for this provider."""
        issuer = oidc["issuerUri"]
        if (keys := self.issuers.get(issuer)) is None:
            raise ExchangeRefusal(400, "invalid_grant", "Error connecting to the given credential's issuer.")
        try:
            claims = verified_claims(token, keys)
        except ValueError as error:
            raise ExchangeRefusal(400, "invalid_grant", f"Unable to verify the ID Token: {error}") from error
        if claims.get("iss") != issuer:
            raise ExchangeRefusal(400, "invalid_grant", f"The issuer in ID Token {claims.get('iss')} is not expected.")
        if float(claims.get("exp", 0)) <= self._project.now().timestamp():
            raise ExchangeRefusal(400, "invalid_grant", "ID Token is stale to sign-in.")
        expected = set(oidc.get("allowedAudiences") or (audience, f"https:{audience}"))
        if not expected & set(claims.get("aud", ())):
            text = f"The audience in ID Token {claims.get('aud')} does not match the expected audience."
            raise ExchangeRefusal(400, "invalid_grant", text)
        return {name: value for name, value in claims.items() if isinstance(value, str)}

    def _caller(self, subject: str, audience: str) -> dict[str, str]:
        """Return AWS's response to the signed GetCallerIdentity."""
        try:
            signed: Any = json.loads(unquote(subject))
            url, method = urlsplit(str(signed["url"])), signed["method"]
            headers = {str(header["key"]).lower(): str(header["value"]) for header in signed["headers"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ExchangeRefusal(400, "invalid_grant", "Unable to parse the subject token.") from error
        query = parse_qs(url.query)
        if method != "POST" or url.scheme != "https" or not _STS.fullmatch(url.hostname or ""):
            raise ExchangeRefusal(400, "invalid_grant", f"not a request to AWS's STS: {method} {signed['url']}")
        if query != {"Action": ["GetCallerIdentity"], "Version": ["2011-06-15"]}:
            raise ExchangeRefusal(400, "invalid_grant", f"not GetCallerIdentity: {url.query}")
        self._check_signature(headers, url.hostname or "", audience)
        return self._get_caller_identity(url.query, headers)

    def _check_signature(self, headers: Mapping[str, str], host: str, audience: str) -> None:
        signed = _SIGNED.fullmatch(headers.get("authorization", ""))
        if signed is None:
            raise ExchangeRefusal(400, "invalid_grant", "The subject token has no signature of AWS.")
        covered = set(signed[4].split(";"))
        target = headers.get("x-goog-cloud-target-resource", "").removeprefix("https:")
        if headers.get("host") != host or target != audience:
            raise ExchangeRefusal(
                400, "invalid_grant", "The subject token was signed for another host or another audience."
            )
        # That it covers x-goog-cloud-target-resource is recommended; Google's own client leaves it out.
        if not {"host", "x-amz-date"} <= covered:
            raise ExchangeRefusal(400, "invalid_grant", "The signature does not cover host and x-amz-date.")
        if "x-amz-security-token" in headers and "x-amz-security-token" not in covered:
            raise ExchangeRefusal(400, "invalid_grant", "The signature does not cover x-amz-security-token.")
        try:
            at = dt.datetime.strptime(headers.get("x-amz-date", ""), "%Y%m%dT%H%M%SZ").replace(tzinfo=dt.UTC)
        except ValueError as error:
            raise ExchangeRefusal(400, "invalid_grant", "The subject token has no valid x-amz-date.") from error
        if abs(self._project.now() - at) > _MAX_AGE:
            raise ExchangeRefusal(400, "invalid_grant", "The subject token has expired.")

    def _get_caller_identity(self, query: str, headers: Mapping[str, str]) -> dict[str, str]:
        if self.aws is None:
            raise ExchangeRefusal(503, "temporarily_unavailable", "the sandbox has no AWS endpoint; start it with aws=")
        headers_to_send = {name: value for name, value in headers.items() if name != "host"}
        request = urllib.request.Request(  # noqa: S310  the endpoint is the test's own
            f"{self.aws}/?{query}", data=b"", headers={**headers_to_send, "Host": headers["host"]}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310  same
                body = response.read()
        except urllib.error.HTTPError as error:
            raise ExchangeRefusal(400, "invalid_grant", f"AWS refuses the signed request: {error.code}") from error
        except OSError as error:
            raise ExchangeRefusal(503, "temporarily_unavailable", f"no response from AWS: {error}") from error
        fields = {element.tag.rpartition("}")[2]: element.text or "" for element in ET.fromstring(body).iter()}  # noqa: S314  same
        if "Arn" not in fields or fields["Arn"].endswith(_UNKNOWN_USER):
            raise ExchangeRefusal(400, "invalid_grant", "AWS does not know the key of the signed request.")
        return {"arn": fields["Arn"], "account": fields["Account"], "userid": fields["UserId"]}

    def _principal(self, provider: PoolRecord, pool: str, assertion: Mapping[str, str]) -> Principal:
        context: dict[str, cel.Value] = {f"assertion.{name}": value for name, value in assertion.items()}
        mapped: dict[str, str] = {}
        for name, expression in (provider.resource.get("attributeMapping") or _DEFAULT_MAPPING).items():
            try:
                value = cel.evaluate(expression, context)
            except cel.Absent as error:
                raise ExchangeRefusal(400, "invalid_grant", f"the mapping of {name} has no value: {error}") from error
            if not isinstance(value, str):
                raise ExchangeRefusal(400, "invalid_grant", f"the mapping of {name} is not a string")
            mapped[name] = value
        subject = mapped.get("google.subject", "")
        if not 0 < len(subject.encode()) <= _LONGEST_SUBJECT:
            message = (
                f"The size of mapped attribute google.subject exceeds the 127 bytes limit: {len(subject.encode())}"
            )
            raise ExchangeRefusal(400, "invalid_grant", message)
        condition = provider.resource.get("attributeCondition")
        if condition and not cel.holds(condition, context | mapped):
            raise ExchangeRefusal(
                403, "unauthorized_client", "The given credential is rejected by the attribute condition."
            )
        root = f"iam.googleapis.com/projects/{self._project.number}/locations/global/workloadIdentityPools/{pool}"
        attributes = {name: value for name, value in mapped.items() if name.startswith("attribute.") and value}
        return Principal(
            name=f"principal://{root}/subject/{subject}",
            sets=frozenset(
                {f"principalSet://{root}/*"}
                | {f"principalSet://{root}/{name}/{value}" for name, value in attributes.items()}
            ),
        )
