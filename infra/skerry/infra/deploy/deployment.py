"""One spec and the clouds it names, put together: resources, handlers, store, state. Knows no cloud by name."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra import bundle, clouds, targets
from skerry.infra.deploy.holding import abandoned
from skerry.infra.estimate import hours_allowed
from skerry.infra.graph import Graph
from skerry.infra.plan import wanted
from skerry.infra.spec import DEPLOYED
from skerry.infra.statefile import StateFile
from skerry.infra.target import Ground
from skerry.runtime.errors import Invalid
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler
    from skerry.infra.spec import Replicas, SpecFile
    from skerry.infra.state import State
    from skerry.infra.target import Home, Rate, Target
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

# Somebody waits for each of these calls.
_DEADLINE_S: Final = 60.0


class Deployment:
    """A spec whose replicas are jobs. Making one asks nobody; each cached part asks its cloud once.

    targets: those of the spec, by kind. others: the rest, which may have been in the spec once. code: packed.
    """

    def __init__(self, spec: SpecFile, clock: Clock, environment: Mapping[str, str]) -> None:
        self.spec = spec
        self.clock = clock
        self.code = bundle.pack(spec.code_path)
        self.ground = Ground(
            spec=spec.spec,
            run_uri=spec.run_uri,
            image=spec.spec.image or "",
            code=self.code.digest,
            seats=spec.seats,
        )
        self.home: Home = clouds.open_home(spec.run_uri, clock, environment)
        kinds = sorted({group.target.kind for group in spec.spec.replicas})
        self.targets: dict[str, Target] = {kind: targets.open_target(kind, clock, environment) for kind in kinds}
        self.others = [targets.open_target(kind, clock, environment) for kind in sorted(DEPLOYED - set(kinds))]
        self._given = environment

    @property
    def run(self) -> str:
        """The run's URI, by which everything of it is known."""
        return self.spec.run_uri

    @functools.cached_property
    def handlers(self) -> dict[str, Handler]:
        """Who makes what, by kind of resource, in an order in which kinds can be made."""
        found = dict(self.home.handlers())
        for target in (*self.others, *self.targets.values()):
            found |= target.handlers()
        return found

    @functools.cached_property
    def bucket(self) -> Resource:
        """What the run's store lies in: made before everything else, and deleted after it."""
        return self.home.resources(self.ground)[0]

    @functools.cached_property
    def graph(self) -> Graph:
        """Everything the spec needs. Asks the clouds what they offer."""
        resources: list[Resource] = list(self.home.resources(self.ground))
        ground = replace(self.ground, hours=self._hours())
        for target, groups in self.groups():
            resources += target.resources(ground, groups)
        return Graph(resources)

    @functools.cached_property
    def rates(self) -> tuple[Rate, ...]:
        """What the replicas of all groups cost while they run. Asks the clouds."""
        return tuple(rate for target, groups in self.groups() for rate in target.rates(self.ground, groups))

    @functools.cached_property
    def accounts(self) -> dict[str, str]:
        """Whose clouds these are."""
        return dict(self.home.identity()) | {
            cloud: account for target in self.targets.values() for cloud, account in target.identity().items()
        }

    @functools.cached_property
    def store(self) -> Store:
        """The run's own prefix."""
        return self._open(self.run)

    @functools.cached_property
    def state_file(self) -> StateFile:
        """Where the state lies: with the run, or where the spec says."""
        place = self.spec.state_uri
        return StateFile(self.store if place is None else self._open(place), self.clock, abandoned)

    def groups(self) -> Iterator[tuple[Target, list[Replicas]]]:
        """Each target of the spec, and the groups that run there."""
        for kind, target in self.targets.items():
            yield target, [group for group in self.spec.spec.replicas if group.target.kind == kind]

    def has_bucket(self) -> bool:
        """Whether the run's bucket is there now, and is its own or brought."""
        (seen,) = self.handlers[self.bucket.KIND].read([wanted(self.bucket, {}, self.run)])
        return seen is not None and (self.bucket.brought or seen.owner == self.run)

    def state(self) -> State | None:
        """What is remembered now; None before the first apply."""
        if self.spec.state_uri is None and not self.has_bucket():
            return None
        return self.state_file.load()

    def _hours(self) -> float | None:
        """How long the run may take. A cost that cannot be kept is told by the plan, which is then never applied."""
        limits = self.spec.spec.limits
        if limits.max_cost_usd is None:
            return limits.max_hours
        rates = self.rates
        try:
            return hours_allowed(limits, rates)
        except Invalid:
            return limits.max_hours

    def _open(self, uri: str) -> Store:
        environment = {**self._given, **self.home.environment(self.ground)}
        return open_store(uri, clock=self.clock, deadline_s=_DEADLINE_S, environment=environment)
