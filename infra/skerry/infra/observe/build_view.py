"""From the log's records to one view of the run. Pure: what was read is given, nothing is looked up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.view import Agreement, ReplicaView, RunView
from skerry.runtime.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.records import Commit, Heartbeat, Outcome, Receipt, Run


# Replicas beat every five seconds at the latest; a longer silence is a process that hangs, or is gone.
SILENT_S: Final = 15.0


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one look at the store found.

    closed: rounds with a commit. outcomes: of each slot's last incarnation. silent_s: of the slots seen before.
    patience_s: whoever is at work and has not moved for so long is silent.
    """

    closed: int = 0
    last_commit: Commit | None = None
    heartbeats: Mapping[str, Heartbeat] = field(default_factory=dict[str, "Heartbeat"])
    outcomes: Mapping[str, Outcome] = field(default_factory=dict[str, "Outcome"])
    receipts: Sequence[Receipt] = ()
    silent_s: Mapping[str, float] = field(default_factory=dict[str, float])
    patience_s: float = SILENT_S


def fold(run: Run, uri: str, now: Sight) -> RunView:
    """The view of `run` at this look."""
    seen = {*run.slots, *now.heartbeats, *now.outcomes}
    return RunView(
        run=run.name,
        uri=uri,
        rounds=run.rounds,
        closed=now.closed,
        work=0.0 if now.last_commit is None else now.last_commit.work,
        due=run.work,
        participants=None if now.last_commit is None else now.last_commit.participants,
        replicas=tuple(_judged(_replica(slot, now), now.patience_s) for slot in sorted(seen, key=slot_order)),
        agreement=agreement(run.slots, now.receipts),
    )


def agreement(slots: Sequence[str], receipts: Sequence[Receipt]) -> Agreement | None:
    """Whether the receipts of the newest common round are equal.

    The newest round that all `slots` have receipts of; if there is none (a replica was away), the newest round with at
    least two. None if no two replicas have a receipt of the same round.
    """
    rounds: dict[int, dict[str, Receipt]] = {}
    for receipt in receipts:
        rounds.setdefault(receipt.round, {})[receipt.slot] = receipt
    shared = {number: found for number, found in rounds.items() if len(found) > 1}
    complete = [number for number, found in shared.items() if found.keys() >= set(slots)]
    if not shared:
        return None
    number = max(complete) if complete else max(shared)
    found = [shared[number][slot] for slot in sorted(shared[number], key=slot_order)]
    states = {(receipt.scope, receipt.state) for receipt in found}
    return Agreement(
        round=number,
        slots=tuple(receipt.slot for receipt in found),
        average=len({receipt.averages for receipt in found}) == 1,
        state=None if all(state is None for _, state in states) else len(states) == 1,
    )


def _judged(view: ReplicaView, patience_s: float) -> ReplicaView:
    return replace(view, silent=view.at_work and view.silent_s is not None and view.silent_s >= patience_s)


def _replica(slot: str, now: Sight) -> ReplicaView:
    beat, outcome = now.heartbeats.get(slot), now.outcomes.get(slot)
    if beat is not None and outcome is not None and outcome.incarnation < beat.incarnation:
        outcome = None  # of an earlier start: the slot lives again
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


def _from_heartbeat(slot: str, beat: Heartbeat | None, now: Sight) -> ReplicaView:
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
