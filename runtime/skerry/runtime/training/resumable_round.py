"""A replica's progress in a round that is not closed: a plain value. `resumable_round_store` saves and loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.training.trainer_interface import Delta
    from skerry.runtime.training.work_counter import WorkAmount


@dataclass(frozen=True, kw_only=True)
class PartialRound:
    """Progress in round `round`, on the log up to the commit `previous`.

    inner_steps, tokens, seconds: of that round alone. deltas: of each DiLoCo fragment, its pseudo-gradient by the order
    of its parameters. trained: what each of them holds; known once it is saved. private: the private state after the
    last of these inner steps, by key.
    """

    round: int
    previous: str
    inner_steps: int
    tokens: int
    seconds: float
    deltas: tuple[Delta, ...]
    private: Mapping[str, object]
    trained: tuple[WorkAmount, ...] = ()

    def next_of(self, fragment: int, fragments: int) -> int:
        """The round that exchanges this one of so many fragments next."""
        return self.round + (fragment - self.round) % fragments

    def is_open(self, fragment: int, head: int) -> bool:
        """The round that exchanges this fragment next is not closed: its part can be trained on from here."""
        return self.next_of(fragment, len(self.deltas)) >= head
