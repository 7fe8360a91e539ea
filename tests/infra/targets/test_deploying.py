"""The life of a run on each target, as the commands carry it out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.runs import (
    BatchRun,
    HfJobsRun,
    KubernetesRun,
    ModalRun,
    SageMakerRun,
    TargetRun,
    VertexRun,
    delete_state,
)

from skerry.infra.deploy.list_and_stop_jobs import list_jobs, read_log
from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan, without_jobs
from skerry.infra.provision.planned_changes import Action
from skerry.infra.provision.state import Id
from skerry.infra.spec_and_store_errors import PushFirst

if TYPE_CHECKING:
    from tests.infra.deploy.account import Operator

    from skerry.testing.faults import How

IN_CLOUDS = [BatchRun, SageMakerRun, VertexRun]
ALL = [*IN_CLOUDS, KubernetesRun, HfJobsRun, ModalRun]
ON_EACH_TARGET = pytest.mark.parametrize("run", ALL, indirect=True, ids=lambda kind: kind.KIND)
# A cluster pulls images from anywhere, and skerry cannot ask its nodes for them.
WITH_REGISTRY = pytest.mark.parametrize("run", IN_CLOUDS, indirect=True, ids=lambda kind: kind.KIND)
pytestmark = pytest.mark.usefixtures("quick")


def ignore(_: object) -> None:
    """The callback for steps."""


def acting(operator: Operator) -> dict[str, Action]:
    return {str(change.id): change.action for change in operator.plan().plan.changes if change.acts}


def change_code(run: TargetRun) -> None:
    (run.folder / "train" / "train.py").write_text("print('training, and better')\n")


@pytest.mark.parametrize(
    ("run", "role", "roles", "definitions"),
    [
        (BatchRun, "replica", {"role": 4}, {"job definition": 2}),
        (SageMakerRun, "group", {"role": 1}, {}),
        (VertexRun, "group", {"service account": 1}, {}),
        (VertexRun, "replica", {"service account": 2}, {}),
        (KubernetesRun, "replica", {"service account": 2}, {}),
        (HfJobsRun, "replica", {}, {}),
        (ModalRun, "replica", {}, {}),
    ],
    indirect=["run"],
)
def test_apply_creates_once_and_destroy_leaves_nothing(
    run: TargetRun, role: str, roles: dict[str, int], definitions: dict[str, int]
) -> None:
    operator = run.operator(options=f"role: {role}")
    assert operator.plan().plan.problems == ()
    assert run.sandbox.calls.writes == []
    assert operator.apply().ok
    inventory = {kind: len(names) for kind, names in run.sandbox.inventory().items()}
    job = "training job" if isinstance(run, SageMakerRun) else "job"
    assert inventory == {**run.CREATED, **roles, **definitions, job: 2}
    run.sandbox.calls.clear()
    assert acting(operator) == {}
    assert run.sandbox.calls.names.count("s3:GetBucketPolicy") <= 1  # a plan reads the bucket's settings once
    assert operator.apply().ok
    assert run.sandbox.calls.writes == []
    running, done = run.jobs(operator).values()
    run.driver.start(running)
    run.driver.finish(done, 0)
    removed = operator.destroy()
    assert removed.ok, (removed.left, removed.outcome.failed)
    assert run.sandbox.inventory() == {}
    # And again.
    assert operator.apply().ok
    assert run.live() == 2
    assert acting(operator) == {}
    assert operator.destroy().ok
    assert run.sandbox.inventory() == {}


@WITH_REGISTRY
def test_no_job_starts_before_its_image_is_pushed(run: TargetRun) -> None:
    run.sandbox.any_image = False
    operator = run.operator()
    with pytest.raises(PushFirst, match=r"(?s)push it: `skerry image push .*no job was started"):
        operator.apply()
    deployment = operator.deployment()
    assert apply_plan(deployment, without_jobs(deployment, make_plan(deployment)), ignore, ignore).ok
    assert set(run.sandbox.inventory()) == {"bucket", "repository"}
    assert run.creations() == 0
    run.sandbox.any_image = True
    assert operator.apply().ok
    assert run.live() == 2


@ON_EACH_TARGET
def test_next_apply_recreates_lost_jobs_only(run: TargetRun) -> None:
    operator = run.operator()
    assert operator.apply().ok
    lost, done = run.jobs(operator).values()
    run.driver.finish(lost, 20)
    run.driver.finish(done, 0)
    job = f"{run.KIND}.a-0"
    assert acting(operator) == {f"{job}#1": Action.REPLACE, job: Action.DELETE}
    run.creations()
    assert operator.apply().ok
    assert (run.creations(), run.live()) == (1, 1)
    again, still_done = run.jobs(operator).values()
    assert (again != lost, still_done) == (True, done)
    assert acting(operator) == {}


@ON_EACH_TARGET
def test_new_code_replaces_running_jobs(run: TargetRun) -> None:
    operator = run.operator()
    assert operator.apply().ok
    before = run.jobs(operator)
    for job in before.values():
        run.driver.start(job)
    change_code(run)
    replaced = {name: action for name, action in acting(operator).items() if name.startswith(run.KIND)}
    assert replaced == {
        f"{run.KIND}.a-{number}{generation}": action
        for number in range(2)
        for generation, action in (("#1", Action.REPLACE), ("", Action.DELETE))
    }
    run.sandbox.settling = 2
    assert operator.apply().ok
    assert run.live() == 2
    assert not set(run.jobs(operator).values()) & set(before.values())


@pytest.mark.slow
@ON_EACH_TARGET
def test_lost_state_adopts_running_jobs_and_ends_those_of_other_code(run: TargetRun) -> None:
    operator = run.operator()
    assert operator.apply().ok
    before = run.jobs(operator)
    for job in before.values():
        run.driver.start(job)
        run.driver.write(job, f"hello of {job}")
    delete_state(operator)
    deployment = operator.deployment()
    lines = [line.text for job, _ in list_jobs(deployment) for line in read_log(deployment, job, None)]
    assert lines == [f"hello of {job}" for job in before.values()]
    changes = {change.id: change.action for change in operator.plan().plan.changes}
    assert changes[Id(f"{run.KIND}.a-0", 0)] is Action.ADOPT
    assert not {Action.CREATE, Action.REPLACE, Action.DELETE} & set(changes.values())
    run.creations()
    assert operator.apply().ok
    assert (run.creations(), run.jobs(operator)) == (0, before)
    assert acting(operator) == {}
    delete_state(operator)
    change_code(run)
    run.creations()
    assert operator.apply().ok
    assert (run.creations(), run.live()) == (2, 2)
    assert acting(operator) == {}
    assert operator.destroy().ok
    assert run.sandbox.inventory() == {}


@pytest.mark.parametrize(
    ("run", "call"),
    [*((kind, kind.CREATE) for kind in ALL), (BatchRun, "batch:RegisterJobDefinition")],
    indirect=["run"],
)
@pytest.mark.parametrize("how", ["lost_reply", "timeout"])
def test_lost_answer_creates_no_duplicate(run: TargetRun, call: str, how: How) -> None:
    operator = run.operator()
    run.sandbox.fail(how=how, on=call)
    assert operator.apply().ok is (how == "lost_reply" or run.REPEATS)
    assert operator.apply().ok
    assert run.live() == 2
    # A definition that is registered twice has two revisions.
    assert len(run.sandbox.inventory().get("job definition", ())) in {0, 2}
    assert acting(operator) == {}
