"""Compares the receipts of a run's replicas: equal digests in every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.log import keys
from skerry.runtime.log.records import Receipt

if TYPE_CHECKING:
    from skerry.runtime.store import Store


def digests_equal(store: Store, rounds: int) -> bool:
    """True if the receipts of each of the first `rounds` are equal, and the last has those of at least two replicas.

    An earlier round may have fewer: a replica that is killed before its receipt writes none for the round that it
    loads from a checkpoint. The digests of the last round cover the state that all earlier ones have led to.
    False if `rounds` is 0. Raises what the store raises, and Corrupt.
    """
    digests: dict[int, set[object]] = {}
    at_end = 0
    for entry in store.list(keys.RECEIPTS):
        number = keys.round_of(entry.key)
        if number < rounds and (data := store.read(entry.key)) is not None:
            receipt = Receipt.parse(data, entry.key)
            digests.setdefault(number, set()).add((receipt.commit, receipt.averages, receipt.scope, receipt.state))
            at_end += number == rounds - 1
    return at_end > 1 and all(len(of_round) == 1 for of_round in digests.values())
