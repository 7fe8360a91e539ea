"""Takes a deployed run away, in reverse order, and looks afterwards whether anything of it is left anywhere.

What holds data goes only on request. What is remembered goes by the state; what nobody remembers is found by its tag.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from skerry.infra.apply import Applying, made_of
from skerry.infra.deploy.holding import holder
from skerry.infra.deploy.strays import owned
from skerry.infra.founding import objects_of, remove_run
from skerry.infra.graph import Graph, Life
from skerry.infra.plan import plan, wanted
from skerry.runtime.errors import Conflict, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.infra.apply import Outcome, Step
    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.handler import DataHandler, Made
    from skerry.infra.plan import Plan
    from skerry.infra.state import Entry, Id, State
    from skerry.infra.statefile import Hold

NOTHING = Graph(())


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What `destroy` would do. plan: deletions in their order. data: what holds data, by address, and what it holds.

    objects, size_bytes: of the run in its store. strays: of this run by their tags, and not remembered. others: objects
    in its bucket that are not of this run.
    """

    plan: Plan
    state: State | None
    data: Mapping[str, str]
    objects: int
    size_bytes: int
    strays: tuple[Made, ...]
    others: int | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing of the run."""
        return self.plan.empty and not self.objects and not self.strays


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What became of it. left: what of ours is still there, in words; why it stayed."""

    outcome: Outcome
    left: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing of ours is left."""
        return self.outcome.ok and not self.left


def survey(deployment: Deployment) -> Removal:
    """What `destroy` would do now. Changes nothing."""
    state = deployment.state()
    entries = {} if state is None else state.by_id()
    found = objects_of(deployment.store) if deployment.has_bucket() else ()
    known = {(entry.made.kind, entry.made.name) for entry in entries.values()}
    strays = tuple(made for made in owned(deployment, entries.values()) if (made.kind, made.name) not in known)
    holding: dict[str, str] = {}
    others = None
    for made in (*_of_data(entries), *(made for made in strays if made.life is Life.DATA)):
        held = _data_handler(deployment, made).held(made)
        if made.address == deployment.bucket.address:
            mine = _data_handler(deployment, made).held(made, _prefix(deployment))
            others = held.objects - mine.objects or None
            held = mine
        if held.objects:
            holding[made.address] = str(held)
    return Removal(
        plan=plan(NOTHING, entries, {}, deployment.run),
        state=state,
        data=holding,
        objects=len(found),
        size_bytes=sum(entry.size for entry in found),
        strays=strays,
        others=others,
    )


def destroy(
    deployment: Deployment,
    removal: Removal,
    *,
    data: bool,
    on_step: Callable[[Step], None],
    applying: Callable[[Applying], None],
) -> Removed:
    """Do it, alone. data: delete what holds data too, and the run's objects.

    The bucket is the last to go, and the state that lies in it the last but one. Raises Conflict if the state is held.
    """
    if removal.empty:
        return Removed(outcome=Applying.nothing(), left=())
    with contextlib.ExitStack() as alone:
        hold = None
        # Without the bucket there is no state in it, and nobody can apply without making it first.
        if deployment.spec.state_uri is not None or deployment.has_bucket():
            mine = holder("destroy", deployment.clock)
            hold = alone.enter_context(deployment.state_file.hold(mine, removal.state, deployment.run))
        outcome = Applying.nothing() if hold is None else _remove(deployment, removal, hold, data, on_step, applying)
        if outcome.ok:
            _sweep(deployment, removal, data=data)
        if outcome.ok and data:
            _remove_data(deployment, removal, hold)
    return Removed(outcome=outcome, left=_left(deployment, removal, data=data))


def _remove(
    deployment: Deployment,
    removal: Removal,
    hold: Hold,
    data: bool,  # noqa: FBT001  named where it comes from
    on_step: Callable[[Step], None],
    applying: Callable[[Applying], None],
) -> Outcome:
    """Delete what is remembered, but for the bucket and what is to stay."""
    bucket = deployment.bucket.address
    stays = {bucket, *(() if data else removal.data)}
    for made in _of_data({entry.id: entry for entry in hold.entries}):
        if data and made.address != bucket:
            _data_handler(deployment, made).empty(made)
    doomed = tuple(change for change in removal.plan.changes if change.address not in stays)
    left = dataclasses.replace(removal.plan, changes=doomed)
    work = Applying(left, NOTHING, hold, deployment.handlers, on_step)
    applying(work)
    return work.run()


def _sweep(deployment: Deployment, removal: Removal, *, data: bool) -> None:
    """Delete what nobody remembers: kinds that are made last go first, and each round frees something for the next."""
    order = {kind: number for number, kind in enumerate(deployment.handlers)}
    stays = {deployment.bucket.address, *(() if data else removal.data)}
    left = sorted((made for made in removal.strays if made.address not in stays), key=lambda made: -order[made.kind])
    for made in left:
        if made.life is Life.DATA:
            _data_handler(deployment, made).empty(made)
    while left:
        stuck: list[Made] = []
        for made in left:
            try:
                deployment.handlers[made.kind].delete(made)
            except Conflict:
                stuck.append(made)
        if len(stuck) == len(left):
            return
        left = stuck


def _remove_data(deployment: Deployment, removal: Removal, hold: Hold | None) -> None:
    """The run's objects, the state with its hold, and the bucket if it is ours alone."""
    there = deployment.has_bucket()
    if there:
        remove_run(deployment.store)
    if hold is not None:
        hold.end_of_state()
    made = made_of(wanted(deployment.bucket, {}, deployment.run), {})
    if there and not made.brought:
        handler = _data_handler(deployment, made)
        handler.empty(made, _prefix(deployment))
        if not removal.others:
            handler.delete(made)


def _left(deployment: Deployment, removal: Removal, *, data: bool) -> tuple[str, ...]:
    state = _state_or_none(deployment)
    entries = {} if state is None else state.by_id()
    found = [f"{made.kind} {made.name}" for made in owned(deployment, entries.values()) if made.life is not Life.DATA]
    kept = [f"{address} with {held}: `--data` deletes it too" for address, held in removal.data.items() if not data]
    if not data and removal.objects and deployment.bucket.address not in removal.data:
        kept.append(f"{removal.objects} objects at {deployment.run}: `--data` deletes them too")
    if data and removal.others and not deployment.bucket.brought:
        name = deployment.bucket.name
        kept.append(f"the bucket {name}, for {removal.others} objects that are not of this run; move them, and repeat")
    return (*found, *kept)


def _state_or_none(deployment: Deployment) -> State | None:
    try:
        return deployment.state()
    except SkerryError:
        return None


def _of_data(entries: Mapping[Id, Entry]) -> Sequence[Made]:
    made = [entry.made for entry in entries.values()]
    return [one for one in made if one.life is Life.DATA and not one.brought]


def _data_handler(deployment: Deployment, made: Made) -> DataHandler:
    return cast("DataHandler", deployment.handlers[made.kind])


def _prefix(deployment: Deployment) -> str:
    """Where the run lies in its bucket."""
    return deployment.run.partition("://")[2].partition("/")[2] + "/"
