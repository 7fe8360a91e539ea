"""A job that another replica has started looks first whether it may run; what it cannot find out keeps no job away."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
from tests.kit.http_server import HttpReply, HttpRequest, HttpServer
from tests.support.container import sagemaker, vertex

from skerry.runtime.contract import Revival

if TYPE_CHECKING:
    from tests.support.container import ContainerStarts

JOBS: Final = "arn:aws:sagemaker:us-east-1:123456789012:training-job/"
LOST: Final = "skerry-tiny-c0609f-r-1-bbb863"
REVIVE: Final = Revival(after_s=180.0, limit=5, window_s=3600.0).to_text()


REFUSAL: Final = HttpReply(status=400, body=json.dumps({"__type": "AccessDeniedException", "Message": "no"}))


def run(
    container: ContainerStarts, tags: dict[str, dict[str, str]] | None, refusal: HttpReply = REFUSAL
) -> tuple[int, bool, str]:
    """Run the job that follows LOST. tags: of each job; None: `refusal`. Exit code, whether it ran, output."""

    def respond(request: HttpRequest) -> HttpReply:
        if tags is None:
            return refusal
        listed = tags.get(json.loads(request.body)["ResourceArn"].removeprefix(JOBS), {})
        return HttpReply(body=json.dumps({"Tags": [{"Key": key, "Value": value} for key, value in listed.items()]}))

    cloud = sagemaker()
    cloud.environment |= {"TRAINING_JOB_NAME": f"{LOST}-g1", "TRAINING_JOB_ARN": f"{JOBS}{LOST}-g1"}
    keys = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "key"}
    with HttpServer(respond) as server:
        cloud.environment |= {"AWS_ENDPOINT_URL": f"http://{server.host}", **keys}
        code, output = container.run(
            "python", "-c", "print('RAN')", cloud=cloud, SKERRY_GROUP="r", SKERRY_REVIVE=REVIVE
        )
    return code, "RAN" in output, output


def test_job_that_follows_a_cancelled_one_does_not_run(container: ContainerStarts) -> None:
    tags = {f"{LOST}-g1": {"skerry:revived": LOST}, LOST: {"skerry:cancelled": "true"}}
    code, ran, output = run(container, tags)
    assert (code, ran) == (30, False)
    assert f"exit code 30: {LOST}, which this job follows, was cancelled" in output
    assert not container.failure.exists()


@pytest.mark.parametrize("revived", [True, False])
def test_job_that_follows_a_lost_one_runs(container: ContainerStarts, *, revived: bool) -> None:
    tags = {
        f"{LOST}-g1": {"skerry:revived": LOST} if revived else {},
        LOST: {} if revived else {"skerry:cancelled": "x"},
    }
    assert run(container, tags)[:2] == (0, True)


def test_refused_look_is_a_warning_and_the_job_runs(container: ContainerStarts) -> None:
    code, ran, output = run(container, None)
    assert (code, ran) == (0, True)
    assert "revive: warning: whether this job was cancelled is not known: Unauthorized: ListTags" in output


@pytest.mark.parametrize("answer", ["[]", '{"Tags": [{}]}', '{"Tags": null}'])
def test_strange_answer_of_the_service_keeps_no_job_away(container: ContainerStarts, answer: str) -> None:
    code, ran, output = run(container, None, refusal=HttpReply(body=answer))
    assert (code, ran) == (0, True)
    assert "revive: warning: whether this job was cancelled is not known" in output


def test_job_of_another_origin_trains_without_a_watch(container: ContainerStarts) -> None:
    code, output = container.run("python", "-c", "print('RAN')", cloud=vertex(), SKERRY_REVIVE=REVIVE)
    assert (code, "RAN" in output) == (0, True)
    assert "revive: warning: revive: peers has no effect" in output
