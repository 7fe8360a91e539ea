"""Compares the output of a command with its example on a page, in which "..." leaves lines out."""

from __future__ import annotations

import re
from typing import Final

# The network has another id in every account.
_NETWORK: Final = re.compile(r"vpc-[0-9a-f]+")


def shown(page: str, command: str) -> list[str]:
    """The lines of the page's block that begins with this command, without the command."""
    (block,) = re.findall(rf"```\n\$ {re.escape(command)}\n(.*?)```", page, re.DOTALL)
    return str(block).splitlines()


def assert_shows(output: str, lines: list[str]) -> None:
    """Assert that the lines follow each other in the output, except across "..."."""
    actual, at, gap = _normalized(output).splitlines(), 0, True
    for line in map(_normalized, lines):
        if line == "...":
            gap = True
            continue
        assert line in actual[at:], f"missing, or in another order: {line}\n{output}"
        position = actual.index(line, at)
        assert gap or position == at, f"lines missing before {line!r}: {actual[at:position]}"
        at, gap = position + 1, False


def _normalized(text: str) -> str:
    return _NETWORK.sub("vpc-0", text)
