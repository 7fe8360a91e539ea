from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.aws_batch.kit import Scene, ground_of, let_stop, multiply, set_status

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

REGION = "us-east-1"
OPTIONS = "instance_types: [g5.xlarge], gpus: 1, role: group"


def register_again(aws: Aws, scene: Scene) -> None:
    """The definition's next revision."""
    definition = scene.graph.get("aws_batch_definition.batch-replicas")
    assert definition is not None
    request = ready(requests.job_definition(scene.wanted(definition)))
    aws.call("batch", REGION, "register_job_definition", **request)


def scene_of(aws: Aws, tmp_path: Path, count: int = 2) -> Scene:
    scene = Scene(aws, ground_of(tmp_path, OPTIONS, count=count))
    scene.make()
    return scene


@pytest.mark.parametrize(
    ("status", "condition"),
    [
        ("SUBMITTED", Condition.READY),
        ("PENDING", Condition.READY),
        ("RUNNABLE", Condition.READY),
        ("STARTING", Condition.READY),
        ("RUNNING", Condition.READY),
        ("SUCCEEDED", Condition.DONE),
        ("FAILED", Condition.LOST),
    ],
)
def test_ended_job_is_done_or_lost(aws: Aws, tmp_path: Path, status: str, condition: Condition) -> None:
    one, _ = scene_of(aws, tmp_path).wanted_jobs()
    set_status(one.outputs["id"], status, "why")
    (seen,) = Jobs(aws).read([one])
    assert seen is not None
    assert (seen.condition, seen.detail, seen.owner) == (condition, "why", one.run)


def test_thousand_jobs_are_read_in_ten_calls(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    scene = scene_of(aws, tmp_path)
    one, _ = scene.wanted_jobs()
    ids = [f"job-{number}" for number in range(1000)]
    # To submit as many takes the emulation ten seconds.
    multiply(scene.made("aws_batch_job.batch-0"), ids)
    calls.take()
    seen = Jobs(aws).read([replace(one, outputs={"id": job}) for job in ids])
    assert [found is not None and found.outputs["id"] for found in seen] == ids
    assert calls.take() == ["batch:DescribeJobs"] * 10


def test_jobs_without_known_ids_are_found_by_name(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    wanted = scene_of(aws, tmp_path, count=110).wanted_jobs()
    calls.take()
    seen = Jobs(aws).read([replace(one, outputs={}) for one in wanted])
    assert [one is not None and one.outputs["id"] for one in seen] == [one.outputs["id"] for one in wanted]
    assert calls.take() == ["batch:ListJobs", "batch:DescribeJobs", "batch:DescribeJobs"]


def test_read_without_a_queue_makes_no_call(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    scene = Scene(aws, ground_of(tmp_path, OPTIONS))
    calls.take()
    assert list(Jobs(aws).read(scene.wanted_jobs())) == [None, None]
    assert calls.take() == []


def test_submission_with_a_lost_answer_is_not_repeated(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    one, _ = scene_of(aws, tmp_path).wanted_jobs()
    for status in ("SUBMITTED", "RUNNING", "SUCCEEDED"):
        set_status(one.outputs["id"], status)
        calls.take()
        assert Jobs(aws).create(replace(one, outputs={})) == one.outputs
        assert "batch:SubmitJob" not in calls.take()


def test_submission_without_an_answer_is_found_in_the_listing(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Listener
) -> None:
    """Batch may list a job some seconds after it took it."""
    one, other = scene_of(aws, tmp_path).wanted_jobs()
    once, listed = Aws.call_once, Jobs._named
    lost_s = aws.clock.now()

    def lost(self: Aws, *said: str, **parameters: object) -> dict[str, object]:
        once(self, *said, **parameters)
        raise Retryable("no answer")

    def late(self: Jobs, *said: str) -> Iterator[Mapping[str, Any]]:
        yield from listed(self, *said) if aws.clock.now() > lost_s + 5 else ()

    for job in (one, other):
        set_status(job.outputs["id"], "FAILED")
    monkeypatch.setattr(Aws, "call_once", lost)
    monkeypatch.setattr(Jobs, "_named", late)
    calls.take()
    # In this account jobs end well at once.
    made = Jobs(aws).create(one)
    assert calls.take().count("batch:SubmitJob") == 1
    assert made["id"] != one.outputs["id"]
    assert aws.clock.now() > lost_s + 5


def test_submission_that_never_arrived_is_retryable(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = scene_of(aws, tmp_path).wanted_jobs()
    set_status(one.outputs["id"], "FAILED")

    def unheard(*_: object, **__: object) -> dict[str, object]:
        raise Retryable("no answer")

    monkeypatch.setattr(Aws, "call_once", unheard)
    with pytest.raises(Retryable, match="no answer"):
        Jobs(aws).create(one)


def test_failed_or_foreign_job_is_not_adopted(aws: Aws, tmp_path: Path) -> None:
    one, other = scene_of(aws, tmp_path).wanted_jobs()
    set_status(one.outputs["id"], "FAILED")
    assert Jobs(aws).create(one)["id"] != one.outputs["id"]
    set_status(other.outputs["id"], "RUNNING")
    assert Jobs(aws).create(replace(other, run="s3://other/run"))["id"] != other.outputs["id"]
    later = replace(other, generation=1)
    assert Jobs(aws).create(later)["id"] != other.outputs["id"]


def test_running_job_of_an_older_definition_is_ended(aws: Aws, tmp_path: Path) -> None:
    scene = scene_of(aws, tmp_path)
    one, _ = scene.wanted_jobs()
    anew = {**one.settings, "definition": scene.made("aws_batch_definition.batch-replicas").outputs["arn"][:-1] + "2"}
    after = replace(one, outputs={}, settings=anew)
    set_status(one.outputs["id"], "SUCCEEDED")
    assert list(Jobs(aws).read([after])) == [None]
    set_status(one.outputs["id"], "RUNNING")
    let_stop(scene.made("aws_batch_job.batch-0"))
    register_again(aws, scene)
    assert Jobs(aws).create(after)["id"] != one.outputs["id"]
    (old,) = Jobs(aws).read([one])
    assert old is not None
    assert (old.condition, old.detail) == (Condition.LOST, "skerry: stopped by the operator")


def test_similar_names_are_other_jobs(aws: Aws, tmp_path: Path) -> None:
    one, _ = scene_of(aws, tmp_path).wanted_jobs()
    told = aws.call(
        "batch",
        REGION,
        "submit_job",
        jobName=one.name.upper(),
        jobQueue=one.settings["queue"],
        jobDefinition=one.settings["definition"],
        tags=one.tags,
    )
    upper = str(told["jobId"])
    set_status(upper, "RUNNING")
    set_status(one.outputs["id"], "FAILED")
    (seen,) = Jobs(aws).read([replace(one, outputs={})])
    assert seen is not None
    assert seen.outputs == one.outputs
    assert Jobs(aws).create(one)["id"] != upper


def test_delete_stops_a_job_in_any_state_and_is_idempotent(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    scene = scene_of(aws, tmp_path)
    one, other = scene.wanted_jobs()
    set_status(one.outputs["id"], "RUNNABLE")
    let_stop(scene.made("aws_batch_job.batch-0"))
    calls.take()
    for _ in range(2):
        Jobs(aws).delete(scene.made("aws_batch_job.batch-0"))
    assert calls.take().count("batch:TerminateJob") == 1
    (seen,) = Jobs(aws).read([one])
    assert seen is not None
    assert (seen.condition, seen.detail) == (Condition.LOST, "skerry: stopped by the operator")
    Jobs(aws).delete(replace(scene.made("aws_batch_job.batch-1"), outputs={"id": "00000000-forgotten"}))
    assert other.outputs["id"]


def test_unrecorded_job_is_stopped_by_its_name(aws: Aws, tmp_path: Path) -> None:
    scene = scene_of(aws, tmp_path)
    one, _ = scene.wanted_jobs()
    set_status(one.outputs["id"], "RUNNING")
    let_stop(scene.made("aws_batch_job.batch-0"))
    Jobs(aws).delete(replace(scene.made("aws_batch_job.batch-0"), outputs={}))
    (seen,) = Jobs(aws).read([one])
    assert seen is not None
    assert seen.condition is Condition.LOST


def test_foreign_job_of_the_same_name_is_not_stopped(aws: Aws, tmp_path: Path, calls: Listener) -> None:
    scene = scene_of(aws, tmp_path)
    one, _ = scene.wanted_jobs()
    told = aws.call(
        "batch",
        REGION,
        "submit_job",
        jobName=one.name,
        jobQueue=one.settings["queue"],
        jobDefinition=one.settings["definition"],
        tags={"of": "others"},
    )
    theirs = str(told["jobId"])
    set_status(theirs, "RUNNING")
    made = scene.made("aws_batch_job.batch-0")
    let_stop(replace(made, outputs={"id": theirs}))
    calls.take()
    Jobs(aws).delete(replace(made, outputs={}))
    assert "batch:TerminateJob" not in calls.take()
    (left,) = aws.call("batch", REGION, "describe_jobs", jobs=[theirs])["jobs"]
    assert (left["status"], left.get("statusReason")) == ("RUNNING", None)


def test_list_owned_returns_live_jobs_only(aws: Aws, tmp_path: Path) -> None:
    scene = scene_of(aws, tmp_path)
    one, _ = scene.wanted_jobs()
    run = scene.ground.run_uri
    assert list(Jobs(aws).list_owned(run, [REGION])) == []
    set_status(one.outputs["id"], "RUNNABLE")
    (found,) = Jobs(aws).list_owned(run, [REGION])
    assert (found.address, found.outputs, found.generation) == ("aws_batch_job.batch-0", one.outputs, 0)
    assert list(Jobs(aws).list_owned("s3://other/run", [REGION])) == []


def test_job_without_a_record_is_absent(aws: Aws, tmp_path: Path) -> None:
    one, _ = scene_of(aws, tmp_path).wanted_jobs()
    assert list(Jobs(aws).read([replace(one, outputs={"id": "00000000-forgotten"})])) == [None]


def test_update_of_a_job_is_rejected(aws: Aws, tmp_path: Path) -> None:
    one, _ = scene_of(aws, tmp_path).wanted_jobs()
    with pytest.raises(Invalid, match=r"a job cannot change: aws_batch_job\.batch-0: definition"):
        Jobs(aws).update(one, {"definition"})
    assert Jobs(aws).update(one, {"log_group"}) == one.outputs
