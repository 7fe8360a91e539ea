"""Whether the replicas of a run have held the same bits after every round, by what they wrote down themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime import keys
from skerry.runtime.records import Receipt

if TYPE_CHECKING:
    from skerry.runtime.store import Store


def digests_equal(store: Store, rounds: int) -> bool:
    """Whether at least two replicas have a receipt of each of the first `rounds`, and those of a round say the same.

    False for no rounds at all: nothing was shown. Raises what the store raises, and Corrupt.
    """
    said: dict[int, list[object]] = {number: [] for number in range(rounds)}
    for entry in store.list(keys.RECEIPTS):
        number = keys.round_of(entry.key)
        if number in said and (data := store.read(entry.key)) is not None:
            receipt = Receipt.parse(data, entry.key)
            said[number].append((receipt.commit, receipt.averages, receipt.scope, receipt.state))
    return bool(said) and all(len(receipts) > 1 and len(set(receipts)) == 1 for receipts in said.values())
