"""Takes a deployed run away, in reverse order, and looks afterwards whether anything of it is left anywhere.

What holds data goes only on request. What is remembered goes by the state; what nobody remembers is found by its tag.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from skerry.infra.apply import Applying, made_of
from skerry.infra.deploy.holding import holder
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

NOTHING = Graph(())


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What `destroy` would do. plan: deletions in their order. data: what holds data, by address, and what it holds.

    objects, size_bytes: of the run in its store. strays: of this run by their tags, and not remembered.
    """

    plan: Plan
    state: State | None
    data: Mapping[str, str]
    objects: int
    size_bytes: int
    strays: tuple[Made, ...]

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
    strays = tuple(made for made in owned(deployment, entries) if (made.kind, made.name) not in known)
    holding = {
        made.address: str(held)
        for made in (*_of_data(entries), *(made for made in strays if made.life is Life.DATA))
        if (held := _data_handler(deployment, made).held(made)).objects
    }
    return Removal(
        plan=plan(NOTHING, entries, {}, deployment.run),
        state=state,
        data=holding,
        objects=len(found),
        size_bytes=sum(entry.size for entry in found),
        strays=strays,
    )


def destroy(
    deployment: Deployment,
    removal: Removal,
    *,
    data: bool,
    on_step: Callable[[Step], None],
    applying: Callable[[Applying], None],
) -> Removed:
    """Do it. data: delete what holds data too, and the run's objects.

    The bucket is the last to go, and the state that lies in it the last but one. Raises Conflict if the state is held.
    """
    foundation = deployment.bucket.address
    stays = {foundation, *(() if data else removal.data)}
    doomed = tuple(change for change in removal.plan.changes if change.address not in stays)
    outcome = None
    if removal.state is not None:
        mine = holder("destroy", deployment.clock)
        with deployment.state_file.hold(mine, removal.state, deployment.run) as hold:
            for made in _of_data({entry.id: entry for entry in hold.entries}):
                if data and made.address != foundation:
                    _data_handler(deployment, made).empty(made)
            left = dataclasses.replace(removal.plan, changes=doomed)
            work = Applying(left, NOTHING, hold, deployment.handlers, on_step)
            applying(work)
            outcome = work.run()
    if outcome is not None and not outcome.ok:
        return Removed(outcome=outcome, left=_left(deployment, removal, data=data))
    _sweep(deployment, removal, data=data)
    if data:
        _remove_data(deployment)
    return Removed(
        outcome=outcome or Applying.nothing(),
        left=_left(deployment, removal, data=data),
    )


def owned(deployment: Deployment, entries: Mapping[Id, Entry]) -> list[Made]:
    """Everything that carries the run's tag, wherever the spec or the state says that something may be."""
    regions = {entry.made.region for entry in entries.values()} | _regions(deployment)
    run = deployment.run
    return [made for handler in deployment.handlers.values() for made in handler.owned(run, regions - {""})]


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


def _remove_data(deployment: Deployment) -> None:
    """The run's objects, the state, and the bucket if it is ours."""
    if not deployment.has_bucket():
        return
    remove_run(deployment.store)
    deployment.state_file.remove()
    made = made_of(wanted(deployment.bucket, {}, deployment.run), {})
    if not made.brought:
        handler = _data_handler(deployment, made)
        handler.empty(made, _prefix(deployment))
        handler.delete(made)


def _left(deployment: Deployment, removal: Removal, *, data: bool) -> tuple[str, ...]:
    state = _state_or_none(deployment)
    entries = {} if state is None else state.by_id()
    found = [f"{made.kind} {made.name}" for made in owned(deployment, entries) if made.life is not Life.DATA]
    kept = [f"{address} with {held}: `--data` deletes it too" for address, held in removal.data.items() if not data]
    if not data and removal.objects and deployment.bucket.address not in removal.data:
        kept.append(f"{removal.objects} objects at {deployment.run}: `--data` deletes them too")
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


def _regions(deployment: Deployment) -> set[str]:
    """Where the spec wants anything."""
    found = {str(getattr(group.target, "region", "")) for group in deployment.spec.spec.replicas}
    return found | {deployment.bucket.region}


def _prefix(deployment: Deployment) -> str:
    """Where the run lies in its bucket."""
    return deployment.run.partition("://")[2].partition("/")[2] + "/"
