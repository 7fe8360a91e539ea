"""What was trained on each fragment since its last exchange: that is what its next pseudo-gradient holds, and weighs.

A round trains all fragments and exchanges one of them. Does no I/O; needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple


class Amount(NamedTuple):
    """Inner steps, and the tokens they took."""

    steps: int
    tokens: int


class Tally:
    """One replica's counts since its start. For the thread that trains.

    per_round: steps of the inner optimizer in a round, empty ones too; plan: those of them before its exchange. None
    until one was seen.
    """

    def __init__(self) -> None:
        self.per_round: int | None = None
        self.plan: int | None = None
        self._standing: object = None
        self._total = Amount(0, 0)
        self._stepped = 0
        self._cleared = Amount(0, 0)
        self._exchanged: dict[int, Amount] = {}

    def count_tokens(self, tokens: int) -> None:
        """They are taken by the next inner step."""
        self._total = self._total._replace(tokens=self._total.tokens + tokens)

    def count_step(self) -> None:
        """An inner step is taken."""
        self._total = self._total._replace(steps=self._total.steps + 1)
        self._stepped = self._total.tokens

    def since(self, fragment: int) -> Amount:
        """What was trained on it since its last exchange."""
        then = self._exchanged.get(fragment, self._cleared)
        return Amount(self._total.steps - then.steps, self._total.tokens - then.tokens)

    def exchanged(self, fragment: int) -> None:
        """What was trained on it is in its pseudo-gradient, or is thrown away."""
        self._exchanged[fragment] = self._total

    def moved(self, standing: object, ticks: int) -> None:
        """A round of so many steps of the inner optimizer was closed, so the replica stands there."""
        self._standing, self.per_round = standing, ticks

    def stands(self, standing: object) -> None:
        """The replica stands there. If no round was closed to come there, a checkpoint was loaded over what it trained.

        That is so at a join, to heal, and to jump.
        """
        if standing is not self._standing:
            self._standing = standing
            self.clear()

    def clear(self) -> None:
        """Every fragment is as it is shared. What the next inner step takes is still to be trained on."""
        self._cleared = Amount(self._total.steps, self._stepped)
        self._exchanged.clear()

    def take_up(self, fragment: int, amount: Amount) -> None:
        """An earlier incarnation has trained so much on it since its last exchange."""
        total = self._total
        self._exchanged[fragment] = Amount(total.steps - amount.steps, total.tokens - amount.tokens)
