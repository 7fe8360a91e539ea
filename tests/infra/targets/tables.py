"""Reads the tables of cases in text files of this folder."""

from __future__ import annotations

import re
from pathlib import Path


def read_cases(name: str) -> list[list[str]]:
    """The cases of a file: a line with the input, and the indented lines after it. "<64 x>" is 64 times that letter."""
    text = Path(__file__).with_name(name).read_text()
    text = re.sub(r"<(\d+) x>", lambda match: "x" * int(match[1]), text)
    return [[line.strip() for line in block.splitlines()] for block in re.split(r"\n(?! )", text.strip())]
