"""The jobs of a deployment: what they are doing, what they write, and their end."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.deploy.holding import holder
from skerry.infra.graph import Life
from skerry.infra.handler import Condition
from skerry.infra.state import Id, Phase
from skerry.runtime import keys
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.handler import Made
    from skerry.infra.state import Entry, State
    from skerry.infra.target import JobView, LogLine

_AT_ONCE: Final = 16


def jobs(deployment: Deployment) -> list[tuple[Made, JobView]]:
    """What each replica's newest job is doing, in slot order. One that somebody has stopped is not to start again."""
    return _jobs(deployment, deployment.state())


def _jobs(deployment: Deployment, state: State | None) -> list[tuple[Made, JobView]]:
    newest = _newest(state)
    made = [entry.made for entry in newest.values()]
    found: list[tuple[Made, JobView]] = []
    for target in (*deployment.others, *deployment.targets.values()):
        # A cloud that runs nothing for us is not asked.
        if mine := [one for one in made if one.kind in target.handlers()]:
            found += zip(mine, target.jobs(mine), strict=True)
    views = [(made, _with(view, newest[made.address])) for made, view in found]
    return sorted(views, key=lambda pair: keys.slot_order(pair[1].slot))


@dataclass(frozen=True, kw_only=True)
class Doomed:
    """Jobs to stop. state: as they were found in it. runs: those that run or wait, or may: the cloud is asked."""

    state: State | None
    made: tuple[Made, ...]
    runs: tuple[Made, ...]


def doomed(deployment: Deployment, slots: Sequence[str] = ()) -> Doomed:
    """Jobs that run, wait, or may be started again, of these slots; of all if none is named.

    Raises Invalid for a slot that has no job.
    """
    state = deployment.state()
    views = _jobs(deployment, state)
    if unknown := set(slots) - {view.slot for _, view in views}:
        raise Invalid(f"no job of {', '.join(sorted(unknown))}; `skerry status` names those there are")
    mine = [(made, view) for made, view in views if not slots or view.slot in slots]
    # One whose creation was begun may be there, whatever the cloud shows of it.
    begun = {at for at, entry in _newest(state).items() if entry.phase is Phase.CREATING}
    runs = [made for made, view in mine if view.condition is Condition.READY or made.address in begun]
    return Doomed(state=state, made=tuple(made for made, view in mine if made in runs or view.again), runs=tuple(runs))


def end(deployment: Deployment, doomed: Doomed) -> None:
    """Stop what of these jobs runs and wait until it has ended; nobody who watches starts one of them again.

    Raises Conflict while an apply, or an `up` that starts a job, holds the state, or if it has moved on since they were
    found: nothing is stopped then.
    """
    if not doomed.made:
        return
    with deployment.state_file.hold(holder("cancel", deployment.clock), doomed.state, deployment.run) as hold:
        for made in doomed.made:
            key = Id(made.address, made.generation)
            if (entry := hold.entry(key)) is not None:
                hold.note(key, dataclasses.replace(entry, stopped=True))

    def stop(made: Made) -> None:
        deployment.handlers[made.kind].delete(made)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(stop, doomed.runs):
            pass


def _with(view: JobView, entry: Entry) -> JobView:
    """What its cloud tells, and what the state does."""
    return dataclasses.replace(view, again=view.again and not entry.stopped, stopped=entry.stopped)


def _newest(state: State | None) -> dict[str, Entry]:
    """Of each replica's job its newest generation, by address."""
    entries = {} if state is None else state.by_id()
    newest = {entry.made.address: entry for _, entry in sorted(entries.items())}
    return {address: entry for address, entry in newest.items() if entry.made.life is Life.JOB}


def lines(deployment: Deployment, made: Made, cursor: str | None) -> Iterator[LogLine]:
    """What a job has written after `cursor`."""
    every = (*deployment.others, *deployment.targets.values())
    return next(target for target in every if made.kind in target.handlers()).logs(made, cursor)
