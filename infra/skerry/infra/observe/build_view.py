"""Builds the view of a run from the records of its log. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.machine_times import machine_of, machine_times, running_seconds
from skerry.infra.observe.pace_of_recent_rounds import (
    loss_curve,
    marks,
    recent_rounds,
    seconds_left,
    time_shares,
    work_per_round,
)
from skerry.infra.observe.run_events import run_events
from skerry.infra.observe.run_totals import RunTotals
from skerry.infra.observe.run_view import Agreement, ReplicaView, RunView
from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.observe.history import Start
    from skerry.infra.observe.read_changed_settings import RunSettings
    from skerry.infra.observe.run_view import RoundView
    from skerry.runtime.log.records import Commit, Heartbeat, Outcome, Receipt
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.log.summarize_round import RoundHistory


# Replicas send a heartbeat at least every five seconds; after a longer silence the process hangs, or is dead.
SILENT_S: Final = 15.0


@dataclass(frozen=True, kw_only=True)
class LogSnapshot:
    """The records of a run at one time.

    closed: rounds with a commit. outcomes: of each slot's last incarnation. silent_s: of the slots read before.
    patience_s: a working replica whose heartbeat has not changed for so long is silent. now_at, created_at: of
    this look and of run.json, in seconds since the epoch. notices: of heartbeats, and when each was first seen. rates:
    tokens a second that were measured between heartbeats. rounds: the last closed rounds that are known, RECENT and
    some more, each with all replicas of the run. totals: of all known rounds. starts: in slot order.
    """

    closed: int = 0
    last_commit: Commit | None = None
    heartbeats: Mapping[str, Heartbeat] = field(default_factory=dict[str, "Heartbeat"])
    outcomes: Mapping[str, Outcome] = field(default_factory=dict[str, "Outcome"])
    receipts: Sequence[Receipt] = ()
    silent_s: Mapping[str, float] = field(default_factory=dict[str, float])
    patience_s: float = SILENT_S
    now_at: float = 0.0
    created_at: float | None = None
    notices: Mapping[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    rounds: Sequence[RoundHistory] = ()
    totals: RunTotals = field(default_factory=RunTotals)
    starts: Sequence[Start] = ()
    settings: RunSettings | None = None


def build_view(run: Run, uri: str, now: LogSnapshot) -> RunView:
    """The view of `run` at this time."""
    slots = sorted({*run.slots, *now.heartbeats, *now.outcomes}, key=slot_order)
    per_round = run.sync_every // run.fragments
    recent = recent_rounds(now.rounds, now.starts)
    replicas = tuple(_mark_silent(_replica(slot, now), now.patience_s) for slot in slots)
    work = 0.0 if now.last_commit is None else now.last_commit.work
    over = run.is_over(now.closed, work)
    silent = {view.slot for view in replicas if view.silent}
    return RunView(
        run=run.name,
        uri=uri,
        rounds=run.rounds,
        closed=now.closed,
        work=work,
        due=run.work,
        participants=None if now.last_commit is None else now.last_commit.participants,
        replicas=tuple(_with_history(replica, now, recent, per_round) for replica in replicas),
        agreement=compare_receipts(run.slots, now.receipts),
        now_at=now.now_at,
        elapsed_s=_elapsed(now, recent, over=over),
        running_s=running_seconds(now.starts, now.totals, now.now_at, silent),
        left_s=None if over or not any(replica.at_work for replica in replicas) else _left(run, now, recent, work),
        steps_per_round=per_round,
        losses=loss_curve(now.totals.losses),
        recent=recent,
        time_shares=time_shares(now.rounds, recent),
        machine_times=machine_times(now.starts, now.totals, now.now_at, silent),
        events=run_events(
            now.rounds,
            recent,
            now.starts,
            {view.slot: now.notices[view.slot] for view in replicas if view.at_work and view.slot in now.notices},
            now.settings,
        ),
    )


def compare_receipts(slots: Sequence[str], receipts: Sequence[Receipt]) -> Agreement | None:
    """Compare the receipts of the newest common round.

    That is the newest round with receipts of all `slots`; without one (a replica was away), the newest with at least
    two. None if no two replicas have a receipt of the same round.
    """
    rounds: dict[int, dict[str, Receipt]] = {}
    for receipt in receipts:
        rounds.setdefault(receipt.round, {})[receipt.slot] = receipt
    shared = {number: by_slot for number, by_slot in rounds.items() if len(by_slot) > 1}
    complete = [number for number, by_slot in shared.items() if by_slot.keys() >= set(slots)]
    if not shared:
        return None
    number = max(complete) if complete else max(shared)
    common = [shared[number][slot] for slot in sorted(shared[number], key=slot_order)]
    states = {(receipt.scope, receipt.state) for receipt in common}
    return Agreement(
        round=number,
        slots=tuple(receipt.slot for receipt in common),
        average=len({receipt.averages for receipt in common}) == 1,
        state=None if all(state is None for _, state in states) else len(states) == 1,
    )


def _elapsed(now: LogSnapshot, recent: Sequence[RoundView], *, over: bool) -> float | None:
    end = recent[-1].closed_at if over and recent else now.now_at
    return None if now.created_at is None or end is None else max(0.0, end - now.created_at)


def _left(run: Run, now: LogSnapshot, recent: Sequence[RoundView], work: float) -> float | None:
    if run.rounds is None:
        return None
    rounds_left = float(run.rounds - now.closed)
    pace = work_per_round(now.rounds)
    if run.work is not None and pace:
        rounds_left = max(rounds_left, (run.work - work) / pace)
    return seconds_left(recent, rounds_left, now.now_at)


def _with_history(view: ReplicaView, now: LogSnapshot, recent: Sequence[RoundView], per_round: int) -> ReplicaView:
    """The replica with its part in the rounds, its starts, its machine and its current numbers."""
    starts = [start for start in now.starts if start.slot == view.slot]
    incarnations = [start.incarnation for start in starts]
    incarnations += [] if view.incarnation is None else [view.incarnation]
    step = None
    if view.at_work and view.inner_step and view.round is not None and per_round:
        step = min(per_round, max(0, view.inner_step + 1 - view.round * per_round))
    return replace(
        view,
        tokens_per_s=now.rates.get(view.slot, view.tokens_per_s),
        step=step,
        marks=marks(view.slot, now.rounds[-len(recent) :] if recent else (), starts),
        in_rounds=now.totals.in_rounds[view.slot],
        of_rounds=now.totals.of_rounds[view.slot],
        share=now.totals.share.get(view.slot),
        starts=1 + max(incarnations, default=-1),  # they are numbered without gaps
        machine=machine_of(starts[-1].place) if starts else None,
    )


def _mark_silent(view: ReplicaView, patience_s: float) -> ReplicaView:
    return replace(view, silent=view.at_work and view.silent_s is not None and view.silent_s >= patience_s)


def _replica(slot: str, now: LogSnapshot) -> ReplicaView:
    beat, outcome = now.heartbeats.get(slot), now.outcomes.get(slot)
    if beat is not None and outcome is not None and outcome.incarnation < beat.incarnation:
        outcome = None  # of an earlier incarnation: the slot runs again
    view = _from_heartbeat(slot, beat, now)
    if outcome is None:
        return view
    return ReplicaView(
        slot=slot,
        incarnation=outcome.incarnation,
        phase=view.phase,
        silent_s=0.0,
        round=outcome.round,
        inner_step=outcome.inner_step,
        loss=outcome.loss_last,
        loss_first=outcome.loss_first,
        tokens=outcome.tokens,
        tokens_per_s=view.tokens_per_s,
        uploaded_bytes=view.uploaded_bytes,
        downloaded_bytes=view.downloaded_bytes,
        notice=view.notice,
        outcome=outcome.status,
        reason=outcome.reason,
    )


def _from_heartbeat(slot: str, beat: Heartbeat | None, now: LogSnapshot) -> ReplicaView:
    if beat is None:
        return ReplicaView(slot=slot)
    return ReplicaView(
        slot=slot,
        incarnation=beat.incarnation,
        phase=beat.phase,
        silent_s=now.silent_s.get(slot),
        round=beat.round,
        inner_step=beat.inner_step,
        loss=beat.loss,
        tokens=beat.tokens,
        tokens_per_s=beat.tokens_per_s,
        waiting_for=beat.waiting_for,
        uploaded_bytes=beat.uploaded_bytes,
        downloaded_bytes=beat.downloaded_bytes,
        notice=beat.notice,
    )
