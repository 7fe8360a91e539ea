"""A replica in one cloud with its store in the other: credentials without a key, renewed for as long as it runs.

And whoever works on a machine that is nobody's: a login at Google's, in whatever form google-auth takes it.

Google to S3: the machine's identity token buys an hour as a role of AWS. AWS to Cloud Storage: the container's keys
sign the question who it is, and for the signature Google gives a token. Once no credentials hold, a refusal is
Unauthorized and says what to compare; a service that is away is Retryable. No secret is in an error, a log or a repr.
Loads google-auth at the first question to Google; no other file of the runtime may.
Sources: STS API reference, AssumeRoleWithWebIdentity; IAM user guide, "Available keys for AWS OIDC federation"; Compute
Engine, "Verify VM identity"; IAM (Google), "Configure Workload Identity Federation with AWS"; RFC 8693.
"""

from __future__ import annotations

import base64
import datetime as dt
import email.utils
import http.client
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final
from urllib.parse import quote, urlencode
from xml.etree import ElementTree as ET

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.asking import carry, host, reason, sent, short, told_by
from skerry.runtime.store.container import container_credentials
from skerry.runtime.store.lease import Lease, Lent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import GCSCredential, S3Credential

    from skerry.runtime.clock import Clock

# The names that skerry.runtime.contract promises; that module lies above this one. A test holds them together.
AWS_ROLE: Final = "SKERRY_AWS_ROLE"
AWS_AUDIENCE: Final = "SKERRY_AWS_AUDIENCE"
GOOGLE_AUDIENCE: Final = "SKERRY_GOOGLE_AUDIENCE"
SLOT: Final = "SKERRY_SLOT"

ACCESS_TOKEN: Final = "CLOUDSDK_AUTH_ACCESS_TOKEN"  # noqa: S105  the name of a variable
"""gcloud's own name for a token to act with, instead of a login."""

# Every role allows an hour, and more only if its owner said so; what leaks is worth little; a renewal costs nothing.
HOUR_S: Final = 3600

_METADATA: Final = "metadata.google.internal"
_IDENTITY: Final = "/computeMetadata/v1/instance/service-accounts/default/identity"
_GOOGLE_STS: Final = "https://sts.googleapis.com/"
_AWS_REQUEST: Final = "urn:ietf:params:aws:token-type:aws4_request"
_EXCHANGE: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_ACCESS_TOKEN: Final = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105  a kind of token
_SCOPES: Final = ["https://www.googleapis.com/auth/devstorage.read_write"]
_WHO: Final = "Action=GetCallerIdentity&Version=2011-06-15"
# Known to every account, whatever regions it has; only for jobs that are not told theirs.
_ANY_REGION: Final = "us-east-1"

_ROLE: Final = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+")
_PROVIDER: Final = re.compile(
    r"//(iam\.googleapis\.com/projects/\d+/locations/global/workloadIdentityPools/[a-z0-9-]+)/providers/([a-z0-9-]+)"
)
# STS's codes for a bad moment, all of them with status 400.
_BUSY: Final = ("IDPCommunicationError", "RequestLimitExceeded", "RequestThrottled", "Throttl", "Timeout")


def aws_visit(environment: Mapping[str, str], clock: Clock | None = None) -> AwsVisit | None:
    """The provider for S3 that the launcher's variables ask for; None without them. Raises Invalid for a wrong one."""
    role = environment.get(AWS_ROLE)
    if not role:
        return None
    if _ROLE.fullmatch(role) is None:
        raise Invalid(f"{AWS_ROLE}={role!r} is no role; write arn:aws:iam::ACCOUNT:role/NAME")
    audience, region = environment.get(AWS_AUDIENCE), environment.get("AWS_REGION")
    for name, value in {AWS_AUDIENCE: audience, "AWS_REGION": region}.items():
        if not value:
            raise Invalid(f"{AWS_ROLE} is set and {name} is not: a role of another cloud needs both")
    return AwsVisit(role, audience or "", region or "", environment, clock or SystemClock())


def google_visit(environment: Mapping[str, str], clock: Clock | None = None) -> GoogleVisit | None:
    """The provider for Cloud Storage that the launcher's variable asks for; None without it. Raises Invalid."""
    audience = environment.get(GOOGLE_AUDIENCE)
    if not audience:
        return None
    if _PROVIDER.fullmatch(audience) is None:
        raise Invalid(
            f"{GOOGLE_AUDIENCE}={audience!r} is no provider; write //iam.googleapis.com/projects/NUMBER/locations/"
            "global/workloadIdentityPools/POOL/providers/PROVIDER"
        )
    return GoogleVisit(audience, environment, clock or SystemClock())


def google_login(environment: Mapping[str, str], clock: Clock | None = None) -> GoogleLogin | None:
    """The provider for Cloud Storage of whoever is logged in here; None if nobody is, or google-auth is not there.

    environment: the process's own, where google-auth looks. Then obstore is left, for a machine's own account.
    """
    key = environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = environment.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")  # noqa: PTH111  without a home it stays as it is, and is no folder
    if not key and not (Path(folder) / "application_default_credentials.json").is_file():
        return None
    return GoogleLogin(clock or SystemClock()) if _has_google_auth() else None


class _Keys(BaseModel):
    """What is used of STS's answer; its repr tells nothing secret, nor do its errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)

    access_key_id: Annotated[str, Field(alias="AccessKeyId", min_length=1)]
    secret_access_key: Annotated[str, Field(alias="SecretAccessKey", min_length=1, repr=False)]
    token: Annotated[str, Field(alias="SessionToken", min_length=1, repr=False)]
    expiration: Annotated[dt.datetime, Field(alias="Expiration")]
    arn: Annotated[str, Field(alias="Arn")]


class AwsVisit:
    """What obstore calls for the keys of a role that trusts this machine's service account."""

    # obstore's own name: it asks again when less than this is left, so always, and the lease decides.
    refresh_threshold: ClassVar = dt.timedelta(days=1)

    def __init__(self, role: str, audience: str, region: str, environment: Mapping[str, str], clock: Clock) -> None:
        self._role = role
        self._audience = audience
        self._sts = _aws_sts(environment, region)
        self._bundle = environment.get("AWS_CA_BUNDLE")
        self._metadata = environment.get("GCE_METADATA_HOST") or _METADATA
        slot = environment.get(SLOT) or "replica"
        # What AWS's records say who it was; it takes no name of one character.
        self._session = slot if len(slot) > 1 else f"replica-{slot}"
        self._lease = Lease(self._ask, clock)

    def __call__(self) -> S3Credential:
        """Keys that hold. Raises Unauthorized, Retryable or Invalid, with words that need no traceback."""
        keys, until = told_by(self._lease)
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.token,
            "expires_at": until,
        }

    def who(self) -> str:
        """The ARN of the assumed role. Raises as a call does."""
        return told_by(self._lease)[0].arn

    def _ask(self) -> Lent[_Keys]:
        token = self._identity_token()
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": self._role,
            "RoleSessionName": self._session,
            "DurationSeconds": str(HOUR_S),
            "WebIdentityToken": token,
        }
        answer = sent("POST", self._sts, {}, urlencode(form).encode(), bundle=self._bundle)
        told = _elements(answer.body, self._sts)
        if answer.status != http.client.OK:
            raise self._refusal(answer.status, told, _claims(token))
        try:
            keys = _Keys.model_validate(told)
        except ValidationError as error:
            raise Retryable(f"{host(self._sts)} answers without a good {_fields(error)}") from None
        # By AWS's own clock: this machine's may be off.
        life_s = (_zoned(keys.expiration) - _date(answer.headers, keys.expiration)).total_seconds()
        return Lent(credentials=keys, life_s=life_s)

    def _identity_token(self) -> str:
        url = f"http://{self._metadata}{_IDENTITY}?audience={quote(self._audience, safe='')}&format=standard"
        answer = sent("GET", url, {"Metadata-Flavor": "Google"}, None, direct=True)
        token = answer.body.decode("ascii", errors="replace").strip()
        if answer.status != http.client.OK or token.count(".") != 2:
            raise Unauthorized(
                f"no identity token from {self._metadata}: status {answer.status}; {AWS_ROLE} is for a job on Google, "
                "and the job needs a service account"
            )
        return token

    def _refusal(self, status: int, told: Mapping[str, str], claims: Mapping[str, str]) -> SkerryError:
        """What STS's error means. Its own words only where they tell more than its code."""
        code = told.get("Code", "")
        about = f"role={self._role} audience={self._audience}"
        if any(sign in code for sign in _BUSY):
            return Retryable(f"{host(self._sts)} is busy ({code}): {about}")
        match code:
            case "AccessDenied":
                return Unauthorized(
                    f"AWS does not let this job take its role: {about}; see that the role exists and trusts the "
                    "federated principal accounts.google.com with what this job's token says: "
                    f"accounts.google.com:sub={claims['sub']}, :oaud={claims['aud']}, :aud={claims['azp']}"
                )
            case "ExpiredTokenException" | "ExpiredToken":
                return Unauthorized(f"AWS says that this job's identity token is not valid now: {about}; claim exp")
            case "ValidationError":
                return Invalid(f"AWS cannot read this: {about} session={self._session}: {_said(told)}")
            case _:
                return Unauthorized(
                    f"AWS does not take this job's identity token ({code or status}): {about}: {_said(told)}"
                )


class _Token(BaseModel):
    """What is used of Google's answer to an exchange. See _Keys."""

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)

    access_token: Annotated[str, Field(min_length=1, repr=False)]
    expires_in: Annotated[int, Field(gt=0)]


class GoogleVisit:
    """What obstore calls for a token of the identity that a pool of Google's gives this job of AWS."""

    # See AwsVisit.
    refresh_threshold: ClassVar = dt.timedelta(days=1)

    def __init__(self, audience: str, environment: Mapping[str, str], clock: Clock) -> None:
        self._audience = audience
        self._caller = _Caller(environment)
        base = environment.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STS") or _GOOGLE_STS
        self._url = f"{base.rstrip('/')}/v1/token"
        self._lease = Lease(self._ask, clock)

    def __call__(self) -> GCSCredential:
        """A token that holds. Raises Unauthorized, Retryable or Invalid, with words that need no traceback."""
        token, until = told_by(self._lease)
        return {"token": token, "expires_at": until}

    def who(self) -> str:
        """The federated subject, as policies of a bucket name it. Raises as a call does."""
        pool = self._audience.partition("/providers/")[0]
        told_by(self._lease)  # that Google lets it in
        return f"principal:{pool}/subject/{self._caller.arn()}"

    def _ask(self) -> Lent[str]:
        try:
            from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415  a fifth of a second; few need it
            from google.oauth2 import sts  # noqa: PLC0415  same
        except ImportError as error:
            raise Invalid(f"{GOOGLE_AUDIENCE} needs google-auth: pip install 'skerry[runtime]'") from error
        client: Any = sts.Client(self._url)
        try:
            told = client.exchange_token(
                carry,
                _EXCHANGE,
                self._caller.proof(self._audience),
                _AWS_REQUEST,
                audience=self._audience,
                scopes=_SCOPES,
                requested_token_type=_ACCESS_TOKEN,
            )
            token = _Token.model_validate(told)
        except GoogleAuthError as error:
            raise self._refusal(reason(error)) from None
        except ValidationError as error:
            raise Retryable(f"{host(self._url)} answers without a good {_fields(error)}") from None
        except ValueError:  # no JSON
            raise Retryable(f"{host(self._url)} answers with something else than a token") from None
        return Lent(credentials=token.access_token, life_s=float(token.expires_in))

    def _refusal(self, said: str) -> SkerryError:
        """What Google's refusal means, in its words and those that name who asked."""
        try:
            arn = self._caller.arn()
        except SkerryError as error:
            arn = f"not known ({error})"
        return Unauthorized(
            f"Google does not let this job in: audience={self._audience} job={arn}: {short(said)}; see that pool and "
            "provider exist and are enabled, that the provider's account is the job's, and that its condition takes "
            "this role (assertion.arn, attribute.aws_role)"
        )


class GoogleLogin:
    """What obstore calls for a token of a person, a key file, a federated pipeline, or of whom these may act as.

    obstore itself knows key files and persons alone; these are the credentials that Google's own clients would have.
    """

    # See AwsVisit.
    refresh_threshold: ClassVar = dt.timedelta(days=1)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lease = Lease(self._ask, clock)

    def __call__(self) -> GCSCredential:
        """A token that holds. Raises Unauthorized or Retryable, with words that need no traceback."""
        token, until = told_by(self._lease)
        return {"token": token, "expires_at": until}

    def _ask(self) -> Lent[str]:
        """Looks anew each time: somebody may have logged in again."""
        from google import auth  # noqa: PLC0415  see GoogleVisit
        from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415  same

        library: Any = auth  # it has no types
        asked = dt.datetime.fromisoformat(self._clock.utc_text())
        try:
            found, _ = library.default(scopes=_SCOPES, request=carry)
            found.refresh(carry)
        # What its parsers raise for a file that is none of Google's is not its own.
        except (GoogleAuthError, OSError, AttributeError, TypeError, ValueError) as error:
            raise Unauthorized(
                f"no login of Google's that works: {short(reason(error))}; run `gcloud auth application-default "
                f"login`, or set GOOGLE_APPLICATION_CREDENTIALS or {ACCESS_TOKEN}"
            ) from None
        ends = found.expiry  # in UTC, and does not say so
        life_s = HOUR_S if ends is None else (_zoned(ends) - asked).total_seconds()
        return Lent(credentials=str(found.token), life_s=life_s)


class _Caller:
    """Who this job is to AWS: the question GetCallerIdentity, signed with its keys, which whoever has it may ask.

    google-auth's own source of keys knows those of the environment and of EC2, and no container's.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises Invalid if nothing says whose keys."""
        self._environment = environment
        self._region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or _ANY_REGION
        self._container = container_credentials(environment)
        if self._container is None and not environment.get("AWS_ACCESS_KEY_ID"):
            raise Invalid(
                f"{GOOGLE_AUDIENCE} is for a job on AWS, and this one has no role there: neither "
                "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI nor AWS_CONTAINER_CREDENTIALS_FULL_URI is set"
            )

    def proof(self, audience: str) -> str:
        """The question as Google takes it, good for this audience alone since the signature covers it."""
        signed = self._signed({"x-goog-cloud-target-resource": audience})
        headers = [{"key": name, "value": value} for name, value in signed["headers"].items()]
        return quote(json.dumps({"url": signed["url"], "method": signed["method"], "headers": headers}))

    def arn(self) -> str:
        """As AWS names this job. Raises Unauthorized or Retryable."""
        base = _aws_sts(self._environment, self._region)
        bundle = self._environment.get("AWS_CA_BUNDLE")
        answer = sent("POST", f"{base}?{_WHO}", self._signed({})["headers"], b"", bundle=bundle)
        arn = _elements(answer.body, base).get("Arn")
        if answer.status != http.client.OK or not arn:
            raise Unauthorized(f"AWS does not say who this job is: {host(base)} answers with status {answer.status}")
        return arn

    def _signed(self, headers: Mapping[str, str]) -> Mapping[str, Any]:
        """url, method and headers. Signed for AWS's own address, wherever it is sent."""
        from google.auth import aws  # noqa: PLC0415  see GoogleVisit

        signer: Any = aws.RequestSigner(self._region)
        keys = aws.AwsSecurityCredentials(*self._keys())
        return signer.get_request_options(
            keys, f"{_aws_sts({}, self._region)}?{_WHO}", "POST", additional_headers=headers
        )

    def _keys(self) -> tuple[str, str, str | None]:
        """Those of now, in the order of AWS's own clients. Raises Retryable if the platform gives none."""
        told = self._environment
        if self._container is None or told.get("AWS_ACCESS_KEY_ID"):
            return told["AWS_ACCESS_KEY_ID"], told.get("AWS_SECRET_ACCESS_KEY", ""), told.get("AWS_SESSION_TOKEN")
        try:
            keys = self._container()
        except OSError as error:  # which says what, and nothing secret
            raise Retryable(str(error)) from None
        return keys["access_key_id"], keys.get("secret_access_key") or "", keys.get("token") or None


def _has_google_auth() -> bool:
    try:
        return importlib.util.find_spec("google.auth") is not None
    except ModuleNotFoundError:  # not even `google`
        return False


def _aws_sts(environment: Mapping[str, str], region: str) -> str:
    names = ("AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL")
    given = next((environment[name] for name in names if environment.get(name)), None)
    return f"{given.rstrip('/')}/" if given else f"https://sts.{region}.{_suffix(region)}/"


def _suffix(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


def _elements(body: bytes, url: str) -> dict[str, str]:
    """Texts of an answer by the name of their element; each stands once in STS's. Raises Retryable for no XML.

    STS declares no entities; an answer with a declaration is not STS's, and is not read.
    """
    try:
        root = None if b"<!" in body else ET.fromstring(body)  # noqa: S314  no declaration, no entity
    except ET.ParseError:
        root = None
    if root is None:
        raise Retryable(f"{host(url)} answers with something else than STS's XML")
    return {one.tag.rpartition("}")[2]: (one.text or "").strip() for one in root.iter()}


def _claims(token: str) -> dict[str, str]:
    """What AWS compares of an identity token: names and numbers, no secrets. For words only: nothing is verified."""
    try:
        middle = token.split(".")[1]
        told: Any = json.loads(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))
        return {name: str(told.get(name, "absent"))[:200] for name in ("sub", "aud", "azp")}
    except (ValueError, IndexError, AttributeError):
        return dict.fromkeys(("sub", "aud", "azp"), "unreadable")


def _date(headers: Mapping[str, str], otherwise: dt.datetime) -> dt.datetime:
    """When the answer was given, by the server's clock; an hour before it ends, where it does not say."""
    try:
        return _zoned(email.utils.parsedate_to_datetime(headers["Date"]))
    except (KeyError, TypeError, ValueError):
        return _zoned(otherwise) - dt.timedelta(seconds=HOUR_S)


def _zoned(when: dt.datetime) -> dt.datetime:
    return when if when.tzinfo else when.replace(tzinfo=dt.UTC)


def _fields(error: ValidationError) -> str:
    return ",".join(sorted({str(one["loc"][0]) if one["loc"] else "document" for one in error.errors()}))


def _said(told: Mapping[str, str]) -> str:
    return short(told.get("Message", "")) or "no reason given"
