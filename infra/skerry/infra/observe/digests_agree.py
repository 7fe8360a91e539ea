"""Compares the receipts of a run's replicas: equal digests after every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.log import keys
from skerry.runtime.log.records import Receipt

if TYPE_CHECKING:
    from skerry.runtime.store import Store


def digests_equal(store: Store, rounds: int) -> bool:
    """True if each of the first `rounds` has receipts of at least two replicas, and those of a round are equal.

    False if `rounds` is 0. Raises what the store raises, and Corrupt.
    """
    digests: dict[int, list[object]] = {number: [] for number in range(rounds)}
    for entry in store.list(keys.RECEIPTS):
        number = keys.round_of(entry.key)
        if number in digests and (data := store.read(entry.key)) is not None:
            receipt = Receipt.parse(data, entry.key)
            digests[number].append((receipt.commit, receipt.averages, receipt.scope, receipt.state))
    return bool(digests) and all(len(of_round) > 1 and len(set(of_round)) == 1 for of_round in digests.values())
