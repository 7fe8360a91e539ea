"""Resource names that leave room for the suffix of a generation."""

from __future__ import annotations

from typing import Final

from skerry.infra.provision.graph import short_name

# The suffix of a generation: -g99 takes four characters.
_GENERATION: Final = 4


def name_with_room(text: str, longest: int) -> str:
    """A short name of `text` with at most `longest` characters, its generation included."""
    return short_name(text, longest - _GENERATION)
