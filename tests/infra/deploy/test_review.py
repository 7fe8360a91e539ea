"""What a hostile reading of the commands found, each as a test: locks, states elsewhere or lost, other runs' data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import Operator, write_spec
from tests.infra.deploy.test_commands import skerry

from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.holding import abandoned, holder
from skerry.infra.deploy.planning import carry_out, make_plan
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Conflict

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.testing.sandbox import Sandbox


@pytest.fixture
def spec(tmp_path: Path, skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in skerry_sandbox.environment.items():
        monkeypatch.setenv(name, value)
    return str(write_spec(tmp_path, count=1))


def test_the_state_may_lie_elsewhere(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    elsewhere = f"state={(tmp_path / 'state').as_uri()}"
    skerry("apply", spec, "--auto-approve", "--set", elsewhere)
    skerry("plan", spec, "--detailed-exitcode", "--set", elsewhere)
    assert list((tmp_path / "state").rglob("*.json"))
    skerry("destroy", spec, "--yes", "--data", "--set", elsewhere)
    assert skerry_sandbox.inventory() == {}
    assert not list((tmp_path / "state").rglob("*.json"))


def test_nothing_is_destroyed_while_somebody_else_holds_the_state(
    spec: str, tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    skerry("apply", spec, "--auto-approve")
    ann = Operator(tmp_path / "skerry.yaml", skerry_sandbox.environment).deployment()
    bob = Operator(tmp_path / "skerry.yaml", skerry_sandbox.environment).deployment()
    removal = removing.survey(ann)
    before = skerry_sandbox.inventory()
    with bob.state_file.hold(holder("apply", bob.clock), bob.state(), bob.run):
        with pytest.raises(Conflict, match="the state is held: apply by"):
            removing.destroy(ann, removal, data=True, on_step=lambda _: None, applying=lambda _: None)
        assert skerry_sandbox.inventory() == before


def test_nobody_applies_while_data_is_deleted(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    ann = Operator(tmp_path / "skerry.yaml", skerry_sandbox.environment).deployment()
    bob = Operator(tmp_path / "skerry.yaml", skerry_sandbox.environment).deployment()
    planned = make_plan(bob)
    refused: list[str] = []
    remove = ann.state_file.remove

    def apply_meanwhile() -> None:
        try:
            carry_out(bob, make_plan(bob), lambda _: None, lambda _: None)
        except Conflict as error:
            refused.append(str(error))
        remove()

    ann.state_file.remove = apply_meanwhile  # type: ignore[method-assign]
    removed = removing.destroy(ann, removing.survey(ann), data=True, on_step=lambda _: None, applying=lambda _: None)
    assert planned.plan.empty
    assert removed.ok
    assert len(refused) == 1
    assert skerry_sandbox.inventory() == {}


def test_a_lost_state_is_found_with_its_generations(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    (tmp_path / "train" / "train.py").write_text("print('mended')\n")
    skerry("apply", spec, "--auto-approve")
    before = skerry_sandbox.inventory()
    assert before["job"][0].endswith("-g1")
    s3 = skerry_sandbox.client("s3")
    for entry in s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"]:
        s3.delete_object(Bucket="acme-skerry", Key=entry["Key"])
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.inventory() == before
    skerry("plan", spec, "--detailed-exitcode")
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.inventory() == {}


def test_another_runs_objects_in_the_bucket_stay_and_are_told(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    s3 = skerry_sandbox.client("s3")
    s3.put_object(Bucket="acme-skerry", Key="runs/other/run.json", Body=b"{}", IfNoneMatch="*")
    said = skerry("destroy", spec, "--yes", "--data", code=1).output
    assert "1 objects that are not of this run" in said
    left = [entry["Key"] for entry in s3.list_objects_v2(Bucket="acme-skerry")["Contents"]]
    assert left == ["runs/other/run.json"]
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",)}
    # Once it is gone, the rest goes, too.
    s3.delete_object(Bucket="acme-skerry", Key="runs/other/run.json")
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.inventory() == {}


def test_a_queue_that_is_now_the_users_own_replaces_ours(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    batch = skerry_sandbox.client("batch")
    environment = batch.describe_compute_environments()["computeEnvironments"][0]["computeEnvironmentArn"]
    batch.create_job_queue(
        jobQueueName="theirs",
        priority=1,
        state="ENABLED",
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment}],
    )
    said = skerry("plan", spec, "--set", "replicas[0].target.byo.queue=theirs").output
    assert "-   aws_batch_queue.b" in said


def test_with_detailed_exit_codes_two_means_changes_and_nothing_else(spec: str) -> None:
    skerry("plan", spec, "--detailed-exitcode", code=2)
    skerry("plan", spec, "--detailed-exitcode", "--set", "outer.rounds=many", code=1)
    skerry("plan", spec, "--set", "outer.rounds=many", code=2)


def test_a_plan_is_never_written_over_something_else(spec: str, tmp_path: Path) -> None:
    before = (tmp_path / "skerry.yaml").read_bytes()
    assert "is no plan" in skerry("plan", spec, "--out", spec, code=2).stderr
    assert (tmp_path / "skerry.yaml").read_bytes() == before
    kept = tmp_path / "kept.json"
    skerry("plan", spec, "--out", str(kept))
    skerry("plan", spec, "--out", str(kept))
    # A spec may be JSON, too: it is told from a plan by what it says.
    (tmp_path / "spec.json").write_text(json.dumps({"run": "x"}))
    assert "store" in skerry("apply", str(tmp_path / "spec.json"), code=2).stderr


def test_of_a_holder_elsewhere_nothing_is_concluded() -> None:
    mine = holder("apply", SystemClock())
    assert not abandoned(mine)
    gone = type(mine)(**{**mine.__dict__, "started": mine.started + 1})
    assert abandoned(gone)
    elsewhere = type(mine)(**{**gone.__dict__, "host": mine.host.replace("pid:", "pid:9")})
    assert not abandoned(elsewhere)


def test_a_part_that_is_made_anew_leaves_the_rest_what_it_uses(spec: str, skerry_sandbox: Sandbox) -> None:
    def templates() -> int:
        return len(skerry_sandbox.client("ec2").describe_launch_templates()["LaunchTemplates"])

    skerry("apply", spec, "--auto-approve")
    larger = ("--set", "replicas[0].target.disk=200GiB")
    part = ("--target", "aws_launch_template.b")
    said = skerry("plan", spec, *larger, *part).output
    assert "stays, for it is used by aws_batch_environment.b; an apply without --target ends that" in said
    skerry("apply", spec, "--auto-approve", *larger, *part)
    assert templates() == 2
    skerry("plan", spec, "--detailed-exitcode", *larger, *part)
    skerry("apply", spec, "--auto-approve", *larger)
    assert templates() == 1
    skerry("plan", spec, "--detailed-exitcode", *larger)
