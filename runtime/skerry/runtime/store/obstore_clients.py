"""Creates obstore's clients for a bucket from the standard environment of each cloud. Sends no request.

s3   AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION, before them the region that
     SKERRY_BUCKET_REGION_* names for the bucket, AWS_CA_BUNDLE. Keys: AWS_* and EC2 by obstore itself; web identity by
     `aws_web_identity`; ECS and EKS by `aws_container`; profiles and SSO by boto3 if it is installed
gs   CLOUDSDK_AUTH_ACCESS_TOKEN; GOOGLE_APPLICATION_CREDENTIALS and gcloud's login by google-auth if it is installed,
     otherwise these and the metadata server by obstore itself; CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE, or
     STORAGE_EMULATOR_HOST, which receives no login but a token of the metadata server GCE_METADATA_HOST if that is set
az   AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_* by obstore itself; AZURE_STORAGE_CONNECTION_STRING
hf   AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, made for the S3 gateway of Hugging Face's buckets; HF_S3_ENDPOINT

SKERRY_AWS_ROLE and SKERRY_GOOGLE_AUDIENCE, set for a job in another cloud than its bucket, have precedence over all of
these (`aws_from_google`, `google_from_aws`). Credentials that the caller passes have precedence over all.

Keys of a role are renewed before they expire. Keys in the environment cannot be renewed.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from skerry.runtime.contract import BUCKET_REGION
from skerry.runtime.errors import Invalid
from skerry.runtime.store.credentials.aws_container import container_credentials
from skerry.runtime.store.credentials.aws_from_google import aws_from_google
from skerry.runtime.store.credentials.aws_signature import AWS_DOMAIN, aws_domain
from skerry.runtime.store.credentials.aws_web_identity import aws_from_token_file
from skerry.runtime.store.credentials.google_from_aws import google_from_aws
from skerry.runtime.store.credentials.google_login import ACCESS_TOKEN, google_login
from skerry.runtime.store.credentials.google_metadata import metadata_token
from skerry.runtime.store.interface import Profile
from skerry.runtime.store.obstore_store import Clients, ObjectStore

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
# A GET costs money and, over a wide area, 30 ms: the first poll after 50 ms, since replicas of equal speed are ready
# together; then up to 2 s apart.
REMOTE: Final = Profile(piece_bytes=8 << 20, streams=4, poll_first=0.05, poll_cap=2.0)
# A server on this machine responds in a quarter of a millisecond and costs nothing.
LOOPBACK: Final = Profile(piece_bytes=8 << 20, streams=2, poll_first=0.005, poll_cap=0.1)
# No byte for this long means a dead connection: clouds answer small requests in a second, throttled ones in five.
STALL_S: Final = 15.0
# Objects and spans have at most 64 MiB; at 1 MB/s, the slowest useful link, they take 67 s.
BULK_S: Final = 120.0
# Only `retrying` repeats requests, because it resolves lost replies.
NO_RETRY: Final[RetryConfig] = {"max_retries": 0}

# botocore returns keys of a role that are valid for at least ten minutes; its adapter caches them for half an hour.
BOTOCORE_VALIDITY: Final = timedelta(minutes=10)

# The S3 gateway of Hugging Face's buckets: one endpoint for each namespace, buckets in the path.
_HF_ENDPOINT: Final = "https://s3.hf.co"

_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

_FIXED_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")


@dataclass(frozen=True, kw_only=True)
class _Connector:
    """The way to reach one cloud. connect: creates clients without cached credentials. renews: these can be renewed."""

    endpoint: str
    connect: Callable[[], Clients]
    renews: bool = True
    rewrite: float = 0.0


def open_cloud_store(
    scheme: str,
    bucket: str,
    prefix: str,
    *,
    environment: Mapping[str, str] | None = None,
    credentials: S3CredentialProvider | GCSCredentialProvider | None = None,
    stall_s: float = STALL_S,
    bulk_s: float = BULK_S,
) -> ObjectStore:
    """The store at `scheme://bucket/prefix`; prefix is empty or ends in `/`. Raises Invalid if it cannot hold a run.

    In hf://, `bucket` is the namespace and the prefix begins with the bucket. environment: read for the variables
    above; obstore and google-auth also read the process's own. credentials: of the scheme's cloud, s3 or gs; the others
    ignore it.
    """
    environment = os.environ if environment is None else environment
    try:
        match scheme:
            case "s3":
                own = cast("S3CredentialProvider | None", credentials)
                connector = _s3(bucket, environment, stall_s, bulk_s, own)
            case "gs":
                token = cast("GCSCredentialProvider | None", credentials)
                connector = _gcs(bucket, environment, stall_s, bulk_s, token)
            case "az":
                connector = _azure(bucket, environment, stall_s, bulk_s)
            case "hf":
                namespace, (bucket_name, _, prefix) = bucket, prefix.partition("/")
                bucket = f"{namespace}/{bucket_name}"
                connector = _hf(namespace, bucket_name, environment, stall_s, bulk_s)
            case _:
                raise Invalid(f"unknown cloud scheme {scheme}://; use s3, gs, az or hf")
        uri = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        profile = replace(LOOPBACK if _is_loopback(connector.endpoint) else REMOTE, rewrite=connector.rewrite)
        return ObjectStore(uri, connector.connect, prefix, profile, renews=connector.renews)
    except BaseError as error:  # such as az:// without an account
        # obstore quotes what it cannot read, such as the key of an account; so the error has no cause either.
        first_line = _QUOTED.sub('"..."', str(error)).partition("\n")[0]
        raise Invalid(
            f"cannot open {scheme}://{bucket}: {first_line}; set the standard environment of this cloud "
            "(runtime/README.md)"
        ) from None


def _s3(
    bucket: str,
    environment: Mapping[str, str],
    stall_s: float,
    bulk_s: float,
    own: S3CredentialProvider | None = None,
) -> _Connector:
    if bucket.endswith("--x-s3"):
        raise Invalid(f"s3://{bucket} is a directory bucket with unordered listings; use a general purpose bucket")
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next((environment[name] for name in names if environment.get(name)), "")
    has_fixed = any(environment.get(name) for name in _FIXED_KEYS)
    is_fixed = own is None and has_fixed and aws_from_google(environment) is None
    config = _s3_config(bucket, environment, endpoint)
    if own is not None:
        config["skip_signature"] = False  # obstore reads AWS_SKIP_SIGNATURE itself
    options = _plain_http(endpoint)
    if ca_bundle := environment.get("AWS_CA_BUNDLE"):
        options["root_certificate"] = Path(ca_bundle).read_bytes()

    def connect() -> Clients:
        provider = None if is_fixed else own or _s3_provider(environment)

        def create(times: ClientConfig) -> S3Store:
            return S3Store(
                config=config, client_options=options | times, retry_config=NO_RETRY, credential_provider=provider
            )

        return Clients(create, stall_s, bulk_s)

    return _Connector(endpoint=endpoint, connect=connect, renews=not is_fixed)


def _hf(namespace: str, bucket: str, environment: Mapping[str, str], stall_s: float, bulk_s: float) -> _Connector:
    if not bucket:
        raise Invalid(f"hf://{namespace} names no bucket; write hf://{namespace}/bucket/prefix")
    if not any(environment.get(name) for name in _FIXED_KEYS):
        raise Invalid(
            f"hf://{namespace}/{bucket} needs keys of its S3 gateway: create them on huggingface.co, and set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    endpoint = f"{environment.get('HF_S3_ENDPOINT') or _HF_ENDPOINT}/{namespace}"
    return _s3(bucket, {**environment, "AWS_ENDPOINT_URL_S3": endpoint, "AWS_REGION": "us-east-1"}, stall_s, bulk_s)


def _s3_config(bucket: str, environment: Mapping[str, str], endpoint: str) -> S3Config:
    config: S3Config = {
        "bucket": bucket,
        "conditional_put": "etag",
        # One DELETE per key works on every server; the bulk form does not.
        "disable_bulk_delete": True,
        # TLS already protects the body, and loopback needs no protection; hashing costs 0.5 CPU-s/GB.
        "unsigned_payload": not endpoint.startswith("http://") or _is_loopback(endpoint),
    }
    if endpoint:
        config["endpoint"] = endpoint
    if (
        region := _region_of(bucket, environment)
        or environment.get("AWS_REGION")
        or environment.get("AWS_DEFAULT_REGION")
    ):
        config["region"] = region
        if not endpoint and aws_domain(region) != AWS_DOMAIN:  # the client knows no other domain
            config["endpoint"] = f"https://s3.{region}.{aws_domain(region)}"
    # obstore would read only the process's own environment.
    if key := environment.get("AWS_ACCESS_KEY_ID"):
        config["access_key_id"] = key
        config["secret_access_key"] = environment.get("AWS_SECRET_ACCESS_KEY", "")
        if token := environment.get("AWS_SESSION_TOKEN"):
            config["session_token"] = token
    return config


def _region_of(bucket: str, environment: Mapping[str, str]) -> str | None:
    """The region that the launcher names for this bucket; None if it names none."""
    named = (value.partition("=") for name, value in environment.items() if name.startswith(BUCKET_REGION))
    return next((region for name, _, region in named if name == bucket), None)


def _s3_provider(environment: Mapping[str, str]) -> S3CredentialProvider | None:
    """The launcher's choice, otherwise the order of AWS's own clients; None leaves it to obstore."""
    if (provider := aws_from_google(environment)) is not None:
        return provider
    return aws_from_token_file(environment) or container_credentials(environment) or _boto3_provider()


def _boto3_provider() -> S3CredentialProvider | None:
    """boto3's chain (profiles, SSO, assumed roles); None if boto3 is not installed or finds nothing."""
    if importlib.util.find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415  imports boto3, which is slow

    try:
        return Boto3CredentialProvider(ttl=BOTOCORE_VALIDITY)
    except ValueError:  # "Received None from session.get_credentials"
        return None


def _gcs(
    bucket: str,
    environment: Mapping[str, str],
    stall_s: float,
    bulk_s: float,
    own: GCSCredentialProvider | None = None,
) -> _Connector:
    # The variable names the JSON API's path of a private endpoint; obstore also uses the XML API.
    endpoint = environment.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", "").rstrip("/").removesuffix("/storage/v1")
    emulator = "" if endpoint else environment.get("STORAGE_EMULATOR_HOST", "")
    config: GCSConfig = {"bucket": bucket}
    if emulator:
        endpoint = (emulator if "://" in emulator else f"http://{emulator}").rstrip("/")
        # obstore requests a token before every write even with `skip_signature`; most emulators accept any.
        config["bearer_token"] = "any"  # noqa: S105  not a secret
    if endpoint:
        config["base_url"] = endpoint
    options = _plain_http(endpoint)
    if emulator:  # it must not receive a person's login
        own = None
    if own is not None:
        config["skip_signature"] = False  # obstore reads GOOGLE_SKIP_SIGNATURE itself
    has_token = own is None and not emulator and bool(environment.get(ACCESS_TOKEN))
    is_fixed = has_token and google_from_aws(environment) is None

    def connect() -> Clients:
        # A provider has precedence over a token.
        provider = own or _google_provider(environment, is_emulator=bool(emulator))

        def create(times: ClientConfig) -> GCSStore:
            return GCSStore(
                config=config, client_options=options | times, retry_config=NO_RETRY, credential_provider=provider
            )

        return Clients(create, stall_s, bulk_s)

    return _Connector(endpoint=endpoint, connect=connect, renews=not is_fixed, rewrite=1.0)


def _google_provider(environment: Mapping[str, str], *, is_emulator: bool) -> GCSCredentialProvider | None:
    """The launcher's choice, otherwise the order of Google's own clients; None leaves it to obstore."""
    if (provider := google_from_aws(environment)) is not None:
        return provider
    if is_emulator:  # it must not receive a person's login
        return metadata_token(environment)
    if token := environment.get(ACCESS_TOKEN):
        return lambda: {"token": token, "expires_at": None}
    return google_login(os.environ)


def _azure(container: str, environment: Mapping[str, str], stall_s: float, bulk_s: float) -> _Connector:
    config: AzureConfig = {"container_name": container}
    endpoint = environment.get("AZURE_STORAGE_ENDPOINT", "")
    if account := environment.get("AZURE_STORAGE_ACCOUNT"):  # the name that Azure's own command line reads
        config["account_name"] = account
    if text := environment.get("AZURE_STORAGE_CONNECTION_STRING"):
        settings = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
        endpoint = endpoint or settings.get("BlobEndpoint", "")
        if "AccountName" in settings:
            config["account_name"] = settings["AccountName"]
        if "AccountKey" in settings:
            config["account_key"] = settings["AccountKey"]
        if "SharedAccessSignature" in settings:
            config["sas_key"] = settings["SharedAccessSignature"]
    if endpoint:
        config["endpoint"] = endpoint.rstrip("/")
    options = _plain_http(endpoint)

    def create(times: ClientConfig) -> AzureStore:
        return AzureStore(config=config, client_options=options | times, retry_config=NO_RETRY)

    return _Connector(endpoint=endpoint, connect=lambda: Clients(create, stall_s, bulk_s))


def _plain_http(endpoint: str) -> ClientConfig:
    """Allows plain HTTP if the user wrote an endpoint with http://."""
    return {"allow_http": True} if endpoint.startswith("http://") else {}


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
