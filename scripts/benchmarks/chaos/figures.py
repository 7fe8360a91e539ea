"""Diaries in, figures out. Pure: reads no clock and starts nothing; every figure is counted from lines, none assumed.

A round is called by its number after it is closed: round 1 is the first. A contribution is what the average of a round
was really made of: for ours what the log says, for torchft what replicas closed with their own inner steps.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from chaos.replica import Setting


LOST = ("late", "discarded", "in_lost_rounds", "in_hand_at_the_end")
# Rounds after which what a late replica kept must be in an average: it may be held back once, and brought in the next.
KEPT_FOR = 3


class Line(NamedTuple):
    """One line of a diary (see chaos.replica). What an event does not tell has its default."""

    t: float
    event: str
    process: int
    round: int = 0
    steps: int = 0
    since: int = 0
    took: float = 0.0
    arrived: float = 0.0
    members: int = 0
    own: bool = False
    healed: bool = False
    resumed: int = 0
    digest: str = ""
    loss: float = float("nan")
    incarnation: int | None = None
    faults: int = 0


class Contribution(NamedTuple):
    """One slot's part in one round's average; process: which of the slot's processes trained it."""

    round: int
    slot: int
    process: int
    steps: int


class Life(NamedTuple):
    """One process of a slot, from its fork to its end. died: it was killed, or crashed."""

    slot: int
    process: int
    start: float
    end: float
    died: bool


@dataclass(kw_only=True)
class Story:
    """What the supervisor did and saw. began: the first inner step. finished: slots that closed all rounds."""

    began: float = 0.0
    ended: float = 0.0
    lives: list[Life] = field(default_factory=list[Life])
    kills: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    crashes: int = 0
    finished: set[int] = field(default_factory=set[int])

    def seconds(self, life: Life) -> float:
        """How long a process lived while the run was measured."""
        return max(0.0, min(life.end, self.ended) - max(life.start, self.began))


Diaries: TypeAlias = "Mapping[int, Sequence[Line]]"


def final_history(diaries: Diaries) -> dict[int, str]:
    """The digest of each round as it was closed last: what the run ended with."""
    closed = sorted((line.t, line.round, line.digest) for _, line in _all(diaries, "closed"))
    return {number: digest for _, number, digest in closed}


def contributions_of_diaries(diaries: Diaries) -> list[Contribution]:
    """torchft's: rounds of the final history that a replica closed with inner steps of its own."""
    history = final_history(diaries)
    found = {
        Contribution(line.round, index, line.process, line.steps)
        for index, line in _all(diaries, "closed")
        if line.own and line.steps and line.digest == history[line.round]
    }
    return sorted(found)


def unwritten(diaries: Diaries, contributions: Sequence[Contribution], sync_every: int) -> int:
    """Inner steps in torchft's averages whose replica was killed before it could write the round down.

    The others tell how many took part; those who healed in the round offered a copy.
    """
    history = final_history(diaries)
    took_part: dict[int, int] = defaultdict(int)
    healed: dict[int, int] = defaultdict(int)
    for _, line in _all(diaries, "closed"):
        if line.digest == history[line.round]:
            took_part[line.round] = max(took_part[line.round], line.members)
            healed[line.round] += line.healed
    written = _by_round(contributions)
    return sync_every * sum(max(0, took_part[r] - healed[r] - len(written.get(r, ()))) for r in took_part)


def fold(
    setting: Setting, story: Story, diaries: Diaries, contributions: Sequence[Contribution], extra: int = 0
) -> dict[str, object]:
    """All figures of one run. extra: useful inner steps that no contribution lists."""
    losses = [line.loss for _, line in _all(diaries, "finished")]
    times = commit_times(diaries)
    return {
        "rounds": max(times, default=0),
        "rounds_of": setting.rounds,
        "seconds": round(story.ended - story.began, 1),
        "kills": len(story.kills),
        "crashes": story.crashes,
        "store_faults": _faults(diaries),
        "replicas_finished": len(story.finished),
        **_goodput(setting, story, diaries, contributions, extra),
        **_participation(story, contributions, diaries, times),
        **_history(diaries),
        **_recovery(story, diaries, contributions, times),
        "held_out_loss": round(statistics.fmean(losses), 5) if losses else None,
        "held_out_losses_equal": len(set(losses)) == 1,
    }


def _goodput(
    setting: Setting, story: Story, diaries: Diaries, contributions: Sequence[Contribution], extra: int
) -> dict[str, object]:
    possible = setting.replicas * (story.ended - story.began) / setting.step_s
    alive = sum(map(story.seconds, story.lives)) / setting.step_s
    spent: defaultdict[str, float] = defaultdict(float)
    spent["useful"] = sum(contribution.steps for contribution in contributions) + extra
    overrun = sum(max(0.0, line.took - setting.step_s) for _, line in _all(diaries, "step"))
    history = final_history(diaries)
    kept_for = KEPT_FOR if setting.contestant == "ours" else 0
    for life in story.lives:
        lines = [line for line in diaries[life.slot] if line.process == life.process]
        ready = next((line.t for line in lines if line.event == "ready"), life.end)
        spent["joining"] += story.seconds(life._replace(end=ready)) / setting.step_s
        for name, steps in _without_use(life, lines, contributions, history, kept_for).items():
            spent[name] += steps
    shares = {name: spent[name] for name in ("useful", "killed", *LOST, "joining")}
    shares["down"] = possible - alive
    shares["overrun"] = overrun / setting.step_s
    shares["waiting"] = possible - sum(shares.values())
    return {
        "goodput": _percent(shares["useful"], possible),
        "goodput_ceiling": _percent(alive - shares["killed"], possible),
        "goodput_while_alive": _percent(shares["useful"], alive),
        "goodput_of_what_kills_left": _percent(shares["useful"], alive - shares["killed"]),
        "possible_steps": round(possible),
        "useful_steps": round(shares["useful"]),
        "survivors_discarded_steps": round(shares["discarded"]),
        "where_steps_went": {name: _percent(steps, possible) for name, steps in shares.items()},
    }


def _without_use(
    life: Life, lines: Sequence[Line], contributions: Sequence[Contribution], history: Mapping[int, str], kept_for: int
) -> dict[str, int]:
    """Inner steps of one process that are in no average, by what became of them.

    A ledger: what an exchange does not use may be kept, and be in one of the next kept_for averages instead. What it
    uses beyond what this process had is the last process's, which it went on with: that was killed, and not lost.
    """
    counted = {c.round: c.steps for c in contributions if (c.slot, c.process) == life[:2]}
    first = min(counted, default=None)
    lost = {"killed": 0, "late": 0, "discarded": 0, "in_lost_rounds": 0, "in_hand_at_the_end": 0}
    kept: list[tuple[int, int]] = []
    open_steps = reached = 0
    rescued = next((line.resumed for line in lines if line.event == "ready"), 0)
    for line in lines:
        if line.event in {"ready", "step"}:
            open_steps = line.since or line.resumed
        if line.event not in {"closed", "failed"}:
            continue
        open_steps, reached = 0, line.round
        closed = line.event == "closed"
        if closed and line.digest != history[reached]:
            lost["in_lost_rounds"] += line.steps
            continue
        kept.append((reached, line.steps))
        used = counted.get(reached, 0) if closed else 0
        rescued += max(0, used - sum(steps for _, steps in kept))
        kept = _use(kept, used)
        for _, steps in [each for each in kept if each[0] + kept_for <= reached]:
            lost["late" if first is None or reached < first else "discarded"] += steps
        kept = [each for each in kept if each[0] + kept_for > reached]
    # Its last contribution may have been decided after its end.
    used = sum(steps for number, steps in counted.items() if number > reached)
    kept = [*kept, (reached, open_steps)]
    rescued += max(0, used - sum(steps for _, steps in kept))
    lost["killed" if life.died else "in_hand_at_the_end"] = sum(steps for _, steps in _use(kept, used))
    lost["killed"] -= rescued
    return lost


def _use(kept: Sequence[tuple[int, int]], steps: int) -> list[tuple[int, int]]:
    """What is left of what was kept when an average has used so many steps, the oldest first."""
    left: list[tuple[int, int]] = []
    for number, amount in kept:
        used = min(steps, amount)
        steps -= used
        left += [(number, amount - used)] if amount > used else []
    return left


def _participation(
    story: Story, contributions: Sequence[Contribution], diaries: Diaries, times: Mapping[int, float]
) -> dict[str, object]:
    members = _by_round(contributions)
    counted: dict[int, int] = defaultdict(int)
    for _, line in _all(diaries, "closed"):
        counted[line.round] = max(counted[line.round], line.members)
    at_commit: list[float] = []
    whole_round: list[float] = []
    own_count: list[float] = []
    before = story.began
    for number, moment in sorted(times.items()):
        alive = {life.slot for life in story.lives if life.start <= moment < life.end}
        whole = {life.slot for life in story.lives if life.start <= before and moment < life.end}
        took_part = members.get(number, set())
        at_commit += [len(took_part & alive) / len(alive)] if alive else []
        whole_round += [len(took_part & whole) / len(whole)] if whole else []
        own_count += [min(1.0, counted[number] / len(alive))] if alive else []
        before = moment
    return {
        "participation": _mean_percent(at_commit),
        "participation_of_the_unharmed": _mean_percent(whole_round),
        "participation_as_it_counts_itself": _mean_percent(own_count),
    }


def _history(diaries: Diaries) -> dict[str, object]:
    digests: dict[int, set[str]] = defaultdict(set)
    for _, line in _all(diaries, "closed"):
        digests[line.round].add(line.digest)
    missing = set(range(1, max(digests, default=0) + 1)) - digests.keys()
    return {
        "rounds_bit_identical": sum(len(found) == 1 for found in digests.values()),
        "states_compared": len(_all(diaries, "closed")),
        "rounds_differing": sorted(number for number, found in digests.items() if len(found) > 1),
        "committed_rounds_lost": sum(len(found) - 1 for found in digests.values()) + len(missing),
    }


def _recovery(
    story: Story, diaries: Diaries, contributions: Sequence[Contribution], times: Mapping[int, float]
) -> dict[str, object]:
    members = {(c.round, c.slot, c.process) for c in contributions}
    arrivals: dict[int, float] = defaultdict(float)
    first: dict[tuple[int, int], float] = {}
    for index, line in _all(diaries, "closed"):
        if (line.round, index, line.process) in members:
            arrivals[line.round] = max(arrivals[line.round], line.arrived)
            first.setdefault((index, line.process), line.t)
    to_commit: list[float] = []
    waited: list[float] = []
    for moment, _ in story.kills:
        after = min(((t, number) for number, t in times.items() if t > moment), default=None)
        if after is not None:
            to_commit.append(after[0] - moment)
            waited += [max(0.0, after[0] - max(moment, arrivals[after[1]]))] if after[1] in arrivals else []
    restarts = [life for life in story.lives if life.process > 0]
    return {
        "kill_to_next_commit_s": _spread(to_commit),
        "of_it_waiting_s": _spread(waited),
        "restart_to_first_contribution_s": _spread([first[r[:2]] - r.start for r in restarts if r[:2] in first]),
        "restarts": len(restarts),
        "restarts_that_never_contributed": sum(r[:2] not in first for r in restarts),
        "failed_exchanges": len(_all(diaries, "failed")),
    }


def commit_times(diaries: Diaries) -> dict[int, float]:
    """When each round was first closed by anybody."""
    times: dict[int, float] = {}
    for _, line in _all(diaries, "closed"):
        times[line.round] = min(times.get(line.round, line.t), line.t)
    return times


def _all(diaries: Diaries, event: str) -> list[tuple[int, Line]]:
    return [(index, line) for index, lines in diaries.items() for line in lines if line.event == event]


def _by_round(contributions: Iterable[Contribution]) -> dict[int, set[int]]:
    members: dict[int, set[int]] = defaultdict(set)
    for contribution in contributions:
        members[contribution.round].add(contribution.slot)
    return dict(members)


def _faults(diaries: Diaries) -> int:
    """Store requests that were made to fail, as far as a process could still tell."""
    most: dict[tuple[int, int], int] = {}
    for index, lines in diaries.items():
        for line in lines:
            most[index, line.process] = max(most.get((index, line.process), 0), line.faults)
    return sum(most.values())


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 1) if whole else 0.0


def _mean_percent(shares: Sequence[float]) -> float | None:
    return round(100 * statistics.fmean(shares), 1) if shares else None


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 2),
        "max": round(ordered[-1], 2),
    }
