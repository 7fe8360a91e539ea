"""Compares the receipts of a run's replicas: equal digests in every round. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.summarize_round import RoundHistory


def digests_equal(rounds: Sequence[RoundHistory], closed: int) -> bool:
    """True if the receipts of each closed round are equal, and the last has those of at least two replicas.

    An earlier round may have fewer: a replica that is killed before its receipt writes none for the round that it
    loads from a checkpoint. The digests of the last round cover the state that all earlier ones have led to.
    rounds: in order, later ones are left out. False if none is closed, or the records of the last one are missing.
    """
    compared = [item for item in rounds if item.round < closed]
    if not compared or compared[-1].round != closed - 1 or compared[-1].averages_equal is None:
        return False
    return not any(item.averages_equal is False or item.state_equal is False for item in compared)
