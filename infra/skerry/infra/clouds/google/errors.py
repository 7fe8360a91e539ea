"""Maps Google's errors, JSON in three dialects, to the caller's next step. Does no I/O.

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
    from skerry.infra.provision.graph import Json

_Tree: TypeAlias = "Mapping[str, Json]"


class Kind(enum.Enum):
    """The caller's next step."""

    BUSY = "busy"
    DENIED = "denied"
    EXPIRED = "expired"
    ABSENT = "absent"
    DISABLED = "disabled"
    TAKEN = "taken"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An error in a service's answer. status: google.rpc.Code by name. reasons: of ErrorInfo, or of the older form.

    permission, service: named as missing, or "". consumer: the project, by number or id, that the call was counted for.
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
        """True if the request was surely not executed: there were too many requests."""
        return self.http == 429 or bool(self.reasons & _RATE_REASONS)

    @property
    def is_of_a_rate(self) -> bool:
        """True for a rate limit, which ends within a minute or two; a quota does not."""
        rate = self.reasons & _RATE_REASONS or (self.http == 429 and _RATE.search(self.message))
        return self.is_unread and bool(rate)

    def __str__(self) -> str:
        """The service's own message."""
        return f"{self.status or self.http}: {self.message}".rstrip(": ")


# Older services report a rate limit with 403; newer ones with 429.
_RATE_REASONS: Final = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED"})
# Not every service adds a reason to its message.
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
_LONGEST_MESSAGE: Final = 500


def parse_refusal(http: int, body: bytes) -> Refusal:
    """The refusal in an error answer; without JSON (a proxy's), the beginning of its text."""
    try:
        parsed = _mapping(json.loads(body))
    except ValueError:
        parsed = _mapping(None)
    error = parsed.get("error")
    if isinstance(error, Mapping):
        return _of_status(http, error)
    if isinstance(error, str):
        return Refusal(http=http, status=error, message=str(parsed.get("error_description") or ""))
    return Refusal(http=http, status="", message=body.decode(errors="replace").strip()[:_LONGEST_MESSAGE])


def failure(error: Mapping[str, Any]) -> Refusal:
    """The refusal in the google.rpc.Status of a failed operation."""
    status, http = _STATUSES.get(int(error.get("code", 2)), _STATUSES[2])
    return _of_status(http, {**error, "status": status})


def kind_of(refused: Refusal) -> Kind:
    """The caller's next step after a refusal."""
    if refused.reasons & _DISABLED:
        return Kind.DISABLED
    if refused.is_unread or refused.http in _BUSY_HTTP or refused.status in {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}:
        return Kind.BUSY
    if refused.http == 401 or refused.status in {"invalid_grant", "UNAUTHENTICATED"}:
        return Kind.EXPIRED
    # Without billing, no permission helps.
    if refused.http == 403 and not refused.reasons & {"BILLING_DISABLED", "accountDisabled", "billingNotEnabled"}:
        return Kind.DENIED
    if refused.http in {404, 410}:
        return Kind.ABSENT
    # 409 ABORTED, and 412: another process wrote first. The caller reads again before it repeats.
    return Kind.TAKEN if refused.http in {409, 412} else Kind.REFUSED


def _of_status(http: int, error: _Tree) -> Refusal:
    message = str(error.get("message", ""))
    infos = [
        mapping for mapping in _mappings(error.get("details")) if str(mapping.get("@type", "")).endswith(".ErrorInfo")
    ]
    metadata = [_mapping(info.get("metadata")) for info in infos]
    older = _mappings(error.get("errors"))
    match = _PERMISSION.search(message)
    violations = [
        f"{mapping.get('field', '')}: {mapping.get('description', '')}"
        for detail in _mappings(error.get("details"))
        for mapping in _mappings(detail.get("fieldViolations"))
    ]
    fields = [text for text in violations if text.partition(": ")[2] not in message]
    return Refusal(
        http=http,
        status=str(error.get("status", "")),
        message="; ".join([message, *fields]),
        reasons=frozenset(str(detail["reason"]) for detail in (*infos, *older) if detail.get("reason")),
        permission=_first(metadata, "permission") or (match[1] if match else ""),
        service=_first(metadata, "service"),
        consumer=_first(metadata, "consumer").removeprefix("projects/"),
    )


def _first(metadata: Sequence[_Tree], name: str) -> str:
    return next((str(fields[name]) for fields in metadata if fields.get(name)), "")


def _mappings(value: Json) -> list[_Tree]:
    listed = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return [element for element in listed if isinstance(element, Mapping)]


def _mapping(value: Json) -> _Tree:
    return value if isinstance(value, Mapping) else {}
