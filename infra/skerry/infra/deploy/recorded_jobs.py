"""Finds the jobs of a run that is named by its URI, by the state of its last apply. Changes nothing.

Without a spec there is no login and no rule of it: the environment's credentials are used. A run whose spec keeps the
state elsewhere (`state:`) has none in its store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra import targets
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.deploy.list_and_stop_jobs import JobLogs
from skerry.infra.deploy.lock_owner_identity import abandoned
from skerry.infra.deploy.revived_jobs import with_revived
from skerry.infra.provision.state_store import StateStore
from skerry.runtime.errors import Conflict
from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.provision.handler import Handler, StateRecord
    from skerry.infra.provision.state import State
    from skerry.infra.provision.target_and_store_interfaces import JobView, Target
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store


def recorded_jobs(store: Store, clock: Clock, environment: Mapping[str, str]) -> JobLogs:
    """The newest job of each replica of the run in this store. environment: where credentials are looked up.

    Its `list_jobs` is empty without a state, and raises Conflict if the credentials are of another account than the
    jobs.
    """
    access = OperatorAccess(clock, environment)
    opened = [targets.open_target(kind, access) for kind in sorted(targets.kinds().deployed)]
    handlers = {kind: handler for target in opened for kind, handler in target.handlers().items()}
    by_kind, state = {target.job_kind: target for target in opened}, StateStore(store, clock, abandoned)
    return JobLogs(
        clock=clock,
        list_jobs=lambda: _list_jobs(handlers, by_kind, state.load()),
        read_log=lambda job, cursor: by_kind[job.kind].logs(job, cursor),
    )


def _list_jobs(
    handlers: Mapping[str, Handler], by_kind: Mapping[str, Target], state: State | None
) -> list[tuple[StateRecord, JobView]]:
    if state is None:
        return []
    state = with_revived(state.run, handlers, state) or state
    newest = {entry.record.address: entry.record for _, entry in sorted(state.by_id().items())}
    pairs: list[tuple[StateRecord, JobView]] = []
    for kind, target in by_kind.items():
        if records := [record for record in newest.values() if record.kind == kind]:
            _check_account(state, target)
            pairs += zip(records, target.jobs(records), strict=True)
    return sorted(pairs, key=lambda pair: slot_order(pair[1].slot))


def _check_account(state: State, target: Target) -> None:
    for place, account in target.identity().items():
        recorded = state.accounts.get(place, account)
        if account not in recorded.split(", "):
            raise Conflict(
                f"the jobs of {state.run} are in {place} {recorded}, and these credentials are of {account}: use "
                "others, or name the spec, which has the login"
            )
