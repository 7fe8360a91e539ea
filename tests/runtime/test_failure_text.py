"""The text about the exception that ended a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.runtime.errors import Invalid
from skerry.runtime.failure_text import OUT_OF_MEMORY, is_out_of_memory, shortened, text_of_failure
from skerry.runtime.log.records import Telemetry

ROOT = Path(__file__).parents[2]

# The script calls a module of its own, whose line is the one to show, and a library that raises.
SCRIPT = """\
import json, sys
from parts import data
from skerry.runtime.failure_text import text_of_failure
for fail in (data.load, lambda: json.loads("{"), lambda: sys.exit(3)):
    try:
        fail()
    except BaseException as error:
        print(text_of_failure(error, "round 3"))
"""
MODULE = "def load():\n    raise ValueError('bad sample in shard 17')\n"


def test_failure_names_the_line_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "data.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(SCRIPT)
    path = os.pathsep.join(str(ROOT / name) for name in ("runtime", "infra"))
    command = [sys.executable, str(tmp_path / "train.py")]
    environment = {"PYTHONPATH": path, "PATH": ""}
    ended = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        "ValueError: bad sample in shard 17 (parts/data.py:2, round 3)",
        (
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
            "(train.py:4, round 3)"
        ),
        "SystemExit: 3 (train.py:4, round 3)",
    ]


def test_error_raised_by_skerry_names_the_call_in_the_script() -> None:
    with pytest.raises(Invalid) as raised:
        raise Invalid("wrong")
    assert text_of_failure(raised.value).startswith("Invalid: wrong (tests/runtime/test_failure_text.py:")


class OutOfMemoryError(RuntimeError):
    """torch's, by its name: this test needs no torch."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_lack_of_memory_is_named_with_a_remedy(error: Exception, *, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    assert text_of_failure(error).endswith(OUT_OF_MEMORY) is expected


def test_long_text_keeps_its_begin_and_end() -> None:
    text = shortened("begin " + "middle\n" * 500 + " ValueError: the cause", 100)
    assert len(text) <= 100
    assert text.startswith("begin middle")
    assert text.endswith("ValueError: the cause")
    assert shortened("a\n  b", 100) == "a b"
    assert len(text_of_failure(ValueError("x" * 5000))) < 700


def test_line_of_a_library_is_not_the_scripts() -> None:
    with pytest.raises(ValueError, match="loss") as raised:
        Telemetry(loss="x")  # type: ignore[arg-type]
    assert "test_failure_text.py" in text_of_failure(raised.value)
