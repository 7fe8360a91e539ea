"""The replicas that took part in which rounds of a run, why one did not, and what each trained. Pure.

Computed from the log's records alone, over all starts of a replica. The texts are those of `up`, `status` and `doctor`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.doctor.findings import SLOW
from skerry.infra.observe.history import build_starts, closed_rounds, fill_in_absent
from skerry.runtime.failure_text import OUT_OF_MEMORY, shortened
from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.observe.doctor.read_log import RunRecords
    from skerry.infra.observe.history import Start
    from skerry.runtime.log.records import Heartbeat, Outcome
    from skerry.runtime.log.summarize_round import ReplicaRound, RoundHistory

# A single round that ended early is the price of a slow step or of an evaluation; more than this is a pattern.
_OFTEN: Final = 3
_OFTEN_SHARE: Final = 0.25
# An outcome's reason may be a whole error message; the log of the replica has the rest.
_REASON_CHARACTERS: Final = 240
_REASONS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The training of one replica in the closed rounds, over all its starts. losses: means of its first and last round.

    uploaded_bytes, downloaded_bytes: of its rounds.
    """

    loss_first: float | None = None
    loss_last: float | None = None
    tokens: int = 0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaParticipation:
    """One slot's part in the closed rounds. missing: the rounds whose average has no contribution of it.

    of: the rounds that it could take part in: those for which the log names it, and those that it took part in.
    last: the newest of these. cut: its contributions of less than a whole round. starts: of its process. failed:
    its last start ended with an error. reasons: why starts of it ended before the run, the oldest first. abstained:
    rounds to which it chose not to contribute, by reason, in their order. late: rounds that were decided without its
    work.
    """

    slot: str
    of: int
    last: int
    missing: tuple[int, ...]
    cut: int
    starts: int
    failed: bool
    reasons: tuple[str, ...]
    abstained: Mapping[str, tuple[int, ...]]
    late: tuple[int, ...] = ()
    figures: Figures = field(default_factory=Figures)

    @property
    def often_cut(self) -> bool:
        """True if many of its contributions are of less than a whole round."""
        return self.cut >= _OFTEN and self.cut >= _OFTEN_SHARE * (self.of - len(self.missing))

    @property
    def often_late(self) -> bool:
        """True if it came too late for many of its rounds."""
        return len(self.late) >= _OFTEN and len(self.late) >= _OFTEN_SHARE * self.of

    @property
    def absent(self) -> bool:
        """True if it took no part in half or more of the rounds."""
        return bool(self.missing) and 2 * len(self.missing) >= self.of

    @property
    def text(self) -> str:
        """Its part in the rounds, in one line; empty if it took whole part in all of them at the first start."""
        parts: list[str] = []
        if self.missing:
            parts.append(f"missing in {len(self.missing)} of {self.of} rounds ({ranges(self.missing)})")
        if self.often_cut:
            parts.append(f"{self.cut} of its contributions are of less than a whole round")
        starts = f"{self.starts} starts in all" if self.starts > 1 and self.reasons else ""
        return "; ".join(filter(None, [": ".join(filter(None, [", ".join(parts), self.why])), starts]))

    @property
    def why(self) -> str:
        """The reasons of its missing rounds and of the end of its last start; empty if none is known."""
        abstained = [f"{reason} ({_rounds(numbers)})" for reason, numbers in self.abstained.items()]
        late = [f"it came too late for {_rounds(self.late)}"] if self.late else []
        if self.often_late:
            late.append(SLOW)
        return "; ".join([*abstained[:_REASONS], *self.reasons[-1:], *late])


@dataclass(frozen=True, kw_only=True)
class Participation:
    """The replicas of a run in slot order. rounds: closed ones. complete: those with every replica of the round."""

    rounds: int
    complete: int
    replicas: tuple[ReplicaParticipation, ...]

    @property
    def by_all(self) -> bool:
        """True if no replica failed, and each took part in more than half of the rounds."""
        return not any(replica.absent or replica.failed for replica in self.replicas)

    def headline(self, rounds: int | None) -> str:
        """The run in one line: 20 of 20 rounds; all 2 replicas in 3 of them. rounds: of the whole run, if it ends."""
        of = "" if rounds is None else f" of {max(rounds, self.rounds)}"
        if not self.rounds:
            joined = sum(replica.starts > 0 for replica in self.replicas)
            return f"0{of} rounds; {joined} of {len(self.replicas)} replicas have joined"
        return f"{self.rounds}{of} rounds; all {len(self.replicas)} replicas in {self.complete} of them"


def participation(log: RunRecords) -> Participation:
    """Compute the part of each replica in the closed rounds. `valid_records` leaves out records of other runs."""
    founders = () if log.run is None else log.run.slots
    heartbeats = {stored.record.slot: stored.record for stored in log.heartbeats.values()}
    return count_parts(founders, fill_in_absent(log.settings, closed_rounds(log)), build_starts(log), heartbeats)


def count_parts(
    founders: Collection[str],
    rounds: Sequence[RoundHistory],
    starts: Sequence[Start],
    heartbeats: Mapping[str, Heartbeat] | None = None,
) -> Participation:
    """Compute the part of each replica in rounds of `fill_in_absent`. founders: slots of run.json.

    heartbeats: the last of each slot, for the end of a start without an outcome.
    """
    parts: dict[str, list[tuple[int, ReplicaRound]]] = {slot: [] for slot in founders}
    parts |= {start.slot: [] for start in starts}
    for history in rounds:
        for replica in history.replicas:
            parts.setdefault(replica.slot, []).append((history.round, replica))
    by_slot: defaultdict[str, list[Start]] = defaultdict(list)
    for start in starts:
        by_slot[start.slot].append(start)
    beats = heartbeats or {}
    return Participation(
        rounds=len(rounds),
        complete=sum(all(replica.in_average for replica in history.replicas) for history in rounds),
        replicas=tuple(
            _replica(slot, parts[slot], by_slot[slot], beats.get(slot)) for slot in sorted(parts, key=slot_order)
        ),
    )


def _replica(
    slot: str, parts: Sequence[tuple[int, ReplicaRound]], starts: Sequence[Start], beat: Heartbeat | None
) -> ReplicaParticipation:
    abstained: defaultdict[str, list[int]] = defaultdict(list)
    for number, replica in parts:
        if replica.reason is not None:
            abstained[shortened(replica.reason, _REASON_CHARACTERS)].append(number)
    # Of a late round there is a receipt: the replica has followed it.
    away = bool(parts) and parts[-1][1].part == "absent"
    last = starts[-1].outcome if starts else None
    return ReplicaParticipation(
        slot=slot,
        of=len(parts),
        last=parts[-1][0] if parts else -1,
        missing=tuple(number for number, replica in parts if not replica.in_average),
        cut=sum(replica.part == "cut" for _, replica in parts),
        starts=len(starts),
        failed=last is not None and last.status in {"failed", "retry"},
        reasons=tuple(_reasons(starts, beat, _absent_after(parts), away=away)),
        abstained={reason: tuple(numbers) for reason, numbers in abstained.items()},
        late=tuple(number for number, replica in parts if replica.part == "late"),
        figures=_figures([replica for _, replica in parts], starts),
    )


def _absent_after(parts: Sequence[tuple[int, ReplicaRound]]) -> set[int]:
    """The starts, by incarnation, that were followed by a round without a record of the replica."""
    last, followed = 0, set[int]()
    for _, replica in parts:
        last = last if replica.incarnation is None else replica.incarnation
        if replica.part == "absent":
            followed.add(last)
    return followed


def _reasons(
    starts: Sequence[Start], beat: Heartbeat | None, absent_after: Collection[int], *, away: bool
) -> Iterator[str]:
    """The reasons for the ends of the starts, if they are no success and no stop that was made up for.

    absent_after: the starts after which rounds closed without the slot. away: the last closed round is one of those, so
    its last start is not simply at work.
    """
    if not starts and away:
        yield "it never joined the run"
    for start in starts:
        latest, outcome = start is starts[-1], start.outcome
        name = f"start {start.incarnation + 1}" if len(starts) > 1 else "it"
        if outcome is not None:
            missed = start.incarnation in absent_after or (away and latest)
            if outcome.status in {"failed", "retry"} or (outcome.status == "stopped" and missed):
                yield _located(outcome)
        elif not latest:
            yield f"{name} ended without a record: killed, out of memory, or its machine was lost"
        elif away:
            yield _unrecorded(name, beat if beat is not None and beat.incarnation == start.incarnation else None)


def _unrecorded(name: str, beat: Heartbeat | None) -> str:
    """The likely reason for the end of a start without a record of it. beat: its last heartbeat."""
    if beat is not None and beat.notice is not None:
        return shortened(beat.notice, _REASON_CHARACTERS)
    if beat is not None and beat.memory is not None and beat.memory.is_nearly_full:
        guess = f"if not late or hanging, then probably {OUT_OF_MEMORY}"
        return f"{name} has no record of its end, and had used {beat.memory}: {guess}"
    return f"{name} has no record of its end: late, hanging, killed, or its machine was lost"


def _located(outcome: Outcome) -> str:
    """The reason of an outcome, with its round. A replica writes the round itself after the line of its script."""
    reason = shortened(outcome.reason, _REASON_CHARACTERS)
    return reason if f"round {outcome.round})" in reason else f"{reason} (round {outcome.round})"


def _figures(parts: Sequence[ReplicaRound], starts: Sequence[Start]) -> Figures:
    telemetry = [part.telemetry for part in parts if part.telemetry is not None]
    ended = [start.outcome for start in starts if start.outcome is not None]
    losses = [item.loss for item in telemetry if item.loss is not None]
    if not telemetry:  # of an older version
        losses = [loss for end in ended for loss in (end.loss_first, end.loss_last) if loss is not None]
    return Figures(
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        tokens=sum(item.tokens for item in telemetry or ended),
        uploaded_bytes=sum(part.uploaded_bytes for part in parts),
        downloaded_bytes=sum(part.downloaded_bytes for part in parts),
    )


def ranges(numbers: Iterable[int]) -> str:
    """Rounds as ranges: 3, 7-9. At most five ranges."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(numbers):
        groups[number - index].append(number)
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in groups.values()]
    return ", ".join(texts if len(texts) <= 5 else [*texts[:4], f"and {len(texts) - 4} more"])


def _rounds(numbers: Sequence[int]) -> str:
    return f"round{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
