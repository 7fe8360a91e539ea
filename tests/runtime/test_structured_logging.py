"""A log that stdout and stderr of a replica share: its lines are whole."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
from skerry.runtime.structured_logging import log_to_stderr
print("before")
log_to_stderr("a")
print("one", 2)
print("no end", end="")
"""


def test_printed_line_and_its_end_are_written_at_once() -> None:
    # A pipe of packets: each read returns what one call has written.
    reader, writer = os.pipe2(os.O_DIRECT)
    with os.fdopen(reader, "rb", 0) as packets:
        with os.fdopen(writer, "wb", 0) as log:
            unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
            subprocess.run([sys.executable, "-c", SCRIPT], stdout=log, env=unbuffered, check=True)
        assert list(iter(lambda: packets.read(4096), b"")) == [b"before", b"\n", b"one 2\n", b"no end"]
