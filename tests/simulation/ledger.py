"""Every inner step of every slot, from the training of it to the record that counts it, at most once per fragment.

A slot numbers its steps over all its incarnations, because the next one may resume what the last one trained. Steps are
read from the payloads in the bucket; replicas report the steps that they train, and those that they resume.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.simulation.training import STEPS, steps_in

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from tests.simulation.session import Mode
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
        mode: Mode,
        sync_every: int,
        min_replicas: int,
    ) -> None:
        self._broken = broken
        self._fragments = fragments
        self._mode = mode
        self._sync_every = sync_every
        self._min_replicas = min_replicas
        # The round that each step of a slot was trained for, by its number.
        self._rounds: defaultdict[str, list[int]] = defaultdict(list)
        self._tokens: defaultdict[str, list[int]] = defaultdict(list)
        # The steps that an incarnation may contribute.
        self._held: defaultdict[Author, set[int]] = defaultdict(set)
        self._contributions: defaultdict[tuple[int, int], dict[str, ContributedSteps]] = defaultdict(dict)
        self._contributors: defaultdict[int, set[str]] = defaultdict(set)
        self._whole: dict[tuple[int, str], float] = {}
        self._counted: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._shares: defaultdict[tuple[Author, int], set[float]] = defaultdict(set)
        self._listed: Counter[str] = Counter()
        self._evaluating: dict[Author, Process] = {}

    # Reported by replicas.

    def step_trained(self, by: Process, round_number: int, tokens: int) -> int:
        """One inner step on so many tokens, for the current round. Returns its number."""
        rounds = self._rounds[by.slot]
        assert len(rounds) < STEPS, "STEPS is too small for this run"
        rounds.append(round_number)
        self._tokens[by.slot].append(tokens)
        self._held[_author(by)].add(len(rounds) - 1)
        return len(rounds) - 1

    def steps_of(self, slot: str) -> int:
        """The number of steps that a slot has trained."""
        return len(self._rounds[slot])

    def resumed(self, by: Process, steps: Iterable[int]) -> None:
        """An incarnation goes on from these steps."""
        self._held[_author(by)].update(steps)

    def end_early(self, by: Process, round_number: int, steps: int, share: float) -> None:
        """A replica ends its round early: only if a quorum of others waits, and it has not contributed itself.

        steps: that it contributes. Its share is that of the fewest steps that count as a whole round for another.
        """
        others = self._contributors[round_number] - {by.slot}
        if len(others) < self._min_replicas:
            needs = f"for {sorted(others)}, min={self._min_replicas}"
            self._broken("early end", f"{by.name} ends round {round_number} early {needs}")
        fewest = min((self._whole[round_number, slot] for slot in others), default=math.inf)
        if not (0.0 < share < 1.0 or (share == 1.0 and steps >= fewest)):
            of = f"with {steps} steps as a share of {share}, others {fewest:g}"
            self._broken("early end", f"{by.name} ends round {round_number} early {of}")
        self.allow(by, round_number, share)

    @contextmanager
    def evaluation(self, by: Process) -> Generator[None]:
        """While a replica evaluates, it may contribute the steps that it has, as an early end."""
        self._evaluating[_author(by)] = by
        yield
        del self._evaluating[_author(by)]

    def allow(self, by: Process, round_number: int, share: float) -> None:
        """Accept this share of a round."""
        self._shares[_author(by), round_number].add(share)

    # Read from the log.

    def contribution_created(self, record: Document) -> None:
        """A slot has contributed, whatever that is worth."""
        slot, round_number = record["slot"], record["round"]
        evaluating = self._evaluating.get(Author(slot, record["incarnation"]))
        if evaluating is not None:
            self.end_early(evaluating, round_number, record["inner_steps"], record["share"])
        self._contributors[round_number].add(slot)
        self._whole[round_number, slot] = record["inner_steps"] / (record["share"] + record["late"])

    def contribution_stored(self, record: Document, content: Floats) -> None:
        """A sound contribution is in the log."""
        author, round_number = Author(record["slot"], record["incarnation"]), record["round"]
        counts = content[:STEPS]
        steps = steps_in(content)
        if twice := [step for step in steps if counts[step] != 1.0]:
            self._broken("work", f"{author} contributes steps {twice} twice in round {round_number}")
        self._contributions[round_number, record["exchange"]][author.slot] = ContributedSteps(author, steps)
        if unknown := sorted(steps - self._held[author]):
            self._broken("work", f"{author} contributes steps {unknown}, which it neither took nor resumed")
            return
        if record["inner_steps"] != (0 if self._mode == "ddp" else len(steps)):  # DDP has no inner steps
            self._broken("work", f"{author} contributes {len(steps)} steps as {record['inner_steps']}")
        tokens = sum(self._tokens[author.slot][step] for step in steps)
        if record["tokens"] != tokens:
            self._broken("work", f"{author} contributes {tokens} tokens as {record['tokens']} in round {round_number}")
        if record["share"] not in self._shares_due(author, round_number, len(steps)) or record["discount"] != 1.0:
            weight = f"share={record['share']} discount={record['discount']}"
            self._broken("weight", f"{author} contributes {len(steps)} steps in round {round_number} at {weight}")
        oldest = round_number - self._fragments
        if late := [step for step in steps if self._rounds[author.slot][step] <= oldest]:
            self._broken("work", f"{author} contributes steps {late} of an earlier exchange in round {round_number}")

    def _shares_due(self, author: Author, round_number: int, steps: int) -> set[float]:
        """Allowed shares of so many steps: their part of all since the fragment's last exchange, or of an early end."""
        if self._mode != "diloco":
            return {1.0}
        whole = self._sync_every * min(round_number + 1, self._fragments)
        return {1.0} if steps >= whole else {max(1, steps) / whole} | self._shares[author, round_number]

    def decision_stored(self, round_number: int, exchange: int, slots: Sequence[str]) -> None:
        """These contributions are counted, and none of their steps was before."""
        for slot in slots:
            self._listed[slot] += exchange == 0
            contributed = self._contributions[round_number, exchange].get(slot)
            if contributed is None:
                continue
            counted = self._counted[slot, round_number % self._fragments + exchange]
            if twice := counted & contributed.steps:
                self._broken("work", f"round {round_number} counts steps {sorted(twice)} of {contributed.author} again")
            counted |= contributed.steps

    def check_participation(self, slots: Iterable[str], rounds: int) -> None:
        """Check that each replica with a steady pace is in most records."""
        for slot in slots:
            if self._listed[slot] < STEADY * rounds:
                self._broken("participation", f"{slot} is in {self._listed[slot]} of {rounds} records")


def _author(process: Process) -> Author:
    assert process.incarnation is not None
    return Author(process.slot, process.incarnation)
