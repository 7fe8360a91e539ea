"""Runs the commands of the first tutorial in a terminal, in a new folder, and records what a person sees.

    scripts/session [--check]

The page (docs/tutorial-first-run.md) gets the lines that each command leaves on the terminal; the picture
(docs/session.svg) shows them one after the other, as they appeared. --check runs the commands too, but changes nothing:
it compares what they left with the page, without numbers, and exits with 1 if something differs.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyte

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs/tutorial-first-run.md", ROOT / "docs/session.svg"
BLOCK: Final = re.compile(r"(?<=^```console\n)(?P<text>.*?)(?=^```)", re.MULTILINE | re.DOTALL)
COLUMNS, ROWS = 100, 34
# Seconds in the picture: between two looks at the terminal, after a command, and the longest time without a change.
LOOK_S, PAUSE_S, LONGEST_S, KEY_S = 0.25, 2.5, 1.2, 0.06
CHARACTER, LINE = 8.4, 18  # pixels
COLOURS: Final = {
    "default": "#d8dee9", "black": "#4c566a", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b",
    "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#ffffff",
}  # fmt: skip

Line: TypeAlias = tuple[tuple[str, str, bool], ...]
"""Runs of characters: text, colour, bold."""


@dataclass(kw_only=True)
class Recording:
    """A terminal with everything that it showed. frames: seconds in the picture, and the lines from then on."""

    screen: pyte.HistoryScreen = field(default_factory=lambda: pyte.HistoryScreen(COLUMNS, ROWS, history=10_000))
    frames: list[tuple[float, tuple[Line, ...]]] = field(default_factory=list[tuple[float, tuple[Line, ...]]])
    now: float = 0.0

    def look(self, seconds: float) -> None:
        """Let `seconds` pass, then keep what the terminal shows, if it differs."""
        lines = tuple(_line(self.screen.buffer[row]) for row in range(ROWS))
        if not self.frames or lines != self.frames[-1][1]:
            self.now += min(seconds, LONGEST_S)
            self.frames.append((self.now, lines))

    def type(self, command: str) -> None:
        """Show how a person types the command."""
        stream = pyte.Stream(self.screen)
        stream.feed("\r\n$ " if self.frames else "$ ")
        for character in command:
            stream.feed(character)
            self.look(KEY_S)
        stream.feed("\r\n")

    def run(self, command: str, folder: Path) -> None:
        """Run the command with this as its terminal. Exits with its words if it fails."""
        child, terminal = pty.fork()
        if child == 0:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            os.chdir(folder)
            settings = {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "PATH": path}
            os.execvpe("sh", ["sh", "-c", command], {**os.environ, **settings})  # noqa: S606, S607
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        stream, looked = pyte.ByteStream(self.screen), time.monotonic()
        for data in _read(terminal):
            stream.feed(data)
            if time.monotonic() - looked >= LOOK_S:
                self.look(time.monotonic() - looked)
                looked = time.monotonic()
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.look(LOOK_S)
        if code:
            sys.exit(f"{command} ended with {code}:\n" + "\n".join(self.text()))

    def text(self) -> list[str]:
        """All lines so far, also those that left the terminal at its top."""
        rows: list[Any] = [*self.screen.history.top, *(self.screen.buffer[row] for row in range(ROWS))]
        lines = ["".join(row[column].data for column in range(COLUMNS)).rstrip() for row in rows]
        return "\n".join(lines).rstrip().split("\n")


def main() -> None:
    """Record the session, or compare it with the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    shown = PAGE.read_text()
    recording, outputs = record(commands_of(shown))
    page = with_outputs(shown, outputs)
    if not check:
        PAGE.write_text(page)
        PICTURE.write_text(picture(recording))
        return
    differences = list(
        difflib.unified_diff(essence(shown), essence(page), "the page", "this session", lineterm="", n=0)
    )
    if differences:
        sys.exit("\n".join([*differences, "if this is intended, run scripts/session, and look at what it writes"]))


def commands_of(page: str) -> list[str]:
    """The commands in the console blocks of the page, without their prompts."""
    lines = (line for block in BLOCK.finditer(page) for line in block["text"].splitlines())
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def record(commands: Sequence[str]) -> tuple[Recording, list[list[str]]]:
    """Run the commands one after the other. Returns what was seen, and the lines that each command left."""
    recording, outputs = Recording(), list[list[str]]()
    with tempfile.TemporaryDirectory(prefix="first-") as temporary:
        folder = Path(temporary)
        for command in commands:
            recording.type(command)
            before = len(recording.text())
            recording.run(command, folder)
            outputs.append(in_shown_folder("\n".join(recording.text()[before:]), temporary).split("\n"))
            recording.now += PAUSE_S
    return recording, outputs


def in_shown_folder(text: str, folder: str) -> str:
    """The text with another path for the folder, also where a line ends within it."""
    shown = "/home/ann/first-run".ljust(len(folder), "_")
    broken = re.compile("\n?".join(map(re.escape, folder)))
    return broken.sub(lambda path: shown if "\n" not in path[0] else _broken_at(shown, path[0].index("\n")), text)


def _broken_at(text: str, at: int) -> str:
    return f"{text[:at]}\n{text[at:]}"


def with_outputs(page: str, outputs: Sequence[Sequence[str]]) -> str:
    """The page with these lines below its commands."""
    waiting = iter(outputs)

    def block(old: re.Match[str]) -> str:
        commands = [line for line in old["text"].splitlines() if line.startswith("$ ")]
        return "".join("\n".join([command, *next(waiting), ""]) for command in commands)

    return BLOCK.sub(block, page)


def essence(page: str) -> list[str]:
    """Return what two sessions have in common: the words of the console blocks, sorted, without numbers."""
    lines = "\n".join(block["text"] for block in BLOCK.finditer(page))
    # The terminal has broken them; a space at the end of its line is lost. Lines with bars and rules end themselves.
    lines = re.sub(rf"^([^\n─▁-█]{{{COLUMNS - 1},{COLUMNS}}})\n", r"\1", lines, flags=re.MULTILINE)
    # What differs on a slow machine.
    slow = (
        r"^ *(bits |time |local-\d|\d\d:\d\d:).*$|^.*(warning:|WARNING) .*$|(?<= rounds; all).*$|(?<=; receipts: ).*$"
    )
    slow += r"|(?<=: finished: ).*$"
    # What the report answers: the cost, and if the run converged, are the same on every machine.
    slow += r"|(?<=converge\? )([a-z ]*).*$|^(  (?:Which|Where) .*\?) .*$"
    slow += r"|\d+ of \d+ in the last round"  # shown if a replica was late in it
    slow += r"|(?:\d+ [hm] )*[\d.]+ s(?= so far)"
    lines = re.sub(slow, lambda line: "".join(filter(None, line.groups()[2:])), lines, flags=re.MULTILINE)
    words = (re.sub(r"[^a-z$]+", " ", re.sub(r"\S*\d\S*", " ", line.lower())).strip() for line in lines.splitlines())
    return sorted(set(words) - {""})


def picture(recording: Recording) -> str:
    """The frames as one SVG that moves: each frame is shown for its time; equal lines are stored once.

    The last frame is shown before the first, and where nothing moves: in print, and in viewers without animation.
    """
    width, height = round(COLUMNS * CHARACTER + 20), ROWS * LINE + 20
    length = PAUSE_S + recording.now + 2 * PAUSE_S
    numbers: dict[Line, int] = {}
    groups = list[str]()
    starts = [PAUSE_S, *(PAUSE_S + at for at, _ in recording.frames[1:])]
    for start, end, (_, lines) in zip(starts, [*starts[1:], length], recording.frames, strict=True):
        uses = [
            f'<use href="#r{numbers.setdefault(line, len(numbers))}" y="{row * LINE}"/>'
            for row, line in enumerate(lines)
            if line
        ]
        at_rest, values, times = "hidden", "hidden;visible;hidden", (start, end)
        if end == length:
            at_rest, values, times = "visible", "visible;hidden;visible", (PAUSE_S, start)
        shown = f'<animate attributeName="visibility" values="{values}"'
        shown += f' keyTimes="0;{times[0] / length:.4f};{times[1] / length:.4f}"'
        motion = f'{shown} calcMode="discrete" dur="{length:.1f}s" repeatCount="indefinite"/>'
        groups.append(f'<g visibility="{at_rest}">{motion}{"".join(uses)}</g>')
    rows = [f'<text id="r{number}" x="10" y="24">{_spans(line)}</text>' for line, number in numbers.items()]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<title>A terminal: the commands of the first tutorial</title>",
        "<style>text { font: 14px monospace; white-space: pre } .b { font-weight: bold }</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#282c34"/>',
        f"<defs>{''.join(rows)}</defs>",
        *groups,
        "</svg>\n",
    ])  # fmt: skip


def _spans(line: Line) -> str:
    spans, column = list[str](), 0
    for text, colour, bold in line:
        if text.strip():
            strong = ' class="b"' if bold else ""
            place = f'x="{10 + column * CHARACTER:.1f}" textLength="{len(text) * CHARACTER:.1f}"'
            spans.append(f'<tspan {place} fill="{colour}"{strong}>{escape(text)}</tspan>')
        column += len(text)
    return "".join(spans)


def _line(row: Any) -> Line:
    """A row of the terminal as runs of equal looks."""
    runs = list[tuple[str, str, bool]]()
    for column in range(COLUMNS):
        cell = row[column]
        colour = COLOURS.get(cell.fg) or (f"#{cell.fg}" if len(cell.fg) == 6 else COLOURS["default"])
        if runs and runs[-1][1:] == (colour, cell.bold):
            runs[-1] = (runs[-1][0] + cell.data, colour, cell.bold)
        else:
            runs.append((cell.data, colour, cell.bold))
    while runs and not runs[-1][0].strip():
        runs.pop()
    return tuple(runs)


def _read(terminal: int) -> Iterator[bytes]:
    """Yield what the child writes, until it has ended."""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed
            return
        if not data:
            return
        yield data


if __name__ == "__main__":
    main()
