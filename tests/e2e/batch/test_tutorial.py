"""Replays docs/tutorial-sandbox.md: each command that it shows, against the sandbox that its first command starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.e2e.conftest import DEADLINE_S, ROOT, until

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = ROOT / "docs/tutorial-sandbox.md"
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f.]*")


def shown() -> list[tuple[str, list[str]]]:
    """Each command of the page with the lines that the page shows of its output."""
    commands: list[tuple[str, list[str]]] = []
    for line in "".join(BLOCK.findall(PAGE.read_text())).splitlines():
        if line.startswith("$ "):
            commands.append((line.removeprefix("$ "), []))
        elif line != "...":
            commands[-1][1].append(line)
    return commands


def without_numbers(text: str) -> list[str]:
    return [NUMBER.sub("N", line.rstrip()) for line in text.splitlines()]


def check(command: str, expected: list[str], printed: str) -> None:
    assert set(without_numbers("\n".join(expected))) <= set(without_numbers(printed)), f"$ {command}\n{printed[-6000:]}"


@contextmanager
def sandbox(command: str, folder: Path) -> Iterator[Path]:
    """Run the first command of the page and yield the file of its messages; `exec`: skerry gets the signal."""
    printed, messages = folder / "sandbox.env", folder / "messages"
    program = command.partition(" |")[0]
    with printed.open("w") as lines, messages.open("w") as notes:
        process = subprocess.Popen(["sh", "-c", f"exec {program}"], cwd=folder, env=own(), stdout=lines, stderr=notes)
        try:
            until(lambda: "is ready" in messages.read_text() or process.poll() is not None)
            assert process.poll() is None, messages.read_text()
            yield messages
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0


def own() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.usefixtures("image")
def test_each_command_of_the_tutorial_prints_what_the_page_shows(tmp_path: Path) -> None:
    (first, lines), *others = shown()
    with sandbox(first, tmp_path) as messages:
        check(first, lines, (tmp_path / "sandbox.env").read_text() + messages.read_text())
        for command, expected in others:
            ended = subprocess.run(
                ["bash", "-c", f"source ./sandbox.env && {command}"],
                cwd=tmp_path,
                env=own(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=DEADLINE_S,
            )
            assert ended.returncode == 0, f"$ {command}\n{ended.stdout[-6000:]}"
            check(command, expected, ended.stdout)
    assert (tmp_path / "run.html").stat().st_size > 0
    assert (tmp_path / "model.safetensors").stat().st_size > 0
