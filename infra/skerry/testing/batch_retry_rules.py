"""Decides whether a job is retried after an attempt, by the rules of AWS Batch. Does no I/O.

Sources: AWS Batch user guide, "Automated job retries" and "Job timeouts"; API reference, EvaluateOnExit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

Strategy: TypeAlias = Mapping[str, Any]
"""A retryStrategy of the API: attempts, evaluateOnExit."""

EXITED: Final = "Essential container in task exited"
"""Batch's status reason of a job whose container ended by itself, with any exit code."""
TIMED_OUT: Final = "Job attempt duration exceeded timeout"


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """The end of an attempt. exit_code: None if the container never started or was lost with its machine.

    reason: the container's, such as OutOfMemoryError. final: never retried, as after a timeout or a requested stop.
    """

    exit_code: int | None
    reason: str = ""
    status_reason: str = EXITED
    final: bool = False


def is_retried(strategy: Strategy | None, attempt_count: int, end: AttemptEnd) -> bool:
    """Return whether another attempt follows.

    The first entry of evaluateOnExit of which all conditions match decides; without a match the job is retried.
    """
    if end.final or end.exit_code == 0:
        return False
    strategy = strategy or {}
    if attempt_count >= int(strategy.get("attempts", 1)):
        return False
    for entry in cast("Sequence[Mapping[str, str]]", strategy.get("evaluateOnExit") or ()):
        if _entry_matches(entry, end):
            return entry["action"].upper() == "RETRY"
    return True


def _entry_matches(entry: Mapping[str, str], end: AttemptEnd) -> bool:
    facts = {
        "onExitCode": None if end.exit_code is None else str(end.exit_code),
        "onReason": end.reason,
        "onStatusReason": end.status_reason,
    }
    return all(name not in entry or _matches(entry[name], text) for name, text in facts.items())


def _matches(pattern: str, text: str | None) -> bool:
    """Compare with a pattern; a trailing asterisk compares only the beginning."""
    if text is None:
        return False
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern
