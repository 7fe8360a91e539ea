"""What Google's errors mean for a caller: one body of JSON in three dialects, read into what to do next. Does no I/O.

Sources: AIP-193 and google.rpc.ErrorInfo (most services), "HTTP status and error codes for JSON" (Cloud Storage, and
the reasons of older services), RFC 6749 (token endpoints).
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from skerry.infra.graph import Json

_Tree: TypeAlias = "Mapping[str, Json]"


class Kind(enum.Enum):
    """What a caller does next."""

    BUSY = "busy"
    DENIED = "denied"
    EXPIRED = "expired"
    ABSENT = "absent"
    DISABLED = "disabled"
    TAKEN = "taken"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What a service said. status: google.rpc.Code by name. reasons: of ErrorInfo, or of the older form.

    permission, service: what a refusal names as lacking, "" if it does not. consumer: the project, by its number or id,
    that the call was counted for.
    """

    http: int
    status: str
    message: str
    reasons: frozenset[str] = frozenset()
    permission: str = ""
    service: str = ""
    consumer: str = ""

    @property
    def is_unread(self) -> bool:
        """Whether what was asked was surely not done: it was turned away for coming too often."""
        return self.http == 429 or bool(self.reasons & _TOO_OFTEN)

    @property
    def is_of_a_rate(self) -> bool:
        """Whether it was turned away for coming too often, which is over within a minute or two; a quota is not."""
        rate = self.reasons & _TOO_OFTEN or (self.http == 429 and _RATE.search(self.message))
        return self.is_unread and bool(rate)

    def __str__(self) -> str:
        """In the service's own words."""
        return f"{self.status or self.http}: {self.message}".rstrip(": ")


# Older services tell a rate with 403; newer ones with 429.
_TOO_OFTEN: Final = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED"})
# Not every service gives a reason beside its words.
_RATE: Final = re.compile(r"per (?:minute|second|user)|rate limit|too (?:many requests|quickly)", re.IGNORECASE)
_DISABLED: Final = frozenset({"SERVICE_DISABLED", "accessNotConfigured"})
_BUSY_HTTP: Final = frozenset({408, 429, 500, 502, 503, 504})
# google.rpc.Code, as a failed operation has it: by number.
_STATUSES: Final = {
    1: ("CANCELLED", 499),
    2: ("UNKNOWN", 500),
    3: ("INVALID_ARGUMENT", 400),
    4: ("DEADLINE_EXCEEDED", 504),
    5: ("NOT_FOUND", 404),
    6: ("ALREADY_EXISTS", 409),
    7: ("PERMISSION_DENIED", 403),
    8: ("RESOURCE_EXHAUSTED", 429),
    9: ("FAILED_PRECONDITION", 400),
    10: ("ABORTED", 409),
    11: ("OUT_OF_RANGE", 400),
    12: ("UNIMPLEMENTED", 501),
    13: ("INTERNAL", 500),
    14: ("UNAVAILABLE", 503),
    15: ("DATA_LOSS", 500),
    16: ("UNAUTHENTICATED", 401),
}
# "Permission 'iam.roles.create' denied", "does not have storage.buckets.get access to".
_PERMISSION: Final = re.compile(r"\b([a-z][a-zA-Z]+(?:\.[a-zA-Z]+){2,3})['\"]? (?:denied|access|permission)")
_TOLD: Final = 500


def refusal(http: int, body: bytes) -> Refusal:
    """What an answer that is an error says; one that is no JSON (a proxy's) says so much of itself."""
    try:
        told = _mapping(json.loads(body))
    except ValueError:
        told = _mapping(None)
    error = told.get("error")
    if isinstance(error, Mapping):
        return _of_status(http, error)
    if isinstance(error, str):
        return Refusal(http=http, status=error, message=str(told.get("error_description") or ""))
    return Refusal(http=http, status="", message=body.decode(errors="replace").strip()[:_TOLD])


def failure(error: Mapping[str, Any]) -> Refusal:
    """What a google.rpc.Status says with which an operation ended."""
    status, http = _STATUSES.get(int(error.get("code", 2)), _STATUSES[2])
    return _of_status(http, {**error, "status": status})


def kind_of(refused: Refusal) -> Kind:
    """What it asks of the caller."""
    if refused.reasons & _DISABLED:
        return Kind.DISABLED
    if refused.is_unread or refused.http in _BUSY_HTTP or refused.status in {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}:
        return Kind.BUSY
    if refused.http == 401 or refused.status in {"invalid_grant", "UNAUTHENTICATED"}:
        return Kind.EXPIRED
    # Without billing nobody has the right, and no right helps.
    if refused.http == 403 and not refused.reasons & {"BILLING_DISABLED", "accountDisabled", "billingNotEnabled"}:
        return Kind.DENIED
    if refused.http in {404, 410}:
        return Kind.ABSENT
    # 409 ABORTED, and 412: somebody else wrote first. The caller reads again before it repeats.
    return Kind.TAKEN if refused.http in {409, 412} else Kind.REFUSED


def _of_status(http: int, error: _Tree) -> Refusal:
    message = str(error.get("message", ""))
    infos = [one for one in _mappings(error.get("details")) if str(one.get("@type", "")).endswith(".ErrorInfo")]
    noted = [_mapping(one.get("metadata")) for one in infos]
    older = _mappings(error.get("errors"))
    named = _PERMISSION.search(message)
    violations = [
        f"{one.get('field', '')}: {one.get('description', '')}"
        for detail in _mappings(error.get("details"))
        for one in _mappings(detail.get("fieldViolations"))
    ]
    fields = [text for text in violations if text.partition(": ")[2] not in message]
    return Refusal(
        http=http,
        status=str(error.get("status", "")),
        message="; ".join([message, *fields]),
        reasons=frozenset(str(one["reason"]) for one in (*infos, *older) if one.get("reason")),
        permission=_first(noted, "permission") or (named[1] if named else ""),
        service=_first(noted, "service"),
        consumer=_first(noted, "consumer").removeprefix("projects/"),
    )


def _first(noted: Sequence[_Tree], name: str) -> str:
    return next((str(one[name]) for one in noted if one.get(name)), "")


def _mappings(value: Json) -> list[_Tree]:
    listed = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return [one for one in listed if isinstance(one, Mapping)]


def _mapping(value: Json) -> _Tree:
    return value if isinstance(value, Mapping) else {}
