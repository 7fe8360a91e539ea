"""Compares this replica's state with the others' after each round, in the background, and waits for it at the end.

A script must not end with a wrong state that was found out: at the end of a run, the comparisons that still go on are
waited for, the receipts of the last round are compared as far as they exist, and a difference is measured.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.ranks.interface import combine_digests
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from skerry.runtime.checkpointing.divergence import DivergenceCheck
    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition, RoundFacts
    from skerry.runtime.checkpointing.shared_state import SharedState, State
    from skerry.runtime.log.records import Receipt, Scope
    from skerry.runtime.ranks.interface import Channel


class ReceiptComparisons:
    """Submits comparisons of receipts to a pool, in order. For the thread that trains, on every rank."""

    def __init__(self, divergence: DivergenceCheck, state: SharedState, ranks: Channel, pool: Executor) -> None:
        """ranks: the channel of the thread that trains. pool: one job at a time, which receipts are written in, too."""
        self._divergence = divergence
        self._state = state
        self._train = ranks
        self._pool = pool
        self._last: tuple[Receipt, tuple[str, ...]] | None = None

    def submit(self, receipt: Receipt, members: tuple[str, ...]) -> None:
        """Compare this replica's receipt of a round with those of the round's members, in the background."""
        self._last = receipt, members
        self._pool.submit(self._compare, receipt, members)

    def finish(self, position: LogPosition) -> None:
        """At the end of the run: wait for all comparisons, compare the last round, and measure what differs.

        Call while state is stable. Costs one listing, and one read for each receipt.
        """
        if self._last is None:
            return
        receipt, members = self._last
        self._pool.submit(self._compare, receipt, members, last=True).exception()
        if self._train.broadcast_from_rank0("compare the last state", lambda: self._divergence.suspects):
            self.keep(position.round, receipt.scope)
            self._pool.submit(self._compare, receipt, members, last=True).exception()

    def keep(self, round_number: int, scope: Scope) -> None:
        """Keep a copy of the state after so many rounds, to measure a difference."""
        kept = cast("State", checkpoint.snapshot(self._state.compared(scope)))
        self._divergence.keep(round_number, kept, self._state.paths(scope))

    def compare_recomputed(self, position: LogPosition, facts: RoundFacts, scope: Scope) -> str | None:
        """Compare a round that is followed for the second time with the receipt of the first. Return the digest.

        Raises Invalid on all ranks if one has what cannot be stored.
        """

        def own_digest() -> str | None:
            return None if scope == "average" else checkpoint.state_digest(self._state.compared(scope))

        def compare(all_ranks: Sequence[str | None]) -> str | None:
            digests = [digest for digest in all_ranks if digest is not None]
            state = combine_digests(digests) if digests else None
            self._divergence.recomputed(position.round - 1, facts.averages, state)
            return state

        return self._train.reduce_on_rank0("compare a recomputed state", own_digest, compare)

    def _compare(self, receipt: Receipt, members: tuple[str, ...], *, last: bool = False) -> None:
        try:
            self._divergence.look(receipt, members, last=last)
        except Exception as error:  # noqa: BLE001  a thread's entry: the next comparison covers this round too
            fields = {"round": receipt.round, "error": str(error)}
            emit("receipt_failed", fields, level=logging.WARNING, error=error)
