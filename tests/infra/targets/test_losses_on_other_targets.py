"""A job on SageMaker or in a cluster is reported by every command, though the bucket or its tags are lost.

`test_running_jobs_are_reported` has more losses, in two other clouds; `test_refusing_places` what is not answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.targets.runs import KubernetesRun, SageMakerRun, TargetRun, VertexRun, start_one
from tests.infra.targets.test_running_jobs_are_reported import OPTIONS, complains, planned
from tests.support.command_line import invoke

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.testing import Result

    from skerry.testing.sandbox import Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
BUCKET: Final = "acme-skerry"
PLACES: Final = {SageMakerRun: "sagemaker", KubernetesRun: "kubernetes"}
CALLS: Final = {
    SageMakerRun: ("sagemaker:*", "sagemaker"),
    KubernetesRun: ("kubernetes:*", "kubernetes"),
    VertexRun: ("aiplatform.*", "google"),
}
STORE: Final = (f"bucket {BUCKET}", "aws_bucket.store")


def lose_bucket(account: Sandbox) -> None:
    s3 = account.client("s3")
    for entry in s3.list_objects_v2(Bucket=BUCKET)["Contents"]:
        s3.delete_object(Bucket=BUCKET, Key=entry["Key"])
    s3.delete_bucket(Bucket=BUCKET)


def lose_tags(account: Sandbox) -> None:
    tags = {"TagSet": [{"Key": "cost-center", "Value": "42"}]}
    account.client("s3").put_bucket_tagging(Bucket=BUCKET, Tagging=tags)


@pytest.mark.parametrize("last", ["cancel", "destroy"])
@pytest.mark.parametrize("lose", [lose_bucket, lose_tags])
@pytest.mark.parametrize("run", PLACES, indirect=True, ids=lambda kind: kind.KIND)
def test_job_is_reported_without_the_bucket_or_its_tags(
    run: TargetRun, lose: Callable[[Sandbox], None], last: str, aws_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, address = str(start_one(run, monkeypatch).path), f"{run.KIND}.a-0"
    lose(aws_sandbox)
    for command in ("status", "plan", last):
        assert run.live() == 1
        result = invoke(command, spec, *OPTIONS[command])
        text = f"{command}: exit code {result.exit_code}: {result.output}{result.stderr}"
        assert is_reported(result, command, address, PLACES[type(run)], lives=run.live() == 1), text


@pytest.mark.parametrize("run", CALLS, indirect=True, ids=lambda kind: kind.KIND)
def test_throttled_service_is_named_although_there_is_a_state(run: TargetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = str(start_one(run, monkeypatch).path)
    calls, place = CALLS[type(run)]
    run.sandbox.fail(how="throttle", on=calls, times=None)
    for command, options in OPTIONS.items():
        result = invoke(command, spec, *options)
        text = f"{command}: exit code {result.exit_code}: {result.output}{result.stderr}"
        assert complains(result, [place]), text
        assert run.live() == 1


def is_reported(result: Result, command: str, address: str, place: str, *, lives: bool) -> bool:
    """True if the job is named with what happens to it, or the command failed and names what it could not ask."""
    unasked = complains(result, (place, *STORE))
    match command:
        case "plan":
            return unasked or planned(result.stdout, address) in ("keep", "adopt", "update", "replace")
        case "status":
            return "a-0: " in result.output
        case _:
            return unasked if lives else "-a-0" in result.output + result.stderr
