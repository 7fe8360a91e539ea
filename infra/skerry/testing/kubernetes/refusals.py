"""Answers of the API server that refuse a request, as its Status objects."""

from __future__ import annotations

from typing import Any, Final

_REASONS: Final = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
}


class Refused(Exception):  # noqa: N818  named for what happened
    """A refusal. code: of HTTP. reason: in one word; by default that of the code."""

    def __init__(self, code: int, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason or _REASONS.get(code, "InternalError")

    @property
    def status(self) -> dict[str, Any]:
        """The body of the response."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
