"""Injects faults: the n-th call fails before it has an effect, or its response is lost afterwards.

Nothing is random: a test that wants every position tries every n.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from skerry.testing.calls import Call

How: TypeAlias = Literal["throttle", "deny", "timeout", "lost_reply"]
"""throttle, deny: the service refuses. timeout: the request never arrives and the connection breaks. lost_reply: the
call has its effect, then the connection breaks. The client cannot tell the last two apart.
"""


@dataclass(kw_only=True)
class Fault:
    """A fault and the calls it applies to: those that `on` matches, or all that write. fired: how many failed by it."""

    how: How
    after: int
    on: str | None
    times: int | None
    fired: int = 0

    def applies(self, call: Call) -> bool:
        """Count this call and return whether it fails."""
        if not (call.writes if self.on is None else fnmatchcase(call.name, self.on)):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.times is not None and self.fired >= self.times:
            return False
        self.fired += 1
        return True


class Faults:
    """The active faults. Thread-safe."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """Activate a fault."""
        with self._lock:
            self._faults.append(fault)

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    def apply(self, call: Call) -> How | None:
        """Return how this call fails, or None. Each fault counts each call, even if another fault applies."""
        with self._lock:
            applied: list[How] = [fault.how for fault in self._faults if fault.applies(call)]
        return applied[0] if applied else None
