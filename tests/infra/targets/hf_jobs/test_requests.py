"""The body of a new job, compared with what the SDK sends, and the answers, parsed by the SDK's classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from huggingface_hub import HfApi
from tests.infra.targets.hf_jobs.kit import LIMITS, check_golden, context_of, jobs_of

from skerry.infra.provision.graph import Ref
from skerry.infra.targets.hf_jobs import requests
from skerry.infra.targets.hf_jobs.resource_graph import build_resources
from skerry.infra.targets.shared.resolve_refs import ready

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.huggingface import HuggingFaceSandbox


def test_body_of_a_job_is_frozen(tmp_path: Path) -> None:
    more = "limits: {max_hours: 24}\ntags: {Team: A B}\n"
    (job,) = jobs_of(context_of(tmp_path, "flavor: a10g-largex2, max_runtime: 6h", count=1, more=more))
    check_golden("job", requests.job(job))


def test_job_knows_the_region_of_a_mirror(tmp_path: Path) -> None:
    mirror = "replication: [{to: s3://acme-west/runs, region: us-west-2}]\n"
    context = context_of(tmp_path, more=f"{LIMITS}{mirror}")
    region = Ref(address="aws_bucket.mirror-acme-west", output="region", before="acme-west=")
    jobs = build_resources(context, context.spec.replicas, {})
    assert [job.environment["SKERRY_BUCKET_REGION_0"] for job in jobs] == [region, region]


@pytest.mark.parametrize("image", ["ghcr.io/acme/skerry:1", "hf.co/spaces/acme/skerry"])
def test_body_is_the_one_that_the_sdk_sends(tmp_path: Path, image: str, huggingface: HuggingFaceSandbox) -> None:
    (job,) = jobs_of(context_of(tmp_path, count=1, image=image))
    body = ready(requests.job(job))
    api = HfApi(endpoint=huggingface.environment["HF_ENDPOINT"], token=huggingface.environment["HF_TOKEN"])
    settings = job.settings
    created = api.run_job(
        image=image,
        command=list(body["command"]),  # type: ignore[call-overload]
        env=dict(settings["environment"]),  # type: ignore[call-overload]
        secrets=dict(settings["secrets"]),  # type: ignore[call-overload]
        flavor="cpu-basic",
        timeout="24h",
        attempts=1,
        labels=dict(body["labels"]),  # type: ignore[call-overload]
        namespace="acme",
    )
    sent = next(call for call in huggingface.calls if call.operation == "RunJob").params["body"]
    assert sent == {**body, "command": list(body["command"])}  # type: ignore[call-overload]
    assert created.labels == body["labels"]
