"""Removes a deployed run: deletes its resources in reverse order, then checks whether any of them still exists.

Data is deleted only on request. Resources are found through the state; those it does not record, by their tag.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from skerry.infra.deploy.lock_owner_identity import this_process
from skerry.infra.deploy.read_clouds import has_bucket, read_state
from skerry.infra.deploy.tagged_resources import list_tagged
from skerry.infra.provision.apply import ApplyRun, Outcome
from skerry.infra.provision.graph import Graph, Life
from skerry.infra.provision.plan import desired_of, plan
from skerry.infra.run.run_record import delete_run, list_run_objects
from skerry.runtime.errors import Conflict, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.provision.apply import Step
    from skerry.infra.provision.handler import DataHandler, StateRecord
    from skerry.infra.provision.plan import Plan
    from skerry.infra.provision.state import State
    from skerry.infra.provision.state_store import LockedState

_NO_RESOURCES: Final = Graph(())


@dataclass(frozen=True, kw_only=True)
class Removal:
    """The resources that `destroy` would delete.

    plan: the deletions in their order. data: the contents of each resource that holds data, by address. objects,
    size_bytes: of the run in its store. strays: resources with the run's tag that the state does not record.
    foreign_objects: objects in the run's bucket that are not of this run.
    """

    plan: Plan
    state: State | None
    data: Mapping[str, str]
    objects: int
    size_bytes: int
    strays: tuple[StateRecord, ...]
    foreign_objects: int | None = None

    @property
    def empty(self) -> bool:
        """True if nothing of the run exists."""
        return self.plan.empty and not self.objects and not self.strays


@dataclass(frozen=True, kw_only=True)
class Removed:
    """The result of `destroy`. left: a line for each thing of the run that still exists, and why."""

    outcome: Outcome
    left: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if nothing of the run is left."""
        return self.outcome.ok and not self.left


def plan_removal(deployment: Deployment) -> Removal:
    """Lists what `destroy` would delete now. Changes nothing."""
    state = read_state(deployment)
    entries = {} if state is None else state.by_id()
    objects = list_run_objects(deployment.open_store()) if has_bucket(deployment) else ()
    recorded = {(entry.record.kind, entry.record.name) for entry in entries.values()}
    tagged = list_tagged(deployment, entries.values())
    strays = tuple(record for record in tagged if (record.kind, record.name) not in recorded)
    data: dict[str, str] = {}
    foreign_objects = None
    for record in (*_with_data(entry.record for entry in entries.values()), *_with_data(strays)):
        contents = _data_handler(deployment, record).contents(record)
        if record.address == deployment.bucket().address:
            own = _data_handler(deployment, record).contents(record, _prefix(deployment))
            foreign_objects = contents.objects - own.objects or None
            contents = own
        if contents.objects:
            data[record.address] = str(contents)
    return Removal(
        plan=plan(_NO_RESOURCES, entries, {}, deployment.run),
        state=state,
        data=data,
        objects=len(objects),
        size_bytes=sum(entry.size for entry in objects),
        strays=strays,
        foreign_objects=foreign_objects,
    )


def destroy(
    deployment: Deployment,
    removal: Removal,
    *,
    data: bool,
    on_step: Callable[[Step], None],
    on_begin: Callable[[ApplyRun], None],
) -> Removed:
    """Delete the run, holding the state's lock. data: also delete resources with data, and the run's objects.

    The bucket is deleted last, and the state in it just before. Raises Conflict if the state is locked.
    """
    if removal.empty:
        return Removed(outcome=Outcome.empty(), left=())
    with contextlib.ExitStack() as lock:
        hold = None
        # Without the bucket there is no state in it, and an apply would have to create the bucket first.
        if deployment.spec.state_uri is not None or has_bucket(deployment):
            holder = this_process("destroy", deployment.clock)
            hold = lock.enter_context(deployment.open_state().hold(holder, removal.state, deployment.run))
        outcome = Outcome.empty()
        if hold is not None:
            work = _begin_deletions(deployment, removal, hold, on_step, data=data)
            on_begin(work)
            outcome = work.run()
        if outcome.ok:
            _delete_strays(deployment, removal, data=data)
        if outcome.ok and data:
            _delete_data(deployment, removal, hold)
    return Removed(outcome=outcome, left=_left(deployment, removal, data=data))


def _begin_deletions(
    deployment: Deployment, removal: Removal, hold: LockedState, on_step: Callable[[Step], None], *, data: bool
) -> ApplyRun:
    """Empty what is to be deleted; the apply that deletes what the state records, except the bucket and kept data."""
    bucket = deployment.bucket().address
    kept = _kept(deployment, removal, data=data)
    for record in _with_data(entry.record for entry in hold.entries):
        if data and record.address != bucket:
            _data_handler(deployment, record).empty(record)
    deletions = tuple(change for change in removal.plan.changes if change.address not in kept)
    deletion_plan = dataclasses.replace(removal.plan, changes=deletions)
    return ApplyRun(deletion_plan, _NO_RESOURCES, hold, deployment.handlers, on_step)


def _kept(deployment: Deployment, removal: Removal, *, data: bool) -> set[str]:
    """The addresses that are not deleted with the other resources."""
    return {deployment.bucket().address, *(() if data else removal.data)}


def _delete_strays(deployment: Deployment, removal: Removal, *, data: bool) -> None:
    """Delete what the state does not record, last created kinds first; repeat while that makes others possible."""
    order = {kind: number for number, kind in enumerate(deployment.handlers)}
    kept = _kept(deployment, removal, data=data)
    strays = [record for record in removal.strays if record.address not in kept]
    left = sorted(strays, key=lambda record: -order[record.kind])
    for record in left:
        if record.life is Life.DATA:
            _data_handler(deployment, record).empty(record)
    while left:
        stuck: list[StateRecord] = []
        for record in left:
            try:
                deployment.handlers[record.kind].delete(record)
            except Conflict:
                stuck.append(record)
        if len(stuck) == len(left):
            return
        left = stuck


def _delete_data(deployment: Deployment, removal: Removal, hold: LockedState | None) -> None:
    """Delete the run's objects, the state with its lock, and the bucket if it holds nothing of another run."""
    bucket_exists = has_bucket(deployment)
    if bucket_exists:
        delete_run(deployment.open_store())
    if hold is not None:
        hold.delete_state()
    bucket = desired_of(deployment.bucket(), {}, deployment.run).to_record({})
    if bucket_exists and not bucket.brought:
        handler = _data_handler(deployment, bucket)
        handler.empty(bucket, _prefix(deployment))
        if not removal.foreign_objects:
            handler.delete(bucket)


def _left(deployment: Deployment, removal: Removal, *, data: bool) -> tuple[str, ...]:
    try:
        state = read_state(deployment)
    except SkerryError:
        state = None
    tagged = list_tagged(deployment, () if state is None else state.by_id().values())
    left = [f"{record.kind} {record.name}" for record in tagged if record.life is not Life.DATA]
    if not data:
        left += [f"{address} with {contents}: `--data` deletes it too" for address, contents in removal.data.items()]
        if removal.objects and deployment.bucket().address not in removal.data:
            left.append(f"{removal.objects} objects at {deployment.run}: `--data` deletes them too")
    elif removal.foreign_objects and not deployment.bucket().brought:
        left.append(
            f"the bucket {deployment.bucket().name}, because {removal.foreign_objects} objects in it are not of this "
            "run; move them, and repeat"
        )
    return tuple(left)


def _with_data(records: Iterable[StateRecord]) -> Sequence[StateRecord]:
    return [record for record in records if record.life is Life.DATA and not record.brought]


def _data_handler(deployment: Deployment, record: StateRecord) -> DataHandler:
    return cast("DataHandler", deployment.handlers[record.kind])


def _prefix(deployment: Deployment) -> str:
    """The run's prefix in its bucket."""
    return deployment.run.partition("://")[2].partition("/")[2] + "/"
