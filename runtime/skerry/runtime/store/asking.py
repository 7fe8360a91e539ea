"""One question to a server that gives out credentials, and what it says no with. No secret is in an error or a repr.

A server that is busy or in trouble is Retryable, whoever asks and whatever for.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from skerry.runtime.errors import Retryable, SkerryError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

    from skerry.runtime.store.lease import Lease

T = TypeVar("T")

# STS answers in a tenth of a second, on a bad day in a few.
_TIMEOUT_S: Final = 10.0
# A session token is 1 to 2 KB, an identity token 1 KB.
_MAX_BYTES: Final = 64 << 10

# Longer than any name, as long as the shortest secret.
_SECRET: Final = re.compile(r"[A-Za-z0-9+/=_.%~-]{40,}")


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer:
    """An answer of a server; without a repr, since it may hold a secret. data: google-auth's word for the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> bytes:
        """See above."""
        return self.body


def carry(
    url: str, method: str = "GET", body: bytes | None = None, headers: Mapping[str, str] | None = None, **_: object
) -> Answer:
    """google-auth's requests, as it wants them carried. Raises Retryable, which passes through it."""
    return sent(method, url, headers or {}, body)


def sent(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    bundle: str | None = None,
    direct: bool = False,
) -> Answer:
    """Any answer but that of a server that is busy or in trouble: that is Retryable. direct: past every proxy."""
    try:
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})] if direct else []
        if url.startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=bundle)))
        # https, or what the environment says of a test or of an endpoint of one's own.
        request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)  # noqa: S310
        with urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT_S) as found:
            answer = Answer(status=found.status, headers=dict(found.headers), body=found.read(_MAX_BYTES + 1))
    except urllib.error.HTTPError as error:
        with error:
            answer = Answer(status=error.code, headers=dict(error.headers), body=error.read(_MAX_BYTES + 1))
    except (OSError, http.client.HTTPException, ValueError) as error:
        # Of these only the kind: a text may quote a header.
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Retryable(f"{host(url)} does not answer: {type(why).__name__}") from None
    in_trouble = answer.status >= http.client.INTERNAL_SERVER_ERROR or answer.status == http.client.TOO_MANY_REQUESTS
    if in_trouble or len(answer.body) > _MAX_BYTES:
        raise Retryable(f"{host(url)} is in trouble: status {answer.status}, {len(answer.body)} bytes")
    return answer


def told_by(lease: Lease[T]) -> tuple[T, dt.datetime]:
    """What the lease gives. Its errors start here: obstore copies a traceback's lines of code into its own text."""
    try:
        return lease.current()
    except SkerryError as error:
        raise type(error)(str(error)) from None


def reason(error: Exception) -> str:
    """What Google says no with: an error of OAuth, or of its APIs in general where it did not get so far.

    google-auth's errors hold whole answers. One that says no error may hold what was asked for, and is not told.
    """
    body = str(error.args[-1]) if error.args else ""
    try:
        told: Any = json.loads(body)
    except ValueError:
        return body
    try:
        found: Any = told["error"]
        return f"{found}: {told.get('error_description', '')}" if isinstance(found, str) else str(found["message"])
    except (KeyError, TypeError):
        return f"an answer without an error ({type(error).__name__})"


def short(text: str) -> str:
    """A server's words without what may be a secret, since some quote what they were sent."""
    return _SECRET.sub("...", " ".join(text.split()))[:300]


def host(url: str) -> str:
    """What an error may tell of an address."""
    return urlsplit(url).netloc
