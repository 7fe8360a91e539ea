from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.kit import failing
from tests.infra.targets.aws import REGION
from tests.infra.targets.aws_batch.kit import Scene, context_of, let_stop, multiply, set_status

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.provision.handler import Condition
from skerry.infra.targets.aws_batch import requests
from skerry.infra.targets.aws_batch.jobs import Jobs
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.errors import Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.infra.kit import Listener

    from skerry.infra.provision.handler import Desired, Observed

OPTIONS = "instance_types: [g5.xlarge], gpus: 1, role: group"


def register_again(aws: Aws, scene: Scene) -> None:
    """Register the next revision of the definition."""
    definition = scene.graph.get("aws_batch_definition.batch-replicas")
    assert definition is not None
    request = ready(requests.job_definition(scene.wanted(definition)))
    aws.call("batch", REGION, "register_job_definition", **request)


def read(aws: Aws, desired: Desired) -> Observed:
    (seen,) = Jobs(aws).read([desired])
    assert seen is not None
    return seen


def submit(aws: Aws, desired: Desired, name: str, tags: Mapping[str, str]) -> str:
    """Submit another job to the queue and set it to running; its id."""
    settings = desired.settings
    queue = {"jobQueue": settings["queue"], "jobDefinition": settings["definition"]}
    job = str(aws.call("batch", REGION, "submit_job", jobName=name, tags=tags, **queue)["jobId"])
    set_status(job, "RUNNING")
    return job


def scene_of(aws: Aws, tmp_path: Path, count: int = 2) -> Scene:
    scene = Scene(aws, context_of(tmp_path, OPTIONS, count=count))
    scene.make()
    return scene


def test_ended_job_is_done_or_lost(aws: Aws, tmp_path: Path) -> None:
    desired, _ = scene_of(aws, tmp_path).wanted_jobs()
    live = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
    conditions = {**dict.fromkeys(live, Condition.READY), "SUCCEEDED": Condition.DONE, "FAILED": Condition.LOST}
    for status, condition in conditions.items():
        set_status(desired.outputs["id"], status, "why")
        seen = read(aws, desired)
        assert (seen.condition, seen.detail, seen.owner) == (condition, "why", desired.run)
    assert list(Jobs(aws).read([replace(desired, outputs={"id": "00000000-forgotten"})])) == [None]


def test_thousand_jobs_are_read_in_ten_calls(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    scene = scene_of(aws, tmp_path)
    desired, _ = scene.wanted_jobs()
    ids = [f"job-{number}" for number in range(1000)]
    # The emulation would need ten seconds to submit that many.
    multiply(scene.record("aws_batch_job.batch-0"), ids)
    calls.take()
    seen = Jobs(aws).read([replace(desired, outputs={"id": name}) for name in ids])
    assert [job is not None and job.outputs["id"] for job in seen] == ids
    assert calls.take() == ["batch:DescribeJobs"] * 10


def test_jobs_without_known_ids_are_found_by_name(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    wanted = scene_of(aws, tmp_path, count=110).wanted_jobs()
    calls.take()
    seen = Jobs(aws).read([replace(desired, outputs={}) for desired in wanted])
    assert [job is not None and job.outputs["id"] for job in seen] == [desired.outputs["id"] for desired in wanted]
    assert calls.take() == ["batch:ListJobs", "batch:DescribeJobs", "batch:DescribeJobs"]


def test_read_without_a_queue_makes_no_call(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    scene = Scene(aws, context_of(tmp_path, OPTIONS))
    calls.take()
    assert list(Jobs(aws).read(scene.wanted_jobs())) == [None, None]
    assert calls.take() == []


def test_submission_with_a_lost_answer_is_not_repeated(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    desired, _ = scene_of(aws, tmp_path).wanted_jobs()
    for status in ("SUBMITTED", "RUNNING", "SUCCEEDED"):
        set_status(desired.outputs["id"], status)
        calls.take()
        assert Jobs(aws).create(replace(desired, outputs={})) == desired.outputs
        assert "batch:SubmitJob" not in calls.take()


def test_submission_without_an_answer_is_found_in_the_listing(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Listener
) -> None:
    """Batch may list a job some seconds after it took it."""
    desired, other = scene_of(aws, tmp_path).wanted_jobs()
    once, pages = Aws.call_once, Aws.pages
    lost_s = aws.clock.now()

    def lost(self: Aws, *positional: str, **parameters: object) -> dict[str, object]:
        once(self, *positional, **parameters)
        raise Retryable("no answer")

    def late(self: Aws, *positional: str, **parameters: object) -> Iterator[Mapping[str, Any]]:
        yield from pages(self, *positional, **parameters) if aws.clock.now() > lost_s + 5 else ()

    for job in (desired, other):
        set_status(job.outputs["id"], "FAILED")
    monkeypatch.setattr(Aws, "call_once", lost)
    monkeypatch.setattr(Aws, "pages", late)
    calls.take()
    # The jobs of this account succeed immediately.
    outputs = Jobs(aws).create(desired)
    assert calls.take().count("batch:SubmitJob") == 1
    assert outputs["id"] != desired.outputs["id"]
    assert aws.clock.now() > lost_s + 5


def test_submission_that_never_arrived_is_retryable(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desired, _ = scene_of(aws, tmp_path).wanted_jobs()
    set_status(desired.outputs["id"], "FAILED")
    monkeypatch.setattr(Aws, "call_once", failing(Retryable("no answer")))
    with pytest.raises(Retryable, match="no answer"):
        Jobs(aws).create(desired)


def test_failed_or_foreign_job_is_not_adopted(aws: Aws, tmp_path: Path) -> None:
    desired, other = scene_of(aws, tmp_path).wanted_jobs()
    set_status(desired.outputs["id"], "FAILED")
    assert Jobs(aws).create(desired)["id"] != desired.outputs["id"]
    set_status(other.outputs["id"], "RUNNING")
    assert Jobs(aws).create(replace(other, run="s3://other/run"))["id"] != other.outputs["id"]
    later = replace(other, generation=1)
    assert Jobs(aws).create(later)["id"] != other.outputs["id"]


def test_running_job_of_an_older_definition_is_ended(aws: Aws, tmp_path: Path) -> None:
    scene = scene_of(aws, tmp_path)
    desired, _ = scene.wanted_jobs()
    anew = {
        **desired.settings,
        "definition": scene.record("aws_batch_definition.batch-replicas").outputs["arn"][:-1] + "2",
    }
    after = replace(desired, outputs={}, settings=anew)
    set_status(desired.outputs["id"], "SUCCEEDED")
    assert list(Jobs(aws).read([after])) == [None]
    set_status(desired.outputs["id"], "RUNNING")
    let_stop(scene.record("aws_batch_job.batch-0"))
    register_again(aws, scene)
    assert Jobs(aws).create(after)["id"] != desired.outputs["id"]
    old = read(aws, desired)
    assert (old.condition, old.detail) == (Condition.LOST, "skerry: stopped by the operator")


def test_similar_names_are_other_jobs(aws: Aws, tmp_path: Path) -> None:
    desired, _ = scene_of(aws, tmp_path).wanted_jobs()
    upper = submit(aws, desired, desired.name.upper(), desired.tags)
    set_status(desired.outputs["id"], "FAILED")
    assert read(aws, replace(desired, outputs={})).outputs == desired.outputs
    assert Jobs(aws).create(desired)["id"] != upper


def test_delete_stops_a_job_in_any_state_and_is_idempotent(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    scene = scene_of(aws, tmp_path)
    desired, other = scene.wanted_jobs()
    set_status(desired.outputs["id"], "RUNNABLE")
    let_stop(scene.record("aws_batch_job.batch-0"))
    calls.take()
    for _ in range(2):
        Jobs(aws).delete(scene.record("aws_batch_job.batch-0"))
    assert calls.take().count("batch:TerminateJob") == 1
    seen = read(aws, desired)
    assert (seen.condition, seen.detail) == (Condition.LOST, "skerry: stopped by the operator")
    Jobs(aws).delete(replace(scene.record("aws_batch_job.batch-1"), outputs={"id": "00000000-forgotten"}))
    assert other.outputs["id"]


def test_unrecorded_job_is_stopped_by_its_name(aws: Aws, tmp_path: Path) -> None:
    scene = scene_of(aws, tmp_path)
    desired, _ = scene.wanted_jobs()
    set_status(desired.outputs["id"], "RUNNING")
    let_stop(scene.record("aws_batch_job.batch-0"))
    Jobs(aws).delete(replace(scene.record("aws_batch_job.batch-0"), outputs={}))
    assert read(aws, desired).condition is Condition.LOST


def test_foreign_job_of_the_same_name_is_not_stopped(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    scene = scene_of(aws, tmp_path)
    desired, _ = scene.wanted_jobs()
    foreign_id = submit(aws, desired, desired.name, {"of": "others"})
    state_record = scene.record("aws_batch_job.batch-0")
    let_stop(replace(state_record, outputs={"id": foreign_id}))
    calls.take()
    Jobs(aws).delete(replace(state_record, outputs={}))
    assert "batch:TerminateJob" not in calls.take()
    (left,) = aws.call("batch", REGION, "describe_jobs", jobs=[foreign_id])["jobs"]
    assert (left["status"], left.get("statusReason")) == ("RUNNING", None)


def test_list_owned_returns_live_jobs_only(aws: Aws, tmp_path: Path) -> None:
    scene = scene_of(aws, tmp_path)
    desired, _ = scene.wanted_jobs()
    run = scene.context.run_uri
    assert list(Jobs(aws).list_owned(run, [REGION])) == []
    set_status(desired.outputs["id"], "RUNNABLE")
    (owned,) = Jobs(aws).list_owned(run, [REGION])
    assert (owned.address, owned.outputs, owned.generation) == ("aws_batch_job.batch-0", desired.outputs, 0)
    assert list(Jobs(aws).list_owned("s3://other/run", [REGION])) == []


def test_update_of_a_job_is_rejected(aws: Aws, tmp_path: Path) -> None:
    desired, _ = scene_of(aws, tmp_path).wanted_jobs()
    with pytest.raises(Invalid, match=r"a job cannot change: aws_batch_job\.batch-0: definition"):
        Jobs(aws).update(desired, {"definition"})
    assert Jobs(aws).update(desired, {"log_group"}) == desired.outputs
