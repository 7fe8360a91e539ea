"""Computes from recent rounds of a run its pace, the strips of its replicas, and the parts of their time. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.run_totals import mean_loss
from skerry.infra.observe.run_view import RoundView
from skerry.runtime.log.summarize_round import EXPOSED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from skerry.infra.observe.history import Start
    from skerry.infra.observe.run_view import Mark
    from skerry.runtime.log.summarize_round import ReplicaRound, RoundHistory

RECENT: Final = 64
"""Rounds of the strips: more than a screen has columns for."""
LOSS_POINTS: Final = 240
"""Points of the loss curve: more than a screen has columns for."""
PHASES: Final[Mapping[str, tuple[str, ...]]] = {
    "train": ("train",),
    "evaluate": ("evaluate",),
    "upload": ("encode", "upload"),
    "wait": ("wait",),
    "average": ("download", "reduce"),
    "away": ("away",),
    "other": ("other",),
}
"""Parts of a replica's time as they are named for people; each with its phases in the log."""
# Rounds from which the pace and the parts of time are computed.
_PACE: Final = 20
# Exit codes above are 128 and the number of the signal that ended the process.
_SIGNALS: Final = 128


def loss_curve(losses: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """At most LOSS_POINTS of these points, evenly spread; the last one is kept."""
    step = max(1, -(-len(losses) // LOSS_POINTS))
    first = (len(losses) - 1) % step if losses else 0
    return tuple(losses[first::step])


def recent_rounds(rounds: Sequence[RoundHistory], starts: Iterable[Start]) -> tuple[RoundView, ...]:
    """The last RECENT rounds. The first round of the run lasts from the first start of a replica."""
    return round_views(rounds, starts, max(0, len(rounds) - RECENT))


def round_views(rounds: Sequence[RoundHistory], starts: Iterable[Start], first: int = 0) -> tuple[RoundView, ...]:
    """The rounds from this index on. The first round of the run lasts from the first start of a replica.

    The time in which every replica had ended, as before a run is continued or extended, belongs to no round.
    """
    starts = list(starts)
    began_at, pauses = min((start.began_at for start in starts), default=None), _pauses(starts)
    views: list[RoundView] = []
    for index, item in enumerate(rounds[first:], start=first):
        since = rounds[index - 1].closed_at if index and rounds[index - 1].round == item.round - 1 else None
        since = began_at if item.round == 0 else since
        seconds = None
        if since is not None and item.closed_at is not None:
            paused = sum(max(0.0, min(end, item.closed_at) - max(begin, since)) for begin, end in pauses)
            seconds = max(0.0, item.closed_at - since - paused)
        views.append(_view(item, seconds))
    return tuple(views)


def _pauses(starts: Sequence[Start]) -> list[tuple[float, float]]:
    """The times in which every replica had ended. A start without an outcome lasts until the next one of its slot."""
    ends: dict[tuple[str, int], float] = {}
    following: dict[str, float] = {}
    for start in sorted(starts, key=lambda start: -start.incarnation):
        end = following.get(start.slot, math.inf) if start.ended_at is None else start.ended_at
        ends[start.slot, start.incarnation] = end
        following[start.slot] = start.began_at
    pauses: list[tuple[float, float]] = []
    over: float | None = None
    for start in sorted(starts, key=lambda start: start.began_at):
        if over is not None and over < start.began_at:
            pauses.append((over, start.began_at))
        end = ends[start.slot, start.incarnation]
        over = end if over is None else max(over, end)
    return pauses


def seconds_left(recent: Sequence[RoundView], rounds_left: float, now_at: float) -> float | None:
    """The time that `rounds_left` need at the pace of the last rounds; None if the pace is unknown.

    The pace is a median, because a run that was stopped between two rounds is not slower for it.
    """
    lengths = [item.seconds for item in recent[-_PACE:] if item.seconds is not None]
    if not lengths or rounds_left <= 0:
        return None
    pace, closed_at = median(lengths), recent[-1].closed_at
    current = 0.0 if closed_at is None else min(pace, max(0.0, now_at - closed_at))
    return rounds_left * pace - current


def work_per_round(rounds: Sequence[RoundHistory]) -> float | None:
    """The work of a round, in rounds of one replica: the mean of the last rounds; None without any."""
    works = [sum(replica.share for replica in item.replicas) for item in rounds[-_PACE:]]
    return fmean(works) if works else None


def time_shares(rounds: Sequence[RoundHistory], recent: Sequence[RoundView]) -> dict[str, float]:
    """The parts of the replicas' time in the last rounds, by phase; the sum is 1.

    away: of the rounds that a replica has no record of. other: without a record, as loading a checkpoint or starting.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    total = 0.0
    for item, view in zip(rounds[-len(recent) :][-_PACE:], recent[-_PACE:], strict=True):
        if view.seconds is None or not any(phases_of(replica) for replica in item.replicas):
            continue
        total += view.seconds * len(item.replicas)
        for replica in item.replicas:
            phases = {"away": view.seconds} if replica.part == "absent" else phases_of(replica)
            for phase, seconds in phases.items():
                spent[phase] += seconds
    used = sum(spent.values())
    if not used:
        return {}
    spent["other"] = max(0.0, total - used)
    return {phase: seconds / max(total, used) for phase, seconds in spent.items()}


def hidden_share(rounds: Iterable[RoundHistory]) -> float | None:
    """The share of all exchanges that was hidden behind training; None if no receipt says it."""
    known = [exchange for item in rounds for replica in item.replicas if (exchange := replica.exchange_s) is not None]
    whole = sum(seconds for seconds, _ in known)
    return 1 - sum(exposed for _, exposed in known) / whole if whole else None


def marks(slot: str, rounds: Sequence[RoundHistory], starts: Iterable[Start]) -> tuple[Mark | None, ...]:
    """The part of one slot in each of the rounds; None in rounds before it joined.

    An absence is `killed` if it begins after the last round of a start that failed or was killed, and so is the first
    late round of the next start if that came back before a round was closed. A start without an outcome was killed if a
    later start exists; else the records cannot tell a killed process from one that still hangs.
    """
    own = sorted((start for start in starts if start.slot == slot), key=lambda start: start.incarnation)
    killed = [start.incarnation for start in own if _is_killed(start, last=start is own[-1])]
    parts = [next((replica for replica in item.replicas if replica.slot == slot), None) for item in rounds]
    last_seen = -1 if not own else own[0].incarnation - 1
    result: list[Mark | None] = []
    for index, part in enumerate(parts):
        if part is None:
            result.append(None)
            continue
        before, last_seen = last_seen, last_seen if part.incarnation is None else part.incarnation
        at_once = part.part == "late" and "killed" not in result[-1:]
        if at_once and any(before <= number < last_seen for number in killed):
            result.append("killed")
            continue
        later = next((item.incarnation for item in parts[index:] if item and item.incarnation is not None), None)
        lost = any(last_seen <= number and (later is None or number < later) for number in killed)
        result.append("killed" if part.part == "absent" and lost else part.part)
    return tuple(result)


def _is_killed(start: Start, *, last: bool) -> bool:
    if start.outcome is None:
        return not last
    return start.outcome.status in {"failed", "retry"} or start.outcome.exit_code > _SIGNALS


def _view(item: RoundHistory, seconds: float | None) -> RoundView:
    reported = [phases for replica in item.replicas if (phases := phases_of(replica))]
    names = dict.fromkeys(name for phases in reported for name in phases)
    trained = {
        replica.slot: replica.telemetry.train_s for replica in item.replicas if replica.telemetry and replica.in_average
    }
    slowest = max(trained, key=lambda slot: trained[slot], default=None) if len(trained) > 1 else None
    return RoundView(
        round=item.round,
        closed_at=item.closed_at,
        seconds=seconds,
        members=sum(replica.in_average for replica in item.replicas),
        replicas=len(item.replicas),
        loss=mean_loss(item),
        phases={name: fmean(phases.get(name, 0.0) for phases in reported) for name in names},
        slowest=None if slowest is None else (slowest, trained[slowest] - fmean(trained.values())),
    )


def phases_of(replica: ReplicaRound) -> Mapping[str, float]:
    """The seconds of one replica in a round, by phase of the log; empty if it reported none.

    Of the exchange only what its training waited for: the rest is in the time that it trained.
    """
    phases = {phase: seconds for phase, seconds in replica.seconds.items() if phase != EXPOSED}
    if (exchange := replica.exchange_s) is not None and exchange[0] > 0:
        phases = {phase: seconds * exchange[1] / exchange[0] for phase, seconds in phases.items()}
    if replica.telemetry is not None:
        phases["train"] = replica.telemetry.train_s
        if replica.telemetry.evaluate_s:
            phases["evaluate"] = replica.telemetry.evaluate_s
    return phases
