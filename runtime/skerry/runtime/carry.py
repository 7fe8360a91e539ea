"""What a late replica trained and no record counts: kept, and brought to a later round of the same fragment.

DiLoCo only: a pseudo-gradient stays useful after the others' outer step, a LocalSGD model or a DDP gradient does not.
Whoever was late once holds back what it kept, and adds it to its next pseudo-gradient: it is then on time again.
Whoever is late twice in a row brings it at once, before it trains on, and so is present long before the others are.
Better than either is not to be late: a slow replica ends its round early, with what it has (`Trained.share`).

Before what is kept may reach the log it is put at stake, under the names of the bytes that hold it. From then on only
the round's decision tells what became of it: so nothing counts twice and nothing is lost, whatever fails in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.codec.layout import Index
    from skerry.runtime.records import Contribution, Part

STALE: Final = 0.5
"""What is late weighs half, for being of an older state: in scripts/bench staleness every larger weight was worse."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What went into a burst since the round began.

    fragment: which part of the model it is of. share: of a round's inner steps, if the round was ended early. late:
    what of earlier rounds is in it besides, in rounds of one replica.
    """

    tokens: int = 0
    inner_steps: int = 0
    fragment: int = 0
    share: float = 1.0
    late: float = 0.0

    def plus(self, kept: Kept) -> Trained:
        """Together with what was kept and is part of the burst now. Its weight stays: the tokens are its own alone."""
        return replace(self, inner_steps=self.inner_steps + kept.inner_steps, late=self.late + kept.work)


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
        """What it weighs in a run that weighs by tokens: of several rounds' tokens those of one."""
        steps = max(1, self.inner_steps)
        return -(-self.trained.tokens * min(steps, max(1, self.full_steps)) // steps)

    @property
    def inner_steps(self) -> int:
        """What went into it."""
        return self.trained.inner_steps

    @property
    def is_finite(self) -> bool:
        """It holds neither NaN nor infinity."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors)

    @property
    def share(self) -> float:
        """How much of a round's work it is, in (0, 1]: of several rounds' work that of one."""
        return min(1.0, self.work)

    @property
    def work(self) -> float:
        """What was trained for it, in rounds of one replica."""
        return self.inner_steps / max(1, self.full_steps)


class Stake(NamedTuple):
    """What was kept, and where it may stand in the log: in this exchange's contribution if that has these parts."""

    kept: Kept
    round: int
    exchange: int
    parts: tuple[Part, ...]


class Carry:
    """One replica's kept pseudo-gradients: at most one for each fragment. For one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self._stakes: dict[int, Stake] = {}

    def keep(self, kept: Kept) -> bool:
        """Keep it, together with what its fragment has kept already. False: it is not finite, and dropped."""
        if not kept.is_finite:
            return False
        self._put(kept)
        return True

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

    def to_add(self, fragment: int, index: Index) -> Kept | None:
        """What may be part of this replica's next pseudo-gradient."""
        kept = self._kept.get(fragment)
        return None if kept is None or kept.index != index else kept

    def stake(self, fragment: int, round_number: int, exchange: int, parts: Sequence[Part]) -> None:
        """What is kept may stand in the log from now on; `settle` tells. Before the first byte is on its way."""
        self._stakes[fragment] = Stake(self._kept.pop(fragment), round_number, exchange, tuple(parts))

    def at_stake(self, fragment: int) -> Stake | None:
        """What may stand in the log, and is not settled."""
        return self._stakes.get(fragment)

    def settle(self, fragment: int, counted: Sequence[Part] | None) -> None:
        """The exchange is decided. counted: the parts that count for this slot; None if it is not among the members.

        What is not among them was late once more: it is kept, and brought at once.
        """
        stake = self._stakes.pop(fragment, None)
        if stake is not None and (counted is None or tuple(counted) != stake.parts):
            self._put(replace(stake.kept, held=True))

    def drop(self, fragment: int) -> None:
        """Forget what this fragment has kept: nobody can use it."""
        del self._kept[fragment]

    def clear(self) -> None:
        """Forget everything: it was trained on a state that was not the others'."""
        self._kept.clear()
        self._stakes.clear()

    def _put(self, kept: Kept) -> None:
        before = self._kept.get(kept.trained.fragment)
        if before is not None and before.index == kept.index:
            for mine, older in zip(kept.tensors, before.tensors, strict=True):
                mine.add_(older)
            trained = replace(kept.trained.plus(before), tokens=kept.trained.tokens + before.trained.tokens)
            kept = replace(kept, trained=trained, held=True)
        self._kept[kept.trained.fragment] = kept


def kept_of(
    tensors: Sequence[torch.Tensor], index: Index, round_number: int, trained: Trained, full_steps: int
) -> Kept:
    """A copy of a burst's tensors, before the average lands in them."""
    copies = tuple(tensor.detach().clone() for tensor in tensors)
    return Kept(tensors=copies, index=index, round=round_number, trained=trained, full_steps=full_steps)


def together(tensors: Sequence[torch.Tensor], kept: Kept) -> list[torch.Tensor]:
    """This round's pseudo-gradient and what was kept, in memory of their own: either may still be wanted alone."""
    return [
        torch.add(tensor.detach(), mine.view(tensor.shape)) for tensor, mine in zip(tensors, kept.tensors, strict=True)
    ]


def full_steps_of(contributions: Sequence[Contribution]) -> int:
    """Inner steps of a whole round, as those took it who were counted.

    The fewest of those who were in time and took all of theirs: one that added what it had kept counts more.
    """
    whole = [one.inner_steps for one in contributions if one.share == one.discount == 1.0 and not one.late]
    return min(whole) if whole else max(round(one.inner_steps / one.work) for one in contributions)
