"""What handlers here have in common besides what those of every cloud have: names, and deleting what may be gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.google.session import Absent, Disabled
from skerry.infra.graph import short_name

if TYPE_CHECKING:
    from collections.abc import Callable

# Generations are written behind a name: -g99 takes four.
_GENERATION: Final = 4


def name_with_room(text: str, longest: int) -> str:
    """A short name of `text` of at most `longest`, its generation with it."""
    return short_name(text, longest - _GENERATION)


def gone(delete: Callable[[], object]) -> None:
    """Delete what may be gone already, which is success. A service that is off may well have it still: that is none."""
    try:
        delete()
    except Disabled:
        raise
    except Absent:
        return
