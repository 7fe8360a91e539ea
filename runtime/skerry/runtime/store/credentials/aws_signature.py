"""Signs requests to AWS. Nothing here has a repr that shows a secret.

Source: AWS Signature Version 4, "Create a signed request".
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

# The suffix of a variable is the service's name in the SDKs.
_VARIABLES: Final = {"secretsmanager": "SECRETS_MANAGER"}
AWS_DOMAIN: Final = "amazonaws.com"
_DOMAINS: Final = {"cn-": "amazonaws.com.cn", "eusc-": "amazonaws.eu"}
# The first part of the host, where it is not the service's name.
_HOSTS: Final = {"sagemaker": "api.sagemaker"}


@dataclass(frozen=True, kw_only=True, repr=False)
class AwsKeys:
    """AWS credentials. session: of temporary ones."""

    name: str
    secret: str
    session: str | None


def aws_endpoint(environment: Mapping[str, str], service: str, region: str) -> str:
    """The configured endpoint of a service (`sts`), otherwise the region's own; ends in `/`."""
    names = (f"AWS_ENDPOINT_URL_{_VARIABLES.get(service, service.upper())}", "AWS_ENDPOINT_URL")
    configured = next((environment[name] for name in names if environment.get(name)), None)
    if configured:
        return f"{configured.rstrip('/')}/"
    return f"https://{_HOSTS.get(service, service)}.{region}.{aws_domain(region)}/"


def aws_domain(region: str) -> str:
    """The end of the names of a region's services: another one in China and in AWS's European partition."""
    return next((domain for start, domain in _DOMAINS.items() if region.startswith(start)), AWS_DOMAIN)


def signed_headers(
    keys: AwsKeys, *, service: str, region: str, host: str, headers: Mapping[str, str], body: bytes, now: dt.datetime
) -> dict[str, str]:
    """The headers of a signed POST to the root of a service: those given, in lower case, and the signature's. Pure."""
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    headers = {**headers, "host": host, "x-amz-date": stamp}
    if keys.session:
        headers["x-amz-security-token"] = keys.session
    signed = ";".join(sorted(headers))
    canonical = "".join(f"{key}:{headers[key]}\n" for key in sorted(headers))
    request = f"POST\n/\n\n{canonical}\n{signed}\n{hashlib.sha256(body).hexdigest()}"
    scope = f"{day}/{region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{keys.secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    authorization = f"AWS4-HMAC-SHA256 Credential={keys.name}/{scope}, SignedHeaders={signed}, Signature={signature}"
    return {**headers, "authorization": authorization}
