"""Many seeds: what all of them together did, and the first that breaks an invariant."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from tests.simulation.run import run_seed

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from tests.simulation.mutants import Mutant


@dataclass(kw_only=True)
class Tally:
    """The totals of a search. reports: one per broken seed, for people. virtual_s: simulated seconds."""

    schedules: int = 0
    events: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter[str])
    facts: Counter[str] = field(default_factory=Counter[str])
    reports: list[str] = field(default_factory=list[str])

    def add(self, other: Tally) -> None:
        """Take in another search's counts."""
        self.schedules += other.schedules
        self.events += other.events
        self.virtual_s += other.virtual_s
        self.faults += other.faults
        self.facts += other.facts
        self.reports += other.reports


@dataclass(frozen=True, kw_only=True)
class Caught:
    """The first seed that shows a mutant, and which invariant it breaks."""

    seeds: int
    invariant: str
    report: str


@contextmanager
def quiet() -> Generator[None]:
    """The runtime's own log is silent: tens of thousands of schedules would fill it.

    What was imported is none of the garbage collector's business meanwhile: a fifth of the time otherwise.
    """
    logger = logging.getLogger("skerry")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        logger.setLevel(before)


def search(seeds: Iterable[int], *, mirrored: bool = False, elastic: bool = False) -> Tally:
    """Simulate every seed, also after a violation. mirrored, elastic: as of `run_seed`."""
    tally = Tally()
    with quiet():
        for seed in seeds:
            result = run_seed(seed, mirrored=mirrored, elastic=elastic)
            tally.schedules += 1
            tally.events += result.events
            tally.virtual_s += result.seconds
            tally.faults += result.faults
            tally.facts += result.facts
            if result.violations:
                tally.reports.append(result.report())
    return tally


def hunt(mutant: Mutant, limit: int, first: int | None = None) -> Caught | None:
    """Simulate seeds 0, 1, ... with the mutant in the code until an invariant breaks; None if `limit` show nothing.

    first: a seed to try before them.
    """
    order = range(limit) if first is None else chain([first], range(limit))
    with mutant.alive(), quiet():
        for tried, seed in enumerate(order, 1):
            result = run_seed(seed)
            if result.violations:
                invariant = result.violations[0].split(":")[0]
                return Caught(seeds=tried, invariant=invariant, report=result.report())
    return None
