"""Every inner step of every incarnation, from the training of it to the record that counts it, at most once.

Steps are read from payloads as they stand in the bucket; what a replica still keeps it tells itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from tests.simulation.training import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.simulation.training import Document, Floats
    from tests.simulation.world import Process

LATE: Final = 0.5
"""What work of an earlier round is discounted by (decision 0004)."""
STEADY: Final = 0.8
"""In what part of the records a replica is that keeps a steady pace, in a run without faults."""


class Author(NamedTuple):
    """One incarnation of one slot."""

    slot: str
    incarnation: int


class Offer(NamedTuple):
    """What a slot has contributed to a round. brought: before it trained for it. is_listed: the decision counts it."""

    author: Author
    steps: frozenset[int]
    brought: bool
    is_listed: bool = False


class Ledger:
    """The inner steps of a run. broken: takes an invariant and how it was broken."""

    def __init__(
        self,
        broken: Callable[[str, str], None],
        *,
        fragments: int,
        sync_every: int,
        min_replicas: int,
    ) -> None:
        self._broken = broken
        self._fragments = fragments
        self._sync_every = sync_every
        self._min_replicas = min_replicas
        self._rounds: dict[tuple[Author, int], int] = {}
        self._offers: defaultdict[int, dict[str, Offer]] = defaultdict(dict)
        self._came: defaultdict[int, set[str]] = defaultdict(set)
        self._counted: defaultdict[tuple[Author, int], set[int]] = defaultdict(set)
        self._shares: defaultdict[tuple[Author, int], set[float]] = defaultdict(set)
        self._listed: Counter[str] = Counter()

    # What replicas tell.

    def trained(self, by: Process, step: int, round_number: int) -> None:
        """One inner step, for the round at hand."""
        self._rounds[_author(by), step] = round_number

    def cut_short(self, by: Process, round_number: int, share: float) -> None:
        """A replica ends its round early: only if a quorum of others waits, and it has not brought anything itself."""
        others = self._came[round_number] - {by.slot}
        if len(others) < self._min_replicas:
            self._broken(
                "pace", f"{by.name} cuts round {round_number} short for {sorted(others)}, min={self._min_replicas}"
            )
        if not 0.0 < share < 1.0:
            self._broken("pace", f"{by.name} cuts round {round_number} short with a share of {share}")
        self._shares[_author(by), round_number].add(share)

    def exchanged(
        self, by: Process, round_number: int, had: Iterable[int], keeps: frozenset[int], *, settled: bool = True
    ) -> None:
        """An exchange is over: what a replica had trained and kept is counted, or it keeps it. Never both.

        settled: it knows the decision; else what it keeps may be counted.
        """
        counted = self._counted[_author(by), round_number % self._fragments]
        if lost := set(had) - counted - keeps:
            self._broken("work", f"{by.name} neither counts nor keeps steps {sorted(lost)} after round {round_number}")
        if settled and (twice := keeps & counted):
            self._broken("work", f"{by.name} keeps steps {sorted(twice)} after round {round_number}; they are counted")

    def repeats(self, by: Process, round_number: int) -> bool:
        """What counts for the slot is an earlier incarnation's: the data that this one trained on is counted."""
        offer = self._offers[round_number].get(by.slot)
        return offer is not None and offer.is_listed and not offer.brought and offer.author != _author(by)

    # What is in the log.

    def came(self, slot: str, round_number: int) -> None:
        """A slot has contributed, whatever that is worth."""
        self._came[round_number].add(slot)

    def offered(self, record: Document, content: Floats) -> None:
        """A sound contribution stands in the log."""
        author, round_number = Author(record["slot"], record["incarnation"]), record["round"]
        counts = content[:STEPS]
        steps = frozenset[int](np.flatnonzero(counts).tolist())
        if float(counts.sum()) != len(steps):
            self._broken("work", f"{author} offers steps twice in round {round_number}: {counts.tolist()}")
        self._offers[round_number][author.slot] = Offer(author, steps, brought=record["discount"] != 1.0)
        unknown = [step for step in steps if (author, step) not in self._rounds]
        if unknown:
            self._broken("work", f"{author} offers steps {unknown}, which it never took")
            return
        fresh = sum(self._rounds[author, step] == round_number for step in steps)
        if not self._is_due(author, round_number, fresh, record):
            told = f"share={record['share']} discount={record['discount']}"
            self._broken("weight", f"{author} offers {fresh} fresh steps in round {round_number} at {told}")

    def _is_due(self, author: Author, round_number: int, fresh: int, record: Document) -> bool:
        """Whether share and discount fit what is offered."""
        if not fresh:
            return record["discount"] == LATE
        whole = fresh == self._sync_every
        shares = {1.0} if whole else self._shares[author, round_number]
        return record["discount"] == 1.0 and record["share"] in shares

    def decided(self, round_number: int, slots: Sequence[str]) -> None:
        """These contributions are counted, and none of their steps was before."""
        for slot in slots:
            self._listed[slot] += 1
            offer = self._offers[round_number].get(slot)
            if offer is None:
                continue
            self._offers[round_number][slot] = offer._replace(is_listed=True)
            counted = self._counted[offer.author, round_number % self._fragments]
            if twice := counted & offer.steps:
                self._broken("work", f"round {round_number} counts steps {sorted(twice)} of {offer.author} again")
            counted |= offer.steps

    def check_participation(self, slots: Iterable[str], rounds: int) -> None:
        """Whoever keeps a steady pace is in most records."""
        for slot in slots:
            if self._listed[slot] < STEADY * rounds:
                self._broken("participation", f"{slot} is in {self._listed[slot]} of {rounds} records")


def _author(process: Process) -> Author:
    assert process.incarnation is not None
    return Author(process.slot, process.incarnation)
