"""Identifies the cloud account that this machine acts as: the source of its credentials and their principal.

Never returns the credentials themselves. Asks each cloud's own service for the name, with short timeouts. It is a check
for people: nothing depends on it. Sources: STS GetCallerIdentity; Google's metadata server.
"""

from __future__ import annotations

import datetime as dt
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
from skerry.runtime.store.credentials.aws_container import container_credentials
from skerry.runtime.store.credentials.aws_from_google import aws_from_google
from skerry.runtime.store.credentials.aws_signature import AwsKeys, aws_endpoint, signed_headers
from skerry.runtime.store.credentials.google_from_aws import google_from_aws

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.clock import Clock

# Metadata servers answer from memory; STS in a tenth of a second.
_TIMEOUT_S: Final = 3.0
_IMDS: Final = "http://169.254.169.254"
_GOOGLE: Final = "http://metadata.google.internal"
_CALLER_QUERY: Final = "Action=GetCallerIdentity&Version=2011-06-15"


@dataclass(frozen=True, kw_only=True)
class CloudIdentity:
    """source: where the credentials come from. principal: their owner, if known. problem: why it is unknown."""

    source: str
    principal: str | None = None
    problem: str | None = None


class _NoAnswer(Exception):  # noqa: N818  names what happened
    """A service did not respond, or not with the expected document; the message contains no secret."""


def identify(uri: str, environment: Mapping[str, str], clock: Clock) -> CloudIdentity:
    """The identity of this machine to the store at `uri`. Raises nothing: an unknown principal is a valid result."""
    scheme = urlsplit(uri).scheme.removeprefix("fsspec+")
    if (cross_cloud := _cross_cloud(uri, environment, clock)) is not None:
        return cross_cloud
    match scheme:
        case "s3":
            return _aws(environment, clock)
        case "gs":
            return _google(environment)
        case "az":
            account = environment.get("AZURE_STORAGE_ACCOUNT_NAME") or environment.get("AZURE_STORAGE_ACCOUNT")
            return CloudIdentity(source="environment", principal=account)
        case _:
            return CloudIdentity(source="the file system", principal=None)


def _cross_cloud(uri: str, environment: Mapping[str, str], clock: Clock) -> CloudIdentity | None:
    """The identity of a job of one cloud in the other; None if its launcher did not set up such a job."""
    source = "another cloud"
    try:
        if uri.startswith("s3:") and (role := aws_from_google(environment, clock)) is not None:
            source = f"a role that trusts this machine's service account ({AWS_ROLE})"
            return CloudIdentity(source=source, principal=role.principal())
        if uri.startswith("gs:") and (guest := google_from_aws(environment, clock)) is not None:
            source = f"a pool that trusts this job's role ({GOOGLE_AUDIENCE})"
            return CloudIdentity(source=source, principal=guest.principal())
    except SkerryError as error:
        return CloudIdentity(source=source, problem=str(error))
    return None


def _aws(environment: Mapping[str, str], clock: Clock) -> CloudIdentity:
    if token_file := environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return CloudIdentity(source=f"web identity ({token_file})", principal=environment.get("AWS_ROLE_ARN"))
    source = "no credentials"
    try:
        if environment.get("AWS_ACCESS_KEY_ID"):
            source = "environment (AWS_ACCESS_KEY_ID)"
            keys = AwsKeys(
                name=environment["AWS_ACCESS_KEY_ID"],
                secret=environment.get("AWS_SECRET_ACCESS_KEY", ""),
                session=environment.get("AWS_SESSION_TOKEN"),
            )
        elif (provider := container_credentials(environment)) is not None:
            source = "the container's role"
            credentials = provider()
            keys = AwsKeys(
                name=credentials["access_key_id"],
                secret=credentials.get("secret_access_key") or "",
                session=credentials.get("token"),
            )
        else:
            source = "the machine's role"
            keys = _machine_keys()
        return CloudIdentity(source=source, principal=_caller(keys, environment, clock))
    except (_NoAnswer, OSError, ValueError) as error:
        return CloudIdentity(source=source, problem=str(error))


def _machine_keys() -> AwsKeys:
    """The credentials of an EC2 machine, from version 2 of its metadata service."""
    token = _request("PUT", f"{_IMDS}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    with_token = {"X-aws-ec2-metadata-token": token}
    folder = f"{_IMDS}/latest/meta-data/iam/security-credentials/"
    role = _request("GET", folder, with_token).strip().splitlines()[0]
    document = cast("dict[str, str]", json.loads(_request("GET", folder + role, with_token)))
    return AwsKeys(name=document["AccessKeyId"], secret=document["SecretAccessKey"], session=document["Token"])


def _caller(keys: AwsKeys, environment: Mapping[str, str], clock: Clock) -> str:
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = aws_endpoint(environment, "sts", region)
    headers = signed_headers(
        keys,
        service="sts",
        region=region,
        host=urlsplit(endpoint).netloc,
        headers={"content-type": "application/x-www-form-urlencoded; charset=utf-8"},
        body=_CALLER_QUERY.encode(),
        now=dt.datetime.fromisoformat(clock.utc_text()),
    )
    response = _request("POST", endpoint, headers, _CALLER_QUERY)
    arn = re.search(r"<Arn>([^<]+)</Arn>", response)
    if arn is None:
        raise _NoAnswer(f"{urlsplit(endpoint).netloc} returned no ARN")
    return arn[1]


def _google(environment: Mapping[str, str]) -> CloudIdentity:
    if environment.get("STORAGE_EMULATOR_HOST") and not environment.get("GCE_METADATA_HOST"):
        return CloudIdentity(source="an emulator without credentials")
    if path := environment.get("GOOGLE_APPLICATION_CREDENTIALS"):
        try:
            document = cast("dict[str, str]", json.loads(Path(path).read_bytes()))
        except (OSError, ValueError) as error:
            return CloudIdentity(source=path, problem=type(error).__name__)
        return CloudIdentity(source=path, principal=document.get("client_email") or document.get("type"))
    host = environment.get("GCE_METADATA_HOST")
    url = f"{f'http://{host}' if host else _GOOGLE}/computeMetadata/v1/instance/service-accounts/default/email"
    try:
        return CloudIdentity(
            source="the machine's service account",
            principal=_request("GET", url, {"Metadata-Flavor": "Google"}).strip(),
        )
    except (_NoAnswer, OSError) as error:
        return CloudIdentity(source="the machine's service account", problem=str(error))


def _request(method: str, url: str, headers: Mapping[str, str], body: str | None = None) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            host, parts.port, timeout=_TIMEOUT_S, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request(method, parts.path, body=body, headers=dict(headers))
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise _NoAnswer(f"{host} does not respond: {type(error).__name__}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise _NoAnswer(f"{host} responds with status {response.status}")
    return text
