"""Whether what a page shows of a command is what the command says; "..." leaves lines out."""

from __future__ import annotations

import re
from typing import Final

# The network has another id in every account.
_NETWORK: Final = re.compile(r"vpc-[0-9a-f]+")


def shown(page: str, command: str) -> list[str]:
    """The lines of the block that begins with this command, without it."""
    (found,) = re.findall(rf"```\n\$ {re.escape(command)}\n(.*?)```", page, re.DOTALL)
    return str(found).splitlines()


def assert_tells(told: str, lines: list[str]) -> None:
    """Each line follows the one before, but where "..." stands between them."""
    found, at, gap = _alike(told).splitlines(), 0, True
    for line in map(_alike, lines):
        if line == "...":
            gap = True
            continue
        assert line in found[at:], f"not told any more, or in another order: {line}"
        place = found.index(line, at)
        assert gap or place == at, f"left out before {line!r} without a word: {found[at:place]}"
        at, gap = place + 1, False


def _alike(text: str) -> str:
    return _NETWORK.sub("vpc-0", text)
