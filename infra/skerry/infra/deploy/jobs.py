"""The jobs of a deployment: what they are doing, what they write, and their end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from skerry.infra.graph import Life
from skerry.infra.handler import Condition
from skerry.runtime import keys
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.handler import Made
    from skerry.infra.target import JobView, LogLine

_AT_ONCE: Final = 16


def jobs(deployment: Deployment) -> list[tuple[Made, JobView]]:
    """What each replica's newest job is doing, in slot order."""
    state = deployment.state()
    entries = {} if state is None else state.by_id()
    newest = {entry.made.address: entry.made for _, entry in sorted(entries.items())}
    made = [one for one in newest.values() if one.life is Life.JOB]
    found: list[tuple[Made, JobView]] = []
    for target in (*deployment.others, *deployment.targets.values()):
        # A cloud that runs nothing for us is not asked.
        if mine := [one for one in made if one.kind in target.handlers()]:
            found += zip(mine, target.jobs(mine), strict=True)
    return sorted(found, key=lambda pair: keys.slot_order(pair[1].slot))


def live(deployment: Deployment, slots: Sequence[str] = ()) -> list[Made]:
    """Jobs that wait or run, of these slots; of all if none is named. Raises Invalid for a slot that has none."""
    views = jobs(deployment)
    if unknown := set(slots) - {view.slot for _, view in views}:
        raise Invalid(f"no job of {', '.join(sorted(unknown))}; `skerry status` names those there are")
    found = [(made, view) for made, view in views if view.condition is Condition.READY]
    return [made for made, view in found if not slots or view.slot in slots]


def end(deployment: Deployment, doomed: Sequence[Made]) -> None:
    """Stop these jobs and wait until they have ended."""

    def stop(made: Made) -> None:
        deployment.handlers[made.kind].delete(made)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(stop, doomed):
            pass


def lines(deployment: Deployment, made: Made, cursor: str | None) -> Iterator[LogLine]:
    """What a job has written after `cursor`."""
    every = (*deployment.others, *deployment.targets.values())
    return next(target for target in every if made.kind in target.handlers()).logs(made, cursor)
