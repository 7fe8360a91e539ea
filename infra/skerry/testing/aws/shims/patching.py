"""Replaces attributes of classes and modules and restores them afterwards."""

from __future__ import annotations

from typing import Any, Final, cast

_ABSENT: Final = object()


class Patches:
    """The replaced attributes. Not thread-safe: shims are installed before the server starts."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> Any:
        """Replace the attribute by `new` and return its previous value."""
        own = cast("dict[str, Any]", vars(owner))
        self._undo.append((owner, name, own.get(name, _ABSENT)))
        before = getattr(owner, name, None)
        setattr(owner, name, new)
        return before

    def undo(self) -> None:
        """Restore all attributes, the last one first. A second call does nothing."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
