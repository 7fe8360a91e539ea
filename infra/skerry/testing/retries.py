"""Whether AWS Batch tries a job again after an attempt: one pure function. Does no I/O.

Sources: AWS Batch user guide, "Automated job retries" and "Job timeouts"; API reference, EvaluateOnExit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

Strategy: TypeAlias = Mapping[str, Any]
"""A retryStrategy as the API takes it: attempts, evaluateOnExit."""

EXITED: Final = "Essential container in task exited"
"""What Batch says of a job whose container ended by itself, with whatever code."""
TIMED_OUT: Final = "Job attempt duration exceeded timeout"


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ended. exit_code: None if the container never started or was lost with its machine.

    reason: the container's own, such as OutOfMemoryError. final: not tried again whatever the strategy says, as after
    a timeout or a stop that was asked for.
    """

    exit_code: int | None
    reason: str = ""
    status_reason: str = EXITED
    final: bool = False


def is_tried_again(strategy: Strategy | None, attempts_made: int, end: End) -> bool:
    """Whether another attempt follows.

    The first entry of evaluateOnExit of which every condition fits decides; if none fits, it is tried again.
    """
    if end.final or end.exit_code == 0:
        return False
    strategy = strategy or {}
    if attempts_made >= int(strategy.get("attempts", 1)):
        return False
    for entry in cast("Sequence[Mapping[str, str]]", strategy.get("evaluateOnExit") or ()):
        if _fits(entry, end):
            return entry["action"].upper() == "RETRY"
    return True


def _fits(entry: Mapping[str, str], end: End) -> bool:
    said = {
        "onExitCode": None if end.exit_code is None else str(end.exit_code),
        "onReason": end.reason,
        "onStatusReason": end.status_reason,
    }
    return all(name not in entry or _matches(entry[name], text) for name, text in said.items())


def _matches(pattern: str, text: str | None) -> bool:
    """A pattern may end in one asterisk; then only the beginning is compared."""
    if text is None:
        return False
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern
