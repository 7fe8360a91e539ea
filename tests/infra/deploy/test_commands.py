"""The commands for clouds against an account in memory: output, changes, exit codes."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

from tests.infra.deploy.account import delete_state, queue_of, skerry

from skerry.infra.run import code_archive

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from skerry.testing.sandbox import Sandbox

QUEUE = "aws_batch_queue.b"


def test_plan_is_deterministic_and_writes_nothing(spec: str, skerry_sandbox: Sandbox) -> None:
    first = skerry("plan", spec, "--json").stdout
    assert skerry("plan", spec, "--json").stdout == first
    assert json.loads(first)["summary"]["create"] > 10
    every_setting = skerry("plan", spec, "-v").output
    assert '"resources": ["(arn of aws_bucket.store)"]' in every_setting
    assert "${" not in every_setting
    assert skerry_sandbox.calls.writes == []
    assert skerry_sandbox.inventory() == {}


def test_plan_shows_the_size_and_digest_of_the_code_and_its_files(spec: str, tmp_path: Path) -> None:
    (tmp_path / "train" / "data").mkdir()
    (tmp_path / "train" / "data" / "words.txt").write_bytes(b"x" * 2000)
    digest = code_archive.pack(tmp_path / "train").digest[:12]
    assert f"code: 2 files, 2.0 kB, sha256 {digest}; -v lists them\n" in skerry("plan", spec).output
    output = skerry("plan", spec, "-v").output
    assert f"code: 2 files, 2.0 kB, sha256 {digest}\n  data/words.txt  2.0 kB\n  train.py  18 bytes\n" in output


def test_detailed_exit_code_reports_changes_and_drift(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("plan", spec, "--detailed-exitcode", code=2)
    skerry("apply", spec, "--auto-approve")
    skerry_sandbox.calls.clear()
    assert "14 unchanged; nothing has been changed" in skerry("plan", spec, "--detailed-exitcode").output
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.calls.writes == []
    # Outside of skerry one resource is changed and one deleted.
    batch = skerry_sandbox.client("batch")
    batch.update_job_queue(jobQueue=queue_of(skerry_sandbox), priority=77)
    skerry_sandbox.client("logs").delete_log_group(logGroupName=skerry_sandbox.inventory()["log group"][0])
    output = skerry("plan", spec, "--detailed-exitcode", code=2).output
    assert QUEUE in output
    assert "priority: 77 -> 1 (changed outside of skerry)" in output
    assert "because: it was deleted outside of skerry" in output
    drift = skerry("plan", spec, "--refresh-only", "--detailed-exitcode", code=2).output
    assert QUEUE in drift
    assert "aws_log_group" in drift
    skerry("apply", spec, "--auto-approve")
    skerry("plan", spec, "--detailed-exitcode")
    assert "nothing was changed outside" in skerry("plan", spec, "--refresh-only").output


def test_detailed_exit_code_of_a_bad_spec_is_1(spec: str) -> None:
    bad = ("plan", spec, "--set", "outer.rounds=many")
    assert "outer.rounds" in skerry(*bad, "--detailed-exitcode", code=1).stderr
    assert "outer.rounds" in skerry(*bad, code=2).stderr
    assert "outer.rounds" not in skerry("plan", spec, "--detailed-exitcode", code=2).stderr


def test_commands_without_terminal_change_nothing_unapproved(spec: str, skerry_sandbox: Sandbox) -> None:
    assert "--auto-approve" in skerry("apply", spec, code=2).stderr
    assert skerry_sandbox.inventory() == {}
    skerry("apply", spec, "--auto-approve")
    before = skerry_sandbox.inventory()
    assert "--yes" in skerry("destroy", spec, code=2).stderr
    assert "--auto-approve" in skerry("cancel", spec, code=2).stderr
    assert skerry_sandbox.inventory() == before


def test_up_ends_with_one_line_of_json_if_the_apply_fails(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.fail(how="deny", on="batch:CreateJobQueue", times=9)
    result = skerry("up", spec, "--auto-approve", "--json", code=1)
    (line,) = result.stdout.splitlines()
    outcome = json.loads(line)
    assert not outcome["ok"]
    assert [*outcome["failed"]] == [QUEUE]


def test_target_option_applies_one_resource_and_its_needs(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve", "--target", "aws_repository.image")
    # The bucket holds the state, so it is created too.
    assert set(skerry_sandbox.inventory()) == {"bucket", "repository"}
    assert "no resource aws_nothing.x" in skerry("plan", spec, "--target", "aws_nothing.x", code=2).stderr


def test_changed_code_replaces_jobs_only(spec: str, skerry_sandbox: Sandbox, tmp_path: Path) -> None:
    skerry("apply", spec, "--auto-approve")
    before = skerry_sandbox.inventory()
    (tmp_path / "train" / "train.py").write_text("print('mended')\n")
    output = skerry("plan", spec).output
    assert "aws_batch_job.b-0" in output
    skerry("apply", spec, "--auto-approve")
    after = skerry_sandbox.inventory()
    assert after["job"] == (f"{before['job'][0]}-g1",)
    assert {kind: names for kind, names in after.items() if not kind.startswith("job")} == {
        kind: names for kind, names in before.items() if not kind.startswith("job")
    }


def test_replicas_can_be_added_and_removed(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    skerry("apply", spec, "--auto-approve", "--set", "replicas[0].count=3")
    assert len(skerry_sandbox.inventory()["job"]) == 3
    skerry("apply", spec, "--auto-approve")
    assert len(skerry_sandbox.inventory()["job"]) == 1
    assert len(skerry_sandbox.inventory()["role"]) == 3


def test_plan_refuses_a_spec_that_contradicts_the_run(spec: str) -> None:
    skerry("apply", spec, "--auto-approve")
    for option in ("-v", "--refresh-only"):
        output = skerry("plan", spec, "--set", "outer.lr=0.1", option, code=1).output
        assert "problem: run 'tiny' was started with other values" in output
        assert "lr: 0.7 -> 0.1" in output


def test_apply_restarts_cancelled_jobs(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    (job,) = skerry_sandbox.inventory()["job"]
    assert job in skerry("cancel", spec, "--auto-approve").output
    assert "job" not in skerry_sandbox.inventory()
    assert "no job waits or runs" in skerry("cancel", spec, "--auto-approve").output
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.inventory()["job"] == (f"{job}-g1",)


def test_reason_after_a_cancel_is_the_cancel(spec: str) -> None:
    skerry("apply", spec, "--auto-approve")
    skerry("cancel", spec, "--auto-approve")
    assert "stopped by `skerry cancel`; `skerry apply` starts it again" in skerry("status", spec).output
    assert "because: stopped by `skerry cancel`" in skerry("plan", spec).output
    assert "nothing was changed outside of skerry" in skerry("plan", spec, "--refresh-only").output


def test_follow_reads_logs_until_the_jobs_end(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve", "--set", "replicas[0].count=2")
    batch = skerry_sandbox.client("batch")
    queue = queue_of(skerry_sandbox)
    jobs = [job["jobId"] for job in batch.list_jobs(jobQueue=queue, jobStatus="RUNNABLE")["jobSummaryList"]]
    for job in jobs:
        skerry_sandbox.batch.write(job, f"\x1b[1mhello\x07 of {job}\x1b[2J")  # no command reaches the terminal

    def end() -> None:
        # The last lines are written while the logs are followed.
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
    output = json.loads(skerry("status", spec, "--json", "--set", "replicas[0].count=2").stdout)
    assert [(job["slot"], job["condition"]) for job in output["jobs"]] == [("b-0", "done"), ("b-1", "done")]


RUN = "s3://acme-skerry/runs/tiny"


def test_logs_by_uri_find_the_jobs_in_the_state(
    spec: str, skerry_sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skerry("apply", spec, "--auto-approve", "--set", "replicas[0].count=2")
    batch = skerry_sandbox.client("batch")
    jobs = batch.list_jobs(jobQueue=queue_of(skerry_sandbox), jobStatus="RUNNABLE")["jobSummaryList"]
    for job in sorted(jobs, key=lambda job: job["jobName"]):
        skerry_sandbox.batch.write(job["jobId"], f"hello of {job['jobName']}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    lines = skerry("logs", RUN).output.splitlines()
    assert [line.split("] hello of ")[0] for line in lines] == ["[b-0", "[b-1"]
    assert skerry("logs", RUN, "--replica", "b-1").output.splitlines() == lines[1:]
    assert "choose one of b-0, b-1" in skerry("logs", RUN, "--replica", "b-7", code=2).stderr


def test_logs_of_a_uri_name_the_next_step_without_jobs_or_their_account(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    s3 = skerry_sandbox.client("s3")
    key = max(entry["Key"] for entry in s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"])
    state = json.loads(s3.get_object(Bucket="acme-skerry", Key=key)["Body"].read())
    state["accounts"] = {"aws": "999999999999"}
    s3.put_object(Bucket="acme-skerry", Key=key, Body=json.dumps(state).encode())
    assert "are in aws 999999999999, and these credentials are of 123456789012: use others, or name the spec" in (
        skerry("logs", RUN, code=1).stderr
    )
    delete_state(skerry_sandbox)
    assert "no jobs in its store: go to the folder of its spec" in skerry("logs", RUN, code=1).stderr


def test_commands_without_state_name_the_regions_that_they_searched(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve", "--set", "replicas[0].target.region=us-west-2")
    delete_state(skerry_sandbox)
    for command in (("status",), ("cancel", "--auto-approve"), ("logs",)):
        result = skerry(*command, spec)
        assert "without a state, only aws_batch_job in us-east-1 was searched" in result.output + result.stderr
    for command in (("status",), ("cancel", "--auto-approve")):
        output = skerry(*command, spec, "--json").stdout
        assert json.loads(output)["searched"] == ["aws_batch_job in us-east-1"]
    assert "b-0: " in skerry("status", spec, "--set", "replicas[0].target.region=us-west-2").output
    assert "without a state, only aws in us-east-1 was searched" in skerry("destroy", spec, "--yes", code=1).output
    assert "without a state" not in skerry("status", spec).output


def test_doctor_checks_before_the_first_apply(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.any_image = False
    output = skerry("doctor", spec, "--json", code=1).stdout
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert checks["AWS credentials"]["ok"]
    assert "123456789012" in checks["AWS credentials"]["text"]
    assert checks["bucket"]["ok"]
    assert checks["image"]["ok"] is False
    assert "push it" in checks["image"]["advice"]
    assert json.loads(output)["log"] is None
    assert skerry_sandbox.inventory() == {}


def test_queue_of_the_user_replaces_ours(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    batch = skerry_sandbox.client("batch")
    environment = batch.describe_compute_environments()["computeEnvironments"][0]["computeEnvironmentArn"]
    batch.create_job_queue(
        jobQueueName="theirs",
        priority=1,
        state="ENABLED",
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment}],
    )
    output = skerry("plan", spec, "--set", "replicas[0].target.byo.queue=theirs").output
    assert "-   aws_batch_queue.b" in output
