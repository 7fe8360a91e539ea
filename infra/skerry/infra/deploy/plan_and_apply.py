"""Plans a deployment and applies the plan. The bucket is created first, because it holds the state of all the rest."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping  # noqa: TC003  a parser reads the annotations of Binding
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra import clouds
from skerry.infra.cost.time_limit_from_cost import cost_problem, limits_of
from skerry.infra.deploy.lock_owner_identity import this_process
from skerry.infra.deploy.read_clouds import (
    accounts_to_record,
    bucket_exists,
    check_accounts,
    read_graph,
    read_state,
    resolve,
)
from skerry.infra.deploy.revived_jobs import note_revived, with_revived
from skerry.infra.deploy.tagged_resources import list_tagged
from skerry.infra.observe.live_replicas import live_replicas
from skerry.infra.provision.apply import ApplyRun, Outcome, Progress, Step
from skerry.infra.provision.graph import Life
from skerry.infra.provision.observe_resources import CALLS_AT_ONCE, refresh_and_plan
from skerry.infra.provision.plan import desired_of
from skerry.infra.provision.planned_changes import Action
from skerry.infra.provision.state import Entry, StatePhase
from skerry.infra.run.change_run_settings import expect_slots
from skerry.infra.run.run_record import (
    check_not_lost,
    check_same_run,
    create_or_load_run,
    find_source_of,
    load_run,
    load_settings,
    require_settings,
)
from skerry.infra.spec_and_store_errors import PushFirst
from skerry.runtime.errors import Conflict, Corrupt, Invalid, Unauthorized
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.deploy.read_clouds import Resolved
    from skerry.infra.observe.live_replicas import LiveReplica
    from skerry.infra.provision.graph import Graph
    from skerry.infra.provision.planned_changes import Plan
    from skerry.infra.provision.state import Id, State
    from skerry.infra.provision.target_and_store_interfaces import Check
    from skerry.infra.run.code_archive import Bundle
    from skerry.infra.run.source_checkpoint import Source
    from skerry.runtime.log.run_record import InitialModel


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The facts that a plan was made from; if one changes, the plan is stale. accounts: {"aws": "123456789012"}.

    init_from: the checkpoint that the run starts from, with its digest; None for the model of the script.
    """

    run: str
    lineage: str | None
    serial: int
    spec: str
    image: str
    code: str
    accounts: Mapping[str, str]
    init_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and what it was made from. code: what the run's store and every replica receive.

    graph: of the resources that were planned, all of `resolved` or a part. tagged: the run's resources by their tags,
    listed only if there is no state. source: the checkpoint that an apply copies into the new run; None if there is
    none to copy.
    """

    plan: Plan
    binding: Binding
    code: Bundle
    resolved: Resolved
    state: State | None
    graph: Graph
    tagged: tuple[Entry, ...] = ()
    source: Source | None = None

    @property
    def stops(self) -> tuple[Check, ...]:
        """The failed checks that keep an apply from starting the jobs of this plan; empty if it starts none."""
        started = {change.address for change in self.plan.changes if change.action in (Action.CREATE, Action.REPLACE)}
        if not any(resource.LIFE is Life.JOB and resource.address in started for resource in self.graph):
            return ()
        return tuple(check for check in self.resolved.checks if check.stops_jobs and check.ok is False)


def make_plan(
    deployment: Deployment,
    only: Sequence[str] = (),
    resolved: Resolved | None = None,
    *,
    to_replace: Sequence[str] = (),
    at_once: int = CALLS_AT_ONCE,
) -> Planned:
    """The changes that an apply would make now. Changes nothing.

    only: plan these addresses, what they need, and the bucket. resolved: of an earlier plan; None reads the clouds.
    to_replace: addresses that get a new generation in any case. at_once: calls to a cloud in flight.
    Raises Conflict if the state's resources are in another account.
    """
    state = with_revived(deployment.run, deployment.handlers, read_state(deployment))
    tagged = _list_tagged_entries(deployment) if state is None else ()
    entries = {entry.id: entry for entry in (tagged if state is None else state.entries)}
    resolved = resolve(deployment) if resolved is None else resolved
    check_accounts(deployment, state, resolved.accounts)
    graph = resolved.graph.part((*only, deployment.bucket().address)) if only else resolved.graph
    tags = deployment.spec.spec.tags
    whole = resolved.graph if only else None
    plan = refresh_and_plan(graph, entries, deployment.handlers, deployment.run, tags, whole, to_replace, at_once)
    cost = cost_problem(limits_of(deployment.spec.spec), resolved.rates)
    mirrors = [route.problem for route in deployment.mirror_routes() if route.problem is not None]
    start = _read_start(deployment)
    rules = clouds.rule_problems(graph)
    problems = (*plan.problems, *rules, *start.problems, *(() if cost is None else (cost,)), *mirrors)
    return Planned(
        plan=dataclasses.replace(plan, problems=problems),
        binding=binding_of(deployment, state, resolved.accounts, start.initial),
        code=deployment.code,
        resolved=resolved,
        state=state,
        graph=graph,
        tagged=tagged,
        source=start.source,
    )


def read_live_elsewhere(deployment: Deployment, planned: Planned) -> list[LiveReplica]:
    """The replicas at work whose slots this plan takes: by the jobs that it creates.

    Without a state, jobs that it adopts or replaces count too: it is not known what started them.
    """
    takes = {Action.CREATE} if planned.state is not None else {Action.CREATE, Action.ADOPT, Action.REPLACE}
    taken = {change.address for change in planned.plan.changes if change.action in takes}
    slots = {job.key for job in planned.graph if job.LIFE is Life.JOB and job.address in taken}
    if not slots or not bucket_exists(deployment):
        return []
    store = deployment.open_store()
    run = load_run(store)
    return [] if run is None else live_replicas(store, run, deployment.clock, slots)


def apply_plan(
    deployment: Deployment,
    planned: Planned,
    on_step: Callable[[Step], None],
    on_begin: Callable[[ApplyRun], None],
    at_once: int = CALLS_AT_ONCE,
) -> Outcome:
    """Make the changes of a plan. on_begin: called with the apply before it begins, so that it can be stopped.

    Raises Conflict if the state changed since the plan, or is locked; Invalid if the plan has problems; PushFirst if
    it would start jobs that cannot run their image. Nothing is changed then.
    """
    if planned.plan.problems:
        raise Invalid("\n".join(planned.plan.problems))
    if planned.stops:
        raise push_first(planned.stops, "skerry apply")
    if planned.plan.empty and not planned.plan.new_conditions:
        return Outcome.empty()
    state_uri = deployment.spec.state_uri
    created = _create_bucket(deployment, planned, on_step) if state_uri is None else None
    holder = this_process("apply", deployment.clock)
    accounts = accounts_to_record(planned.state, planned.resolved.accounts)
    with deployment.open_state().hold(holder, planned.state, deployment.run, accounts) as hold:
        if state_uri is not None:
            created = _create_bucket(deployment, planned, on_step)
        for entry in planned.tagged:
            hold.note(entry.id, entry)
        note_revived(hold, planned.state)
        store = deployment.open_store()
        prices = {route.uri: route.price.usd for route in deployment.mirror_routes() if route.price is not None}
        create_or_load_run(
            store, deployment.spec, deployment.clock, lambda _: planned.source or _find(deployment), prices
        )
        if state_uri is not None:
            store.create(keys.STATE_ELSEWHERE, state_uri.encode())
        is_whole = planned.graph is planned.resolved.graph
        started = [resource.key for resource in planned.graph if resource.LIFE is Life.JOB]
        slots = [replica.slot for replica in deployment.spec.replica_slots] if is_whole else started
        expect_slots(
            store, require_settings(store), slots, removes=is_whole, by=holder.who, now=deployment.clock.utc_text()
        )
        store.create(keys.code(deployment.code.digest), deployment.code.data)

        def on_other_step(step: Step) -> None:
            if step.change.id != created:
                on_step(step)

        tags = deployment.spec.spec.tags
        work = ApplyRun(planned.plan, planned.graph, hold, deployment.handlers, on_other_step, at_once, tags)
        on_begin(work)
        return work.run()


def without_jobs(deployment: Deployment, planned: Planned) -> Planned:
    """A plan of the bucket and the repositories alone: what an apply can create before the images are pushed."""
    data = [resource.address for resource in planned.resolved.graph if resource.LIFE is Life.DATA]
    return make_plan(deployment, data, planned.resolved)


def push_first(stops: Sequence[Check], command: str) -> PushFirst:
    """The error for jobs that cannot run their image. command: to run after the push."""
    reasons = (f"{check.name}: {check.text}; {check.advice}" for check in stops)
    return PushFirst("\n".join((*reasons, f"no job was started; push first, then run `{command}` again")))


def record_endings(deployment: Deployment, resolved: Resolved | None = None) -> None:
    """Record in the state how jobs ended, if there is nothing else to change: clouds delete job records after days."""
    planned = make_plan(deployment, resolved=resolved)
    if planned.plan.empty and planned.plan.new_conditions and not planned.plan.problems:
        apply_plan(deployment, planned, lambda _: None, lambda _: None)


def import_resource(deployment: Deployment, address: str) -> str:
    """Tag an existing resource as part of this run; returns its name. `plan` then shows what would change in it.

    Raises Invalid if the spec has no such resource or it does not exist; Conflict if it belongs to another run.
    """
    resource = read_graph(deployment, deployment.spec.spec.limits.max_hours).get(address)
    if resource is None:
        raise Invalid(f"the spec has no resource {address}; `skerry plan` lists them all")
    if resource.brought:
        raise Invalid(f"{address} is named in `byo:`, so it stays yours; remove it from `byo:` first")
    state = read_state(deployment)
    entries = {} if state is None else state.by_id()
    desired = desired_of(resource, entries, deployment.run, deployment.spec.spec.tags)
    (observed,) = deployment.handlers[resource.KIND].read([desired])
    if observed is None:
        raise Invalid(f"{desired.name} does not exist; `skerry apply` creates it")
    if observed.owner is not None and observed.owner != deployment.run:
        raise Conflict(f"{desired.name} belongs to the run {observed.owner}; it was not changed")
    if observed.owner is None:
        places = (deployment.home, *deployment.mirror_homes.values(), *deployment.targets.values())
        next(place for place in places if resource.KIND in place.handlers()).claim(desired, observed)
    return desired.name


def _create_bucket(deployment: Deployment, planned: Planned, on_step: Callable[[Step], None]) -> Id | None:
    """Create the bucket if the plan does; the change that is done then, so that it is not reported twice."""
    bucket = deployment.bucket()
    change = next((change for change in planned.plan.changes if change.address == bucket.address), None)
    if change is None or change.action is not Action.CREATE:
        return None
    on_step(Step(change=change, progress=Progress.BEGUN))
    deployment.handlers[bucket.KIND].create(desired_of(bucket, {}, deployment.run, deployment.spec.spec.tags))
    on_step(Step(change=change, progress=Progress.DONE))
    return change.id


def _list_tagged_entries(deployment: Deployment) -> tuple[Entry, ...]:
    """The entries of a lost state: every resource with the run's tag, and its generation."""
    records = (record for record in list_tagged(deployment, ()) if record.address)
    return tuple(Entry(record=record, phase=StatePhase.CREATING) for record in records)


@dataclass(frozen=True, kw_only=True)
class _Start:
    """The begin of the run. problems: why the spec cannot start or continue it."""

    problems: tuple[str, ...] = ()
    source: Source | None = None
    initial: InitialModel | None = None


def _read_start(deployment: Deployment) -> _Start:
    """Read the run in the store, or, for a new run that starts from another one, that one's checkpoint."""
    settings = load_settings(deployment.open_store()) if bucket_exists(deployment) else None
    try:
        if settings is not None:
            check_same_run(settings, deployment.spec, deployment.clock)
            return _Start(initial=settings.first.init_from)
        check_not_lost(deployment.spec, deployment.open_source)
        source = _find(deployment)
        return _Start(source=source, initial=None if source is None else source.initial)
    except (Invalid, Corrupt, Unauthorized) as error:
        return _Start(problems=(str(error),))


def _find(deployment: Deployment) -> Source | None:
    return find_source_of(deployment.spec, deployment.open_source)


def binding_of(
    deployment: Deployment, state: State | None, accounts: Mapping[str, str], initial: InitialModel | None = None
) -> Binding:
    """The facts that a plan is made from."""
    spec = deployment.spec.spec.model_dump_json()
    return Binding(
        run=deployment.run,
        lineage=None if state is None else state.lineage,
        serial=0 if state is None else state.serial,
        spec=hashlib.sha256(spec.encode()).hexdigest(),
        image=" ".join(dict.fromkeys(deployment.context.images.values())),
        code=deployment.context.code,
        accounts=accounts,
        init_from=None if initial is None else f"{initial.uri}@{initial.round} sha256 {initial.manifest[:12]}",
    )
