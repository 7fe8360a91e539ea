"""A deployed run as a plain value: its spec, packed code, clouds, targets and handlers. Names no cloud.

`prepare` calls a cloud only to check its account, for a spec that allows certain ones; reading an attribute never does.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.infra import clouds, targets
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.cost import prices
from skerry.infra.cost.mirror_costs import MirrorRoute, route_of
from skerry.infra.deploy.lock_owner_identity import abandoned
from skerry.infra.provision.state_store import StateStore
from skerry.infra.provision.target_and_store_interfaces import RunContext
from skerry.infra.run import code_archive
from skerry.infra.spec.model import Byo
from skerry.runtime.errors import Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Handler
    from skerry.infra.provision.target_and_store_interfaces import StoreCloud, Target
    from skerry.infra.run.code_archive import Bundle
    from skerry.infra.spec.model import Replicas, SpecFile
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

# The operator waits for each of these calls.
_DEADLINE_S: Final = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Deployment:
    """A spec whose replicas are jobs, and the objects that reach its clouds.

    access: the sessions with clouds. home: the cloud of the run's store, and home_name its name. mirror_homes: the
    clouds of its mirrors, by name, home included. targets: those of the spec, by kind. other_targets: all others, which
    an earlier version of the spec may have named. handlers: by kind of resource, in an order in which kinds can be
    created. These functions may look up credentials; each does its work once:
    bucket: the resource that holds the run's store; created before all others and deleted after them.
    mirrors: the buckets of mirrors in clouds, each with the URI of the mirror in it. mirror_routes: their traffic.
    open_store: opens the run's own prefix. open_source: opens the prefix of another run, or of a mirror. list_folders:
    the names of folders below a URI in the run's bucket.
    open_state: opens the state, in the run's store or at the spec's `state`.
    check_allowed: raises Unauthorized if the spec does not allow the account of one of these clouds.
    """

    spec: SpecFile
    clock: Clock
    access: OperatorAccess
    code: Bundle
    context: RunContext
    home_name: str
    home: StoreCloud
    mirror_homes: Mapping[str, StoreCloud]
    targets: Mapping[str, Target]
    other_targets: tuple[Target, ...]
    handlers: Mapping[str, Handler]
    bucket: Callable[[], Resource]
    mirrors: Callable[[], Mapping[str, Resource]]
    mirror_routes: Callable[[], tuple[MirrorRoute, ...]]
    open_store: Callable[[], Store]
    open_source: Callable[[str], Store]
    list_folders: Callable[[str], Sequence[str]]
    open_state: Callable[[], StateStore]
    check_allowed: Callable[[Iterable[str]], None]

    @property
    def run(self) -> str:
        """The run's URI; every resource of the run is tagged with it."""
        return self.spec.run_uri

    @property
    def all_targets(self) -> tuple[Target, ...]:
        """The targets that the spec does not name, then those it names."""
        return (*self.other_targets, *self.targets.values())

    def groups(self) -> Iterator[tuple[Target, list[Replicas]]]:
        """Each target of the spec with its groups."""
        for kind, target in self.targets.items():
            yield target, [group for group in self.spec.spec.replicas if group.target.kind == kind]


def prepare(spec: SpecFile, clock: Clock, environment: Mapping[str, str], at_once: int | None = None) -> Deployment:
    """The deployment of a spec. Packs the code. Raises Invalid if the code or the store cannot be used.

    environment: where credentials and endpoints are looked up. at_once: calls to clouds in flight. Raises Unauthorized
    if the spec does not allow the account of a cloud: nothing else is called before, so no command looks up or changes
    anything in another account.
    """
    access = OperatorAccess.of(spec, clock, environment, at_once)
    clouds.check_allowed(spec, access)
    code = code_archive.pack(spec.code_path)
    context = RunContext(
        spec=spec.spec,
        run_uri=spec.run_uri,
        image=spec.spec.image or "",
        code=code.digest,
        replica_slots=spec.replica_slots,
    )
    groups = spec.spec.replicas
    home = clouds.open_home(spec.run_uri, access)
    mirror_homes = _open_mirror_homes(spec, home, access)
    named_kinds = {group.target.kind for group in groups}
    opened = {kind: targets.open_target(kind, access) for kind in sorted(targets.kinds().deployed | named_kinds)}
    named = {kind: target for kind, target in opened.items() if kind in named_kinds}
    others = tuple(target for kind, target in opened.items() if kind not in named_kinds)
    handlers: dict[str, Handler] = {}
    for place in (home, *mirror_homes.values(), *others, *named.values()):
        handlers |= place.handlers()

    def open_at(uri: str) -> Store:
        return clouds.open_store(uri, access, home.environment(context), _DEADLINE_S)

    def open_source(uri: str) -> Store:
        in_home = _bucket_of(uri) == _bucket_of(spec.run_uri)
        return open_at(uri) if in_home else _open_other(context, access, uri)

    @functools.cache
    def list_mirrors() -> Mapping[str, Resource]:
        return _mirror_buckets(context, spec, mirror_homes)

    def list_routes() -> tuple[MirrorRoute, ...]:
        own = prices.own_file(environment)
        places = {uri: (clouds.home_of(uri), bucket.region) for uri, bucket in list_mirrors().items()}
        return tuple(route_of(uri, spec.mirrors[uri], place, groups, own) for uri, place in places.items())

    @functools.cache
    def open_run_store() -> Store:
        return open_at(spec.run_uri)

    @functools.cache
    def open_state() -> StateStore:
        store = open_run_store() if spec.state_uri is None else open_at(spec.state_uri)
        return StateStore(store, clock, abandoned)

    return Deployment(
        spec=spec,
        clock=clock,
        access=access,
        code=code,
        context=context,
        home_name=clouds.home_of(spec.run_uri),
        home=home,
        mirror_homes=mirror_homes,
        targets=named,
        other_targets=others,
        handlers=handlers,
        bucket=functools.cache(lambda: clouds.under_rules(home.resources(context)[:1], spec.spec)[0]),
        mirrors=list_mirrors,
        mirror_routes=functools.cache(list_routes),
        open_store=open_run_store,
        open_source=open_source,
        list_folders=lambda uri: clouds.list_folders(uri, access, home.environment(context)),
        open_state=open_state,
        check_allowed=functools.partial(clouds.check_allowed, spec, access),
    )


def _open_mirror_homes(spec: SpecFile, home: StoreCloud, access: OperatorAccess) -> dict[str, StoreCloud]:
    """The clouds of the mirrors, by name; that of the run's store is `home`."""
    homes: dict[str, StoreCloud] = {}
    for uri in spec.mirrors:
        name = clouds.home_of(uri)
        is_home = name == clouds.home_of(spec.run_uri)
        homes.setdefault(name, home if is_home else clouds.open_home(uri, access))
    return homes


def _mirror_buckets(context: RunContext, spec: SpecFile, homes: Mapping[str, StoreCloud]) -> Mapping[str, Resource]:
    """The buckets of mirrors, by the URI of the mirror; a mirror in a folder has none."""
    buckets = {
        bucket.name: bucket
        for cloud in homes.values()
        for bucket in clouds.under_rules(cloud.mirrors(context), spec.spec)
    }
    return {uri: buckets[name] for uri in spec.mirrors if (name := _bucket_of(uri).partition("://")[2]) in buckets}


def _open_other(context: RunContext, access: OperatorAccess, uri: str) -> Store:
    """Open a run in another bucket, which may be in another region or in another cloud."""
    variables: Mapping[str, str] = {}
    if clouds.is_home(uri):
        of_bucket = replace(context, run_uri=uri, spec=context.spec.model_copy(update={"byo": Byo(bucket=True)}))
        # Perhaps only its owner may look up its region; then it is the region of the operator's environment.
        with suppress(Unauthorized):
            variables = clouds.open_home(uri, access).environment(of_bucket)
    return clouds.open_store(uri, access, variables, _DEADLINE_S)


def _bucket_of(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"
