"""Checkpoints of another state than the log says, with their writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Collection


class WrongCheckpoints:
    """The rounds whose checkpoint is of another state, and its writer's slot, whether that knew of it or not."""

    def __init__(self) -> None:
        self._writers: dict[int, str] = {}

    def __contains__(self, round_number: int) -> bool:
        return round_number in self._writers

    def add(self, round_number: int, writer: str = "") -> None:
        """writer: a slot; empty if the object was replaced from outside."""
        self._writers[round_number] = writer

    def take(self, writer: str, key: str) -> bool:
        """Return True if `key` is the manifest of one that this slot wrote, and forget that: it is deleted."""
        mine = [number for number, other in self._writers.items() if other == writer]
        number = next((number for number in mine if key == keys.checkpoint_manifest(number)), None)
        return number is not None and self._writers.pop(number) == writer

    def left_behind(self, round_number: int, finished: Collection[str]) -> str | None:
        """The one of these slots whose wrong checkpoint of a round is still there; None if there is none."""
        writer = self._writers.get(round_number)
        return writer if writer in finished else None
