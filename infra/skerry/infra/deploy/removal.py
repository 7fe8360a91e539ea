"""Removes a deployed run: deletes its resources in reverse order, then checks whether any of them still exists.

The run's own objects are deleted only on request. What other runs may use is never deleted: their objects, a bucket
that holds any, and images. Resources are found through the state; those it does not record, by their tag.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from skerry.infra.deploy.lock_owner_identity import this_process
from skerry.infra.deploy.read_clouds import check_accounts, read_accounts, read_bucket, read_state
from skerry.infra.deploy.revived_jobs import is_revivable, note_revived, with_revived
from skerry.infra.deploy.tagged_resources import list_tagged
from skerry.infra.provision.apply import ApplyRun, Outcome, Progress, Step
from skerry.infra.provision.graph import Graph, Life
from skerry.infra.provision.handler import Contents
from skerry.infra.provision.plan import desired_of, plan
from skerry.infra.provision.planned_changes import Change
from skerry.infra.run.run_record import delete_run, is_mirror, list_run_objects
from skerry.runtime.errors import Conflict, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import BucketHandler, DataHandler, Observed, StateRecord
    from skerry.infra.provision.planned_changes import Plan
    from skerry.infra.provision.state import State
    from skerry.infra.provision.state_store import LockedState
    from skerry.runtime.store import Entry

_NO_RESOURCES: Final = Graph(())


@dataclass(frozen=True, kw_only=True)
class MirrorContents:
    """A mirror that exists. contents: of its prefix. foreign_objects: the others in a bucket that is the run's own.

    bucket: None for a folder. ours: its bucket was created for this run.
    """

    uri: str
    bucket: Resource | None
    contents: Contents
    foreign_objects: int = 0
    ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Removal:
    """The resources that `destroy` would delete.

    plan: the deletions in their order. bucket: of the run's store; None if it does not exist. contents: of the run's
    prefix in it, the state included; objects, size_bytes: of the run alone. foreign_objects: the others in it, if the
    bucket is the run's own. strays: resources with the run's tag that the state does not record. in_use: the contents
    of other resources that hold data, by address: other runs may use them, so they are kept. mirrors: of this run.
    """

    plan: Plan
    state: State | None
    bucket: Observed | None
    contents: Contents
    objects: int
    size_bytes: int
    strays: tuple[StateRecord, ...]
    foreign_objects: int
    in_use: Mapping[str, Contents]
    mirrors: tuple[MirrorContents, ...] = ()

    @property
    def empty(self) -> bool:
        """True if nothing of the run exists."""
        return self.plan.empty and not self.objects and not self.strays and not self.mirrors


@dataclass(frozen=True, kw_only=True)
class Removed:
    """The result of `destroy`. objects: those of the run that were deleted. kept: a line for each thing that stays
    because others may use it. left: a line for each thing of the run that still exists, and why.
    """

    outcome: Outcome
    objects: Contents
    kept: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is left that is the run's alone."""
        return self.outcome.ok and not self.left


def plan_removal(deployment: Deployment) -> Removal:
    """Lists what `destroy` would delete now. Changes nothing. Raises Conflict if resources are in another account."""
    state, bucket = with_revived(deployment.run, deployment.handlers, read_state(deployment)), read_bucket(deployment)
    if state is not None and state.accounts:
        check_accounts(deployment, state, read_accounts(deployment))
    entries = {} if state is None else state.by_id()
    objects = () if bucket is None else list_run_objects(deployment.open_store())
    recorded = {(entry.record.kind, entry.record.name) for entry in entries.values()}
    tagged = list_tagged(deployment, entries.values())
    strays = tuple(record for record in tagged if (record.kind, record.name) not in recorded)
    in_use: dict[str, Contents] = {}
    for record in (*(entry.record for entry in entries.values()), *strays):
        if record.life is Life.DATA and not record.brought and not _is_store(deployment, record):
            contents = cast("DataHandler", deployment.handlers[record.kind]).contents(record)
            if contents.objects:
                in_use[record.address] = contents
    own, foreign = _contents(deployment, bucket)
    return Removal(
        plan=plan(_NO_RESOURCES, entries, {}, deployment.run),
        state=state,
        bucket=bucket,
        contents=own,
        objects=len(objects),
        size_bytes=sum(entry.size for entry in objects),
        strays=strays,
        foreign_objects=foreign,
        in_use=in_use,
        mirrors=tuple(_list_mirrors(deployment)),
    )


def destroy(
    deployment: Deployment,
    removal: Removal,
    *,
    data: bool,
    on_step: Callable[[Step], None],
    on_begin: Callable[[ApplyRun], None],
) -> Removed:
    """Delete the run, holding the state's lock. data: also delete the run's objects, and its bucket if others use none.

    The bucket is deleted last, and the state in it just before. Raises Conflict if the state is locked.
    """
    outcome, deleted = Outcome.empty(), Contents(objects=0, size_bytes=0)
    if removal.empty:
        return Removed(outcome=outcome, objects=deleted, kept=(), left=())
    with contextlib.ExitStack() as lock:
        hold = None
        if removal.state is not None or deployment.spec.state_uri is not None or _is_ours(deployment, removal.bucket):
            holder = this_process("destroy", deployment.clock)
            hold = lock.enter_context(deployment.open_state().hold(holder, removal.state, deployment.run))
            note_revived(hold, removal.state)
            kept = kept_addresses(deployment, removal)
            changes = tuple(change for change in removal.plan.changes if change.address not in kept)
            deletions = dataclasses.replace(removal.plan, changes=changes)
            work = ApplyRun(deletions, _NO_RESOURCES, hold, deployment.handlers, on_step)
            on_begin(work)
            outcome = work.run()
        if outcome.ok:
            strays = _delete_strays(deployment, removal, on_step)
            strays += _delete_revived(deployment, removal, on_step)
            outcome = dataclasses.replace(outcome, done=(*outcome.done, *strays))
        if outcome.ok and data:
            mirrors = _delete_mirrors(deployment, removal, on_step)
            deleted, bucket = _delete_data(deployment, removal, hold, on_step)
            outcome = dataclasses.replace(outcome, done=(*outcome.done, *mirrors, *bucket))
    kept_lines, left = _kept(deployment, removal, data=data), _left(deployment, removal, data=data)
    return Removed(outcome=outcome, objects=deleted, kept=kept_lines, left=left)


def _delete_strays(deployment: Deployment, removal: Removal, on_step: Callable[[Step], None]) -> list[Change]:
    """Delete what the state does not record, last created kinds first; repeat while that makes others possible.

    Returns what was deleted.
    """
    order = {kind: number for number, kind in enumerate(deployment.handlers)}
    strays = [
        record
        for record in removal.strays
        if not _is_store(deployment, record) and record.address not in removal.in_use
    ]
    left, done = sorted(strays, key=lambda record: -order[record.kind]), list[Change]()
    while left:
        stuck: list[tuple[StateRecord, Conflict]] = []
        for record in left:
            try:
                deployment.handlers[record.kind].delete(record)
            except Conflict as error:
                stuck.append((record, error))
                continue
            done.append(Change.of(record))
            on_step(Step(change=done[-1], progress=Progress.DONE))
        if len(stuck) == len(left):
            for record, error in stuck:
                on_step(Step(change=Change.of(record), progress=Progress.FAILED, error=str(error)))
            break
        left = [record for record, _ in stuck]
    return done


def _delete_revived(deployment: Deployment, removal: Removal, on_step: Callable[[Step], None]) -> list[Change]:
    """Delete the jobs that replicas have started while theirs were stopped, and those that these have started."""
    entries = () if removal.state is None else removal.state.entries
    done: list[Change] = []
    while any(is_revivable(entry.record) for entry in entries):
        listed = list_tagged(deployment, entries)
        late = tuple(record for record in listed if record.life is Life.JOB)
        deleted = _delete_strays(deployment, dataclasses.replace(removal, strays=late), on_step)
        done += deleted
        if not deleted:
            break
    return done


def kept_addresses(deployment: Deployment, removal: Removal) -> set[str]:
    """The addresses that are not deleted with the others: of buckets, and of what other runs may use."""
    mirrors = (bucket.address for bucket in deployment.mirrors().values())
    return {deployment.bucket().address, *mirrors, *removal.in_use}


def _list_mirrors(deployment: Deployment) -> Iterator[MirrorContents]:
    """The mirrors of this run that exist, and the buckets that were created for them."""
    buckets = deployment.mirrors()
    for uri in deployment.spec.mirrors:
        bucket, store = buckets.get(uri), deployment.open_source(uri)
        if bucket is None:
            if is_mirror(store, deployment.run):
                yield MirrorContents(uri=uri, bucket=None, contents=_sum(list_run_objects(store)))
            continue
        handler = cast("BucketHandler", deployment.handlers[bucket.KIND])
        desired = desired_of(bucket, {}, deployment.run)
        (observed,) = handler.read([desired])
        if observed is None:
            continue
        ours = not bucket.brought and observed.owner == deployment.run
        record = desired.to_record({})
        own = handler.contents(record, prefix_of(uri)) if is_mirror(store, deployment.run) else Contents(objects=0)
        foreign = handler.contents(record).objects - own.objects if ours else 0
        if ours or own.objects:
            yield MirrorContents(uri=uri, bucket=bucket, contents=own, foreign_objects=foreign, ours=ours)


def _delete_mirrors(deployment: Deployment, removal: Removal, on_step: Callable[[Step], None]) -> Sequence[Change]:
    """Delete the mirrors, and their buckets where nothing else is in them. Returns the buckets that were deleted."""
    done: list[Change] = []
    for mirror in removal.mirrors:
        if mirror.bucket is None:
            delete_run(deployment.open_source(mirror.uri))
            continue
        handler = cast("BucketHandler", deployment.handlers[mirror.bucket.KIND])
        record = desired_of(mirror.bucket, {}, deployment.run).to_record({})
        if mirror.contents.objects:
            handler.empty(record, prefix_of(mirror.uri))
        if mirror.ours and not mirror.foreign_objects:
            handler.delete(record)
            done.append(Change.of(record))
            on_step(Step(change=done[-1], progress=Progress.DONE))
    return done


def _delete_data(
    deployment: Deployment, removal: Removal, hold: LockedState | None, on_step: Callable[[Step], None]
) -> tuple[Contents, Sequence[Change]]:
    """Delete the run's objects, the state with its lock, and the run's own bucket if it holds nothing of another run.

    Returns the objects and the bucket that were deleted.
    """
    deleted: Sequence[Entry] = ()
    if removal.bucket is not None:
        deleted = delete_run(deployment.open_store())
    if hold is not None:
        hold.delete_state()
    bucket = desired_of(deployment.bucket(), {}, deployment.run).to_record({})
    contents = _sum(deleted)
    if deployment.bucket().brought or not _is_ours(deployment, removal.bucket):
        return contents, ()
    handler = bucket_handler(deployment)
    handler.empty(bucket, prefix_of(deployment.run))
    if removal.foreign_objects:
        return contents, ()
    handler.delete(bucket)
    on_step(Step(change=Change.of(bucket), progress=Progress.DONE))
    return contents, (Change.of(bucket),)


def _kept(deployment: Deployment, removal: Removal, *, data: bool) -> tuple[str, ...]:
    kept = [
        f"{address} with {contents}: other runs may use it; delete it yourself once none does"
        for address, contents in removal.in_use.items()
    ]
    kept += [
        f"the bucket {mirror.bucket.name}, because {mirror.foreign_objects} objects in it are not of this run"
        for mirror in removal.mirrors
        if data and mirror.bucket is not None and mirror.foreign_objects
    ]
    bucket = deployment.bucket()
    if data and removal.foreign_objects:
        kept.append(f"the bucket {bucket.name}, because {removal.foreign_objects} objects in it are not of this run")
    owner = None if removal.bucket is None else removal.bucket.owner
    if data and not bucket.brought and owner not in (None, deployment.run):
        kept.append(f"the bucket {bucket.name}, because it belongs to the run {owner}")
    return tuple(kept)


def _left(deployment: Deployment, removal: Removal, *, data: bool) -> tuple[str, ...]:
    try:
        state = read_state(deployment)
    except SkerryError:
        state = None
    tagged = list_tagged(deployment, () if state is None else state.by_id().values())
    left = [f"{record.kind} {record.name}" for record in tagged if record.life is not Life.DATA]
    if not data:
        left += [f"the mirror at {mirror.uri}: `--data` deletes it too" for mirror in removal.mirrors]
    bucket = deployment.bucket()
    if not data and _is_ours(deployment, removal.bucket) and not bucket.brought and removal.contents.objects:
        left.append(f"{bucket.address} with {removal.contents}: `--data` deletes it too")
    elif not data and removal.objects:
        left.append(f"{removal.objects} objects at {deployment.run}: `--data` deletes them too")
    elif data and removal.bucket is not None and removal.bucket.owner is None and not bucket.brought:
        left.append(
            f"the bucket {bucket.name}, because it has no tag of this run; if this run created it, run "
            f"`skerry import {bucket.address}`, and repeat"
        )
    return tuple(left)


def _contents(deployment: Deployment, bucket: Observed | None) -> tuple[Contents, int]:
    """The contents of the run's prefix in its bucket; the number of other objects if the bucket is the run's own."""
    if bucket is None or deployment.bucket().brought or bucket.owner != deployment.run:
        return Contents(objects=0), 0
    record, handler = desired_of(deployment.bucket(), {}, deployment.run).to_record({}), bucket_handler(deployment)
    own = handler.contents(record, prefix_of(deployment.run))
    return own, handler.contents(record).objects - own.objects


def _is_ours(deployment: Deployment, bucket: Observed | None) -> bool:
    """True if the bucket exists and is tagged as the run's own, or named by the user in `byo:`."""
    return bucket is not None and (deployment.bucket().brought or bucket.owner == deployment.run)


def _is_store(deployment: Deployment, record: StateRecord) -> bool:
    """True if it is the bucket of the run's store or of a mirror, by its name: a tag with its address may be lost."""
    buckets = (deployment.bucket(), *deployment.mirrors().values())
    return (record.kind, record.name) in {(bucket.KIND, bucket.name) for bucket in buckets}


def _sum(entries: Sequence[Entry]) -> Contents:
    return Contents(objects=len(entries), size_bytes=sum(entry.size for entry in entries))


def bucket_handler(deployment: Deployment) -> BucketHandler:
    """The handler of the run's bucket."""
    return cast("BucketHandler", deployment.handlers[deployment.bucket().KIND])


def prefix_of(uri: str) -> str:
    """The prefix of a run, or of a mirror, in its bucket."""
    return uri.partition("://")[2].partition("/")[2] + "/"
