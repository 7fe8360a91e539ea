"""Diaries in, figures out. Pure: reads no clock and starts nothing; every figure is counted from lines, none assumed.

A round is called by its number after it is closed: round 1 is the first. A contribution is what the average of a round
was really made of: for ours what the log says, for torchft what replicas closed with their own inner steps.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    """One slot's part in one round's average; process: which of the slot's processes contributed it.

    brought: all of it was trained for earlier rounds.
    """

    round: int
    slot: int
    process: int
    steps: int
    brought: bool = False


class Life(NamedTuple):
    """One process of a slot, from its fork to its end. died: it was killed, or crashed."""

    slot: int
    process: int
    start: float
    end: float
    died: bool


@dataclass(kw_only=True)
class Story:
    """The supervisor's record of a run. began: the first inner step. finished: slots that closed all rounds."""

    began: float = 0.0
    ended: float = 0.0
    lives: list[Life] = field(default_factory=list[Life])
    kills: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    crashes: int = 0
    finished: set[int] = field(default_factory=set[int])

    def seconds(self, life: Life) -> float:
        """Return how long a process lived during the measurement."""
        return max(0.0, min(life.end, self.ended) - max(life.start, self.began))


Diaries: TypeAlias = "Mapping[int, Sequence[Line]]"


def read_lines(data: bytes) -> Iterator[Line]:
    """The lines of a diary. One that its process was killed in says nothing, and is passed over."""
    for text in data.splitlines():
        try:
            facts = json.loads(text)
        except ValueError:
            continue
        yield Line(**facts)


def final_history(diaries: Diaries) -> dict[int, str]:
    """The digest of each round as it was closed last: what the run ended with."""
    closed = sorted((line.t, line.round, line.digest) for _, line in _all(diaries, "closed"))
    return {number: digest for _, number, digest in closed}


def contributions_of_diaries(diaries: Diaries) -> list[Contribution]:
    """torchft's: rounds of the final history that a replica closed with inner steps of its own."""
    history = final_history(diaries)
    result = {
        Contribution(line.round, index, line.process, line.steps)
        for index, line in _all(diaries, "closed")
        if line.own and line.steps and line.digest == history[line.round]
    }
    return sorted(result)


def unwritten(diaries: Diaries, contributions: Sequence[Contribution], sync_every: int) -> int:
    """Inner steps in torchft's averages whose replica was killed before it could write the round down.

    The other replicas report how many participated; replicas that healed in the round sent a copy.
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
    ledgers = {
        slot: Ledger(
            contributions={c.round: c for c in contributions if c.slot == slot}, history=history, kept_for=kept_for
        )
        for slot in diaries
    }
    for life in sorted(story.lives, key=lambda life: life.process):
        lines = [line for line in diaries[life.slot] if line.process == life.process]
        ready = next((line.t for line in lines if line.event == "ready"), life.end)
        spent["joining"] += story.seconds(life._replace(end=ready)) / setting.step_s
        ledgers[life.slot].read(life, lines)
    for ledger in ledgers.values():
        for name, steps in ledger.end().items():
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


@dataclass(kw_only=True)
class Ledger:
    """Accounts for the inner steps of one slot, over all its processes. kept_for: see KEPT_FOR.

    In hand are those of the current round; kept, by their round, those that an exchange did not use; left behind, those
    of ended processes, until a later process continues them. The rest was lost by kills.
    """

    contributions: Mapping[int, Contribution]
    history: Mapping[int, str]
    kept_for: int
    lost: Counter[str] = field(default_factory=Counter[str])
    _hand: int = 0
    _kept: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _left_behind: int = 0
    _reached: int = 0

    def read(self, life: Life, lines: Sequence[Line]) -> None:
        """One process of the slot; they must come in their order."""
        first = min(
            (
                contribution.round
                for contribution in self.contributions.values()
                if contribution.process == life.process
            ),
            default=None,
        )
        self._reached = 0
        for line in lines:
            if line.event == "ready":
                self._hand = line.resumed
                self._left_behind -= line.resumed
            elif line.event == "step":
                self._hand = line.since
            elif line.event in {"closed", "failed"}:
                self._reached = line.round
                self._exchanged(life, line)
                restarted = first is None or self._reached < first
                self._give_up(
                    "late" if restarted else "discarded", lambda number: number + self.kept_for <= self._reached
                )
        # Its last contribution may have been decided after its end.
        for number, item in self.contributions.items():
            if item.process == life.process and number > self._reached:
                self._use(item)
        self._kept.append((self._reached, self._hand))
        self._hand = 0
        if life.died:
            self._left_behind += sum(steps for _, steps in self._kept)
            self._kept = []
        else:
            self._give_up("in_hand_at_the_end", lambda _: True)

    def end(self) -> dict[str, int]:
        """By what became of them, all that no average has used."""
        self.lost["killed"] += self._left_behind
        self._left_behind = 0
        return {name: self.lost[name] for name in ("killed", *LOST)}

    def _exchanged(self, life: Life, line: Line) -> None:
        closed = line.event == "closed"
        mine = self.contributions.get(line.round) if closed else None
        if closed and line.digest != self.history[line.round]:
            self.lost["in_lost_rounds"] += self._hand
        elif mine is not None and mine.process != life.process:
            # What the process before this one has contributed counts; what this one did for the same round cannot.
            self._left_behind += self._hand
        else:
            if mine is not None:
                self._use(mine)
            self._kept.append((line.round, self._hand))
        self._hand = 0

    def _use(self, contribution: Contribution) -> None:
        """Its steps are the round's own first, unless it was brought before; then what was kept, the oldest first."""
        steps = contribution.steps
        if not contribution.brought:
            own = min(steps, self._hand)
            self._hand -= own
            steps -= own
        left: list[tuple[int, int]] = []
        for number, amount in self._kept:
            used = min(steps, amount)
            steps -= used
            left.append((number, amount - used))
        self._kept = left
        self._left_behind -= steps

    def _give_up(self, name: str, due: Callable[[int], bool]) -> None:
        self.lost[name] += sum(steps for number, steps in self._kept if due(number))
        self._kept = [each for each in self._kept if each[1] and not due(each[0])]


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
        "rounds_bit_identical": sum(len(result) == 1 for result in digests.values()),
        "states_compared": len(_all(diaries, "closed")),
        "rounds_differing": sorted(number for number, result in digests.items() if len(result) > 1),
        "committed_rounds_lost": sum(len(result) - 1 for result in digests.values()) + len(missing),
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
    """Return when each round was first closed by any replica."""
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
