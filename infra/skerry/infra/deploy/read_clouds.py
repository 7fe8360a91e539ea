"""Reads what the clouds report of a deployment: its bucket, state, resources with their prices, and checks.

Changes nothing. Every function here calls a cloud.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

from skerry.infra import clouds, targets
from skerry.infra.clouds.handler_helpers import each
from skerry.infra.cost.time_limit_from_cost import hours_allowed, limits_of, within
from skerry.infra.provision.graph import Graph, Life
from skerry.infra.provision.plan import desired_of
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.run.run_record import find_move, load_run
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import BucketHandler, Observed
    from skerry.infra.provision.state import State
    from skerry.infra.provision.target_and_store_interfaces import Rate
    from skerry.infra.run.run_record import Move
    from skerry.infra.spec.env_secrets_and_data import Inputs
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

_AND: Final = ", "
FAILOVER: Final = "failover"
"""The name of the check."""
_NOT_MADE: Final = "; that run is not there yet"
COMPLETE: Final = "if its replicas cannot make it, restore a mirror: `skerry restore`, or `skerry restore MIRROR`"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A spec resolved against its clouds.

    graph: every resource that the spec needs. rates: the price per hour of each group, and for how long at most.
    accounts: {"aws": "123456789012"}; a cloud in which the run uses several accounts lists them all. principals: as
    `read_principals`. checks: what `skerry doctor` checks, the images of the jobs included. inputs: of the replicas, by
    group.
    """

    graph: Graph
    rates: tuple[Rate, ...]
    accounts: Mapping[str, str]
    principals: Mapping[str, str]
    checks: tuple[Check, ...]
    inputs: Mapping[str, Inputs]


def resolve(deployment: Deployment) -> Resolved:
    """Read the offers, prices and accounts that a plan needs, and the checks beside them."""
    prices = read_prices(deployment)
    hours = _hours(deployment, prices)
    with ThreadPoolExecutor(1, thread_name_prefix="checks") as pool:
        checking = pool.submit(_read_checks, deployment, hours)
        graph, accounts = read_graph(deployment, hours), read_accounts(deployment)
        return Resolved(
            graph=graph,
            rates=within(hours, prices),
            accounts=accounts,
            principals=read_principals(deployment, accounts),
            checks=checking.result(),
            inputs={group.name: deployment.context.inputs(group) for group in deployment.spec.spec.replicas},
        )


def read_graph(deployment: Deployment, hours: float | None) -> Graph:
    """Read the offers, and return every resource that the spec needs. hours: for how long jobs may run."""
    context = replace(deployment.context, hours=hours)
    resources = [*deployment.home.resources(context), *deployment.mirrors().values()]
    for target, groups in deployment.groups():
        resources += target.resources(context, groups)
    return Graph(clouds.under_rules(resources, deployment.spec.spec, _read_keys(deployment)))


def _read_keys(deployment: Deployment) -> set[str]:
    """The keys that encrypt the buckets of the run and its mirrors now; not those of the user's own buckets."""
    keys_in_use: set[str] = set()
    for bucket in (deployment.bucket(), *deployment.mirrors().values()):
        if not bucket.brought:
            record = desired_of(bucket, {}, deployment.run).to_record({})
            keys_in_use.add(_handler_of(deployment, bucket).key(record))
    return keys_in_use - {""}


def read_rates(deployment: Deployment) -> tuple[Rate, ...]:
    """Reads what the groups cost per hour, and for how long at most."""
    prices = read_prices(deployment)
    return within(_hours(deployment, prices), prices)


def read_prices(deployment: Deployment) -> tuple[Rate, ...]:
    """Reads what the groups cost per hour, without the limits of the run."""
    return tuple(rate for target, groups in deployment.groups() for rate in target.rates(deployment.context, groups))


def read_bucket(deployment: Deployment) -> Observed | None:
    """The run's bucket as its cloud reports it; None if it does not exist."""
    bucket = deployment.bucket()
    (observed,) = deployment.handlers[bucket.KIND].read([desired_of(bucket, {}, deployment.run)])
    return observed


def read_bucket_region(deployment: Deployment) -> str:
    """The region of the run's bucket; before it exists, the one in which it would be created."""
    return _region_of_bucket(deployment) or deployment.bucket().region


def bucket_exists(deployment: Deployment) -> bool:
    """True if the bucket of the run's store exists, of any owner: the run's keys in it are the run's own."""
    return _region_of_bucket(deployment) is not None


def _region_of_bucket(deployment: Deployment) -> str | None:
    bucket = deployment.bucket()
    name = desired_of(bucket, {}, deployment.run).name
    return _handler_of(deployment, bucket).region_of(name, bucket.region)


def _handler_of(deployment: Deployment, bucket: Resource) -> BucketHandler:
    return cast("BucketHandler", deployment.handlers[bucket.KIND])


def read_move(deployment: Deployment) -> Move | None:
    """The place at which the run went on by itself; None if it did not.

    Raises Retryable if its mirror cannot be read: the run's own store may be one that it has left.
    """
    mirror = deployment.spec.failover_mirror
    if mirror is None:
        return None
    try:
        return find_move(deployment.open_source(mirror))
    except Invalid:  # no such bucket: before the first apply, and after the last destroy
        return None
    except (SkerryError, OSError) as error:
        raise Retryable(
            f"{mirror}, which knows whether the run has left {deployment.run}, cannot be read: {in_short(error)}; try "
            "again, or name the URI of the run instead of the spec"
        ) from error


def find_run_store(deployment: Deployment) -> Store | None:
    """The store in which the run is now; None if it was never started, or if its bucket is gone. As `read_move`."""
    if (move := read_move(deployment)) is not None:
        return deployment.open_source(move.uri)
    return deployment.open_store() if bucket_exists(deployment) else None


def read_state(deployment: Deployment) -> State | None:
    """The state, read by its key; None if there is none, as before the first apply, or if the bucket is missing.

    Raises Unauthorized if the spec does not allow the account of a cloud in which the state has resources: every
    command that may change something reads it first. `prepare` has checked the clouds that the spec names.
    """
    if deployment.spec.state_uri is None and not bucket_exists(deployment):
        return None
    state = deployment.open_state().load()
    if state is not None:
        deployment.check_allowed({targets.cloud_of(entry.record.kind) for entry in state.entries})
    return state


def read_accounts(deployment: Deployment) -> dict[str, str]:
    """The accounts of all places that the spec names; several of one place are listed."""
    accounts: dict[str, set[str]] = {}
    for place in (deployment.home, *deployment.mirror_homes.values(), *deployment.targets.values()):
        for cloud, account in place.identity().items():
            accounts.setdefault(cloud, set()).add(account)
    return {cloud: _AND.join(sorted(names)) for cloud, names in accounts.items()}


def read_principals(deployment: Deployment, accounts: Iterable[str]) -> dict[str, str]:
    """The name that the operator has in each cloud: {"aws": "arn:aws:iam::123456789012:user/ada"}.

    A cloud of `accounts` without a session of its own is left out.
    """
    return {cloud: name for cloud in accounts if (name := deployment.access.principal(cloud))}


def accounts_to_record(state: State | None, accounts: Mapping[str, str]) -> dict[str, str]:
    """These accounts, and those that the state's resources may still be in."""
    return {**(state.accounts if state is not None and _has_resources(state) else {}), **accounts}


def check_accounts(deployment: Deployment, state: State | None, accounts: Mapping[str, str]) -> None:
    """Raise Conflict if the state's resources are in other accounts than these, where they would count as deleted."""
    if state is None or not _has_resources(state):
        return
    for place, was in state.accounts.items():
        now = accounts.get(place)
        if now is not None and not set(was.split(_AND)) & set(now.split(_AND)):
            uri = f"{deployment.spec.state_uri or deployment.run}/{keys.STATE}"
            raise Conflict(
                f"this run was applied in {place} {was}, and these credentials are of {now}, where its jobs would not "
                f"be found; switch back, or, if {was} is gone for good, remove {uri}"
            )


def _has_resources(state: State) -> bool:
    """Return whether more than buckets and repositories is left, which outlive a run."""
    return any(entry.record.life is not Life.DATA for entry in state.entries)


def run_checks(deployment: Deployment) -> tuple[Check, ...]:
    """Check what would make an apply fail: first the store's cloud, then each target. See StoreCloud, Target."""
    limits = deployment.spec.spec.limits
    try:
        hours = limits.max_hours if limits.max_cost_usd is None else _hours(deployment, read_prices(deployment))
    except SkerryError:  # prices could not be read; the target's own check reports that
        hours = limits.max_hours
    return _read_checks(deployment, hours)


def _read_checks(deployment: Deployment, hours: float | None) -> tuple[Check, ...]:
    """The checks of the store's cloud and of each target; these are read in parallel."""
    context = replace(deployment.context, hours=hours)
    checks = [deployment.home.checks(deployment.context), _failover_checks(deployment)]
    checks += [target.checks(context, groups) for target, groups in deployment.groups()]
    return tuple(itertools.chain.from_iterable(each(_completed, checks)))


def _failover_checks(deployment: Deployment) -> Iterator[Check]:
    """Check that a run with failover can go on by itself, or that it does."""
    if (mirror := deployment.spec.failover_mirror) is None:
        return
    try:
        move = read_move(deployment)
        uri = mirror + keys.GOES_ON if move is None else move.uri
        run = _run_at(deployment, uri)
    except (SkerryError, OSError) as error:
        yield Check(name=FAILOVER, ok=None, text=f"cannot be checked ({in_short(error)})")
        return
    if move is None:
        text = f"by votes at {mirror}" if run is None else f"{uri} has run {run.name}, so the run could not go on there"
        yield Check(name=FAILOVER, ok=run is None, text=text, advice=f"`skerry destroy {uri}`, or another `run:`")
    else:
        text = f"the run left {deployment.run}: {move}" + ("" if run is not None else _NOT_MADE)
        yield Check(name=FAILOVER, ok=run is not None, text=text, advice=COMPLETE)


def _run_at(deployment: Deployment, uri: str) -> Run | None:
    try:
        return load_run(deployment.open_source(uri))
    except Invalid:  # no such bucket yet
        return None


def _completed(checks: Iterator[Check]) -> list[Check]:
    """All of these checks; the last one is undecided if a cloud did not reply to one of them."""
    completed: list[Check] = []
    try:
        for check in checks:
            completed.append(check)  # noqa: PERF402  those before an error count
    except (SkerryError, TimeoutError) as error:
        completed.append(Check(name="further checks", ok=None, text=f"cannot be completed ({error})"))
    return completed


def _hours(deployment: Deployment, prices: tuple[Rate, ...]) -> float | None:
    """The number of hours that the run may take. A cost limit that cannot be kept is the plan's problem."""
    limits = limits_of(deployment.spec.spec)
    try:
        return limits.max_hours if limits.max_cost_usd is None else hours_allowed(limits, prices)
    except Invalid:
        return limits.max_hours
