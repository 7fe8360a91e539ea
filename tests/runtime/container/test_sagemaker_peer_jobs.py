"""The listings of a group's jobs, as the services page them."""

from __future__ import annotations

import json
from typing import Final

from tests.kit.http_server import HttpReply, HttpRequest, HttpServer
from tests.support.clocks import FakeClock

from skerry.runtime.container.sagemaker_peer_jobs import SageMakerPeerJobs

ARN: Final = "arn:aws:sagemaker:us-east-1:123456789012:training-job/"
JOB: Final = "skerry-tiny-c0609f-gpu"


def test_listing_is_read_to_its_end_and_other_groups_are_left_out() -> None:
    names = [f"{JOB}-1-bbb863{f'-g{number}' if number else ''}" for number in range(120)]
    pages = [names[:100], [*names[100:], f"{JOB}-b-1-bbb863-g7", f"{JOB}-12-bbb863", f"{JOB}-1-bbb863-g7-x"]]

    def respond(request: HttpRequest) -> HttpReply:
        page = int(json.loads(request.body).get("NextToken", "0"))
        rows = [{"TrainingJobName": name, "TrainingJobStatus": "Failed", "CreationTime": 1.5} for name in pages[page]]
        return HttpReply(body=json.dumps({"TrainingJobSummaries": rows, **({} if page else {"NextToken": "1"})}))

    with HttpServer(respond) as server:
        environment = {
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_ENDPOINT_URL": f"http://{server.host}",
        }
        jobs = SageMakerPeerJobs(f"{ARN}{JOB}-0-bbb863", "gpu", environment, FakeClock()).list()
    assert [job.generation for job in jobs if job.slot == "gpu-1"] == list(range(120))
    assert [job.key for job in jobs if job.slot != "gpu-1"] == [f"{JOB}-12-bbb863"]
