"""HTTP requests to credential services, with errors that contain no secret.

A service that is unreachable or overloaded (5xx, 429) is always Retryable.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from skerry.runtime.errors import Retryable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import ValidationError

# STS responds within a tenth of a second, on a bad day within a few seconds.
_TIMEOUT_S: Final = 10.0
# A session token has 1 to 2 KB, an identity token 1 KB.
_MAX_BYTES: Final = 64 << 10

# Longer than any name, as short as the shortest secret.
_SECRET: Final = re.compile(r"[A-Za-z0-9+/=_.%~-]{40,}")


@dataclass(frozen=True, kw_only=True, repr=False)
class HttpResponse:
    """A response of a credential service. Has no repr because the body may contain a secret."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> bytes:
        """The body, under the name that google-auth uses."""
        return self.body


def send_request(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    ca_bundle: str | None = None,
    use_proxy: bool = True,
    max_bytes: int = _MAX_BYTES,
) -> HttpResponse:
    """The response, whatever its status below 500. Raises Retryable for no response, 429, 5xx or an oversized body."""
    try:
        handlers: list[urllib.request.BaseHandler] = [] if use_proxy else [urllib.request.ProxyHandler({})]
        if url.startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_bundle)))
        # https, unless the environment names a plain endpoint, as tests and private clouds do.
        request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)  # noqa: S310
        with urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT_S) as reply:
            response = HttpResponse(status=reply.status, headers=dict(reply.headers), body=reply.read(max_bytes + 1))
    except urllib.error.HTTPError as error:
        with error:
            response = HttpResponse(status=error.code, headers=dict(error.headers), body=error.read(max_bytes + 1))
    except (OSError, http.client.HTTPException, ValueError) as error:
        # Only the class: the text may quote a header.
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Retryable(f"no response from {host_of(url)}: {type(cause).__name__}") from None
    failed = response.status >= http.client.INTERNAL_SERVER_ERROR or response.status == http.client.TOO_MANY_REQUESTS
    if failed or len(response.body) > max_bytes:
        raise Retryable(f"{host_of(url)} failed: status={response.status} bytes={len(response.body)}")
    return response


def google_auth_transport(
    url: str, method: str = "GET", body: bytes | None = None, headers: Mapping[str, str] | None = None, **_: object
) -> HttpResponse:
    """Sends google-auth's requests (its `transport.Request`). Raises Retryable, which google-auth passes on."""
    return send_request(method, url, headers or {}, body)


def google_error_text(error: Exception) -> str:
    """The reason in a google-auth error, which contains a whole response: an OAuth error or an API error.

    A response without an error may contain the requested token; only the error's class is returned then.
    """
    body = str(error.args[-1]) if error.args else ""
    try:
        document: Any = json.loads(body)
    except ValueError:
        return body
    try:
        reason: Any = document["error"]
        if isinstance(reason, str):
            return f"{reason}: {document.get('error_description', '')}"
        return str(reason["message"])
    except (KeyError, TypeError):
        return f"response without an error ({type(error).__name__})"


def redact(text: str) -> str:
    """A service's message, shortened and without anything that may be a secret: some services quote the request."""
    return _SECRET.sub("...", " ".join(text.split()))[:300]


def invalid_fields(error: ValidationError) -> str:
    """The names of the wrong fields, without their values."""
    return ",".join(sorted({str(item["loc"][0]) if item["loc"] else "document" for item in error.errors()}))


def host_of(url: str) -> str:
    """The host and port of a URL; the rest may be secret."""
    return urlsplit(url).netloc
