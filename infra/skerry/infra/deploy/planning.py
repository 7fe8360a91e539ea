"""From a deployment to a plan, and from a plan to what it says. The bucket is made before the state that lies in it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping  # noqa: TC003  a parser reads the annotations of Binding
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra.apply import Applying, Progress, Step, look
from skerry.infra.deploy.holding import holder
from skerry.infra.deploy.strays import owned
from skerry.infra.estimate import cost_problem
from skerry.infra.founding import check_run, find_run, fix_run
from skerry.infra.plan import Action, wanted
from skerry.infra.state import Entry, Phase
from skerry.runtime import keys
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.apply import Outcome
    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.graph import Graph
    from skerry.infra.plan import Plan
    from skerry.infra.state import Id, State
    from skerry.infra.target import Rate


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What a plan holds for: anything else, and it is stale. accounts: {"aws": "123456789012"}."""

    run: str
    lineage: str | None
    serial: int
    spec: str
    image: str
    code: str
    accounts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, what it holds for, and what the replicas will cost.

    state, graph: what it was made from. found: what the run has by its tags, where no state remembers anything.
    """

    plan: Plan
    binding: Binding
    rates: tuple[Rate, ...]
    state: State | None
    graph: Graph
    found: tuple[Entry, ...] = ()


def make_plan(deployment: Deployment, only: Sequence[str] = ()) -> Planned:
    """What would have to change now. Changes nothing. only: of these addresses, what they need, and the bucket."""
    state = deployment.state()
    found = _found(deployment) if state is None else ()
    entries = {entry.id: entry for entry in (found if state is None else state.entries)}
    whole = deployment.graph
    graph = whole.part((*only, deployment.bucket.address)) if only else whole
    tags = deployment.spec.spec.tags
    changes = look(graph, entries, deployment.handlers, deployment.run, tags, whole if only else None)
    return Planned(
        plan=dataclasses.replace(
            changes, problems=(*changes.problems, *_run_problems(deployment), *_costs(deployment))
        ),
        binding=_binding(deployment, state),
        rates=deployment.rates,
        state=state,
        graph=graph,
        found=found,
    )


def carry_out(
    deployment: Deployment,
    planned: Planned,
    on_step: Callable[[Step], None],
    applying: Callable[[Applying], None],
) -> Outcome:
    """Do what a plan says. applying: told what is on its way, so that it can be stopped.

    Raises Conflict if the state moved on since the plan, or is held; Invalid if the plan has problems.
    """
    if planned.plan.problems:
        raise Invalid("\n".join(planned.plan.problems))
    if planned.plan.empty and not planned.plan.noted:
        return Applying.nothing()
    in_bucket = deployment.spec.state_uri is None
    told = _make_bucket(deployment, planned, on_step) if in_bucket else None
    mine = holder("apply", deployment.clock)
    with deployment.state_file.hold(mine, planned.state, deployment.run) as hold:
        if not in_bucket:
            told = _make_bucket(deployment, planned, on_step)
        for entry in planned.found:
            hold.note(entry.id, entry)
        fix_run(deployment.store, deployment.spec, deployment.clock)
        deployment.store.create(keys.code(deployment.code.digest), deployment.code.data)
        tags = deployment.spec.spec.tags
        work = Applying(planned.plan, planned.graph, hold, deployment.handlers, _silent_about(told, on_step), tags=tags)
        applying(work)
        return work.run()


def carry_out_noted(deployment: Deployment) -> None:
    """Note how jobs ended, if there is nothing else to do: clouds forget it after some days."""
    planned = make_plan(deployment)
    if planned.plan.empty and planned.plan.noted and not planned.plan.problems:
        carry_out(deployment, planned, lambda _: None, lambda _: None)


def take_in(deployment: Deployment, address: str) -> str:
    """Make what is there under a resource's name this run's; its name. `plan` then says what of it would change.

    Raises Invalid if the spec has no such resource, or there is nothing; Conflict if it is another run's.
    """
    resource = deployment.graph.get(address)
    if resource is None:
        raise Invalid(f"the spec has no resource {address}; `skerry plan` names them all")
    if resource.brought:
        raise Invalid(f"{address} is named in `byo:`, and is to stay yours; take it out of the spec first")
    state = deployment.state()
    entries = {} if state is None else state.by_id()
    asked = wanted(resource, entries, deployment.run, deployment.spec.spec.tags)
    (seen,) = deployment.handlers[resource.KIND].read([asked])
    if seen is None:
        raise Invalid(f"there is nothing of the name {asked.name}; `skerry apply` makes it")
    if seen.owner is not None and seen.owner != deployment.run:
        raise Conflict(f"{asked.name} belongs to the run {seen.owner}; it is left alone")
    if seen.owner is None:
        clouds = (deployment.home, *deployment.targets.values())
        next(one for one in clouds if resource.KIND in one.handlers()).claim(asked, seen)
    return asked.name


def _make_bucket(deployment: Deployment, planned: Planned, on_step: Callable[[Step], None]) -> Id | None:
    """Make the bucket that the run will lie in, if that is planned: what was made, and need not be told again."""
    bucket = deployment.bucket
    change = next((one for one in planned.plan.changes if one.address == bucket.address), None)
    if change is None or change.action is not Action.CREATE:
        return None
    on_step(Step(change=change, progress=Progress.BEGUN))
    deployment.handlers[bucket.KIND].create(wanted(bucket, {}, deployment.run, deployment.spec.spec.tags))
    on_step(Step(change=change, progress=Progress.DONE))
    return change.id


def _found(deployment: Deployment) -> tuple[Entry, ...]:
    """What a lost state would remember: whatever carries the run's tag, with generations."""
    if not deployment.has_bucket():
        return ()
    made = (one for one in owned(deployment, ()) if one.address)
    return tuple(Entry(made=one, phase=Phase.CREATING) for one in made)


def _run_problems(deployment: Deployment) -> Sequence[str]:
    """Whether the spec can go on with the run that is there."""
    run = find_run(deployment.store) if deployment.has_bucket() else None
    if run is None:
        return ()
    try:
        check_run(run, deployment.spec, deployment.clock)
    except Invalid as error:
        return (str(error),)
    return ()


def _costs(deployment: Deployment) -> Sequence[str]:
    """Whether what the run may cost can be kept."""
    problem = cost_problem(deployment.spec.spec.limits, deployment.rates)
    return () if problem is None else (problem,)


def _binding(deployment: Deployment, state: State | None) -> Binding:
    spec = deployment.spec.spec.model_dump_json()
    return Binding(
        run=deployment.run,
        lineage=None if state is None else state.lineage,
        serial=0 if state is None else state.serial,
        spec=hashlib.sha256(spec.encode()).hexdigest(),
        image=" ".join(dict.fromkeys(deployment.ground.images.values())),
        code=deployment.ground.code,
        accounts=deployment.accounts,
    )


def _silent_about(key: Id | None, on_step: Callable[[Step], None]) -> Callable[[Step], None]:
    """Do not tell a second time of what was told as made already."""

    def tell(step: Step) -> None:
        if step.change.id != key:
            on_step(step)

    return tell
