"""The resources of AWS Batch in plans: the actions that follow from a change of the spec or of the cloud."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.infra.targets.aws_batch.kit import Scene, context_of, set_status

from skerry.infra.provision.graph import Life
from skerry.infra.provision.observe_resources import refresh_and_plan
from skerry.infra.provision.planned_changes import Action
from skerry.infra.provision.state import Entry, Id

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.planned_changes import Change, Plan

OPTIONS = "instance_types: [g5.xlarge], gpus: 1, spot: true"


def running(aws: Aws, folder: Path, options: str = OPTIONS) -> Scene:
    """Create a run and set its jobs to running."""
    scene = Scene(aws, context_of(folder, options))
    scene.make()
    for resource in scene.graph:
        if resource.LIFE is Life.JOB:
            set_status(scene.outputs[resource.address]["id"], "RUNNING")
    return scene


def plan_of(scene: Scene, wanted: Scene) -> Plan:
    """Plan the changes from the resources of `scene` to those of `wanted`."""
    entries = {
        Id(node.address, 0): Entry(record=scene.record(node.address))
        for node in scene.graph
        if node.address in scene.outputs
    }
    return refresh_and_plan(wanted.graph, entries, wanted.handlers, wanted.context.run_uri)


def acting(plan: Plan) -> dict[str, Action]:
    assert plan.problems == ()
    return {str(change.id): change.action for change in plan.changes if change.acts}


def change_of(plan: Plan, address: str) -> Change:
    return next(change for change in plan.changes if change.address == address)


def test_other_machines_are_created_before_the_queue_moves(aws: Aws, tmp_path: Path) -> None:
    scene = running(aws, tmp_path)
    changed = Scene(aws, context_of(tmp_path, OPTIONS.replace("g5.xlarge", "g5.xlarge, g6.xlarge")))
    plan = plan_of(scene, changed)
    environment, queue = "aws_batch_environment.batch", "aws_batch_queue.batch"
    actions = {name: action for name, action in acting(plan).items() if "definition" not in name and "job" not in name}
    assert actions == {f"{environment}#1": Action.REPLACE, queue: Action.UPDATE, environment: Action.DELETE}
    (difference,) = change_of(plan, queue).differences
    assert difference.after == [f"${{{environment}.arn}}"]


def test_more_vcpus_update_the_environment_in_place(aws: Aws, tmp_path: Path) -> None:
    group = f"{OPTIONS}, role: group"
    scene = running(aws, tmp_path, group)
    address = "aws_batch_environment.batch"
    plan = plan_of(scene, Scene(aws, context_of(tmp_path, group, count=5)))
    assert acting(plan)[address] is Action.UPDATE
    (difference,) = change_of(plan, address).differences
    assert (difference.setting, difference.before, difference.after) == ("max_vcpus", 8, 20)


def test_byo_resources_are_adopted_and_missing_ones_reported(aws: Aws, tmp_path: Path) -> None:
    scene = running(aws, tmp_path)
    names = {kind: scene.record(f"aws_batch_{kind}.batch").name for kind in ("queue", "environment")}
    for option, kind in (("queue", "queue"), ("compute_environment", "environment")):
        options = f"{OPTIONS}, byo: {{{option}: %s}}"
        existing = Scene(aws, context_of(tmp_path, options % names[kind], more="tags: {a: b}\n"))
        plan = refresh_and_plan(existing.graph, {}, existing.handlers, existing.context.run_uri)
        assert change_of(plan, f"aws_batch_{kind}.batch").action is Action.ADOPT
        missing = Scene(aws, context_of(tmp_path, options % "absent"))
        plan = refresh_and_plan(missing.graph, {}, missing.handlers, missing.context.run_uri)
        assert any("does not exist" in problem for problem in plan.problems)
