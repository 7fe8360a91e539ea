"""One seed: how many replicas, what kind of run, and which faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tests.simulation.faults import CALL_FAULTS, ROT, Rates
from tests.simulation.operator import Change
from tests.simulation.owners import Owner
from tests.simulation.session import ReplicaSettings

from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.checkpointing.roll_up_writer import RollUpSettings
from skerry.runtime.log.records import Place
from skerry.runtime.log.run_record import MirrorSettings, Run
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.training.open_session import SessionOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.simulation.session import Mode

# How often each kind of run is drawn.
RUN_KINDS: Final[Mapping[str, int]] = {
    "calm": 6,
    "flaky": 12,
    "crashing": 6,
    "sleepy": 6,
    "cut": 6,
    "storm": 12,
    "steady": 3,
    "rotten": 6,
    "flipping": 1,
}


MODES: Final[Sequence[Mode]] = ("diloco", "local_sgd", "ddp")
CALM_GRACE: Final = Grace(floor_s=1.0, cap_s=2.0, share=0.25)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The run of a seed. lost: slots that stay away once they crashed. late: seconds until each slot starts.

    steady: it has no faults, and every replica keeps a pace that must be enough to be counted. changes: of its
    settings, by the operator. slots: also those that are added later, which run.json does not have. own_roles: each
    slot has a role of its own, as in a cloud. owner: one that makes its units slowly, or is of another version.
    """

    seed: int
    slots: tuple[str, ...]
    run: Run
    terms: SessionOptions
    settings: tuple[ReplicaSettings, ...]
    rates: Rates
    late: tuple[float, ...]
    lost: frozenset[str] = frozenset()
    store_has_clock: bool = True
    steady: bool = False
    changes: tuple[Change, ...] = ()
    own_roles: bool = False
    owner: Owner | None = None

    def __str__(self) -> str:
        terms, run = self.terms, self.run
        slow = max(h.train_s for h in self.settings) / min(h.train_s for h in self.settings)
        lost = ",".join(sorted(self.lost)) or "-"
        return (
            f"seed={self.seed} replicas={len(self.slots)} rounds={run.rounds} steps={run.sync_every} "
            f"fragments={run.fragments} work={run.work} min={terms.min_replicas} grace={terms.grace} "
            f"mode={self.settings[0].mode} spares={terms.spares} weighting={run.weighting} slowest={slow:.1f}x "
            f"keeps={terms.retention if self.settings[0].collects else None} "
            f"saves={self.settings[0].unfinished_every_s} lost={lost} horizon={self.rates.horizon_s:g} "
            f"steady={self.steady} changes={len(self.changes)} roll_ups={terms.roll_ups.rounds} "
            f"rot={self.rates.rot:g} roles={self.own_roles}"
        )


def calm(
    replicas: int = 3,
    *,
    rounds: int = 4,
    min_replicas: int = 2,
    sync_every: int = 1,
    fragments: int = 1,
    checkpoint_every: int = 1,
    start_window_s: float = 20.0,
    work: float | None = None,
    heartbeat_s: float = 1.0,
    deadline_s: float = 60.0,
    grace: Grace = CALM_GRACE,
    retention: Retention | None = None,
    **settings: object,
) -> Scenario:
    """A run in which nothing happens by itself, and replicas work at the same pace. settings: of `ReplicaSettings`."""
    slots = tuple(f"r-{i}" for i in range(replicas))
    run = run_of(
        slots,
        rounds=rounds,
        min_replicas=min_replicas,
        sync_every=sync_every,
        fragments=fragments,
        work=work,
        checkpoint_every=checkpoint_every,
        start_window_s=start_window_s,
    )
    terms = SessionOptions(
        min_replicas=min_replicas,
        deadline_s=deadline_s,
        heartbeat_s=heartbeat_s,
        grace=grace,
        propose_delay_s=0.0,
        retention=retention or Retention(),
    )
    usual: dict[str, object] = {"train_s": 4.0, "jitter": 0.1, "collects": retention is not None}
    shared = ReplicaSettings(terms=terms, run=run, **(usual | settings))  # type: ignore[arg-type]
    return Scenario(
        seed=0,
        slots=slots,
        run=run,
        terms=terms,
        settings=(shared,) * replicas,
        rates=Rates(),
        late=(0.0,) * replicas,
    )


def run_of(slots: tuple[str, ...], *, rounds: int, min_replicas: int, **changes: object) -> Run:
    """A run's record. Its nonce is its first replica's."""
    usual: dict[str, object] = {
        "nonce": "0" * 32,
        "name": "simulated",
        "spec": None,
        "slots": slots,
        "rounds": rounds,
        "sync_every": 1,
        "fragments": 1,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "min_replicas": min_replicas,
        "grace_s": 20.0,
        "start_window_s": 20.0,
        "checkpoint_every": 1,
        "codec": "none",
        "weighting": "uniform",
        "created": "",
        "layout": 2,
        "links": True,
    }
    return Run.model_validate(usual | changes)


def with_mirror(scenario: Scenario) -> Scenario:
    """The same with a mirror. Checkpoints are what they say: a mirror copies them without comparing receipts."""
    rng = random.Random(f"{scenario.seed} mirror")
    mirror = MirrorSettings(uri="memory://mirror", every=rng.choice((1, 1, 2, 3)), each_round=rng.random() < 0.7)
    run = scenario.run.model_copy(update={"mirrors": (mirror,)})
    settings = tuple(replace(each, run=run, flips_after=None) for each in scenario.settings)
    rates = replace(scenario.rates, forged=0.0)
    return replace(scenario, run=run, settings=settings, rates=rates)


def with_other_slots(scenario: Scenario) -> Scenario:
    """The same, with slots that are added and removed in mid-run; enough for a round are always left."""
    rng = random.Random(f"{scenario.seed} elastic")
    run = scenario.run.model_copy(update={"spec": "0" * 64})
    added = tuple(f"r-{len(run.slots) + number}" for number in range(rng.choice((1, 1, 2))))
    settings = tuple(replace(each, run=run, flips_after=None) for each in scenario.settings)
    settings += tuple(replace(rng.choice(settings), poisons=0.0) for _ in added)
    run_s = (run.rounds or 0) * max(each.train_s for each in settings)
    reliable = {
        slot
        for slot, each in zip((*run.slots, *added), settings, strict=True)
        if slot not in scenario.lost and not each.poisons
    }
    slots, changes = run.slots, list(scenario.changes)
    for at_s in sorted(rng.uniform(0.0, 1.2 * run_s) for _ in range(rng.choice((1, 2, 3)))):
        away = [slot for slot in (*run.slots, *added) if slot not in slots]
        here = [slot for slot in slots if slot in reliable]
        if away and (rng.random() < 0.6 or len(here) <= run.min_replicas):
            slots = (*slots, rng.choice(away))
        elif len(here) > run.min_replicas:
            gone = rng.choice(here)
            slots = tuple(slot for slot in slots if slot != gone)
        else:
            continue
        changes.append(Change(at_s=at_s, slots=slots))
    return replace(
        scenario,
        slots=(*scenario.slots, *added),
        run=run,
        settings=settings,
        rates=replace(scenario.rates, forged=0.0, vanished=0.0),
        late=(*scenario.late, *(0.0 for _ in added)),
        steady=False,
        changes=tuple(sorted(changes, key=lambda change: change.at_s)),
    )


def with_settings(scenario: Scenario, slot: str, **changes: object) -> Scenario:
    """One replica goes about its work differently."""
    changed = tuple(
        replace(settings, **changes) if name == slot else settings  # type: ignore[arg-type]
        for name, settings in zip(scenario.slots, scenario.settings, strict=True)
    )
    return replace(scenario, settings=changed)


SCATTERED: Final = 2000
"""Lower seeds show the deliberate bugs: their schedules stay as they are."""


def draw(seed: int) -> Scenario:
    """The scenario of a seed. From SCATTERED on, the replicas of every other one propose reduce-scatter.

    In a quarter of those the first half of the replicas is to make all units. In an eighth each, the reduction is
    chosen (in half of these runs a replica is of before links), one owner of units is slow, and one publishes units of
    another version.
    """
    rng = random.Random(seed)
    run_kind = rng.choices(list(RUN_KINDS), list(RUN_KINDS.values()))[0]
    match run_kind:
        case "steady":
            scenario = _steady(rng, seed)
        case "flipping":
            scenario = _flipping(rng, seed)
        case _:
            scenario = _troubled(rng, seed, run_kind)
    if seed < SCATTERED or not seed % 2:
        return scenario
    match seed % 16:
        case 9:
            return chooses(scenario) if seed % 32 == 9 else chooses_beside_an_older_one(scenario)
        case 3 | 13:
            return with_owner(scatters(scenario), slow=seed % 16 == 3)
        case _:
            pass
    return reduces_in_one_region(scatters(scenario)) if seed % 8 == 7 else scatters(scenario)


def with_owner(scenario: Scenario, *, slow: bool) -> Scenario:
    """The same, with units of several owners, of which one is slow or of another version."""
    rng = random.Random(f"{scenario.seed} owner")
    owner = Owner(
        slot=rng.choice(scenario.slots), kind="slow" if slow else "version", seconds=rng.choice((1.0, 8.0, 40.0))
    )
    settings = tuple(replace(replica, parts=3) for replica in scenario.settings)
    return replace(scenario, settings=settings, owner=owner, steady=False)


def chooses(scenario: Scenario) -> Scenario:
    """The same, with replicas that record links, by which the reduction of each exchange is chosen."""
    settings = tuple(replace(replica, draws_links=True, parts=3) for replica in scenario.settings)
    return replace(scenario, settings=settings)


def chooses_beside_an_older_one(scenario: Scenario) -> Scenario:
    """The same in a run of before links: the last replica is older, and can read no contribution with a link."""
    chosen = chooses(scenario)
    run = scenario.run.model_copy(update={"links": None})
    settings = tuple(replace(replica, run=run) for replica in chosen.settings)
    older = replace(settings[-1], draws_links=False)
    owner = Owner(slot=scenario.slots[-1], kind="before_links")
    return replace(chosen, run=run, settings=(*settings[:-1], older), owner=owner)


def scatters(scenario: Scenario) -> Scenario:
    """The same, with replicas that propose reduce-scatter."""
    settings = tuple(
        replace(replica, terms=replace(replica.terms, reduction="reduce_scatter")) for replica in scenario.settings
    )
    return replace(scenario, settings=settings)


def reduces_in_one_region(scenario: Scenario, nearby: int | None = None) -> Scenario:
    """The same, with so many replicas, or the first half, in the region that makes all units."""
    run = scenario.run.model_copy(update={"reduce_in": "here"})
    nearby = nearby or (len(scenario.settings) + 1) // 2
    places = [Place(region="here" if number < nearby else "there") for number in range(len(scenario.settings))]
    settings = tuple(
        replace(replica, run=run, terms=replace(replica.terms, place=place))
        for replica, place in zip(scenario.settings, places, strict=True)
    )
    return replace(scenario, run=run, settings=settings)


def _steady(rng: random.Random, seed: int) -> Scenario:
    """One replica is up to three times slower than the others, and they are enough without it."""
    count = rng.choice((3, 4))
    heartbeat_s, train_s = rng.choice((0.5, 1.0)), rng.uniform(15.0, 25.0)
    slots = tuple(f"r-{i}" for i in range(count))
    run = run_of(slots, rounds=10, min_replicas=rng.randint(1, count - 1), sync_every=12)
    terms = SessionOptions(
        min_replicas=run.min_replicas,
        deadline_s=120.0,
        heartbeat_s=heartbeat_s,
        grace=Grace(floor_s=1.0, cap_s=20.0, share=0.5),
        propose_delay_s=0.0,
    )
    slow = rng.randrange(count)
    settings = tuple(
        ReplicaSettings(
            terms=terms,
            run=run,
            train_s=train_s * (rng.uniform(1.0, 3.0) if i == slow else 1.0),
            jitter=0.2,
        )
        for i in range(count)
    )
    rates = Rates(latency_s=rng.choice((0.005, 0.02)))
    return Scenario(
        seed=seed, slots=slots, run=run, terms=terms, settings=settings, rates=rates, late=(0.0,) * count, steady=True
    )


def _flipping(rng: random.Random, seed: int) -> Scenario:
    """A bit flips in what one replica holds: it must find out, and heal. In half of these runs of two replicas.

    Of four, a majority is right in every record; two recompute their states. In half of these runs some checkpoints are
    replaced with forged ones, and in half of those from SCATTERED on, the bit flips at any time until the last round.
    """
    pairs = random.Random(f"{seed} pair")
    count, mode = (2, pairs.choice(("diloco", "ddp"))) if pairs.random() < 0.5 else (4, "diloco")
    calls = {kind: rng.choice((0.0, 0.01)) for kind in CALL_FAULTS}
    terms = calm(
        count,
        rounds=14,
        min_replicas=min(count, 3),
        mode=mode,
        checkpoint_every=1,
        train_s=rng.uniform(1.0, 4.0),
        compares=True,
        ends_early=rng.random() < 0.5,
    )
    rates = Rates(calls=calls, latency_s=rng.choice((0.005, 0.02)), horizon_s=20.0)
    flips_after, late = rng.randint(1, 3), random.Random(f"{seed} late")
    if seed >= SCATTERED and late.random() < 0.5:
        flips_after = late.randint(4, 13)
    slot = terms.slots[rng.randrange(count)]
    rates = replace(rates, forged=rng.choice((0.0, 0.9)))
    return with_settings(replace(terms, seed=seed, rates=rates), slot, flips_after=flips_after)


def _troubled(rng: random.Random, seed: int, run_kind: str) -> Scenario:
    count = rng.choice((2, 2, 3, 3, 3, 4, 5))
    slots = tuple(f"r-{i}" for i in range(count))
    away = rng.randint(1, count - 1) if count > 2 and run_kind != "rotten" and rng.random() < 0.15 else 0
    lost = frozenset[str](rng.sample(slots, away))
    needed = count - len(lost)
    min_replicas = rng.randint(1 if rng.random() < 0.3 else min(2, needed), needed)
    heartbeat_s = rng.choice((0.5, 1.0, 2.0))
    # A third of the runs train so briefly that what is left behind of one round meets the next.
    train_s = rng.choice((rng.uniform(3.0, 9.0), rng.uniform(3.0, 9.0), rng.uniform(0.2, 1.0)))
    rounds = rng.randint(2, 6)
    rates = _rates(rng, run_kind, horizon_s=rounds * (train_s + 1.0) * rng.uniform(1.0, 3.0))
    spare = min_replicas < needed
    if spare and rates.horizon_s:
        # Its round must be possible without it: a slot speaks once, so a round needs another in its place.
        rates = replace(rates, vanished=rng.choice((0.0, 0.0, 0.02)) if run_kind != "rotten" else 0.0)
    other = random.Random(f"{seed} mode")
    mode: Mode = "diloco" if run_kind == "rotten" else other.choices(MODES, (8, 1, 1))[0]
    # Of numbers of its own: seeds that save nothing stay what they are.
    saves = random.Random(f"{seed} unfinished")
    unfinished_every_s = saves.choice((None, None, 0.0, 2.0))
    if unfinished_every_s is not None and run_kind in {"flaky", "crashing", "storm"}:
        rates = replace(rates, crash=saves.choice((rates.crash, 0.006)))
    saved_steps = 1 if unfinished_every_s is None else saves.choice((2, 4))
    if not spare:
        rates = replace(rates, rots=[how for how in ROT if not how.startswith("header")])
    run = run_of(
        slots,
        rounds=rounds,
        min_replicas=min_replicas,
        sync_every=1 if mode == "ddp" else max(rng.choice((1, 1, 2, 4)), saved_steps),
        fragments=_fragments(rng, seed) if mode == "diloco" else 1,
        start_window_s=rng.choice((0.0, 20.0)),
        checkpoint_every=rng.choice((1, 1, 2, 3)),
        weighting=rng.choice(("uniform", "uniform", "tokens")),
        # Of a number of its own: the seeds that show mutants stay what they are.
        work=float(rounds * count) if random.Random(f"{seed} work").random() < 0.3 else None,
    )
    grace = Grace(floor_s=1.0, cap_s=rng.choice((2.0, 10.0, 20.0)), share=rng.choice((0.25, 0.5)))
    terms = SessionOptions(
        min_replicas=min_replicas,
        deadline_s=rng.choice((30.0, 60.0, 120.0)),
        heartbeat_s=heartbeat_s,
        grace=grace,
        propose_delay_s=rng.choice((0.0, 0.5, 1.25)),
        spares=rng.random() < 0.15 and run.work is None,
        checkpoint_every=run.checkpoint_every,
    )
    retention = rng.choice((None, Retention(last=rng.randint(1, 3), age_s=rng.choice((0.0, 5.0, 60.0)))))
    terms = terms if retention is None else replace(terms, retention=retention)
    # Of numbers of its own, as below.
    if random.Random(f"{seed} in roll-ups").random() < 0.2:
        terms = replace(terms, roll_ups=RollUpSettings(rounds=2, looks=(1, 2)))
    settings = _settings(rng, terms, run, train_s=train_s, collects=retention is not None)
    fails = other.choice((0.0, 0.2)) if mode == "ddp" else 0.0
    settings = tuple(replace(s, unfinished_every_s=unfinished_every_s, mode=mode, fails=fails) for s in settings)
    settings = _evaluating(settings, random.Random(f"{seed} evaluates"), train_s)
    if spare and not rates.vanished and run_kind != "rotten" and rng.random() < 0.25:
        poisoner = rng.randrange(count)
        settings = tuple(replace(each, poisons=0.3) if i == poisoner else each for i, each in enumerate(settings))
    late = tuple(rng.choice((0.0, 0.1, 2.0)) if rng.random() < 0.85 else rng.uniform(5.0, 60.0) for _ in slots)
    return Scenario(
        seed=seed,
        slots=slots,
        run=run,
        terms=terms,
        settings=settings,
        rates=rates,
        late=late,
        lost=lost,
        store_has_clock=rng.random() < 0.8,
        changes=_changes(random.Random(f"{seed} changes"), rounds * train_s),
        own_roles=random.Random(f"{seed} roles").random() < 0.5,
    )


def _changes(rng: random.Random, run_s: float) -> tuple[Change, ...]:
    """In a fifth of the runs the operator changes the settings, once or twice, before the end or after it."""
    if rng.random() >= 0.2:
        return ()
    times = sorted(rng.uniform(0.0, 2.5 * run_s + 20.0) for _ in range(rng.choice((1, 2))))
    return tuple(
        Change(at_s=at_s, more=rng.choice((0, 1, 2)), ahead=rng.choice((0, 0, 1, 2)), lr=rng.choice((0.3, 0.5)))
        for at_s in times
    )


def _evaluating(
    settings: tuple[ReplicaSettings, ...], rng: random.Random, train_s: float
) -> tuple[ReplicaSettings, ...]:
    """In a fifth of the runs one replica evaluates, for a part of a round or for longer than one."""
    if rng.random() >= 0.2:
        return settings
    chosen, evaluate_s, every = rng.randrange(len(settings)), train_s * rng.uniform(0.1, 1.5), rng.choice((1, 3, 5))
    changed = replace(settings[chosen], evaluate_s=evaluate_s, evaluate_every=every)
    return (*settings[:chosen], changed, *settings[chosen + 1 :])


def _fragments(rng: random.Random, seed: int) -> int:
    """One for most seeds, else two or three, drawn by a generator of its own: other seeds keep their schedules."""
    several = rng.choice((False, False, False, True))
    return random.Random(f"{seed} fragments").choice((2, 3)) if several else 1


def _settings(
    rng: random.Random, terms: SessionOptions, run: Run, *, train_s: float, collects: bool
) -> tuple[ReplicaSettings, ...]:
    parts = rng.choice((1, 1, 2, 3))
    ends_early = rng.random() < 0.85
    return tuple(
        ReplicaSettings(
            terms=terms,
            run=run,
            train_s=train_s * (3.0 if rng.random() < 0.2 else rng.uniform(0.9, 1.1)),
            abstains=rng.choice((0.0, 0.0, 0.0, 0.2)),
            parts=parts,
            ends_early=ends_early,
            collects=collects,
        )
        for _ in run.slots
    )


def _rates(rng: random.Random, run_kind: str, horizon_s: float) -> Rates:
    """A mix of faults: each kind is there or not, and then rare or frequent."""
    often = rng.choice((0.003, 0.01, 0.03))

    def maybe(*run_kinds: str, rate: float) -> float:
        return rate if run_kind in run_kinds and rng.random() < 0.8 else 0.0

    calls = {kind: often if run_kind in {"flaky", "storm"} and rng.random() < 0.6 else 0.0 for kind in CALL_FAULTS}
    return Rates(
        calls=calls,
        crash=maybe("crashing", "storm", rate=rng.choice((0.0005, 0.002, 0.004))),
        pause=maybe("sleepy", "storm", rate=rng.choice((0.0003, 0.001, 0.002))),
        cut_off=maybe("cut", "storm", rate=rng.choice((0.0005, 0.002))),
        stop=maybe("crashing", "sleepy", rate=rng.choice((0.0, 0.0005))),
        delayed=maybe("sleepy", "cut", "storm", rate=rng.choice((0.001, 0.01))),
        hidden=maybe("flaky", "storm", rate=rng.choice((0.02, 0.2))),
        # The replica that has the state after the round must live: such a run has no other faults.
        rot=0.2 if run_kind == "rotten" else 0.0,
        latency_s=rng.choice((0.005, 0.02, 0.1)),
        horizon_s=0.0 if run_kind == "calm" else horizon_s,
    )
