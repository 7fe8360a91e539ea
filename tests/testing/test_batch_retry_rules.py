"""The retry rules of AWS, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.testing.batch_retry_rules import TIMED_OUT, AttemptEnd, is_retried

OURS: dict[str, Any] = {
    "attempts": 3,
    "evaluateOnExit": [
        {"onStatusReason": "Host EC2*", "action": "retry"},
        {"onExitCode": "10", "action": "RETRY"},
        {"onExitCode": "137", "onReason": "", "action": "RETRY"},
        {"onReason": "*", "action": "EXIT"},
    ],
}
LOST = "Host EC2 (instance i-1) terminated."


def twice(**condition: str) -> dict[str, Any]:
    """Two attempts, unless the first one ends so."""
    return {"attempts": 2, "evaluateOnExit": [{**condition, "action": "EXIT"}]}


@pytest.mark.parametrize(
    ("strategy", "attempts", "end", "expected"),
    [
        (None, 1, AttemptEnd(exit_code=1), False),
        ({"attempts": 2}, 1, AttemptEnd(exit_code=1), True),
        ({"attempts": 2}, 2, AttemptEnd(exit_code=1), False),
        ({"attempts": 2}, 1, AttemptEnd(exit_code=0), False),
        ({"attempts": 2}, 1, AttemptEnd(exit_code=143, final=True), False),
        ({"attempts": 2}, 1, AttemptEnd(exit_code=143, status_reason=TIMED_OUT, final=True), False),
        (OURS, 1, AttemptEnd(exit_code=10), True),
        (OURS, 3, AttemptEnd(exit_code=10), False),
        (OURS, 1, AttemptEnd(exit_code=20), False),
        (OURS, 1, AttemptEnd(exit_code=137), True),
        (OURS, 1, AttemptEnd(exit_code=137, reason="OutOfMemoryError: killed"), False),
        (OURS, 1, AttemptEnd(exit_code=None, status_reason=LOST), True),
        (twice(onExitCode="1*"), 1, AttemptEnd(exit_code=137), False),
        (twice(onExitCode="*"), 1, AttemptEnd(exit_code=None), True),
        (twice(onExitCode="20"), 1, AttemptEnd(exit_code=1), True),
        (twice(onExitCode="1", onReason="Out*"), 1, AttemptEnd(exit_code=1), True),
    ],
)
def test_first_matching_entry_decides_and_no_match_retries(
    strategy: dict[str, Any] | None,
    attempts: int,
    end: AttemptEnd,
    expected: bool,  # noqa: FBT001  a column of the table
) -> None:
    assert is_retried(strategy, attempts, end) is expected
