"""Faults that a test asks for: the n-th writing call fails before it has an effect, or its answer gets lost after.

Nothing here is random: a test that wants every place tries every n.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from skerry.infra.testing.calls import Call

How: TypeAlias = Literal["throttle", "deny", "timeout", "lost_reply"]
"""throttle, deny: the service says no. timeout: the request never arrives, the connection breaks. lost_reply: the call
has had its effect, and the connection breaks. The last two look the same to who called.
"""

_THROTTLED: Final = {
    "s3": (503, "SlowDown"),
    "ec2": (503, "RequestLimitExceeded"),
    "batch": (429, "TooManyRequestsException"),
}
_DENIED: Final = {"s3": (403, "AccessDenied"), "ec2": (403, "UnauthorizedOperation"), "iam": (403, "AccessDenied")}


@dataclass(kw_only=True)
class Fault:
    """A fault that waits for its call. fired: how often it has struck."""

    how: How
    after: int
    on: str | None
    times: int | None
    fired: int = 0

    def strikes(self, call: Call) -> bool:
        """Whether this call fails; counts it."""
        if not call.writes or (self.on is not None and self.on != call.name):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.times is not None and self.fired >= self.times:
            return False
        self.fired += 1
        return True


class Faults:
    """What shall fail. Thread-safe."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """From now on."""
        with self._lock:
            self._faults.append(fault)

    def heal(self) -> None:
        """Nothing fails any more."""
        with self._lock:
            self._faults.clear()

    def strike(self, call: Call) -> How | None:
        """How this call fails, if it does. Each fault counts each call, whether or not another one strikes."""
        with self._lock:
            struck: list[How] = [fault.how for fault in self._faults if fault.strikes(call)]
        return struck[0] if struck else None


def answer(service: str, how: Literal["throttle", "deny"]) -> tuple[int, str, bytes]:
    """Status, content type and body with which this service says so."""
    if how == "throttle":
        query = service in {"iam", "sts"}
        status, code = _THROTTLED.get(service, (400, "Throttling" if query else "ThrottlingException"))
        return error(service, status, code, "Rate exceeded")
    status, code = _DENIED.get(service, (403, "AccessDeniedException"))
    return error(service, status, code, "not authorized to perform this operation: a fault that the test asked for")


def error(service: str, status: int, code: str, message: str) -> tuple[int, str, bytes]:
    """An error as this service words it: status, content type and body."""
    said = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    match service:
        case "s3":
            text = f"<Error>{said}</Error>"
        case "ec2":
            text = f"<Response><Errors><Error>{said}</Error></Errors><RequestID>0</RequestID></Response>"
        case "iam" | "sts":
            text = f"<ErrorResponse><Error>{said}</Error><RequestId>0</RequestId></ErrorResponse>"
        case _:
            return status, "application/json", json.dumps({"__type": code, "message": message}).encode()
    return status, "text/xml", text.encode()
