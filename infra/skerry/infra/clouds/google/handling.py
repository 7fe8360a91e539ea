"""What handlers here have in common besides what those of every cloud have: names, and deleting what may be gone."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.google.session import Absent, Disabled

if TYPE_CHECKING:
    from collections.abc import Callable

# Generations are written behind a name: -g99 takes four.
_GENERATION: Final = 4
_DIGEST: Final = 6
_NOT_A_NAME: Final = re.compile(r"[^a-z0-9]+")


def short_name(text: str, longest: int) -> str:
    """A name of at most `longest` of a-z, 0-9 and -, with room for a generation; other texts have others.

    It begins with a letter if `text` does.
    """
    room = longest - _GENERATION
    plain = _NOT_A_NAME.sub("-", text.lower()).strip("-")
    if plain == text and len(text) <= room:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: room - _DIGEST - 1].strip('-')}-{digest}"


def gone(delete: Callable[[], object]) -> None:
    """Delete what may be gone already, which is success. A service that is off may well have it still: that is none."""
    try:
        delete()
    except Disabled:
        raise
    except Absent:
        return
