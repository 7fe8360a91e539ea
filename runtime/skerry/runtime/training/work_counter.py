"""Counts the work in each fragment's next pseudo-gradient: steps and tokens since its last exchange.

A round trains all fragments and exchanges one of them. Does no I/O; needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from skerry.runtime.log.records import Telemetry


class WorkAmount(NamedTuple):
    """Inner steps, and the tokens they took."""

    steps: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The work in one contribution.

    fragment: which part of the model it is of. share: of a round's inner steps, if the round was ended early.
    telemetry: of the round; only in its first exchange.
    """

    tokens: int = 0
    inner_steps: int = 0
    fragment: int = 0
    share: float = 1.0
    telemetry: Telemetry | None = None


class WorkCounter:
    """Counts one replica's work since its start. For the thread that trains.

    per_round: steps of the inner optimizer in a round, empty ones too; plan: those of them before its exchange. None
    until one was seen.
    """

    def __init__(self) -> None:
        self.per_round: int | None = None
        self.plan: int | None = None
        self._position: object = None
        self._total = WorkAmount(0, 0)
        self._stepped = 0
        self._cleared = WorkAmount(0, 0)
        self._exchanged: dict[int, WorkAmount] = {}

    def count_tokens(self, tokens: int) -> None:
        """Count tokens that the next inner step trains on."""
        self._total = self._total._replace(tokens=self._total.tokens + tokens)

    def count_step(self) -> None:
        """Count an inner step."""
        self._total = self._total._replace(steps=self._total.steps + 1)
        self._stepped = self._total.tokens

    def since(self, fragment: int) -> WorkAmount:
        """The work on a fragment since its last exchange."""
        then = self._exchanged.get(fragment, self._cleared)
        return WorkAmount(self._total.steps - then.steps, self._total.tokens - then.tokens)

    def exchanged(self, fragment: int) -> None:
        """Reset a fragment: its work was exchanged or dropped."""
        self._exchanged[fragment] = self._total

    def close_round(self, position: object, ticks: int) -> None:
        """Record that a round of so many steps of the inner optimizer was closed."""
        self._position, self.per_round = position, ticks

    def set_position(self, position: object) -> bool:
        """Set the position. Returns whether no closed round led there: a checkpoint was loaded.

        That is so at a join, to heal, and to jump.
        """
        was_loaded = position is not self._position
        self._position = position
        return was_loaded

    def clear(self) -> None:
        """Reset all fragments; tokens counted for the next inner step remain."""
        self._cleared = WorkAmount(self._total.steps, self._stepped)
        self._exchanged.clear()

    def resume(self, fragment: int, amount: WorkAmount) -> None:
        """Add the work of an earlier incarnation on a fragment."""
        total = self._total
        self._exchanged[fragment] = WorkAmount(total.steps - amount.steps, total.tokens - amount.tokens)
