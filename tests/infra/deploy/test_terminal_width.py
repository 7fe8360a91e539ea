"""Commands in a terminal: the changes of a plan are aligned to its columns, and nothing of them is cut."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.deploy.account import skerry

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
SKERRY: Final = [sys.executable, "-c", "from skerry.infra.cli.app import main; main()"]
STYLES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def in_terminal(columns: int, *words: str, answer: str = "") -> list[str]:
    """The lines that a command shows in a terminal of so many columns, without styles. answer: to its question."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    command = subprocess.Popen(
        [*SKERRY, *words], stdin=terminal, stdout=terminal, stderr=terminal, env={**environment, "TERM": "xterm"}
    )
    with command as process:
        os.close(terminal)
        os.write(screen, answer.encode())
        output = b""
        with suppress(OSError):  # the process has closed its side
            while part := os.read(screen, 65536):
                output += part
        process.wait(60)
    os.close(screen)
    return STYLES.sub("", output.decode()).replace("\r", "").splitlines()


def changes_in(lines: list[str]) -> list[str]:
    """The lines of the changes: between the table of groups and the rights."""
    first = next(number for number, line in enumerate(lines) if line.startswith("  +   "))
    return lines[first : lines.index("rights that change:")]


@pytest.mark.parametrize("columns", [80, 140])
def test_plan_in_a_terminal_fits_its_columns(spec: str, tmp_path: Path, columns: int) -> None:
    saved = str(tmp_path / "saved.plan")
    whole = changes_in(skerry("plan", spec, "--out", saved).output.splitlines())
    assert max(map(len, whole)) > 140
    for command in (("plan", spec), ("show", saved), ("apply", spec)):
        lines = changes_in(in_terminal(columns, *command, answer="n\n"))
        assert max(map(len, lines)) <= columns, command
        assert max(map(len, lines)) > columns - 25, "it uses the terminal's width"
        assert len(lines) > len(whole), command
        assert " ".join(" ".join(lines).split()) == " ".join(" ".join(whole).split()), command
