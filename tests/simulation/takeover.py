"""The time of an exchange by reduce-scatter whose owner of units dies, against the same exchange without a death.

Drives the shipped takeover in virtual time. Only the sums are left out: a unit takes as long as its bytes need on the
replica's link. Members learn of the decision at different times, and their links differ.
"""
# Drives the work of one replica, which has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.faults import PROFILE
from tests.simulation.world import Process, SimulatedClock, World

from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.reduce import AverageResult
from skerry.runtime.tensors.reduce_scatter import Scatter, _Work

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from skerry.runtime.store.interface import Data, Profile, Span

LATENCY_S: Final = 0.03
LATE_S: Final = 2.0
"""A member learns of the decision so much later than the proposer, at most: the longest pause between two looks."""


@dataclass(frozen=True, kw_only=True)
class TakeoverCase:
    """members: of the exchange. units: of the average. unit_s: seconds of one unit of one contribution on a link."""

    members: int
    units: int
    unit_s: float


class _Link(MemoryStore):
    """One member's way to the store they share. pace: how much slower its link is."""

    def __init__(self, shared: MemoryStore, world: World, unit_s: float) -> None:
        super().__init__()
        self.shared, self.world, self.unit_s = shared, world, unit_s

    @property
    def profile(self) -> Profile:
        return replace(PROFILE, poll_first=0.2, poll_cap=LATE_S)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self.world.sleep(LATENCY_S)
        data = self.shared.read(key, span, into)
        self.world.sleep(0.0 if data is None else self.unit_s)
        return data

    def create(self, key: str, data: Data) -> bool:
        self.world.sleep(LATENCY_S + self.unit_s)
        return self.shared.create(key, data)


class _Units:
    """Takes the place of `Reducer`: a unit of all contributions takes its time."""

    def __init__(self, world: World, case: TakeoverCase, unit_s: float) -> None:
        self.plan = tuple(range(case.units))
        self.reduction = SimpleNamespace(unit=lambda _: [b"sum"], set_unit=lambda _piece, _data: None)
        self._world, self._seconds = world, LATENCY_S + (case.members - 1) * unit_s

    def run(self, pieces: Sequence[int]) -> Generator[int]:
        for piece in pieces:
            self._world.sleep(self._seconds)
            yield piece

    def result(self) -> AverageResult:
        return AverageResult(digest="", downloaded_bytes=0, requests=0, download_s=0.0)


class _Member(_Work):
    def _sample(self) -> None:
        """No bytes, so nothing to check."""


def exchange_seconds(case: TakeoverCase, seed: int, *, death: bool) -> float:
    """Seconds from the decision until every member that lives has the average.

    death: one member dies at a random moment before it has made all of its units.
    """
    world, shared = World(seed), MemoryStore()
    slots = [f"r-{number}" for number in range(case.members)]
    ends: dict[str, float] = {}
    own_s = case.units / case.members * (LATENCY_S + case.members * case.unit_s)
    victim, dies_at = world.random.randrange(case.members), world.random.random()

    def live(slot: str, late: float, unit_s: float) -> None:
        world.sleep(late)
        scatter = Scatter(
            round=0, exchange=0, decision="00" * 32, rank=0, members=slots, makers=slots, mine=slot, patient=True
        )
        units: Any = _Units(world, case, unit_s)
        _Member(_Link(shared, world, unit_s), scatter, units, SimulatedClock(world, 0.0, 1.0)).run()
        ends[slot] = world.now

    for number, slot in enumerate(slots):
        late, pace = world.random.random() * LATE_S, world.random.uniform(0.8, 1.2)
        process = Process(world, slot, slot)
        process.spawn(lambda slot=slot, late=late, pace=pace: live(slot, late, pace * case.unit_s))
        if death and number == victim:
            world.after(late + dies_at * own_s, process.kill)
    world.run(until=1e6, max_events=10_000_000)
    world.close()
    dead = {slots[victim]} if death else set[str]()
    assert ends.keys() >= set(slots) - dead
    return max(seconds for slot, seconds in ends.items() if slot not in dead)


def takeover_ratios(case: TakeoverCase, seeds: int) -> list[float]:
    """Of each seed, the time with a death in the time without, sorted."""
    return sorted(
        exchange_seconds(case, seed, death=True) / exchange_seconds(case, seed, death=False) for seed in range(seeds)
    )
