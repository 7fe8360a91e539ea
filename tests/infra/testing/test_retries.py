"""What AWS documents of retries, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.infra.testing.retries import TIMED_OUT, End, is_tried_again

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


@pytest.mark.parametrize(
    ("strategy", "attempts", "end", "expected"),
    [
        (None, 1, End(exit_code=1), False),
        ({"attempts": 2}, 1, End(exit_code=1), True),
        ({"attempts": 2}, 2, End(exit_code=1), False),
        ({"attempts": 2}, 1, End(exit_code=0), False),
        ({"attempts": 2}, 1, End(exit_code=143, final=True), False),
        ({"attempts": 2}, 1, End(exit_code=143, status_reason=TIMED_OUT, final=True), False),
        (OURS, 1, End(exit_code=10), True),
        (OURS, 3, End(exit_code=10), False),
        (OURS, 1, End(exit_code=20), False),
        (OURS, 1, End(exit_code=137), True),
        (OURS, 1, End(exit_code=137, reason="OutOfMemoryError: killed"), False),
        (OURS, 1, End(exit_code=None, status_reason=LOST), True),
        ({"attempts": 2, "evaluateOnExit": [{"onExitCode": "1*", "action": "EXIT"}]}, 1, End(exit_code=137), False),
        ({"attempts": 2, "evaluateOnExit": [{"onExitCode": "*", "action": "EXIT"}]}, 1, End(exit_code=None), True),
        ({"attempts": 2, "evaluateOnExit": [{"onExitCode": "20", "action": "EXIT"}]}, 1, End(exit_code=1), True),
        (
            {"attempts": 2, "evaluateOnExit": [{"onExitCode": "1", "onReason": "Out*", "action": "EXIT"}]},
            1,
            End(exit_code=1),
            True,
        ),
    ],
)
def test_the_first_entry_that_fits_decides_and_none_means_again(
    strategy: dict[str, Any] | None,
    attempts: int,
    end: End,
    expected: bool,  # noqa: FBT001  a column of the table
) -> None:
    assert is_tried_again(strategy, attempts, end) is expected
