"""One spec and the clouds it names, put together: resources, handlers, store, state. Knows no cloud by name."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra import bundle, clouds, targets
from skerry.infra.deploy.holding import abandoned
from skerry.infra.estimate import hours_allowed, within
from skerry.infra.graph import Graph
from skerry.infra.plan import wanted
from skerry.infra.spec import DEPLOYED
from skerry.infra.statefile import StateFile
from skerry.infra.target import Ground
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler
    from skerry.infra.spec import Replicas, SpecFile
    from skerry.infra.state import State
    from skerry.infra.target import Check, Home, Rate, Target
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

# Somebody waits for each of these calls.
_DEADLINE_S: Final = 60.0


class Deployment:
    """A spec whose replicas are jobs. Making one asks nobody; each cached part asks its cloud once.

    home_name: of the cloud of its store. targets: those of the spec, by kind. others: the rest, which may have been in
    the spec once. code: packed.
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
        self.home_name = clouds.home_of(spec.run_uri)
        self.home: Home = clouds.open_home(spec.run_uri, clock, environment, spec.spec.replicas)
        kinds = sorted({group.target.kind for group in spec.spec.replicas})
        self.targets: dict[str, Target] = {
            kind: targets.open_target(kind, clock, environment, spec.spec.replicas) for kind in kinds
        }
        self.others = [
            targets.open_target(kind, clock, environment, spec.spec.replicas) for kind in sorted(DEPLOYED - set(kinds))
        ]
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
        ground = replace(self.ground, hours=self._hours)
        resources = list(self.home.resources(ground))
        for target, groups in self.groups():
            resources += target.resources(ground, groups)
        return Graph(resources)

    @functools.cached_property
    def rates(self) -> tuple[Rate, ...]:
        """What the replicas of all groups cost while they run, and for how long at most. Asks the clouds."""
        return within(self._hours, self._rates)

    @functools.cached_property
    def accounts(self) -> dict[str, str]:
        """Whose clouds these are. A cloud in which a run has several accounts has them all."""
        found: dict[str, set[str]] = {}
        for maker in (self.home, *self.targets.values()):
            for cloud, account in maker.identity().items():
                found.setdefault(cloud, set()).add(account)
        return {cloud: ", ".join(sorted(accounts)) for cloud, accounts in found.items()}

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

    def checks(self) -> Iterator[Check]:
        """What can be known beforehand of what would fail later, of the home first. See Home.checks, Target.checks."""
        yield from self.home.checks(self.ground)
        try:
            hours = self._hours
        except SkerryError:  # of prices; a check of its own says that this cloud cannot be asked
            hours = self.spec.spec.limits.max_hours
        for target, groups in self.groups():
            yield from target.checks(replace(self.ground, hours=hours), groups)

    def has_bucket(self) -> bool:
        """Whether the run's bucket is there now, and is its own or brought."""
        (seen,) = self.handlers[self.bucket.KIND].read([wanted(self.bucket, {}, self.run)])
        return seen is not None and (self.bucket.brought or seen.owner == self.run)

    def state(self) -> State | None:
        """What is remembered now; None before the first apply."""
        if self.spec.state_uri is None and not self.has_bucket():
            return None
        return self.state_file.load()

    @functools.cached_property
    def _hours(self) -> float | None:
        """How long the run may take. Asks for prices only if a cost is limited.

        A cost that cannot be kept is told by the plan, which is then never applied.
        """
        limits = self.spec.spec.limits
        try:
            return limits.max_hours if limits.max_cost_usd is None else hours_allowed(limits, self._rates)
        except Invalid:
            return limits.max_hours

    @functools.cached_property
    def _rates(self) -> tuple[Rate, ...]:
        return tuple(rate for target, groups in self.groups() for rate in target.rates(self.ground, groups))

    def _open(self, uri: str) -> Store:
        environment = {**self._given, **self.home.environment(self.ground)}
        return open_store(uri, clock=self.clock, deadline_s=_DEADLINE_S, environment=environment)
