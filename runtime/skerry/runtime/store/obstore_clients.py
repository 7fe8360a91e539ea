"""obstore's clients for a bucket, from the standard environment of each cloud. Reads the environment; does no request.

s3   AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION, AWS_CA_BUNDLE; keys from AWS_*,
     web identity and EC2 by obstore itself; ECS and EKS through `container`; profiles and SSO through boto3 where it
     is installed
gs   CLOUDSDK_AUTH_ACCESS_TOKEN; GOOGLE_APPLICATION_CREDENTIALS and gcloud's login through google-auth where it is
     installed; else these, and the metadata server, by obstore itself; CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE, or
     STORAGE_EMULATOR_HOST, which gets no login, but asks the metadata server of GCE_METADATA_HOST, if there is one
az   AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_* by obstore itself; AZURE_STORAGE_CONNECTION_STRING

A job in another cloud than its bucket is told so by SKERRY_AWS_ROLE or SKERRY_GOOGLE_AUDIENCE, which come before all of
these (`visiting`).

Keys of a role are asked for again before they run out. Keys that stand in the environment stay what they are.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from skerry.runtime.errors import Invalid
from skerry.runtime.store.cloud import Clients, ObjectStore
from skerry.runtime.store.container import container_credentials
from skerry.runtime.store.interface import Profile
from skerry.runtime.store.machine import machine_token
from skerry.runtime.store.visiting import ACCESS_TOKEN, aws_visit, google_login, google_visit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from obstore.store import (
        AzureConfig,
        ClientConfig,
        GCSConfig,
        GCSCredentialProvider,
        RetryConfig,
        S3Config,
        S3CredentialProvider,
    )

# 8 MiB amortises a round trip; 4 streams fill 1 Gbit/s at 30 ms (950 of 1000 Mbit/s measured, one stream 675).
# A GET costs money and, on a wide area, 30 ms: the first look after 0.2 s, then up to 2 s apart.
REMOTE: Final = Profile(piece_bytes=8 << 20, streams=4, poll_first=0.2, poll_cap=2.0)
# A server on this machine answers in a quarter of a millisecond and sends no bill.
LOOPBACK: Final = Profile(piece_bytes=8 << 20, streams=2, poll_first=0.005, poll_cap=0.1)
# No byte for this long means a dead connection: clouds answer small requests in a second, throttled ones in five.
STALL_S: Final = 15.0
# Callers keep objects at most 64 MiB, or a read's span at most that; at 1 MB/s, the slowest link worth using, 67 s.
BULK_S: Final = 120.0
# Repeats belong to `retrying`, which knows what a lost reply means.
NO_RETRY: Final[RetryConfig] = {"max_retries": 0}

# botocore hands out keys of a role that are good for at least ten minutes; its adapter keeps them for half an hour.
BOTOCORE_KEEPS: Final = timedelta(minutes=10)

_FIXED_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How to reach one cloud. connect: makes clients that know no credentials yet. renews: these can be renewed."""

    endpoint: str
    connect: Callable[[], Clients]
    renews: bool = True
    rewrite: float = 0.0


def cloud_store(
    scheme: str,
    bucket: str,
    prefix: str,
    *,
    environment: Mapping[str, str] | None = None,
    stall_s: float = STALL_S,
    bulk_s: float = BULK_S,
) -> ObjectStore:
    """The store at `scheme://bucket/prefix`; prefix is empty or ends in `/`. Raises Invalid if it cannot hold a run.

    environment: read for what is listed above; obstore and google-auth read the process's own besides.
    """
    environment = os.environ if environment is None else environment
    try:
        match scheme:
            case "s3":
                way = _s3(bucket, environment, stall_s, bulk_s)
            case "gs":
                way = _gcs(bucket, environment, stall_s, bulk_s)
            case "az":
                way = _azure(bucket, environment, stall_s, bulk_s)
            case _:
                raise Invalid(f"no cloud store for {scheme}://; s3, gs and az are supported")
        uri = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        profile = replace(LOOPBACK if _is_loopback(way.endpoint) else REMOTE, rewrite=way.rewrite)
        return ObjectStore(uri, way.connect, prefix, profile, renews=way.renews)
    except BaseError as error:  # such as az:// without an account
        first = str(error).partition("\n")[0]
        raise Invalid(
            f"cannot open {scheme}://{bucket}: {first}; set the standard environment of this cloud (runtime/README.md)"
        ) from error


def _s3(bucket: str, environment: Mapping[str, str], stall_s: float, bulk_s: float) -> _Way:
    if bucket.endswith("--x-s3"):
        raise Invalid(
            f"s3://{bucket} is a directory bucket, whose listings have no order; use a general purpose bucket"
        )
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next((environment[name] for name in names if environment.get(name)), "")
    config: S3Config = {
        "bucket": bucket,
        "conditional_put": "etag",
        # One DELETE per key works on every server; the bulk form does not.
        "disable_bulk_delete": True,
        # TLS already protects the body, and loopback has nobody to protect it from; hashing costs 0.5 CPU-s/GB.
        "unsigned_payload": not endpoint.startswith("http://") or _is_loopback(endpoint),
    }
    if endpoint:
        config["endpoint"] = endpoint
    if region := environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"):
        config["region"] = region
    visits = aws_visit(environment) is not None
    is_fixed = not visits and any(environment.get(name) for name in _FIXED_KEYS)
    # obstore would look in the process's own environment only.
    if key := environment.get("AWS_ACCESS_KEY_ID"):
        config["access_key_id"] = key
        config["secret_access_key"] = environment.get("AWS_SECRET_ACCESS_KEY", "")
        if token := environment.get("AWS_SESSION_TOKEN"):
            config["session_token"] = token
    options = _options(endpoint)
    if bundle := environment.get("AWS_CA_BUNDLE"):
        options["root_certificate"] = Path(bundle).read_bytes()

    def connect() -> Clients:
        provider = None if is_fixed else _provider(environment)
        quick, bulk = (
            S3Store(config=config, client_options=options | times, retry_config=NO_RETRY, credential_provider=provider)
            for times in (_quick(stall_s, bulk_s), _bulk(bulk_s))
        )
        return Clients(quick=quick, bulk=bulk)

    return _Way(endpoint=endpoint, connect=connect, renews=not is_fixed)


def _provider(environment: Mapping[str, str]) -> S3CredentialProvider | None:
    """Who gives the keys of a role: the launcher's word, then the order of AWS's own clients; None is obstore."""
    if (visit := aws_visit(environment)) is not None:
        return visit
    if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None
    return container_credentials(environment) or _boto3_provider()


def _boto3_provider() -> S3CredentialProvider | None:
    """boto3's chain (profiles, SSO, assumed roles), if boto3 is installed and finds anything; else obstore's own."""
    if importlib.util.find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415  imports boto3, which is slow

    try:
        return Boto3CredentialProvider(ttl=BOTOCORE_KEEPS)
    except ValueError:  # "Received None from session.get_credentials"
        return None


def _gcs(bucket: str, environment: Mapping[str, str], stall_s: float, bulk_s: float) -> _Way:
    # Private endpoints end in the path of the one interface, and obstore uses another one, too.
    endpoint = environment.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", "").rstrip("/").removesuffix("/storage/v1")
    emulator = "" if endpoint else environment.get("STORAGE_EMULATOR_HOST", "")
    config: GCSConfig = {"bucket": bucket}
    if emulator:
        endpoint = (emulator if "://" in emulator else f"http://{emulator}").rstrip("/")
        # obstore asks for a token before every write even with `skip_signature`; most emulators take any.
        config["bearer_token"] = "any"  # noqa: S105  not a secret
    if endpoint:
        config["base_url"] = endpoint
    options = _options(endpoint)
    is_fixed = not emulator and google_visit(environment) is None and bool(environment.get(ACCESS_TOKEN))

    def connect() -> Clients:
        # A provider comes before a token.
        provider = _google_provider(environment, is_emulator=bool(emulator))
        quick, bulk = (
            GCSStore(config=config, client_options=options | times, retry_config=NO_RETRY, credential_provider=provider)
            for times in (_quick(stall_s, bulk_s), _bulk(bulk_s))
        )
        return Clients(quick=quick, bulk=bulk)

    return _Way(endpoint=endpoint, connect=connect, renews=not is_fixed, rewrite=1.0)


def _google_provider(environment: Mapping[str, str], *, is_emulator: bool) -> GCSCredentialProvider | None:
    """Who gives tokens: the launcher's word, then the order of Google's own clients; None is obstore."""
    if (visit := google_visit(environment)) is not None:
        return visit
    if is_emulator:  # a person's login is not for it
        return machine_token(environment)
    if token := environment.get(ACCESS_TOKEN):
        return lambda: {"token": token, "expires_at": None}
    return google_login(os.environ)


def _azure(container: str, environment: Mapping[str, str], stall_s: float, bulk_s: float) -> _Way:
    config: AzureConfig = {"container_name": container}
    endpoint = environment.get("AZURE_STORAGE_ENDPOINT", "")
    if account := environment.get("AZURE_STORAGE_ACCOUNT"):  # the name that Azure's own command line reads
        config["account_name"] = account
    if text := environment.get("AZURE_STORAGE_CONNECTION_STRING"):
        told = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
        endpoint = endpoint or told.get("BlobEndpoint", "")
        if "AccountName" in told:
            config["account_name"] = told["AccountName"]
        if "AccountKey" in told:
            config["account_key"] = told["AccountKey"]
        if "SharedAccessSignature" in told:
            config["sas_key"] = told["SharedAccessSignature"]
    if endpoint:
        config["endpoint"] = endpoint.rstrip("/")
    options = _options(endpoint)

    def connect() -> Clients:
        quick, bulk = (
            AzureStore(config=config, client_options=options | times, retry_config=NO_RETRY)
            for times in (_quick(stall_s, bulk_s), _bulk(bulk_s))
        )
        return Clients(quick=quick, bulk=bulk)

    return _Way(endpoint=endpoint, connect=connect)


def _options(endpoint: str) -> ClientConfig:
    """An endpoint that says http:// is the user's word that plain HTTP is meant."""
    return {"allow_http": True} if endpoint.startswith("http://") else {}


def _quick(stall_s: float, bulk_s: float) -> ClientConfig:
    return {"read_timeout": timedelta(seconds=stall_s), "timeout": timedelta(seconds=bulk_s)}


def _bulk(bulk_s: float) -> ClientConfig:
    return {"timeout": timedelta(seconds=bulk_s)}


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
