"""`skerry plan`, `apply`, `destroy` and the rest against an account in memory: what they say, do, and end with."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import write_spec
from typer.testing import CliRunner

from skerry.infra.cli import app

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

    from skerry.infra.testing.sandbox import Sandbox

QUEUE = "aws_batch_queue.b"


@pytest.fixture
def spec(tmp_path: Path) -> str:
    return str(write_spec(tmp_path, count=1))


@pytest.fixture(autouse=True)
def _in_the_sandbox(skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in skerry_sandbox.environment.items():
        monkeypatch.setenv(name, value)


def skerry(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result


def queue_of(sandbox: Sandbox) -> str:
    (name,) = sandbox.inventory()["job queue"]
    return name


def test_a_plan_is_the_same_bytes_each_time_and_writes_nothing(spec: str, skerry_sandbox: Sandbox) -> None:
    first = skerry("plan", spec, "--json").stdout
    assert skerry("plan", spec, "--json").stdout == first
    assert json.loads(first)["summary"]["create"] > 10
    assert skerry_sandbox.calls.writes == []
    assert skerry_sandbox.inventory() == {}


def test_the_exit_code_tells_whether_there_is_something_to_do_and_drift_is_named(
    spec: str, skerry_sandbox: Sandbox
) -> None:
    skerry("plan", spec, "--detailed-exitcode", code=2)
    skerry("apply", spec, "--auto-approve")
    skerry_sandbox.calls.clear()
    assert "14 as they are; nothing has been changed" in skerry("plan", spec, "--detailed-exitcode").output
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.calls.writes == []
    # Behind its back: one thing changed, one gone.
    batch = skerry_sandbox.client("batch")
    batch.update_job_queue(jobQueue=queue_of(skerry_sandbox), priority=77)
    skerry_sandbox.client("logs").delete_log_group(logGroupName=skerry_sandbox.inventory()["log group"][0])
    said = skerry("plan", spec, "--detailed-exitcode", code=2).output
    assert QUEUE in said
    assert "priority: 77 -> 1 (changed outside of skerry)" in said
    assert "because: it is gone" in said
    drift = skerry("plan", spec, "--refresh-only", "--detailed-exitcode", code=2).output
    assert QUEUE in drift
    assert "aws_log_group" in drift
    skerry("apply", spec, "--auto-approve")
    skerry("plan", spec, "--detailed-exitcode")
    assert "nothing was changed outside" in skerry("plan", spec, "--refresh-only").output


def test_a_saved_plan_is_carried_out_as_it_is_once(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    kept = tmp_path / "plan.json"
    skerry("plan", spec, "--out", str(kept))
    skerry("apply", str(kept))
    assert skerry_sandbox.inventory()["job queue"]
    skerry_sandbox.calls.clear()
    assert "stale plan: lineage" in skerry("apply", str(kept), code=1).stderr
    assert skerry_sandbox.calls.writes == []


@pytest.mark.parametrize("moved", ["spec", "code", "cloud"])
def test_a_saved_plan_is_refused_when_anything_moved(
    spec: str, tmp_path: Path, skerry_sandbox: Sandbox, moved: str
) -> None:
    skerry("apply", spec, "--auto-approve")
    text = (tmp_path / "skerry.yaml").read_text()
    (tmp_path / "skerry.yaml").write_text(text.replace("count: 1", "count: 2"))
    kept = tmp_path / "plan.json"
    skerry("plan", spec, "--out", str(kept))
    match moved:
        case "spec":
            (tmp_path / "skerry.yaml").write_text(text.replace("count: 1", "count: 3"))
        case "code":
            (tmp_path / "train" / "train.py").write_text("print('other')\n")
        case _:
            skerry_sandbox.client("batch").update_job_queue(jobQueue=queue_of(skerry_sandbox), priority=77)
    skerry_sandbox.calls.clear()
    said = skerry("apply", str(kept), code=1).stderr
    assert "stale plan" in said
    assert {"spec": "spec: ", "code": "code: ", "cloud": "what is there has changed"}[moved] in said
    assert skerry_sandbox.calls.writes == []


def test_without_a_terminal_nothing_is_done_unasked(spec: str, skerry_sandbox: Sandbox) -> None:
    assert "--auto-approve" in skerry("apply", spec, code=2).stderr
    assert skerry_sandbox.inventory() == {}
    skerry("apply", spec, "--auto-approve")
    before = skerry_sandbox.inventory()
    assert "--yes" in skerry("destroy", spec, code=2).stderr
    assert "--auto-approve" in skerry("cancel", spec, code=2).stderr
    assert skerry_sandbox.inventory() == before


def test_destroy_keeps_what_was_trained_unless_told_and_says_so(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    said = skerry("destroy", spec, "--yes", code=1).output
    assert "`--data` deletes" in said
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",)}
    # What it kept can be gone on with.
    skerry("apply", spec, "--auto-approve")
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.inventory() == {}
    assert "nothing to destroy" in skerry("destroy", spec, "--yes", "--data").output


def test_what_nobody_remembers_is_found_by_its_tag(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    s3 = skerry_sandbox.client("s3")
    for entry in s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"]:
        s3.delete_object(Bucket="acme-skerry", Key=entry["Key"])
    assert "though nobody remembers it" in skerry("destroy", spec, "--yes", "--data").output
    assert skerry_sandbox.inventory() == {}


def test_lost_state_is_found_again_by_names_and_tags(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    before = skerry_sandbox.inventory()
    s3 = skerry_sandbox.client("s3")
    for entry in s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"]:
        s3.delete_object(Bucket="acme-skerry", Key=entry["Key"])
    said = skerry("plan", spec).output
    assert "to take in" in said
    assert "to create" not in said
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.inventory() == before
    skerry("plan", spec, "--detailed-exitcode")


def test_what_belongs_to_somebody_else_is_never_touched(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry")
    skerry_sandbox.client("s3").put_object(Bucket="acme-skerry", Key="theirs", Body=b"x")
    assert "byo" in skerry("plan", spec, code=1).output
    skerry("apply", spec, "--auto-approve", code=2)
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",)}
    # Said to be theirs, it is used, and stays with what is in it.
    skerry("apply", spec, "--auto-approve", "--set", "byo.bucket=true")
    skerry("destroy", spec, "--yes", "--data", "--set", "byo.bucket=true")
    left = skerry_sandbox.client("s3").list_objects_v2(Bucket="acme-skerry")["Contents"]
    assert [entry["Key"] for entry in left] == ["theirs"]


def test_what_is_nobodys_can_be_taken_in_and_goes_with_the_run(spec: str, skerry_sandbox: Sandbox) -> None:
    s3 = skerry_sandbox.client("s3")
    s3.create_bucket(Bucket="acme-skerry")
    s3.put_bucket_tagging(Bucket="acme-skerry", Tagging={"TagSet": [{"Key": "team", "Value": "research"}]})
    assert "nothing of the name" in skerry("import", "aws_repository.image", spec, "--auto-approve", code=2).stderr
    assert "--auto-approve" in skerry("import", "aws_bucket.store", spec, code=2).stderr
    skerry("import", "aws_bucket.store", spec, "--auto-approve")
    tags = {tag["Key"]: tag["Value"] for tag in s3.get_bucket_tagging(Bucket="acme-skerry")["TagSet"]}
    assert (tags["team"], tags["skerry:run"]) == ("research", "s3://acme-skerry/runs/tiny")
    # What it lacks is seen, and put right.
    assert "public: " in skerry("plan", spec).output
    skerry("apply", spec, "--auto-approve")
    skerry("plan", spec, "--detailed-exitcode")
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.inventory() == {}


def test_the_doctor_looks_before_anything_is_made(spec: str, skerry_sandbox: Sandbox) -> None:
    # The image is in no repository yet, and that is what it says.
    said = skerry("doctor", spec, "--json", code=1).stdout
    checks = {check["name"]: check for check in json.loads(said)["checks"]}
    assert checks["AWS credentials"]["ok"]
    assert "123456789012" in checks["AWS credentials"]["text"]
    assert checks["bucket"]["ok"]
    assert checks["image"]["ok"] is False
    assert "push it" in checks["image"]["advice"]
    assert json.loads(said)["log"] is None
    assert skerry_sandbox.inventory() == {}


def test_only_a_part_and_what_it_needs(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve", "--target", "aws_repository.image")
    # The state lies in the bucket, so that is there first.
    assert set(skerry_sandbox.inventory()) == {"bucket", "repository"}
    assert "no resource aws_nothing.x" in skerry("plan", spec, "--target", "aws_nothing.x", code=2).stderr


def test_cancelled_jobs_are_started_again_by_the_next_apply(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    (job,) = skerry_sandbox.inventory()["job"]
    assert job in skerry("cancel", spec, "--auto-approve").output
    assert "job" not in skerry_sandbox.inventory()
    assert "no job waits or runs" in skerry("cancel", spec, "--auto-approve").output
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.inventory()["job"] == (f"{job}-g1",)


def test_a_changed_spec_makes_a_new_generation_of_jobs_only(spec: str, skerry_sandbox: Sandbox, tmp_path: Path) -> None:
    skerry("apply", spec, "--auto-approve")
    before = skerry_sandbox.inventory()
    (tmp_path / "train" / "train.py").write_text("print('mended')\n")
    said = skerry("plan", spec).output
    assert "aws_batch_job.b-0" in said
    skerry("apply", spec, "--auto-approve")
    after = skerry_sandbox.inventory()
    assert after["job"] == (f"{before['job'][0]}-g1",)
    assert {kind: names for kind, names in after.items() if not kind.startswith("job")} == {
        kind: names for kind, names in before.items() if not kind.startswith("job")
    }


def test_replicas_may_be_added_to_a_run_and_taken_away(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    skerry("apply", spec, "--auto-approve", "--set", "replicas[0].count=3")
    assert len(skerry_sandbox.inventory()["job"]) == 3
    skerry("apply", spec, "--auto-approve")
    assert len(skerry_sandbox.inventory()["job"]) == 1
    assert len(skerry_sandbox.inventory()["role"]) == 3


def test_a_spec_that_contradicts_the_run_is_told_at_plan(spec: str) -> None:
    skerry("apply", spec, "--auto-approve")
    assert "lr: 0.7 -> 0.1" in skerry("plan", spec, "--set", "outer.lr=0.1", code=1).output


def test_unlock_names_who_held_the_state(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    assert "nobody holds the state" in skerry("unlock", spec).output
    # An apply on another machine that was killed.
    s3 = skerry_sandbox.client("s3")
    newest = s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"][-1]["Key"]
    state = json.loads(s3.get_object(Bucket="acme-skerry", Key=newest)["Body"].read())
    holder = {
        "token": "x",
        "who": "ann@elsewhere",
        "host": "elsewhere",
        "doing": "apply",
        "since": "noon",
        "pid": 1,
        "started": 1,
        "boot": "b",
    }
    held = json.dumps(state | {"serial": state["serial"] + 1, "holder": holder}).encode()
    s3.put_object(Bucket="acme-skerry", Key=f"runs/tiny/state/{state['serial'] + 1:08d}.json", Body=held)
    said = skerry("apply", spec, "--auto-approve", "--set", "replicas[0].count=2", code=1).stderr
    assert "apply by ann@elsewhere (pid 1) since noon" in said
    assert "freed from apply by ann@elsewhere" in skerry("unlock", spec, "--auto-approve").output
    skerry("apply", spec, "--auto-approve", "--set", "replicas[0].count=2")


def test_logs_are_followed_until_the_jobs_are_over(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve", "--set", "replicas[0].count=2")
    batch = skerry_sandbox.client("batch")
    queue = queue_of(skerry_sandbox)
    jobs = [one["jobId"] for one in batch.list_jobs(jobQueue=queue, jobStatus="RUNNABLE")["jobSummaryList"]]
    for job in jobs:
        skerry_sandbox.batch.write(job, f"hello of {job}")

    def end() -> None:
        # They are followed when they end: what they wrote last is read all the same.
        for job in jobs:
            skerry_sandbox.batch.write(job, f"goodbye of {job}")
            skerry_sandbox.batch.finish(job, 0)

    ending = threading.Timer(1.0, end)
    ending.start()
    lines = skerry("logs", spec, "--follow", "--set", "replicas[0].count=2").output.splitlines()
    ending.join()
    assert sorted(line.split("] ")[1] for line in lines) == sorted(
        f"{word} of {job}" for word in ("hello", "goodbye") for job in jobs
    )
    told = json.loads(skerry("status", spec, "--json", "--set", "replicas[0].count=2").stdout)
    assert [(job["slot"], job["condition"]) for job in told["jobs"]] == [("b-0", "done"), ("b-1", "done")]


def test_a_job_that_failed_for_good_says_why_and_is_made_again(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    (job,) = skerry_sandbox.client("batch").list_jobs(jobQueue=queue_of(skerry_sandbox), jobStatus="RUNNABLE")[
        "jobSummaryList"
    ]
    skerry_sandbox.batch.start(job["jobId"])
    skerry_sandbox.batch.finish(job["jobId"], 20)
    told = skerry("status", spec).output
    assert "b-0: failed exit code 20" in told
    said = skerry("plan", spec, "--detailed-exitcode", code=2).output
    assert "aws_batch_job.b-0" in said
    assert "because: lost" in said
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.inventory()["job"][0].endswith("-g1")
