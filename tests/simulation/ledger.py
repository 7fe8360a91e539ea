"""Every inner step of every incarnation, from the training of it to the record that counts it, at most once.

Steps are read from the payloads in the bucket; replicas report the steps that they have not contributed yet.
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

STEADY: Final = 0.8
"""In what part of the records a replica is that keeps a steady pace, in a run without faults."""


class Author(NamedTuple):
    """One incarnation of one slot."""

    slot: str
    incarnation: int


class ContributedSteps(NamedTuple):
    """The contribution of a slot to a round."""

    author: Author
    steps: frozenset[int]


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
        self._contributions: defaultdict[int, dict[str, ContributedSteps]] = defaultdict(dict)
        self._contributors: defaultdict[int, set[str]] = defaultdict(set)
        self._counted: defaultdict[tuple[Author, int], set[int]] = defaultdict(set)
        self._shares: defaultdict[tuple[Author, int], set[float]] = defaultdict(set)
        self._listed: Counter[str] = Counter()

    # What replicas tell.

    def step_trained(self, by: Process, step: int, round_number: int) -> None:
        """One inner step, for the current round."""
        self._rounds[_author(by), step] = round_number

    def end_early(self, by: Process, round_number: int, share: float) -> None:
        """A replica ends its round early: only if a quorum of others waits, and it has not contributed itself."""
        others = self._contributors[round_number] - {by.slot}
        if len(others) < self._min_replicas:
            needs = f"for {sorted(others)}, min={self._min_replicas}"
            self._broken("early end", f"{by.name} ends round {round_number} early {needs}")
        if not 0.0 < share < 1.0:
            self._broken("early end", f"{by.name} ends round {round_number} early with a share of {share}")
        self._shares[_author(by), round_number].add(share)

    # What is in the log.

    def contribution_created(self, slot: str, round_number: int) -> None:
        """A slot has contributed, whatever that is worth."""
        self._contributors[round_number].add(slot)

    def contribution_stored(self, record: Document, content: Floats) -> None:
        """A sound contribution is in the log."""
        author, round_number = Author(record["slot"], record["incarnation"]), record["round"]
        counts = content[:STEPS]
        steps = frozenset[int](np.flatnonzero(counts).tolist())
        if float(counts.sum()) != len(steps):
            self._broken("work", f"{author} offers steps twice in round {round_number}: {counts.tolist()}")
        self._contributions[round_number][author.slot] = ContributedSteps(author, steps)
        unknown = [step for step in steps if (author, step) not in self._rounds]
        if unknown:
            self._broken("work", f"{author} offers steps {unknown}, which it never took")
            return
        if record["share"] not in self._shares_due(author, round_number, len(steps)) or record["discount"] != 1.0:
            weight = f"share={record['share']} discount={record['discount']}"
            self._broken("weight", f"{author} offers {len(steps)} steps in round {round_number} at {weight}")
        oldest = round_number - self._fragments
        if late := [step for step in steps if self._rounds[author, step] <= oldest]:
            self._broken("work", f"{author} offers steps {late} of an earlier exchange in round {round_number}")

    def _shares_due(self, author: Author, round_number: int, steps: int) -> set[float]:
        """Allowed shares of so many steps: their part of those since the fragment's last exchange, unless the round ended early."""
        whole = self._sync_every * min(round_number + 1, self._fragments)
        return {1.0} if steps >= whole else {max(1, steps) / whole} | self._shares[author, round_number]

    def decision_stored(self, round_number: int, slots: Sequence[str]) -> None:
        """These contributions are counted, and none of their steps was before."""
        for slot in slots:
            self._listed[slot] += 1
            offer = self._contributions[round_number].get(slot)
            if offer is None:
                continue
            counted = self._counted[offer.author, round_number % self._fragments]
            if twice := counted & offer.steps:
                self._broken("work", f"round {round_number} counts steps {sorted(twice)} of {offer.author} again")
            counted |= offer.steps

    def check_participation(self, slots: Iterable[str], rounds: int) -> None:
        """Check that each replica with a steady pace is in most records."""
        for slot in slots:
            if self._listed[slot] < STEADY * rounds:
                self._broken("participation", f"{slot} is in {self._listed[slot]} of {rounds} records")


def _author(process: Process) -> Author:
    assert process.incarnation is not None
    return Author(process.slot, process.incarnation)
