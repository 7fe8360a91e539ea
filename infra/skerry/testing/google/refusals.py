"""The error of Google's services, formatted for each of their three API styles.

Sources: google.rpc.Status and AIP-193 for most; "HTTP status and error codes for JSON" and "for XML" of Cloud Storage.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping

Face: TypeAlias = Literal["rpc", "storage", "xml"]
"""The error format of an API: google.rpc.Status, the storage JSON API's, the XML API's."""

_STATUSES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
    416: "OUT_OF_RANGE",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}
# reason of the storage JSON API, Code of the XML API
_STORAGE: Final = {
    400: ("invalid", "InvalidArgument"),
    401: ("authError", "AuthenticationRequired"),
    403: ("forbidden", "AccessDenied"),
    404: ("notFound", "NoSuchKey"),
    409: ("conflict", "Conflict"),
    412: ("conditionNotMet", "PreconditionFailed"),
    416: ("requestedRangeNotSatisfiable", "InvalidRange"),
    429: ("rateLimitExceeded", "SlowDown"),
    500: ("backendError", "InternalError"),
    501: ("notImplemented", "NotImplemented"),
    503: ("backendError", "ServiceUnavailable"),
}


class Refusal(Exception):  # noqa: N818  named for what happened
    """An error response. status: google.rpc.Code's name if the HTTP status alone does not determine it.

    reason: of ErrorInfo, or the storage JSON API's. code_xml: the XML API's Code. details: as in the response.
    """

    def __init__(
        self,
        http: int,
        message: str,
        *,
        status: str | None = None,
        reason: str | None = None,
        code_xml: str | None = None,
        details: tuple[Mapping[str, Any], ...] = (),
    ) -> None:
        super().__init__(message)
        self.http: Final = http
        self.message: Final = message
        self.status: Final = status or _STATUSES.get(http, "UNKNOWN")
        self.reason: Final = reason
        self.code_xml: Final = code_xml
        self.details: Final = details

    def formatted(self, face: Face) -> tuple[int, str, bytes]:
        """Return status, content type and body."""
        reason, code = _STORAGE.get(self.http, ("unknown", "Unknown"))
        match face:
            case "xml":
                elements = f"<Code>{escape(self.code_xml or code)}</Code><Message>{escape(self.message)}</Message>"
                return (
                    self.http,
                    "application/xml; charset=UTF-8",
                    f"<?xml version='1.0'?><Error>{elements}</Error>".encode(),
                )
            case "storage":
                entry = {"domain": "global", "reason": self.reason or reason, "message": self.message}
                error: dict[str, Any] = {"code": self.http, "message": self.message, "errors": [entry]}
            case "rpc":
                error = {"code": self.http, "message": self.message, "status": self.status}
                if self.details:
                    error["details"] = list(self.details)
        return self.http, "application/json; charset=UTF-8", json.dumps({"error": error}).encode()


def absent(message: str) -> Refusal:
    """Return a 404."""
    return Refusal(404, message)


def denied(permission: str, resource: str) -> Refusal:
    """Return a 403 with the message of most services."""
    return Refusal(
        403, f"Permission '{permission}' denied on resource '{resource}' (or it may not exist).", reason="forbidden"
    )


def invalid(message: str, *fields: str) -> Refusal:
    """Return a 400. fields: the invalid fields."""
    violations = [{"field": field, "description": message} for field in fields]
    bad = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}
    return Refusal(400, message, details=(bad,) if fields else ())
