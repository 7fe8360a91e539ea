"""Containers on AWS with their store in Cloud Storage: they use their AWS identity and have no key of Google's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.e2e.conftest import DEADLINE_S
from tests.e2e.deployed import Deployed, check_nothing_was_lost

from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from skerry.testing.both_clouds import Clouds

GROUPS: Final = """\
  - name: b
    count: 1
    target: {kind: aws_batch, region: us-east-1, instance_types: [c7i.2xlarge], memory: 3GiB, shared_memory: 256MiB}
  - name: s
    count: 1
    target: {kind: sagemaker, region: us-east-1, instance: ml.c7i.2xlarge, output: s3://skerry-e2e/artifacts}
"""


def test_a_run_on_aws_lies_in_cloud_storage(
    clouds: Clouds, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws, google = clouds.aws, clouds.google
    monkeypatch.setenv("CLOUDSDK_COMPUTE_REGION", "us-central1")
    run = Deployed.write(
        tmp_path,
        store="gs://skerry-e2e/runs",
        image=aws.publish(image, "skerry"),
        groups=GROUPS,
        slots=("b-0", "s-0"),
        rounds=2,
    )
    run.apply()
    jobs = {slot: str(job["job"]) for slot, job in run.jobs().items()}
    assert aws.batch.wait(jobs["b-0"], within_s=DEADLINE_S) == "SUCCEEDED"
    assert aws.training.wait(jobs["s-0"], within_s=DEADLINE_S) == "SUCCEEDED"
    check_nothing_was_lost(open_store("gs://skerry-e2e/runs/tried"), run, killed=())
    guests = {call.caller for call in google.calls if call.caller.startswith("principal:")}
    assert len(guests) == 2
    run.destroy()
    assert (aws.inventory(), google.inventory()) == ({}, {})
