"""One run of a scenario, from the start to the end of its last process, and what came of it.

The launcher here does what real ones do: it starts again what crashed or gave up, replaces what it believes dead
while it only sleeps, and leaves only those slots down that the scenario lost for good.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulation.faults import Bucket, FaultyStore, Script
from tests.simulation.invariants import Checker
from tests.simulation.links import LinkCheck
from tests.simulation.mirrors import MirrorCheck
from tests.simulation.owners import NewerRecords, script_of
from tests.simulation.replica import Replica
from tests.simulation.roll_ups import RollUpCheck
from tests.simulation.scenario import Scenario, draw, with_mirror, with_other_slots
from tests.simulation.world import Process, SimulatedClock, TraceLine, World

from skerry.runtime.log import keys
from skerry.runtime.protocol.quorum import Grace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.simulation.operator import Change

    from skerry.runtime.store.interface import Store

# Ten times what the longest of hundreds of schedules has needed: beyond it, something polls for ever.
MAX_EVENTS: Final = 100_000


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a schedule. digest: of its whole trace; equal digests are equal schedules."""

    scenario: Scenario
    violations: Sequence[str]
    events: int
    seconds: float
    faults: Counter[str]
    facts: Counter[str]
    trace: Sequence[TraceLine] = field(repr=False)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(map(str, self.trace)).encode()).hexdigest()

    def report(self, last: int = 40) -> str:
        """For people: the seed, what is broken, and how it came to that."""
        lines = [str(self.scenario), *self.violations, *map(str, self.trace[-last:])]
        mirrors = " --mirrors" if self.scenario.run.mirrors else ""
        lines.append(f"replay: scripts/bench simulate --seed {self.scenario.seed}{mirrors}")
        return "\n".join(lines)


class Simulation:
    """One run of a scenario. script: faults of a test's own choosing. skew_s: how far clocks may be off."""

    def __init__(self, scenario: Scenario, script: Script | None = None, *, skew_s: float = 7200.0) -> None:
        self.scenario = scenario
        self._script = script
        self._skew_s = skew_s
        self.world = World(scenario.seed)
        retention = scenario.terms.retention if scenario.settings[0].collects else None
        self.checker = Checker(
            self.world,
            scenario.run,
            spares=scenario.terms.spares,
            mode=scenario.settings[0].mode,
            retention=retention,
        )
        self.bucket = Bucket(
            self.world,
            self.checker,
            has_clock=scenario.store_has_clock,
            deadline_s=scenario.terms.deadline_s,
            own_roles=scenario.own_roles,
        )
        if script is None and scenario.owner is not None:
            self._script = script_of(scenario.owner, self.bucket)
        self.checker.watch(self.bucket.engine)
        engine = self.bucket.engine
        self.mirror = MirrorCheck(self.world, self.checker, engine, scenario) if scenario.run.mirrors else None
        self.roll_ups = RollUpCheck(self.world, self.checker, self.bucket.engine, scenario)
        if scenario.settings[0].draws_links:
            LinkCheck(self.checker, engine, scenario)
        self.processes: list[Process] = []
        self._launches: Counter[str] = Counter()
        self._removed = {slot for slot in scenario.slots if slot not in scenario.run.slots}  # or not yet added

    def run(self) -> Result:
        """From the start to the end of the last process, or to the first violation."""
        scenario = self.scenario
        for slot, late in zip(scenario.slots, scenario.late, strict=True):
            if slot in scenario.run.slots:
                self.world.after(late, partial(self.launch, slot))
        for change in scenario.changes:
            self.world.after(change.at_s, partial(self._change, change))
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

    def launch(self, slot: str) -> None:
        """Start the next process of a slot."""
        scenario, world = self.scenario, self.world
        self._launches[slot] += 1
        process = Process(world, f"{slot}#{self._launches[slot]}", slot)
        self.processes.append(process)
        engine: Store = FaultyStore(self.bucket, process, scenario.rates, self._fell_asleep, self._script)
        # Monotonic clocks count from the machine's start.
        clock = SimulatedClock(world, self._skew_s * world.random.uniform(0.0, 2.0), world.random.uniform(0.95, 1.05))
        settings = scenario.settings[scenario.slots.index(slot)]
        mirror = None if self.mirror is None else self.mirror.open(process, self._fell_asleep)
        owner = scenario.owner
        if owner is not None and owner.kind in {"older", "before_links"} and owner.slot == slot:
            engine = NewerRecords(engine, owner)
        replica = Replica(process, engine, settings, self.checker, clock, mirror)

        def main() -> None:
            replica.main()
            world.note(process.name, "ends", process.status, "")
            process.over()

        process.on_end(lambda: self._ended(process))
        process.spawn(main)

    def _change(self, change: Change) -> None:
        """Change the settings as `skerry extend` does, and start again what had ended as done."""
        scenario, checker = self.scenario, self.checker
        if not checker.settings.write(self.bucket.engine, change, checker.head, len(scenario.slots)):
            return
        self.world.note("OPERATOR", "changes", keys.SETTINGS, str(change))
        if change.slots is not None:
            self._add_and_remove(change.slots)
        if not checker.is_over:
            for slot in (slot for slot in scenario.slots if slot not in self._removed):
                if {p.status for p in self.processes if p.slot == slot} & {"done", "finished"}:
                    self._start_again(slot)

    def _add_and_remove(self, slots: tuple[str, ...]) -> None:
        """As an apply does: start the jobs of new slots, and stop or kill those of the others a little later."""
        before, self._removed = self._removed, set(self.scenario.slots) - set(slots)
        for slot in (slot for slot in slots if slot in before):
            self.world.facts["slots added"] += 1
            self.launch(slot)
        for process in self.processes:
            if process.slot in self._removed - before and process.status == "running":
                self.world.facts["slots removed"] += 1
                end = self.world.random.choice((process.stop.set, process.kill))
                self.world.after(self.world.random.uniform(0.0, 10.0), partial(self._end_removed, process, end))

    def _end_removed(self, process: Process, end: Callable[[], None]) -> None:
        if process.status == "running":
            end()

    def _start_again(self, slot: str) -> None:
        """As `skerry up` does for a run that is not over: it knows the slot's newest process, and none before it."""
        newest = [process for process in self.processes if process.slot == slot][-1]
        if newest.status != "running" and slot not in self._removed:
            self.world.facts["starts after an extension"] += 1
            self.launch(slot)

    def _ended(self, process: Process) -> None:
        """React as a launcher does when a process is gone."""
        if self._nothing_leads_on(process):
            self.world.stop("lost")
            return
        if process.status.startswith("refused"):
            self.checker.broken("fail closed", f"{process.name} stopped without a cause: {process.status}")
            return
        if process.status in {"done", "finished"}:
            if self.scenario.changes and not self.checker.is_over:  # it ended while the run was extended
                self.world.after(5.0, lambda: self._start_again(process.slot))
            elif process.status == "finished" and not self.checker.is_over:
                self.checker.broken("liveness", f"{process.name} ended as finished at round {self.checker.head}")
            return
        if process.slot in self.scenario.lost | self._removed:
            return
        # The successor of a fenced process may be dead by now: the slot is started again if it has no process by then.
        waits = (60.0,) if process.status == "fenced" else (0.5, 5.0, 20.0)
        self.world.after(self.world.random.choice(waits), lambda: self._restart(process.slot))

    def _nothing_leads_on(self, gone: Process) -> bool:
        """A decided payload rotted, and no living process has the state after its round, or may reach it."""
        for key in self.checker.rotten:
            slot, number = keys.slot_of(key), keys.round_of(key)
            if slot not in self.checker.members.get(number, ()) or self.checker.newest > number:
                continue
            author = self.checker.authors[number, slot]
            alive = [process for process in self.processes if process is not gone and process.status == "running"]
            if any(p.round > number or (p.slot, p.incarnation) == (slot, author) for p in alive):
                continue
            if gone.round > number and gone.status in {"retry", "done", "finished"}:
                self.checker.broken("liveness", f"{gone.name} left, and alone held the state after round {number}")
            return True
        return False

    def _restart(self, slot: str) -> None:
        """As a launcher does that has seen the slot's process end, unless the slot is done, or has another process."""
        if slot in self._removed:
            return
        settled = {"running", "done", "finished"} if self.checker.is_over else {"running"}
        mine = [process for process in self.processes if process.slot == slot]
        if not any(process.status in settled and process.asleep_until <= self.world.now for process in mine):
            self.launch(slot)

    def _fell_asleep(self, process: Process, seconds: float) -> None:
        """The launcher hears nothing of a process and believes it dead, sometimes too early."""
        if seconds > 100.0 or self.world.random.random() < 0.5:
            self.world.after(min(seconds * 0.9, self.world.random.uniform(1.0, 30.0)), lambda: self._replace(process))

    def _replace(self, process: Process) -> None:
        if process.status == "running" and process.slot not in self.scenario.lost | self._removed:
            self.world.fault("replaced", process.name)
            self.launch(process.slot)

    def _limit_s(self) -> float:
        """Virtual time within which a run must be over, once faults have stopped and every process is awake."""
        scenario = self.scenario
        slowest = max(settings.train_s for settings in scenario.settings)
        terms = scenario.terms
        stale_s, grace_s = 6 * (terms.heartbeat_s or 0.0) + 2.0, (terms.grace or Grace()).cap_s
        round_s = 3 * slowest + terms.deadline_s + stale_s + grace_s
        rounds = (scenario.run.rounds or 0) + sum(change.more for change in scenario.changes)
        if scenario.run.work is not None:  # one replica may have to do it all, a third of a round at a time
            rounds *= 3 * len(scenario.slots)
        last = max((change.at_s for change in scenario.changes), default=0.0)
        return last + scenario.rates.horizon_s + 3600.0 + 400.0 + 2 * rounds * round_s

    def _at_the_end(self, ended: str) -> None:
        rounds = self.checker.settings.rounds
        if ended == "lost":
            self.world.facts["runs lost to rot"] += 1
            return
        if self.scenario.steady and ended == "idle":
            self.checker.ledger.check_participation(self.scenario.slots, rounds)
        if ended != "idle":
            running = ",".join(p.name for p in self.processes if p.status == "running")
            self.checker.broken("liveness", f"no end: {ended} at {self.world.now:.0f} s, running={running}")
        elif not self.checker.is_over:
            done = f"{self.checker.head} of {rounds} rounds were closed, {self.checker.work:g} trained"
            self.checker.broken("liveness", done)
        else:
            self.world.facts["rounds that made up"] += self.checker.head - rounds
        for slot in (slot for slot in self.scenario.slots if slot not in self._removed):
            last = [p.status for p in self.processes if p.slot == slot]
            if slot not in self.scenario.lost and not {"done", "finished"} & set(last) and ended == "idle":
                self.checker.broken("liveness", f"{slot} did not finish: {last}")
        if ended == "idle":
            self._check_healing()
        if not self.checker.violations:
            self.checker.rebuild("at the end")
            self.roll_ups.read_history()
        if not self.checker.violations and self.mirror is not None:
            self.mirror.check_end()

    def _check_healing(self) -> None:
        """No process holds another state at the end, and no slot that finished has left a last checkpoint of one."""
        crashed = {process.name for process in self.processes if process.status == "crashed"}
        if wrong := sorted(self.checker.flipped - crashed):
            self.checker.broken("healing", f"{wrong} still hold another state at the end")
        finished = {process.slot for process in self.processes if process.status in {"done", "finished"}}
        writer = self.checker.wrong.left_behind(self.checker.head, finished)
        if writer is not None:
            self.checker.broken("healing", f"{writer} ended, and the last checkpoint is of its wrong state")


def run_seed(seed: int, *, mirrored: bool = False, elastic: bool = False) -> Result:
    """Simulate one seed. mirrored: the replicas keep a mirror. elastic: slots are added and removed."""
    scenario = with_other_slots(draw(seed)) if elastic else draw(seed)
    return Simulation(with_mirror(scenario) if mirrored else scenario).run()
