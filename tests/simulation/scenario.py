"""One seed: how many replicas, what kind of run, what befalls it, and what came of it.

The launcher here does what real ones do: it starts again what crashed or gave up, replaces what it believes dead
while it only sleeps, and gives up nothing but what the scenario lost for good.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from tests.simulation.faults import CALL_FAULTS, Bucket, FaultyStore, Rates, Script
from tests.simulation.invariants import Checker
from tests.simulation.replica import Habits, Replica
from tests.simulation.world import Happening, Process, SimulatedClock, World

from skerry.runtime.garbage import Retention
from skerry.runtime.records import Run
from skerry.runtime.rounds import Grace, Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

# Ten times what the longest of hundreds of schedules has needed: beyond it, something polls for ever.
MAX_EVENTS: Final = 100_000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a seed stands for. lost: slots that stay away once they crashed. late: seconds until each slot starts."""

    seed: int
    slots: tuple[str, ...]
    run: Run
    policy: Policy
    habits: tuple[Habits, ...]
    rates: Rates
    late: tuple[float, ...]
    lost: frozenset[str] = frozenset()
    store_has_clock: bool = True

    def __str__(self) -> str:
        policy = self.policy
        slow = max(h.train_s for h in self.habits) / min(h.train_s for h in self.habits)
        lost = ",".join(sorted(self.lost)) or "-"
        return (
            f"seed={self.seed} replicas={len(self.slots)} rounds={self.run.rounds} min={policy.min_replicas} "
            f"grace={policy.grace.cap_s:g} spares={policy.spares} weighting={policy.weighting} slowest={slow:.1f}x "
            f"keeps={self.habits[0].retention} lost={lost} horizon={self.rates.horizon_s:g}"
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a schedule. digest: of its whole trace; equal digests are equal schedules."""

    scenario: Scenario
    violations: Sequence[str]
    events: int
    seconds: float
    faults: Counter[str]
    facts: Counter[str]
    trace: Sequence[Happening] = field(repr=False)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(map(str, self.trace)).encode()).hexdigest()

    def report(self, last: int = 40) -> str:
        """For people: the seed, what is broken, and how it came to that."""
        lines = [str(self.scenario), *self.violations, *map(str, self.trace[-last:])]
        lines.append(f"replay: scripts/bench simulate --seed {self.scenario.seed}")
        return "\n".join(lines)


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    count = rng.choice((2, 2, 3, 3, 3, 4, 5))
    slots = tuple(f"r-{i}" for i in range(count))
    lost = frozenset(rng.sample(slots, rng.randint(1, count - 1))) if count > 2 and rng.random() < 0.15 else frozenset()
    min_replicas = rng.randint(1 if rng.random() < 0.3 else min(2, count - len(lost)), count - len(lost))
    heartbeat_s = rng.choice((0.5, 1.0, 2.0))
    # A third of the runs train so briefly that what is left behind of one round meets the next.
    train_s = rng.choice((rng.uniform(3.0, 9.0), rng.uniform(3.0, 9.0), rng.uniform(0.2, 1.0)))
    rounds = rng.randint(2, 6)
    rates = _rates(rng, horizon_s=rounds * (train_s + 1.0) * rng.uniform(1.0, 3.0))
    if min_replicas + len(lost) < count and rates.horizon_s:
        # Its round must be possible without it.
        rates = replace(rates, vanished=rng.choice((0.0, 0.0, 0.02)))
    run = Run(
        nonce="0" * 32,
        name="simulated",
        spec=None,
        slots=slots,
        rounds=rounds,
        sync_every=1,
        fragments=1,
        outer_lr=0.7,
        outer_momentum=0.9,
        min_replicas=min_replicas,
        grace_s=20.0,
        start_window_s=rng.choice((0.0, 20.0)),
        checkpoint_every=rng.choice((1, 1, 2, 3)),
        codec="none",
        weighting=rng.choice(("uniform", "uniform", "tokens")),
        created="",
    )
    policy = Policy(
        min_replicas=min_replicas,
        expected=frozenset(slots),
        start_window_s=run.start_window_s,
        grace=Grace(floor_s=1.0, cap_s=rng.choice((2.0, 10.0, 20.0)), share=rng.choice((0.25, 0.5))),
        stale_s=6 * heartbeat_s + 2.0,
        deadline_s=rng.choice((30.0, 60.0, 120.0)),
        propose_delay_s=rng.choice((0.0, 0.5, 1.25)),
        spares=rng.random() < 0.15,
        weighting=run.weighting,
    )
    retention = rng.choice((None, Retention(last=rng.randint(1, 3), age_s=rng.choice((0.0, 5.0, 60.0)))))
    habits = tuple(
        Habits(
            policy=policy,
            run=run,
            heartbeat_s=heartbeat_s,
            train_s=train_s * (3.0 if rng.random() < 0.15 else rng.uniform(0.9, 1.1)),
            store_deadline_s=rng.choice((20.0, 60.0)),
            checkpoint_every=run.checkpoint_every,
            abstains=rng.choice((0.0, 0.0, 0.0, 0.2)),
            parts=rng.choice((1, 1, 2, 3)),
            keeps_late=rng.random() < 0.8,
            retention=retention,
        )
        for _ in slots
    )
    late = tuple(rng.choice((0.0, 0.1, 2.0)) if rng.random() < 0.85 else rng.uniform(5.0, 60.0) for _ in slots)
    return Scenario(
        seed=seed,
        slots=slots,
        run=run,
        policy=policy,
        habits=habits,
        rates=rates,
        late=late,
        lost=lost,
        store_has_clock=rng.random() < 0.8,
    )


def _rates(rng: random.Random, horizon_s: float) -> Rates:
    """A mix of faults: each kind is there or not, and then rare or frequent."""
    mood = rng.choice(("calm", "flaky", "flaky", "crashing", "sleepy", "cut", "storm", "storm"))
    often = rng.choice((0.003, 0.01, 0.03))

    def maybe(*moods: str, rate: float) -> float:
        return rate if mood in moods and rng.random() < 0.8 else 0.0

    calls = {kind: often if mood in {"flaky", "storm"} and rng.random() < 0.6 else 0.0 for kind in CALL_FAULTS}
    return Rates(
        calls=calls,
        crash=maybe("crashing", "storm", rate=rng.choice((0.0005, 0.002, 0.004))),
        pause=maybe("sleepy", "storm", rate=rng.choice((0.0003, 0.001, 0.002))),
        cut_off=maybe("cut", "storm", rate=rng.choice((0.0005, 0.002))),
        stop=maybe("crashing", "sleepy", rate=rng.choice((0.0, 0.0005))),
        delayed=maybe("sleepy", "cut", "storm", rate=rng.choice((0.001, 0.01))),
        hidden=maybe("flaky", "storm", rate=rng.choice((0.02, 0.2))),
        latency_s=rng.choice((0.005, 0.02, 0.1)),
        horizon_s=0.0 if mood == "calm" else horizon_s,
    )


class Simulation:
    """One run of a scenario. script: faults of a test's own choosing. skew_s: how far clocks may be off."""

    def __init__(self, scenario: Scenario, script: Script | None = None, *, skew_s: float = 7200.0) -> None:
        self.scenario = scenario
        self._script = script
        self._skew_s = skew_s
        self.world = World(scenario.seed)
        self.checker = Checker(
            self.world,
            min_replicas=scenario.policy.min_replicas,
            spares=scenario.policy.spares,
            by_tokens=scenario.run.weighting == "tokens",
            retention=scenario.habits[0].retention,
        )
        self.bucket = Bucket(self.world, self.checker, has_clock=scenario.store_has_clock)
        self.checker.watch(self.bucket.engine)
        self.processes: list[Process] = []
        self._launches: Counter[str] = Counter()

    def run(self) -> Result:
        """From the start to the end of the last process, or to the first violation."""
        scenario = self.scenario
        for slot, late in zip(scenario.slots, scenario.late, strict=True):
            self.world.after(late, lambda slot=slot: self.launch(slot))
        try:
            ended = self.world.run(self._limit_s(), MAX_EVENTS)
        except Exception as error:  # noqa: BLE001  whatever escapes a replica's main is a finding
            self.checker.broken("program", repr(error))
            ended = "broken"
        if ended != "broken":
            self._at_the_end(ended)
        self.world.close()
        for process in self.processes:
            self.world.facts[f"processes {process.status.split(':')[0]}"] += 1
        self.world.facts["rounds closed"] += self.checker.head
        return Result(
            scenario=scenario,
            violations=self.checker.violations,
            events=self.world.events,
            seconds=self.world.now,
            faults=self.world.faults,
            facts=self.world.facts,
            trace=self.world.trace,
        )

    def launch(self, slot: str) -> Process:
        """Start the next process of a slot."""
        scenario, world = self.scenario, self.world
        self._launches[slot] += 1
        process = Process(world, f"{slot}#{self._launches[slot]}", slot)
        self.processes.append(process)
        engine = FaultyStore(self.bucket, process, scenario.rates, self._fell_asleep, self._script)
        clock = SimulatedClock(world, self._skew_s * world.random.uniform(-1.0, 1.0), world.random.uniform(0.95, 1.05))
        habits = scenario.habits[scenario.slots.index(slot)]
        replica = Replica(process, engine, habits, self.checker, clock)

        def main() -> None:
            replica.main()
            world.note(process.name, "ends", process.status, "")
            process.over()

        process.on_end(lambda: self._ended(process))
        process.spawn(main)
        return process

    def _ended(self, process: Process) -> None:
        """What a launcher does when a process is gone."""
        if process.status.startswith("refused"):
            self.checker.broken("fail closed", f"{process.name} stopped without a cause: {process.status}")
            return
        if process.status in {"done", "finished"}:
            if process.status == "finished" and self.checker.head < (self.scenario.run.rounds or 0):
                self.checker.broken("liveness", f"{process.name} ended as finished at round {self.checker.head}")
            return
        if process.slot in self.scenario.lost:
            return
        # Whoever replaced a fenced process may be dead by now: it is started again if nobody lives after a while.
        waits = (60.0,) if process.status == "fenced" else (0.5, 5.0, 20.0)
        self.world.after(self.world.random.choice(waits), lambda: self._restart(process.slot))

    def _restart(self, slot: str) -> None:
        mine = [process for process in self.processes if process.slot == slot]
        if not any(
            process.status in {"running", "done", "finished"} and process.asleep_until <= self.world.now
            for process in mine
        ):
            self.launch(slot)

    def _fell_asleep(self, process: Process, seconds: float) -> None:
        """The launcher hears nothing of a process and believes it dead, sometimes too early."""
        if seconds > 100.0 or self.world.random.random() < 0.5:
            self.world.after(min(seconds * 0.9, self.world.random.uniform(1.0, 30.0)), lambda: self._replace(process))

    def _replace(self, process: Process) -> None:
        if process.status == "running" and process.slot not in self.scenario.lost:
            self.world.fault("replaced", process.name)
            self.launch(process.slot)

    def _limit_s(self) -> float:
        """Virtual time within which a run must be over, once faults have stopped and everybody is awake."""
        scenario = self.scenario
        slowest = max(habits.train_s for habits in scenario.habits)
        round_s = 3 * slowest + scenario.policy.deadline_s + scenario.policy.stale_s + scenario.policy.grace.cap_s
        return scenario.rates.horizon_s + 3600.0 + 400.0 + 2 * (scenario.run.rounds or 0) * round_s

    def _at_the_end(self, ended: str) -> None:
        rounds = self.scenario.run.rounds or 0
        if ended != "idle":
            running = ",".join(p.name for p in self.processes if p.status == "running")
            self.checker.broken("liveness", f"no end: {ended} at {self.world.now:.0f} s, running={running}")
        elif self.checker.head < rounds:
            self.checker.broken("liveness", f"{self.checker.head} of {rounds} rounds were closed")
        for slot in self.scenario.slots:
            last = [p.status for p in self.processes if p.slot == slot]
            if slot not in self.scenario.lost and not {"done", "finished"} & set(last) and ended == "idle":
                self.checker.broken("liveness", f"{slot} did not finish: {last}")
        if not self.checker.violations:
            self.checker.rebuild("at the end")


def run_seed(seed: int) -> Result:
    """Simulate one seed."""
    return Simulation(draw(seed)).run()
