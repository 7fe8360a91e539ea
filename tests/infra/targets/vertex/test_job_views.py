from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.vertex.kit import Scene, context_of

from skerry.infra.provision.handler import Condition
from skerry.infra.targets.vertex.job_views import lines, view, views
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.handler import StateRecord
    from skerry.testing.google.sandbox import GoogleSandbox

NAME = "projects/1/locations/us-central1/customJobs/42"


@pytest.fixture
def scene(google: Google, tmp_path: Path) -> Scene:
    scene = Scene(google, context_of(tmp_path, "machine: g2-standard-8, scheduling: spot"))
    scene.make()
    return scene


@pytest.fixture
def state_record(google: Google, tmp_path: Path) -> StateRecord:
    return Scene(google, context_of(tmp_path)).record("vertex_job.vertex-0")


def test_queued_job_shows_its_quota_and_the_page_of_quotas(state_record: StateRecord) -> None:
    def why(**settings: str) -> str:
        record = replace(state_record, settings={**state_record.settings, **settings})
        return view(record, {"name": NAME, "state": "JOB_STATE_QUEUED"}).why

    assert why() == (
        "waits for a machine: none is free in us-central1, or its quota "
        "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus is used up; see `skerry doctor` and "
        "https://console.cloud.google.com/iam-admin/quotas?project=skerry-sandbox"
    )
    assert "custom_model_training_preemptible_nvidia_l4_gpus" in why(scheduling="spot")
    assert why(scheduling="flex_start") == "queued for machines by flex_start, until max_wait is over"


def test_views_keep_their_order_and_need_one_listing(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    first, second = (scene.record(f"vertex_job.vertex-{number}") for number in (0, 1))
    sandbox.jobs.start(first.outputs["id"])
    sandbox.jobs.finish(second.outputs["id"], 20)
    sandbox.calls.clear()
    jobs = views(google, [second, first])
    assert [(each.slot, each.state, each.exit_code) for each in jobs] == [
        ("vertex-1", "FAILED", 20),
        ("vertex-0", "RUNNING", None),
    ]
    assert [call.operation for call in sandbox.calls] == ["projects.locations.customJobs.list"]
    assert views(google, []) == []


def test_logs_of_a_deleted_job_can_still_be_read(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    record = scene.record("vertex_job.vertex-0")
    sandbox.jobs.write(record.outputs["id"], "hello")
    scene.handlers[record.kind].delete(record)
    (job,) = views(google, [record])
    assert (job.state, job.condition) == ("UNKNOWN", Condition.LOST)
    assert job.why == "Vertex AI has no record of it: it was stopped and deleted; `skerry apply` starts another"
    assert [line.text for line in lines(google, record, None)] == ["hello"]


def test_lines_continue_at_a_cursor(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    record, other = (scene.record(f"vertex_job.vertex-{number}") for number in (0, 1))
    assert list(lines(google, record, None)) == []
    for text in ("one", "two"):
        sandbox.jobs.write(record.outputs["id"], text)
    sandbox.jobs.write(other.outputs["id"], "not mine")
    log = list(lines(google, record, None))
    assert [(line.slot, line.text) for line in log] == [("vertex-0", "one"), ("vertex-0", "two")]
    assert [line.text for line in lines(google, record, log[0].cursor)] == ["two"]
    sandbox.jobs.write(record.outputs["id"], "three")
    assert [line.text for line in lines(google, record, log[-1].cursor)] == ["three"]


def test_lines_of_a_job_that_was_never_created_are_an_error(google: Google, state_record: StateRecord) -> None:
    with pytest.raises(Invalid, match=re.escape("its job was never created; run `skerry apply` again")):
        list(lines(google, state_record, None))
