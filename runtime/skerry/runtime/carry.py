"""What a late replica trained and no record counts: kept, and brought to a later round of the same fragment.

DiLoCo only: a pseudo-gradient stays useful after the others' outer step, a LocalSGD model or a DDP gradient does not.
Whoever was late once holds back what it kept, and adds it to its next pseudo-gradient: it is then on time again.
Whoever is late twice in a row brings it at once, before it trains on, and so is present long before the others are.
Better than either is not to be late: a slow replica ends its round early, with what it has (`Trained.share`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.codec.layout import Index

# What is late weighs half for being of an older state: scripts/bench staleness, where every larger weight was worse.
_STALE = 0.5


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What went into a burst since the round began.

    fragment: which part of the model it is of. share: of a round's inner steps, if the round was ended early.
    """

    tokens: int = 0
    inner_steps: int = 0
    fragment: int = 0
    share: float = 1.0

    def discount(self, *, by_tokens: bool) -> float:
        """What its weight is multiplied by. by_tokens: the weight counts the tokens already."""
        return 1.0 if by_tokens else self.share

    def plus(self, kept: Kept | None) -> Trained:
        """Together with what was kept and is part of the burst now."""
        if kept is None:
            return self
        return replace(self, tokens=self.tokens + kept.tokens, inner_steps=self.inner_steps + kept.inner_steps)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A pseudo-gradient that no record counts.

    tensors: of `index`, in host memory, this object's own. round: the one that left it out. full_steps: inner steps of
    the replicas that were counted. held: it was held back once already.
    """

    tensors: tuple[torch.Tensor, ...]
    index: Index
    round: int
    trained: Trained
    full_steps: int
    held: bool = False

    @property
    def tokens(self) -> int:
        """What went into it."""
        return self.trained.tokens

    @property
    def inner_steps(self) -> int:
        """What went into it."""
        return self.trained.inner_steps

    @property
    def share(self) -> float:
        """How much of a round's work it is, in (0, 1]."""
        return min(1.0, self.inner_steps / max(1, self.full_steps))

    def discount(self, *, by_tokens: bool) -> float:
        """What its weight is multiplied by. by_tokens: the weight counts the tokens already."""
        return _STALE if by_tokens else _STALE * self.share


class Carry:
    """One replica's kept pseudo-gradients: at most one for each fragment. For one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self._offered: dict[int, tuple[int, Kept]] = {}

    def keep(self, kept: Kept) -> None:
        """Keep it, together with what its fragment has kept already. What is not finite is dropped."""
        fragment = kept.trained.fragment
        if not all(bool(torch.isfinite(tensor).all()) for tensor in kept.tensors):
            return
        before = self._kept.get(fragment)
        if before is not None and before.index == kept.index:
            for mine, older in zip(kept.tensors, before.tensors, strict=True):
                mine.add_(older)
            kept = replace(kept, trained=kept.trained.plus(before), held=before.held)
        self._kept[fragment] = kept

    def keeps(self, fragment: int) -> bool:
        """There is something to bring."""
        return fragment in self._kept

    def to_offer(self, fragment: int) -> Kept | None:
        """What to bring to the round that begins now, before training for it; None: nothing, or it is held back."""
        kept = self._kept.get(fragment)
        if kept is None:
            return None
        if not kept.held:
            self._kept[fragment] = replace(kept, held=True)
            return None
        return kept

    def offered(self, fragment: int, round_number: int) -> None:
        """What was kept stands in the log, in a contribution to this round that may be counted."""
        self._offered[fragment] = round_number, self._kept.pop(fragment)

    def add_to(self, fragment: int, index: Index, tensors: Sequence[torch.Tensor]) -> Kept | None:
        """Add what is kept to this replica's next pseudo-gradient, in place. Returns what was added."""
        kept = self._kept.get(fragment)
        if kept is None or kept.index != index:
            return None
        del self._kept[fragment]
        for tensor, mine in zip(tensors, kept.tensors, strict=True):
            tensor.detach().add_(mine.view(tensor.shape))
        return kept

    def decided(self, fragment: int, round_number: int, *, counted: bool) -> None:
        """The round is decided: what was offered to it is counted, or is still to be brought.

        What was offered to a round that was passed over by a checkpoint is given up: nothing may count twice.
        """
        offered = self._offered.pop(fragment, None)
        if offered is not None and offered[0] == round_number and not counted:
            self._kept[fragment] = replace(offered[1], held=True)

    def clear(self) -> None:
        """Forget everything: it was trained on a state that was not the others'."""
        self._kept.clear()
        self._offered.clear()


def kept_of(
    tensors: Sequence[torch.Tensor], index: Index, round_number: int, trained: Trained, full_steps: int
) -> Kept:
    """A copy of a burst's tensors, before the average lands in them."""
    copies = tuple(tensor.detach().clone() for tensor in tensors)
    return Kept(tensors=copies, index=index, round=round_number, trained=trained, full_steps=full_steps)
