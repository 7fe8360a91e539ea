"""The one error the operator's side adds to `skerry.runtime.errors`: a spec with everything that is wrong in it.

The caller prints every problem and exits with 2. Also: what a store's long error says, in short. Does no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.errors import Invalid, Retryable

_ADDRESS = re.compile(r"https?://([^/\s]+)")
# How the HTTP client's own account of an error names what the operating system said.
_SAID = re.compile(r'(?:message: |error: )"([^"]+)"')

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """Where something of the spec was written: a line and column of the file, or the flag that set it.

    line, column: from 1; both 0 for a flag. Places order as a reader meets them, flags first.
    """

    line: int
    column: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """One thing to change in a spec. path: the place in the document, replicas[0].count; "" is the whole document."""

    place: Place
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.path}: {self.text}" if self.path else f"{self.place}: {self.text}"


class SpecInvalid(Invalid):
    """The spec cannot be used; `problems` holds everything that is wrong, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(map(str, self.problems)))


def in_short(error: BaseException) -> str:
    """What an error of a store comes down to: host:port and what the operating system said, or its first paragraph."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    address, said = _ADDRESS.search(str(root)), _SAID.findall(str(root))
    if isinstance(error, Retryable) and address is not None and said:
        return f"{address[1]}: {said[-1].lower()}"
    # The engine's own account of itself follows an empty line.
    return str(error).partition("\n\n")[0] or type(error).__name__
