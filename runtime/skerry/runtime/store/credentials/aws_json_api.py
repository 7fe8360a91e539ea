"""Calls the JSON API of an AWS service with a signed request, without an SDK, and names the meaning of a refusal.

Source: AWS JSON 1.1 protocol; "Common error types" of the API references.
"""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.credentials.aws_signature import aws_endpoint, signed_headers
from skerry.runtime.store.credentials.http import send_request

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

    from skerry.runtime.store.credentials.aws_signature import AwsKeys
    from skerry.runtime.store.credentials.http import HttpResponse

# Error codes that mean "try again"; their status is 400.
_BUSY: Final = ("Throttl", "TooManyRequests", "RequestLimitExceeded", "InternalServiceError", "InternalServerError")
_DENIED: Final = ("AccessDenied", "UnrecognizedClient", "ExpiredToken", "InvalidSignature", "IncompleteSignature")


def call_aws(
    keys: AwsKeys,
    environment: Mapping[str, str],
    *,
    service: str,
    region: str,
    action: str,
    request: Mapping[str, object],
    now: dt.datetime,
    max_bytes: int,
) -> HttpResponse:
    """The response, also a refusal. action: with the name of the API, `SageMaker.ListTags`. Raises Retryable."""
    url, body = aws_endpoint(environment, service, region), json.dumps(request).encode()
    headers = signed_headers(
        keys,
        service=service,
        region=region,
        host=urlsplit(url).netloc,
        headers={"content-type": "application/x-amz-json-1.1", "x-amz-target": action},
        body=body,
        now=now,
    )
    bundle = environment.get("AWS_CA_BUNDLE")
    return send_request("POST", url, headers, body, ca_bundle=bundle, max_bytes=max_bytes)


def error_code(document: object) -> str:
    """The error code of a refusal, as far as the document has one: "com.amazonaws.x#AccessDeniedException"."""
    kind = document.get("__type") if isinstance(document, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return kind.rpartition("#")[2] if isinstance(kind, str) else ""


def kind_of_refusal(status: int, code: str) -> type[SkerryError]:
    """Retryable, Unauthorized or Invalid, for a response that is not OK."""
    if any(busy in code for busy in _BUSY):
        return Retryable
    if status in {http.client.FORBIDDEN, http.client.UNAUTHORIZED} or any(denied in code for denied in _DENIED):
        return Unauthorized
    return Invalid
