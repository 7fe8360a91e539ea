"""Security Token Service: who AWS says that somebody is, exchanged for a token of this project.

The subject token is a signed GetCallerIdentity that anybody can send; this server sends it to the AWS that it was given
and believes what that answers. Sources: "Workload Identity Federation with AWS", REST reference of sts.token,
google.auth.aws, RFC 8693.
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

from skerry.infra.testing.google import cel
from skerry.infra.testing.google.principals import TOKEN_S, Principal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.google.pools import Kept, Pools
    from skerry.infra.testing.google.project import Project

_GRANT: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_REQUESTED: Final = "urn:ietf:params:oauth:token-type:access_token"
_SUBJECT: Final = "urn:ietf:params:aws:token-type:aws4_request"
_AUDIENCE: Final = re.compile(
    r"//iam\.googleapis\.com/projects/(\d+)/locations/global/workloadIdentityPools/([a-z0-9-]+)/providers/([a-z0-9-]+)"
)
# The last is what google-auth asks for where the token is only to act as a service account.
_SCOPES: Final = tuple(f"https://www.googleapis.com/auth/{one}" for one in ("cloud-platform", "devstorage.", "iam"))
_STS: Final = re.compile(r"sts(\.[a-z0-9-]+)?\.amazonaws\.com")
_SIGNED: Final = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/,]+)/(\d{8})/([^/]+)/sts/aws4_request, ?"
                            r"SignedHeaders=([a-z0-9;-]+), ?Signature=[0-9a-f]{64}")  # fmt: skip
_FRESH: Final = dt.timedelta(minutes=15)
_LONGEST_SUBJECT: Final = 127
_TIMEOUT_S: Final = 10
# moto's answer for a key that it does not know.
_NOBODY: Final = ":user/moto"
# What a provider without a mapping maps.
_DEFAULT: Final = {
    "google.subject": "assertion.arn",
    "attribute.aws_role": "assertion.arn.contains('assumed-role') ? assertion.arn.extract('{account_arn}assumed-role/')"
    " + 'assumed-role/' + assertion.arn.extract('assumed-role/{role_name}/') : assertion.arn",
}


class Rejected(Exception):  # noqa: N818  named for what happened
    """An exchange that is refused, in the words of RFC 6749."""

    def __init__(self, http: int, error: str, why: str) -> None:
        super().__init__(why)
        self.http: Final = http
        self.body: Final = json.dumps({"error": error, "error_description": why}).encode()


class Exchange:
    """The endpoint at /v1/token. aws: the endpoint that plays AWS's STS; None refuses every exchange."""

    def __init__(self, project: Project, pools: Pools, aws: str | None) -> None:
        self._project = project
        self._pools = pools
        self.aws = aws

    def token(self, form: Mapping[str, str]) -> dict[str, Any]:
        """The answer to one exchange. Takes the project's lock itself, and not while it asks AWS. Raises Rejected."""
        for name, wanted in (("grant_type", _GRANT), ("requested_token_type", _REQUESTED)):
            if form.get(name) != wanted:
                raise Rejected(400, "invalid_request", f"{name} is not {wanted}: {form.get(name)}")
        if form.get("subject_token_type") != _SUBJECT:
            raise Rejected(400, "invalid_request", f"this sandbox exchanges {_SUBJECT} only")
        if not any(one.startswith(_SCOPES) for one in form.get("scope", "").split()):
            raise Rejected(400, "invalid_scope", f"scope: {form.get('scope')}")
        audience = form.get("audience", "")
        with self._project.lock:
            provider, pool = self._provider(audience)
        assertion = self._caller(form.get("subject_token", ""), audience)
        with self._project.lock:
            principal = self._principal(provider, pool, assertion)
            token = self._project.principals.token(principal)
        return {
            "access_token": token,
            "issued_token_type": _REQUESTED,
            "token_type": "Bearer",
            "expires_in": TOKEN_S,
        }

    def _provider(self, audience: str) -> tuple[Kept, str]:
        found = _AUDIENCE.fullmatch(audience)
        if found is None:
            raise Rejected(400, "invalid_request", f"Invalid value for audience: {audience}")
        if found[1] != self._project.number or (one := self._pools.usable(found[2], found[3])) is None:
            raise Rejected(
                400, "invalid_target", f"The target service indicated by the audience is invalid: {audience}"
            )
        if "aws" not in one.told:
            raise Rejected(400, "invalid_grant", "this provider is not one of AWS")
        return one, found[2]

    def _caller(self, subject: str, audience: str) -> dict[str, str]:
        """What AWS's GetCallerIdentity answers to the signed request."""
        try:
            told: Any = json.loads(unquote(subject))
            url, method = urlsplit(str(told["url"])), told["method"]
            headers = {str(one["key"]).lower(): str(one["value"]) for one in told["headers"]}
        except (ValueError, KeyError, TypeError) as error:
            raise Rejected(400, "invalid_grant", "Unable to parse the subject token.") from error
        query = parse_qs(url.query)
        if method != "POST" or url.scheme != "https" or not _STS.fullmatch(url.hostname or ""):
            raise Rejected(400, "invalid_grant", f"not a request to AWS's STS: {method} {told['url']}")
        if query != {"Action": ["GetCallerIdentity"], "Version": ["2011-06-15"]}:
            raise Rejected(400, "invalid_grant", f"not GetCallerIdentity: {url.query}")
        self._check_signature(headers, url.hostname or "", audience)
        return self._ask_aws(url.query, headers)

    def _check_signature(self, headers: Mapping[str, str], host: str, audience: str) -> None:
        signed = _SIGNED.fullmatch(headers.get("authorization", ""))
        if signed is None:
            raise Rejected(400, "invalid_grant", "The subject token has no signature of AWS.")
        covered = set(signed[4].split(";"))
        target = headers.get("x-goog-cloud-target-resource", "").removeprefix("https:")
        if headers.get("host") != host or target != audience:
            raise Rejected(400, "invalid_grant", "The subject token was signed for another host or another audience.")
        # That it covers x-goog-cloud-target-resource is recommended; Google's own client leaves it out.
        if not {"host", "x-amz-date"} <= covered:
            raise Rejected(400, "invalid_grant", "The signature does not cover host and x-amz-date.")
        if "x-amz-security-token" in headers and "x-amz-security-token" not in covered:
            raise Rejected(400, "invalid_grant", "The signature does not cover x-amz-security-token.")
        try:
            at = dt.datetime.strptime(headers.get("x-amz-date", ""), "%Y%m%dT%H%M%SZ").replace(tzinfo=dt.UTC)
        except ValueError as error:
            raise Rejected(400, "invalid_grant", "The subject token has no good x-amz-date.") from error
        if abs(self._project.now() - at) > _FRESH:
            raise Rejected(400, "invalid_grant", "The subject token has expired.")

    def _ask_aws(self, query: str, headers: Mapping[str, str]) -> dict[str, str]:
        if self.aws is None:
            raise Rejected(503, "temporarily_unavailable", "this sandbox was given no AWS to ask")
        passed = {name: value for name, value in headers.items() if name != "host"}
        request = urllib.request.Request(  # noqa: S310  the endpoint is the test's own
            f"{self.aws}/?{query}", data=b"", headers={**passed, "Host": headers["host"]}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310  same
                body = answer.read()
        except urllib.error.HTTPError as error:
            raise Rejected(400, "invalid_grant", f"AWS refuses the signed request: {error.code}") from error
        except OSError as error:
            raise Rejected(503, "temporarily_unavailable", f"AWS does not answer: {error}") from error
        found = {one.tag.rpartition("}")[2]: one.text or "" for one in ET.fromstring(body).iter()}  # noqa: S314  same
        if "Arn" not in found or found["Arn"].endswith(_NOBODY):
            raise Rejected(400, "invalid_grant", "AWS does not know the key of the signed request.")
        return {"arn": found["Arn"], "account": found["Account"], "userid": found["UserId"]}

    def _principal(self, provider: Kept, pool: str, assertion: Mapping[str, str]) -> Principal:
        if assertion["account"] != provider.told["aws"]["accountId"]:
            raise Rejected(400, "invalid_grant", "The AWS account of the subject token is not the provider's.")
        context: dict[str, cel.Value] = {f"assertion.{name}": value for name, value in assertion.items()}
        mapped: dict[str, str] = {}
        for name, expression in (provider.told.get("attributeMapping") or _DEFAULT).items():
            try:
                value = cel.evaluated(expression, context)
            except cel.Absent as error:
                raise Rejected(400, "invalid_grant", f"the mapping of {name} has no value: {error}") from error
            if not isinstance(value, str):
                raise Rejected(400, "invalid_grant", f"the mapping of {name} is no string")
            mapped[name] = value
        subject = mapped.get("google.subject", "")
        if not 0 < len(subject.encode()) <= _LONGEST_SUBJECT:
            why = f"The size of mapped attribute google.subject exceeds the 127 bytes limit: {len(subject.encode())}"
            raise Rejected(400, "invalid_grant", why)
        condition = provider.told.get("attributeCondition")
        if condition and not cel.holds(condition, context | mapped):
            raise Rejected(403, "unauthorized_client", "The given credential is rejected by the attribute condition.")
        root = f"iam.googleapis.com/projects/{self._project.number}/locations/global/workloadIdentityPools/{pool}"
        attributes = {name: value for name, value in mapped.items() if name.startswith("attribute.") and value}
        return Principal(
            name=f"principal://{root}/subject/{subject}",
            sets=frozenset(
                {f"principalSet://{root}/*"}
                | {f"principalSet://{root}/{name}/{value}" for name, value in attributes.items()}
            ),
        )
