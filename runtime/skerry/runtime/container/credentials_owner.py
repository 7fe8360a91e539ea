"""Who the store takes this machine for: where its credentials come from and whose they are, never what they are.

Asks each cloud's own service for the name, in seconds or not at all. A check for people; nothing depends on it.
Sources: AWS Signature Version 4, "Create a signed request"; STS GetCallerIdentity; Google's metadata server.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import http.client
import json
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

from skerry.runtime.contract import AWS_ROLE, GOOGLE_AUDIENCE
from skerry.runtime.errors import SkerryError
from skerry.runtime.store.container import container_credentials
from skerry.runtime.store.visiting import aws_visit, google_visit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.clock import Clock

# Metadata servers answer from memory; STS in a tenth of a second.
_ASK_S: Final = 3.0
_IMDS: Final = "http://169.254.169.254"
_GOOGLE: Final = "http://metadata.google.internal"
_WHO: Final = "Action=GetCallerIdentity&Version=2011-06-15"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """source: where the credentials come from. who: whose they are, if anybody said. problem: why nobody did."""

    source: str
    who: str | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class _Keys:
    """Without a repr: it holds secrets."""

    name: str
    secret: str
    session: str | None


class _NoAnswer(Exception):  # noqa: N818  named for what happened
    """A service did not answer, or not with what was asked for; the message holds no secret."""


def identity(uri: str, environment: Mapping[str, str], clock: Clock) -> Identity:
    """Who this is to the store at `uri`. Raises nothing: not to know it is an answer."""
    scheme = urlsplit(uri).scheme.removeprefix("fsspec+")
    if (visitor := _visitor(uri, environment, clock)) is not None:
        return visitor
    match scheme:
        case "s3":
            return _aws(environment, clock)
        case "gs":
            return _google(environment)
        case "az":
            account = environment.get("AZURE_STORAGE_ACCOUNT_NAME") or environment.get("AZURE_STORAGE_ACCOUNT")
            return Identity(source="environment", who=account)
        case _:
            return Identity(source="the file system", who=None)


def _visitor(uri: str, environment: Mapping[str, str], clock: Clock) -> Identity | None:
    """Who a job of one cloud is in the other; None if its launcher did not say that it is one."""
    source = "another cloud"
    try:
        if uri.startswith("s3:") and (role := aws_visit(environment, clock)) is not None:
            source = f"a role that trusts this machine's service account ({AWS_ROLE})"
            return Identity(source=source, who=role.who())
        if uri.startswith("gs:") and (guest := google_visit(environment, clock)) is not None:
            source = f"a pool that takes this job's role ({GOOGLE_AUDIENCE})"
            return Identity(source=source, who=guest.who())
    except SkerryError as error:
        return Identity(source=source, problem=str(error))
    return None


def _aws(environment: Mapping[str, str], clock: Clock) -> Identity:
    if token_file := environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return Identity(source=f"web identity ({token_file})", who=environment.get("AWS_ROLE_ARN"))
    source = "nowhere"
    try:
        if environment.get("AWS_ACCESS_KEY_ID"):
            source = "environment (AWS_ACCESS_KEY_ID)"
            keys = _Keys(
                name=environment["AWS_ACCESS_KEY_ID"],
                secret=environment.get("AWS_SECRET_ACCESS_KEY", ""),
                session=environment.get("AWS_SESSION_TOKEN"),
            )
        elif (provider := container_credentials(environment)) is not None:
            source = "the container's role"
            told = provider()
            keys = _Keys(
                name=told["access_key_id"], secret=told.get("secret_access_key") or "", session=told.get("token")
            )
        else:
            source = "the machine's role"
            keys = _machine_keys()
        return Identity(source=source, who=_caller(keys, environment, clock))
    except (_NoAnswer, OSError, ValueError) as error:
        return Identity(source=source, problem=str(error))


def _machine_keys() -> _Keys:
    """Those of an EC2 machine, by version 2 of its metadata service."""
    token = _ask("PUT", f"{_IMDS}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    with_token = {"X-aws-ec2-metadata-token": token}
    folder = f"{_IMDS}/latest/meta-data/iam/security-credentials/"
    role = _ask("GET", folder, with_token).strip().splitlines()[0]
    told = cast("dict[str, str]", json.loads(_ask("GET", folder + role, with_token)))
    return _Keys(name=told["AccessKeyId"], secret=told["SecretAccessKey"], session=told["Token"])


def _caller(keys: _Keys, environment: Mapping[str, str], clock: Clock) -> str:
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    names = ("AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL")
    endpoint = next((environment[name] for name in names if environment.get(name)), "")
    endpoint = endpoint or f"https://sts.{region}.amazonaws.com"
    now = dt.datetime.fromisoformat(clock.utc_text())
    headers = signed_headers(
        keys.name, keys.secret, keys.session, region=region, host=urlsplit(endpoint).netloc, now=now
    )
    answer = _ask("POST", f"{endpoint.rstrip('/')}/", headers, _WHO)
    found = re.search(r"<Arn>([^<]+)</Arn>", answer)
    if found is None:
        raise _NoAnswer(f"{urlsplit(endpoint).netloc} did not say who this is")
    return found[1]


def signed_headers(
    name: str, secret: str, session: str | None, *, region: str, host: str, now: dt.datetime
) -> dict[str, str]:
    """The headers of a signed GetCallerIdentity. Pure."""
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    headers = {"content-type": "application/x-www-form-urlencoded; charset=utf-8", "host": host, "x-amz-date": stamp}
    if session:
        headers["x-amz-security-token"] = session
    signed = ";".join(sorted(headers))
    canonical = "".join(f"{key}:{headers[key]}\n" for key in sorted(headers))
    request = f"POST\n/\n\n{canonical}\n{signed}\n{hashlib.sha256(_WHO.encode()).hexdigest()}"
    scope = f"{day}/{region}/sts/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for part in (day, region, "sts", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    authorization = f"AWS4-HMAC-SHA256 Credential={name}/{scope}, SignedHeaders={signed}, Signature={signature}"
    return {**headers, "authorization": authorization}


def _google(environment: Mapping[str, str]) -> Identity:
    if environment.get("STORAGE_EMULATOR_HOST") and not environment.get("GCE_METADATA_HOST"):
        return Identity(source="an emulator, which asks nobody")
    if path := environment.get("GOOGLE_APPLICATION_CREDENTIALS"):
        try:
            told = cast("dict[str, str]", json.loads(Path(path).read_bytes()))
        except (OSError, ValueError) as error:
            return Identity(source=path, problem=type(error).__name__)
        return Identity(source=path, who=told.get("client_email") or told.get("type"))
    host = environment.get("GCE_METADATA_HOST")
    url = f"{f'http://{host}' if host else _GOOGLE}/computeMetadata/v1/instance/service-accounts/default/email"
    try:
        return Identity(
            source="the machine's service account", who=_ask("GET", url, {"Metadata-Flavor": "Google"}).strip()
        )
    except (_NoAnswer, OSError) as error:
        return Identity(source="the machine's service account", problem=str(error))


def _ask(method: str, url: str, headers: Mapping[str, str], body: str | None = None) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, parts.port, timeout=_ASK_S, context=ssl.create_default_context())
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=_ASK_S)
    try:
        connection.request(method, parts.path, body=body, headers=dict(headers))
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise _NoAnswer(f"{host} does not answer: {type(error).__name__}") from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise _NoAnswer(f"{host} answers with status {answer.status}")
    return text
