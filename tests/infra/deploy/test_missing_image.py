"""Jobs are not started from an image that is not in its registry."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.deploy.account import queue_of, skerry

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

REPOSITORY: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"
TAGGED: Final = f"image={REPOSITORY}:gpu"
INDEX: Final = "application/vnd.oci.image.index.v1+json"


@pytest.fixture(autouse=True)
def _nothing_is_pushed(skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.any_image = False


def push(sandbox: Sandbox, architecture: str = "amd64") -> None:
    """Push an image with the tag gpu into the repository."""
    entry = {"digest": f"sha256:{'0' * 64}", "platform": {"architecture": architecture}}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]})
    sandbox.client("ecr").put_image(repositoryName="skerry", imageManifest=manifest, imageTag="gpu")


def test_apply_without_the_image_creates_its_repository_and_stops(spec: str, skerry_sandbox: Sandbox) -> None:
    for _ in range(2):
        stderr = skerry("apply", spec, "--auto-approve", code=4).stderr
        assert set(skerry_sandbox.inventory()) == {"bucket", "repository"}
        assert f"push it: `skerry image push {REPOSITORY}`" in stderr
        assert f"no job was started; push first, then run `skerry apply {spec}` again" in stderr
    assert "batch:SubmitJob" not in skerry_sandbox.calls.names


def test_apply_after_the_push_starts_the_jobs(spec: str, skerry_sandbox: Sandbox) -> None:
    assert (
        f"skerry image push {REPOSITORY} --tag gpu`"
        in skerry("apply", spec, "--auto-approve", "--set", TAGGED, code=4).stderr
    )
    push(skerry_sandbox)
    skerry("apply", spec, "--auto-approve", "--set", TAGGED)
    assert len(skerry_sandbox.inventory()["job"]) == 1


def test_image_without_its_layers_starts_no_job(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve", "--set", TAGGED, code=4)
    config = {"digest": f"sha256:{'0' * 64}"}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": INDEX.replace("index", "manifest"), "config": config})
    skerry_sandbox.client("ecr").put_image(repositoryName="skerry", imageManifest=manifest, imageTag="gpu")
    assert "skerry image push" in skerry("apply", spec, "--auto-approve", "--set", TAGGED, code=4).stderr


def test_image_for_other_machines_starts_no_job(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve", "--set", TAGGED, code=4)
    push(skerry_sandbox, "arm64")
    assert (
        "build it with --platform linux/amd64"
        in skerry("apply", spec, "--auto-approve", "--set", TAGGED, code=4).stderr
    )
    assert "job" not in skerry_sandbox.inventory()


def test_plan_reports_the_missing_image_and_asks_once(spec: str, skerry_sandbox: Sandbox) -> None:
    output = skerry("plan", spec).output
    assert "no job will be started: image: " in output
    assert skerry_sandbox.calls.names.count("ecr:BatchGetImage") == 1
    assert skerry_sandbox.calls.writes == []
    skerry_sandbox.calls.clear()
    checks = json.loads(skerry("plan", spec, "--json").stdout)["checks"]
    (image,) = [check for check in checks if check["name"] == "image"]
    assert (image["ok"], image["stops_jobs"]) == (False, True)


def test_up_without_the_image_does_not_watch(spec: str, skerry_sandbox: Sandbox) -> None:
    last = skerry("up", spec, "--auto-approve", "--json", code=4).stdout.splitlines()[-1]
    assert json.loads(last)["ok"] is False
    assert "job" not in skerry_sandbox.inventory()


def test_fresh_sample_starts_no_job(skerry_sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    skerry("init", "--target", "aws_batch")
    assert "no job will be started: image: " in skerry("plan").output
    skerry("apply", "--auto-approve", code=4)
    assert set(skerry_sandbox.inventory()) == {"bucket", "repository"}


def test_running_jobs_need_no_image_for_a_repair(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.any_image = True
    skerry("apply", spec, "--auto-approve")
    skerry_sandbox.any_image = False
    skerry_sandbox.client("batch").update_job_queue(jobQueue=queue_of(skerry_sandbox), priority=77)
    output = skerry("apply", spec, "--auto-approve").output
    assert "warning: image: " in output
    assert "aws_batch_queue.b changed" in output


def test_plan_notes_checks_that_could_not_be_made(spec: str) -> None:
    output = skerry("plan", spec).output
    assert "problem:" not in output
    (note,) = [line for line in output.splitlines() if line.startswith("note: not checked: ")]
    assert "quota L-1216C47A in us-east-1" in note
