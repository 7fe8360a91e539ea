"""Putting something else in an attribute's place, and everything back afterwards."""

from __future__ import annotations

from typing import Any, Final, cast

_ABSENT: Final = object()


class Patches:
    """What was replaced, so that it can be undone. Not thread-safe: shims go in before the server starts."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> Any:
        """Put `new` there and return what callers got until now."""
        mine = cast("dict[str, Any]", vars(owner))
        self._undo.append((owner, name, mine.get(name, _ABSENT)))
        before = getattr(owner, name, None)
        setattr(owner, name, new)
        return before

    def undo(self) -> None:
        """Put everything back, the last one first. Again is success."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
