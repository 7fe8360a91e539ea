"""Describes the exception that ended a script in one line: what, the line of the script that raised it, the remedy.

Does no I/O; needs no torch. The text is for people; the type of the exception decides about restarts.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

OUT_OF_MEMORY: Final = "out of memory: use a smaller batch or model, or a machine with more memory"
"""Part of every text about a lack of memory, so that readers of an outcome recognise it."""
# An error of a DataLoader worker contains a whole traceback, with the cause at its end.
_LONGEST: Final = 600
# The allocator of torch raises a RuntimeError on a CPU; the last is of a DataLoader.
_MEMORY_TEXTS: Final = ("can't allocate memory", "CUDA out of memory", "is killed by signal: Killed")
# Colours, then all other control characters but the ends of lines and tabs, and changes of the direction of writing.
_COMMANDS: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LIBRARIES: Final = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))


def text_of_failure(error: BaseException, position: str = "") -> str:
    """One line: `ValueError: bad sample (train.py:39, round 3)`. position: of the replica in its run."""
    place = ", ".join(filter(None, [raised_at(error), position]))
    text = f"{type(error).__name__}: {shortened(str(error), _LONGEST)}".removesuffix(": ")
    text += f" ({place})" if place else ""
    return f"{text}; {OUT_OF_MEMORY}" if is_out_of_memory(error) else text


def is_out_of_memory(error: BaseException) -> bool:
    """True for a lack of memory of the process or of its GPU."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or any(text in str(error) for text in _MEMORY_TEXTS)


def raised_at(error: BaseException) -> str:
    """The innermost line of the script in the traceback, `train.py:39`; empty if no line of it is there."""
    folders = _script_folders()
    for path, line in reversed(_lines(error.__traceback__)):
        if "site-packages" in path.parts or any(path.is_relative_to(library) for library in _LIBRARIES):
            continue
        for folder in folders:
            if path.is_relative_to(folder):
                return f"{path.relative_to(folder)}:{line}"
    return ""


def shortened(text: str, limit: int) -> str:
    """The text in one line of at most `limit` characters, with its begin and its end. Can be stored as UTF-8."""
    words = " ".join(text.split()).encode(errors="backslashreplace").decode()
    if len(words) <= limit:
        return words
    head = limit // 3
    return f"{words[:head]} ... {words[len(words) - (limit - head - 5) :]}"


def _script_folders() -> list[Path]:
    """The folders with the code of the script: that of its main file, and the current one."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [] if main is None else [Path(main).absolute().parent]
    try:
        return [*folders, Path.cwd()]
    except FileNotFoundError:  # it was deleted
        return folders


def _lines(trace: TracebackType | None) -> list[tuple[Path, int]]:
    return [(Path(frame.f_code.co_filename).absolute(), line) for frame, line in traceback.walk_tb(trace)]


def without_commands(text: str) -> str:
    """The text without what a terminal takes for commands: a replica's words are printed beside skerry's own."""
    return _COMMANDS.sub("", text)
