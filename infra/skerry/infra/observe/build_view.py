"""Builds the view of a run from the records of its log. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.run_view import Agreement, ReplicaView, RunView
from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.log.records import Commit, Heartbeat, Outcome, Receipt, Run


# Replicas send a heartbeat at least every five seconds; after a longer silence the process hangs, or is dead.
SILENT_S: Final = 15.0


@dataclass(frozen=True, kw_only=True)
class LogSnapshot:
    """The records of a run at one time.

    closed: rounds with a commit. outcomes: of each slot's last incarnation. silent_s: of the slots read before.
    patience_s: a working replica whose heartbeat has not changed for so long is silent.
    """

    closed: int = 0
    last_commit: Commit | None = None
    heartbeats: Mapping[str, Heartbeat] = field(default_factory=dict[str, "Heartbeat"])
    outcomes: Mapping[str, Outcome] = field(default_factory=dict[str, "Outcome"])
    receipts: Sequence[Receipt] = ()
    silent_s: Mapping[str, float] = field(default_factory=dict[str, float])
    patience_s: float = SILENT_S


def build_view(run: Run, uri: str, now: LogSnapshot) -> RunView:
    """The view of `run` at this time."""
    slots = {*run.slots, *now.heartbeats, *now.outcomes}
    return RunView(
        run=run.name,
        uri=uri,
        rounds=run.rounds,
        closed=now.closed,
        work=0.0 if now.last_commit is None else now.last_commit.work,
        due=run.work,
        participants=None if now.last_commit is None else now.last_commit.participants,
        replicas=tuple(_mark_silent(_replica(slot, now), now.patience_s) for slot in sorted(slots, key=slot_order)),
        agreement=compare_receipts(run.slots, now.receipts),
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
