"""Formats errors as each AWS service words them."""

from __future__ import annotations

import json
from typing import Final, Literal
from xml.sax.saxutils import escape

_THROTTLED: Final = {
    "s3": (503, "SlowDown"),
    "ec2": (503, "RequestLimitExceeded"),
    "batch": (429, "TooManyRequestsException"),
}
_DENIED: Final = {"s3": (403, "AccessDenied"), "ec2": (403, "UnauthorizedOperation"), "iam": (403, "AccessDenied")}


def injected_error(service: str, fault: Literal["throttle", "deny"]) -> tuple[int, str, bytes]:
    """Return status, content type and body of this service's response to an injected fault."""
    if fault == "throttle":
        query = service in {"iam", "sts"}
        status, code = _THROTTLED.get(service, (400, "Throttling" if query else "ThrottlingException"))
        return error_response(service, status, code, "Rate exceeded")
    status, code = _DENIED.get(service, (403, "AccessDeniedException"))
    return error_response(service, status, code, "not authorized to perform this operation (injected fault)")


def error_response(service: str, status: int, code: str, message: str) -> tuple[int, str, bytes]:
    """Return an error in this service's format: status, content type and body."""
    detail = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    match service:
        case "s3":
            text = f"<Error>{detail}</Error>"
        case "ec2":
            text = f"<Response><Errors><Error>{detail}</Error></Errors><RequestID>0</RequestID></Response>"
        case "iam" | "sts":
            text = f"<ErrorResponse><Error>{detail}</Error><RequestId>0</RequestId></ErrorResponse>"
        case _:
            return status, "application/json", json.dumps({"__type": code, "message": message}).encode()
    return status, "text/xml", text.encode()
