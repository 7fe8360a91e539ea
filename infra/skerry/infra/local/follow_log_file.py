"""Follows a growing log file line by line. Owns one open file and never blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.runtime.failure_text import without_commands

if TYPE_CHECKING:
    from pathlib import Path

# One call reads at most this much, so that a replica that floods its log cannot delay the others.
_CHUNK: Final = 1 << 20
# A line without an end (a progress bar) is returned once it is this long.
_LONGEST_LINE: Final = 64 << 10


class LogTail:
    """The lines of one file, each returned once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def lines(self) -> tuple[str, ...]:
        """The complete lines since the last call; of a line redrawn with carriage returns, its last state."""
        data = self._rest + self._file.read(_CHUNK)
        whole, end, self._rest = data.rpartition(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            whole, end, self._rest = data, b"\n", b""
        return tuple(map(_text, whole.split(b"\n"))) if end else ()

    def close(self) -> tuple[str, ...]:
        """All remaining lines, the unfinished last one included. Empty when called again."""
        if self._file.closed:
            return ()
        rest: list[str] = []
        while more := self.lines():
            rest += more
        self._file.close()
        return (*rest, _text(self._rest)) if self._rest else tuple(rest)


def _text(line: bytes) -> str:
    return without_commands(line.decode(errors="replace").rstrip("\r").rpartition("\r")[2])
