"""Failover by votes: seeded schedules of replicas that lose stores, die and return, with a kill at every put."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError
from tests.kit.protocol import run_record
from tests.kit.stores import HookedStore
from tests.support.clocks import FakeClock

from skerry.runtime.errors import Invalid, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import FailoverSettings, MirrorSettings, Run, Verdict, Vote, majority
from skerry.runtime.mirrors import ballots as ballots_module
from skerry.runtime.mirrors.ballots import Ballots, has_votes, read_verdict
from skerry.runtime.mirrors.failover_vote import Failover
from skerry.runtime.mirrors.restorable import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from skerry.runtime.mirrors.failover_vote import Next
    from skerry.runtime.store import Store

MIRROR, FORK, AFTER_S = "memory://mirror/run", "memory://mirror/run-failover", 60.0
SEEDS = 300


def failover_run(slots: int, minimum: int, **changes: object) -> Run:
    return run_record(
        FakeClock(),
        slots=tuple(f"r-{number}" for number in range(slots)),
        min_replicas=minimum,
        **{
            "mirrors": (MirrorSettings(uri=MIRROR, each_round=True),),
            "failover": FailoverSettings(mirror=MIRROR, uri=FORK, after_s=AFTER_S),
            **changes,
        },
    )


class KilledError(BaseException):
    """The process is gone, in the middle of a request."""


@dataclass
class Process:
    """One `skerry-replica run`. is_home: its script runs in the run's store. fork: the round from which it went on.

    claim: the newest start of its scripts.
    """

    slot: str
    ballots: Ballots
    failover: Failover
    is_home: bool = False
    sees_home: bool = True
    is_dead: bool = False
    claim: int | None = None
    fork: int | None = None


@dataclass
class World:
    """A run whose rounds are closed by contributions of its least number of slots, and its mirror.

    older: processes of slots whose platform has started another one, and which live.
    """

    seed: int
    dice: random.Random = field(init=False)
    violations: list[str] = field(default_factory=list)
    facts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.slots = self.dice.randint(2, 5)
        least = self.slots - majority(self.slots) + 1
        self.run = failover_run(self.slots, self.dice.randint(least, self.slots))
        self.clock = FakeClock()
        self.mirror = HookedStore(self.before_request, self.clock)
        self.contributed: set[str] = set()
        self.closed = self.copied = 0
        self.closed_at_verdict: int | None = None
        self.depth = 0
        self.is_calm = False
        self.home_is_lost = False
        self.sees_mirror = dict.fromkeys(self.run.slots, True)
        self.acting: list[Process] = []
        self.older: list[Process] = []
        self.claims = dict.fromkeys(self.run.slots, -1)
        self.processes = {slot: self.started(slot) for slot in self.run.slots}

    def started(self, slot: str) -> Process:
        ballots = Ballots(self.mirror, self.run, slot, self.clock, self.cut)
        return Process(slot, ballots, Failover(ballots, AFTER_S, self.clock))

    def cut(self, _: Store) -> Cut:
        return Cut(run=self.run, round=self.copied, checkpoint=self.copied, commit=f"{self.copied:064x}", logged=0)

    def before_request(self, verb: str, key: str) -> None:
        del key
        if not self.acting:
            return  # a look of the test itself
        acting = self.acting[-1]
        if not self.sees_mirror[acting.slot]:
            raise Retryable("the mirror is away")
        if self.is_calm:
            return
        if verb == "create" and self.dice.random() < 0.15:
            self.facts["kills at a put"] += 1
            raise KilledError
        if self.depth < 2 and self.dice.random() < 0.3:
            slots = [acting.slot] if self.dice.random() < 0.5 else self.run.slots
            other = self.any_of(self.dice.choice(slots))
            other.sees_home = self.dice.random() < 0.5
            self.act(other)

    def act(self, process: Process) -> None:
        """One look of a process, and what it does then. Others may act within each of its requests."""
        if process in self.acting or process.is_dead:
            return
        self.acting.append(process)
        self.depth += 1
        try:
            self.look(process)
        except KilledError:
            self.restart(process)
        finally:
            self.depth -= 1
            self.acting.pop()

    def look(self, process: Process) -> None:
        if process.fork is not None:
            return
        answers = process.sees_home and not self.home_is_lost
        claim = None if process.is_home else self.claim_of(process)
        following = process.failover.step(answers=answers, is_training=process.is_home, claim=claim)
        if process.is_dead:
            return
        if following == "train":
            if not process.is_home and not answers:
                self.violations.append("a script was started in a store that does not answer")
            if not process.is_home:
                self.start_script(process)
        elif following == "end":
            process.is_home = False
        elif isinstance(following, Verdict):
            process.is_home, process.fork = False, following.round
            self.facts["moves"] += 1

    def claim_of(self, process: Process) -> int | None:
        """The claim of a process whose slot has no newer start in the mirror."""
        try:
            newest = newest_start(self.mirror, process.slot)
        except Retryable:
            return None
        return process.claim if process.claim is not None and newest <= process.claim else None

    def start_script(self, process: Process) -> None:
        """Claim the slot in the store, copy the claim to the mirror, look for a vote, train. Others may act between."""
        process.claim = self.claims[process.slot] = self.claims[process.slot] + 1
        try:
            self.mirror.create(keys.member(process.slot, process.claim), b"{}")
            verdict = process.ballots.withdraw()
        except Retryable:
            return
        process.is_home = verdict is None and not process.is_dead

    def restart(self, process: Process) -> None:
        process.is_dead = True
        if self.processes[process.slot] is process:
            self.processes[process.slot] = self.started(process.slot)

    def replace(self, slot: str) -> None:
        """The platform starts another process of the slot; the older one may live on."""
        older = self.processes[slot]
        self.processes[slot] = self.started(slot)
        if self.dice.random() < 0.5:
            self.older.append(older)
            self.facts["older processes that live on"] += 1
        else:
            older.is_dead = True

    def train(self, slot: str) -> None:
        """Contribute to the open round, and close it if enough have. A newer claim in the store fences older ones."""
        scripts = [each for each in (self.processes[slot], *self.older) if each.slot == slot and each.is_home]
        for script in scripts:
            if script.claim != self.claims[slot]:
                self.restart(script)
        if not any(script.sees_home and self.may_contribute(script) for script in scripts) or self.home_is_lost:
            return
        if slot in promised(self.mirror):
            self.violations.append(f"{slot} contributed after its vote")
        self.contributed.add(slot)
        if len(self.contributed) >= self.run.min_replicas:
            self.closed, self.contributed = self.closed + 1, set()
        if self.sees_mirror[slot] and self.dice.random() < 0.2:
            self.copy()

    def may_contribute(self, process: Process) -> bool:
        """Its script runs, and no newer claim in the store fences it."""
        return process.is_home and not process.is_dead and process.claim == self.claims[process.slot]

    def any_of(self, slot: str) -> Process:
        return self.dice.choice([self.processes[slot], *(each for each in self.older if each.slot == slot)])

    def copy(self) -> None:
        """One round; the mirror is behind."""
        if not self.home_is_lost:
            self.copied = min(self.closed, self.copied + 1)

    def run_to_end(self) -> World:
        for _ in range(self.dice.randint(40, 160)):
            self.clock.advance(self.dice.choice((1.0, 5.0, 20.0)))
            chance, slot = self.dice.random(), self.dice.choice(self.run.slots)
            if chance < 0.06:
                process = self.any_of(slot)
                process.sees_home = not process.sees_home
            elif chance < 0.10:
                self.sees_mirror[slot] = not self.sees_mirror[slot]
            elif chance < 0.14:
                self.replace(slot)
            elif chance < 0.15:
                self.home_is_lost = True
            elif chance < 0.20:
                self.copy()  # by `skerry replicate`
            elif chance < 0.6:
                self.act(self.any_of(slot))
            else:
                self.train(slot)
            self.check()
        self.settle()
        return self

    def settle(self) -> None:
        """All that can return does, and time passes. Either all train, or all go on where the verdict says."""
        self.is_calm = True
        for older in self.older:
            older.is_dead = True
        self.sees_mirror = dict.fromkeys(self.run.slots, True)
        for _ in range(12):
            self.clock.advance(AFTER_S / 4)
            for process in list(self.processes.values()):
                process.sees_home = True
                self.act(process)
            self.check()
        verdict = read_verdict(self.mirror)
        forks = {process.fork for process in self.processes.values()}
        owners = sum(self.claim_of(process) is not None for process in self.processes.values())
        if verdict is not None:
            if forks != {verdict.round}:
                self.violations.append(f"replicas went on at {forks}, the verdict is {verdict.round}")
        elif not self.home_is_lost:
            if not all(process.is_home for process in self.processes.values()):
                self.violations.append("the store is back, and not all train")
        elif owners >= majority(self.slots):
            self.violations.append("the store is lost, and a majority did not go on")

    def check(self) -> None:
        verdict = read_verdict(self.mirror)
        if verdict is None:
            return
        if self.closed_at_verdict is None:
            self.closed_at_verdict = self.closed
            self.facts["verdicts to move"] += 1
            if len(verdict.votes) < majority(self.slots):
                self.violations.append("a minority has moved the run")
            training = {each.slot for each in (*self.processes.values(), *self.older) if self.may_contribute(each)}
            if training & set(verdict.votes):
                self.violations.append("a slot of the majority goes on training")
        if self.closed > self.closed_at_verdict + 1:
            self.violations.append("both stores go on")


def newest_start(mirror: Store, slot: str) -> int:
    starts = mirror.list(keys.members_prefix(slot))
    return keys.incarnation_of(starts[-1].key) if starts else -1


def promised(mirror: Store) -> set[str]:
    """Slots with a vote that counts in the newest ballot, which has no verdict or moves the run."""
    acting: set[str] = set()
    number = 0
    while (data := mirror.read(keys.verdict(number))) is not None:
        if Verdict.parse(data, "verdict").uri is not None:
            break
        number += 1
    for entry in mirror.list(keys.votes_prefix(number)):
        vote = Vote.parse(mirror.read(entry.key) or b"", entry.key)
        if vote.incarnation is None or newest_start(mirror, vote.slot) <= vote.incarnation:
            acting.add(vote.slot)
    return acting


def broken(seeds: Iterable[int]) -> str:
    """The first violation; empty if there is none."""
    for seed in seeds:
        if violations := World(seed).run_to_end().violations:
            return f"seed {seed}: {violations[0]}"
    return ""


def test_two_sides_of_a_partition_never_both_go_on() -> None:
    facts: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = World(seed).run_to_end()
        assert not world.violations, f"seed {seed}: {world.violations[0]}"
        facts += world.facts
        facts["rounds"] += world.closed
        facts["ballots that stay"] += read_verdict(world.mirror) is None and len(world.mirror.list(keys.FAILOVER)) > 0
    assert facts["verdicts to move"] > SEEDS // 10
    assert facts["ballots that stay"] > SEEDS // 20
    assert facts["kills at a put"] > SEEDS // 3
    assert facts["older processes that live on"] > SEEDS
    assert facts["rounds"] > 2 * SEEDS


def ignores_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ballots_module, "majority", lambda _: 1)


def forgets_its_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ballots, "has_voted", lambda _: False)


def returns_without_a_verdict(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ballots, "stay", lambda _: None)


def votes_while_training(patch: pytest.MonkeyPatch) -> None:
    real = Failover.step

    def step(self: Failover, *, answers: bool, is_training: bool, claim: int | None) -> Next:
        del claim
        following = real(self, answers=answers, is_training=False, claim=0)
        return "train" if following == "wait" and is_training else following

    patch.setattr(Failover, "step", step)


def starts_without_asking(patch: pytest.MonkeyPatch) -> None:
    real = Failover.step
    patch.setattr(
        Failover,
        "step",
        lambda self, *, answers, is_training, claim: (
            "train" if not is_training else real(self, answers=answers, is_training=True, claim=claim)
        ),
    )


def goes_on_from_its_own_round(patch: pytest.MonkeyPatch) -> None:
    real = Ballots.read

    def read(self: Ballots) -> Verdict | None:
        verdict = real(self)
        return verdict and verdict.model_copy(update={"round": self._find(self._mirror).round})

    patch.setattr(Ballots, "read", read)


@pytest.mark.parametrize(
    "mutate",
    [
        ignores_majority,
        forgets_its_vote,
        returns_without_a_verdict,
        votes_while_training,
        starts_without_asking,
        goes_on_from_its_own_round,
    ],
)
def test_search_sees_a_broken_rule(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert broken(range(SEEDS))


@pytest.mark.parametrize(("slots", "minimum"), [(2, 1), (3, 2), (4, 2), (5, 3)])
def test_spec_is_refused_where_both_sides_could_close_rounds(slots: int, minimum: int) -> None:
    failover_run(slots, minimum)
    if minimum > 1:
        with pytest.raises(ValidationError, match=f"min_replicas of at least {minimum}"):
            failover_run(slots, minimum - 1)


@pytest.mark.parametrize("changes", [{"uri": "memory://other"}, {"each_round": False}, {"max_usd": 5.0}])
def test_failover_needs_a_mirror_of_each_round_without_a_limit(changes: dict[str, object]) -> None:
    """Beyond its limit a mirror stays as it is: an outage of minutes would take the run back to that round."""
    mirror = MirrorSettings.model_validate({"uri": MIRROR, "each_round": True, **changes})
    with pytest.raises(ValidationError, match="a mirror of each round without max_usd"):
        failover_run(3, 2, mirrors=(mirror,))


def test_votes_of_an_open_ballot_keep_a_mirror_from_deleting() -> None:
    clock, run = FakeClock(), failover_run(3, 2)
    mirror = HookedStore(lambda *_: None, clock)
    ballots = Ballots(
        mirror, run, "r-0", clock, lambda _: Cut(run=run, round=0, checkpoint=0, commit="0" * 64, logged=0)
    )
    assert not has_votes(mirror)
    ballots.vote(0)
    assert has_votes(mirror)
    assert ballots.stay() is None
    assert not has_votes(mirror)


def test_start_that_has_not_claimed_its_slot_does_not_vote() -> None:
    """An older process of the slot may still contribute in the store."""
    clock, run = FakeClock(), failover_run(3, 2)
    mirror = HookedStore(lambda *_: None, clock)
    cut = Cut(run=run, round=0, checkpoint=0, commit="0" * 64, logged=0)
    for number, claim in enumerate((None, 0)):
        failover = Failover(Ballots(mirror, run, "r-0", clock, lambda _: cut), AFTER_S, clock)
        clock.advance(AFTER_S)
        assert failover.step(answers=False, is_training=False, claim=claim) == "wait"
        assert len(mirror.list(keys.FAILOVER)) == number


def test_vote_does_not_count_beside_a_newer_start() -> None:
    """That start was recorded after the voter had looked for one, and before its vote; it trains."""
    clock, run = FakeClock(), failover_run(3, 2)
    mirror = HookedStore(lambda *_: None, clock)
    cut = Cut(run=run, round=0, checkpoint=0, commit="0" * 64, logged=0)
    ballots = [Ballots(mirror, run, slot, clock, lambda _: cut) for slot in ("r-0", "r-1")]
    mirror.create(keys.member("r-0", 1), b"{}")
    for each in ballots:
        each.vote(0)
    assert ballots[1].move() is None
    assert read_verdict(mirror) is None
    ballots.append(Ballots(mirror, run, "r-2", clock, lambda _: cut))
    ballots[2].vote(0)
    whole = bytes(mirror.read(keys.vote(0, "r-2")) or b"")
    mirror.replace(keys.vote(0, "r-2"), b"{}")
    assert ballots[1].move() is None  # a damaged vote does not count either, and stops nothing
    mirror.replace(keys.vote(0, "r-2"), whole)
    verdict = ballots[1].move()
    assert verdict is not None
    assert verdict.votes == ("r-1", "r-2")


def test_foreign_object_beside_the_starts_of_a_slot_stops_no_vote() -> None:
    """A mirror copies the folder as it is, and a replica claims its slot beside it."""
    clock, run = FakeClock(), failover_run(3, 2)
    mirror = HookedStore(lambda *_: None, clock)
    cut = Cut(run=run, round=0, checkpoint=0, commit="0" * 64, logged=0)
    ballots = [Ballots(mirror, run, slot, clock, lambda _: cut) for slot in ("r-0", "r-1")]
    for key in (keys.member("r-0", 0), f"{keys.members_prefix('r-0')}notes.txt", f"{keys.members_prefix('r-1')}notes"):
        mirror.create(key, b"{}")
    for each in ballots:
        each.vote(0)
    verdict = ballots[1].move()
    assert verdict is not None
    assert verdict.votes == ("r-0", "r-1")


def moved_beside_a_start(recorded: int, looked: int) -> bool:
    """True if the vote of a process moves the run while a newer start of its slot goes on training.

    recorded, looked: before which request of the voter the start is recorded in the mirror, and looks for a vote.
    """
    clock, run, requests = FakeClock(), failover_run(3, 2), 0
    is_training = is_busy = False

    def start(verb: str, key: str) -> None:
        nonlocal requests, is_training, is_busy
        del verb, key
        if is_busy:
            return
        is_busy = True
        if requests == recorded:
            mirror.create(keys.member("r-0", 1), b"{}")
        if requests == looked:
            is_training = newer.withdraw() is None
        requests, is_busy = requests + 1, False

    is_busy = True
    mirror = HookedStore(start, clock)
    cut = Cut(run=run, round=0, checkpoint=0, commit="0" * 64, logged=0)
    newer, other, older = (Ballots(mirror, run, slot, clock, lambda _: cut) for slot in ("r-0", "r-1", "r-0"))
    voter = Failover(older, AFTER_S, clock)
    other.vote(0)
    clock.advance(AFTER_S)
    is_busy = False
    for _ in range(3):
        claim = 0 if newest_start(mirror, "r-0") <= 0 else None
        voter.step(answers=False, is_training=False, claim=claim)
    return is_training and read_verdict(mirror) is not None


def misses() -> list[tuple[int, int]]:
    return [
        (first, second) for second in range(24) for first in range(second + 1) if moved_beside_a_start(first, second)
    ]


def test_vote_and_newer_start_of_a_slot_never_miss_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order their requests come. Without either of the two looks they do."""
    assert misses() == []
    with monkeypatch.context() as patch:
        vote = Ballots.vote
        patch.setattr(Ballots, "vote", lambda self, _: vote(self, 1))  # as if no start were newer
        assert misses()
    with monkeypatch.context() as patch:
        patch.setattr(Ballots, "withdraw", Ballots.read)
        assert misses()


def test_order_of_an_operator_ends_the_ballot_once() -> None:
    clock, run = FakeClock(), failover_run(3, 2)
    mirror = HookedStore(lambda *_: None, clock)
    cut = Cut(run=run, round=7, checkpoint=7, commit="1" * 64, logged=7)
    first, second = (Ballots(mirror, run, name, clock, lambda _: cut) for name in ("operator", "r-1"))
    assert (ordered := first.order("memory://other", cut)) is not None
    assert (ordered.uri, ordered.round) == ("memory://other", 7)
    assert second.stay() == ordered
    assert second.order("memory://third", cut) == ordered


def test_run_without_failover_has_no_ballots() -> None:
    with pytest.raises(Invalid, match="no failover"):
        Ballots(
            HookedStore(lambda *_: None), run_record(FakeClock()), "r-0", FakeClock(), lambda _: pytest.fail("asked")
        )
