"""The lines of replicas: what a script writes is its user's, and the protocol's events are shown with -v only."""

from __future__ import annotations

import logging

from skerry.infra.cli import supervisor_output_text
from skerry.infra.local.up_destroy_events import LogLines
from skerry.runtime import structured_logging


def logged(level: str, message: str) -> str:
    record = logging.makeLogRecord({"levelname": level, "msg": message})
    return logging.Formatter(structured_logging.line_format("a-0")).format(record)


def test_events_below_a_warning_are_shown_only_with_verbose() -> None:
    shown = [
        logged("WARNING", "catch_up_missing slot=a-0"),
        logged("INFO", "loaded 3 shards"),  # the script's own, in the same form
        "train.py:3: UserWarning: lr is high",
        "loss 3.1",
    ]
    report = LogLines(slot="a-0", lines=(logged("INFO", "joined slot=a-0"), *shown))
    assert [line.plain for line in supervisor_output_text.lines_of(report, verbose=False)] == [
        f"[a-0] {line}" for line in shown
    ]
    assert len(supervisor_output_text.lines_of(report)) == 5
