"""Builds the history of a run for reports: each replica's part in each closed round, and its starts.

`read_history` reads, `build_history` is pure. Never writes.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from skerry.infra.observe.doctor.read_log import read_starts
from skerry.infra.observe.doctor.valid_records import valid_records
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import read_closed_rounds
from skerry.runtime.log.records import Contribution, Decision, Receipt
from skerry.runtime.log.run_record import Run
from skerry.runtime.log.summarize_round import Part, ReplicaRound, RoundHistory, RoundRecords, summarize_round

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from skerry.infra.observe.doctor.read_log import RunRecords, StoredRecord
    from skerry.infra.observe.read_changed_settings import RunSettings
    from skerry.runtime.log.recorded_starts import StartRecord
    from skerry.runtime.log.records import Heartbeat, Member, Outcome, Place, Software
    from skerry.runtime.store import Store

__all__ = ["Part", "ReplicaRound", "RoundHistory", "RunHistory", "Start", "build_history", "read_history"]

R = TypeVar("R", Contribution, Decision, Receipt)


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a replica. ended_at: None without a record of its end; times are by the store's clock.

    place: None in old logs, and of replicas that were started by hand. software: None in old logs.
    """

    slot: str
    incarnation: int
    began_at: float
    ended_at: float | None
    place: Place | None
    host: str
    outcome: Outcome | None
    software: Software | None = None


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The history of a run. rounds: all closed ones. starts: in slot order. heartbeats: the last of each slot.

    heard_at: when each slot's last heartbeat was written, by the store's clock; without stores that have none.
    """

    run: Run
    uri: str
    rounds: tuple[RoundHistory, ...]
    starts: tuple[Start, ...]
    heartbeats: Mapping[str, Heartbeat]
    heard_at: Mapping[str, float] = field(default_factory=dict[str, float])


def last_evaluations(rounds: Sequence[RoundHistory], starts: Iterable[Start]) -> tuple[int, list[Start]]:
    """The number of the round that would follow, and the starts that have evaluated after the last one.

    One for each replica: a later start evaluates the same model once more. starts: in order.
    """
    closed = rounds[-1].round + 1 if rounds else 0
    ends = {
        start.slot: start
        for start in starts
        if start.outcome is not None and start.outcome.round == closed and start.outcome.metrics
    }
    return closed, list(ends.values())


def read_history(store: Store) -> RunHistory:
    """The history of the run under this prefix. Raises SkerryError if there is no run, and what the store raises.

    Reads each roll-up instead of the records of its rounds, and the heartbeats, starts and outcomes that are in none.
    """
    data = store.read(keys.RUN)
    if data is None:
        raise SkerryError(f"no run at {store.uri}; name a spec, or the URI of a run's own prefix")
    run = Run.parse(data, keys.RUN)
    rolled_up: dict[str, StartRecord] = {}
    rounds = list(read_closed_rounds(store, run.nonce, rolled_up))
    log = valid_records(read_starts(store, run, rolled_up))
    return _history(log, run, fill_in_absent(log.settings, rounds))


def build_history(log: RunRecords, run: Run) -> RunHistory:
    """The history of a run from its records. `valid_records` leaves out records of other runs."""
    return _history(log, run, fill_in_absent(log.settings, closed_rounds(log)))


def _history(log: RunRecords, run: Run, rounds: tuple[RoundHistory, ...]) -> RunHistory:
    beats = log.heartbeats.values()
    return RunHistory(
        run=run,
        uri=log.uri,
        rounds=rounds,
        starts=build_starts(log),
        heartbeats={stored.record.slot: stored.record for stored in beats},
        heard_at={stored.record.slot: stored.modified for stored in beats if stored.modified},
    )


def closed_rounds(log: RunRecords) -> tuple[RoundHistory, ...]:
    """The closed rounds with a readable decision, each with the replicas that have any record of it."""
    closings = {stored.record.round: stored.modified or None for stored in log.commits.values()}
    return tuple(
        summarize_round(number, closings.get(number), records)
        for number, records in sorted(records_by_round(log).items())
        if records.decisions and number < log.closed
    )


def records_by_round(log: RunRecords) -> dict[int, RoundRecords]:
    """The records of each round that has any but a commit."""
    decisions, contributions = _by_round(log.decisions), _by_round(log.contributions)
    receipts = _by_round(log.receipts)
    return {
        number: RoundRecords(
            decisions=decisions.get(number, ()),
            contributions=contributions.get(number, ()),
            receipts=receipts.get(number, ()),
        )
        for number in decisions.keys() | contributions.keys() | receipts.keys()
    }


def fill_in_absent(
    settings: RunSettings | None, rounds: Iterable[RoundHistory], joined: Iterable[str] = ()
) -> tuple[RoundHistory, ...]:
    """The rounds with every replica that belongs to them: absent ones have no record in a round.

    Those are the slots that the log names for the round, and all in its average. A slot that the log never names joins
    with its first contribution to an average, or has `joined` before. Other attempts are left out.
    """
    named = frozenset[str]() if settings is None else settings.named
    others = set(joined) - named
    filled: list[RoundHistory] = []
    for history in rounds:
        present = {replica.slot: replica for replica in history.replicas}
        averaged = {slot for slot, replica in present.items() if replica.in_average}
        others |= averaged - named
        slots = averaged.union(others, () if settings is None else settings.slots_of(history.round))
        if present.keys() != slots:
            replicas = tuple(
                present.get(slot) or ReplicaRound(slot=slot, part="absent")
                for slot in sorted(slots, key=keys.slot_order)
            )
            history = replace(history, replicas=replicas)  # noqa: PLW2901  the same round with all replicas
        filled.append(history)
    return tuple(filled)


def build_starts(log: RunRecords) -> tuple[Start, ...]:
    """Every start of every replica, in slot order."""
    outcomes = {(stored.record.slot, stored.record.incarnation): stored for stored in log.outcomes.values()}
    members = sorted(
        log.members.values(), key=lambda stored: (keys.slot_order(stored.record.slot), stored.record.incarnation)
    )
    return tuple(_start(member, outcomes.get((member.record.slot, member.record.incarnation))) for member in members)


def _start(member: StoredRecord[Member], outcome: StoredRecord[Outcome] | None) -> Start:
    return Start(
        slot=member.record.slot,
        incarnation=member.record.incarnation,
        began_at=member.modified or _seconds(member.record.created),
        ended_at=None if outcome is None else outcome.modified or _seconds(outcome.record.ended),
        place=member.record.place,
        host=member.record.host,
        outcome=None if outcome is None else outcome.record,
        software=member.record.software,
    )


def _seconds(text: str) -> float:
    """Seconds since the epoch, from a text by the clock of a replica; 0 if it is none."""
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _by_round(stored: Mapping[str, StoredRecord[R]]) -> Mapping[int, Sequence[R]]:
    by_round: defaultdict[int, list[R]] = defaultdict(list)
    for item in stored.values():
        by_round[item.record.round].append(item.record)
    return by_round
