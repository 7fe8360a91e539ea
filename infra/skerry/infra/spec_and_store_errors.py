"""Errors of a spec, with every problem and its place in the file, and short texts of a store's errors.

All other errors are those of `skerry.runtime.errors`. Does no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.errors import Invalid, Retryable

_ADDRESS = re.compile(r"https?://([^/\s]+)")
# The operating system's message inside the HTTP client's error text.
_OS_MESSAGE = re.compile(r'(?:message: |error: )"([^"]+)"')

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """The place where a field of the spec was written: a line and column of the file, or the flag that set it.

    line, column: from 1; both 0 for a flag. Places sort in the order of the file, flags first.
    """

    line: int
    column: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """A field of the spec to change. path: the place in the document, replicas[0].count; "" is the whole document."""

    place: Place
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.path}: {self.text}" if self.path else f"{self.place}: {self.text}"


class SpecInvalid(Invalid):
    """The spec cannot be used. problems: all of them, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(map(str, self.problems)))


class PushFirst(Invalid):
    """No job was started, because none could run its image: push the image, then apply again."""


def in_short(error: BaseException) -> str:
    """A short text of a store's error: host:port and the operating system's message, or its first paragraph."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    address, messages = _ADDRESS.search(str(root)), _OS_MESSAGE.findall(str(root))
    if isinstance(error, Retryable) and address is not None and messages:
        return f"{address[1]}: {messages[-1].lower()}"
    # Details of the storage library follow an empty line.
    return str(error).partition("\n\n")[0] or type(error).__name__
