"""Jobs at a played Hugging Face: pages, lost labels, lost answers, logs, busy times."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.hf_jobs.kit import context_of, jobs_of
from tests.support.clocks import FakeClock

from skerry.infra.provision.handler import Condition
from skerry.infra.targets.hf_jobs.jobs_api import Hub
from skerry.infra.targets.hf_jobs.labelled_jobs_service import HfJobs
from skerry.infra.targets.hf_jobs.resource_types import Job
from skerry.infra.targets.shared import labelled_jobs
from skerry.infra.targets.shared.labelled_jobs import LabelledJobs
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.testing.huggingface import HuggingFaceSandbox

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.handler import Desired


@pytest.fixture
def jobs(tmp_path: Path) -> list[Desired]:
    return jobs_of(context_of(tmp_path, count=3))


@pytest.fixture
def handler(service: HfJobs) -> LabelledJobs:
    return LabelledJobs(service, Job)


def test_all_pages_of_a_listing_are_read(jobs: list[Desired]) -> None:
    with HuggingFaceSandbox(page=2) as sandbox:
        environment = {**sandbox.environment, "KEY_ID": "a", "SECRET_KEY": "b"}
        service = HfJobs(Hub(FakeClock(), environment), environment)
        created = [LabelledJobs(service, Job).create(job)["id"] for job in jobs]
        assert [job.id for job in service.listed("acme", jobs[0].run)] == created[::-1]


def test_live_job_that_lost_its_labels_is_still_the_runs_own(
    handler: LabelledJobs, jobs: list[Desired], huggingface: HuggingFaceSandbox
) -> None:
    lost, ended = (handler.create(job)["id"] for job in jobs[:2])
    for job in (lost, ended):
        huggingface.relabel(job, {"mine": "1"})
    huggingface.jobs.finish(ended, 0)
    (record,) = handler.list_owned(jobs[0].run, ["acme"])
    assert (record.address, record.name, record.outputs) == ("hf_jobs_job.hf-0", jobs[0].name, {"id": lost})
    assert list(handler.list_owned("s3://acme/runs/other", ["acme"])) == []


@pytest.mark.parametrize("how", ["lost_reply", "timeout"])
def test_creation_without_an_answer_makes_one_job(
    handler: LabelledJobs, jobs: list[Desired], huggingface: HuggingFaceSandbox, how: str
) -> None:
    huggingface.fail(how=how, on="huggingface:RunJob")  # type: ignore[arg-type]
    if how == "timeout":
        with pytest.raises(Retryable, match="no answer from http"):
            handler.create(jobs[0])
    first = handler.create(jobs[0])
    assert handler.create(jobs[0]) == first
    assert len(huggingface.inventory()["job"]) == 1


def test_new_settings_end_the_live_job_of_the_slot(
    handler: LabelledJobs, tmp_path: Path, jobs: list[Desired], huggingface: HuggingFaceSandbox
) -> None:
    first = handler.create(jobs[0])["id"]
    (other,) = jobs_of(context_of(tmp_path, "flavor: l4x1", count=1))
    assert handler.create(other)["id"] != first
    assert len(huggingface.inventory()["job"]) == 1


def test_drift_of_a_job_shows_in_what_is_read(handler: LabelledJobs, jobs: list[Desired]) -> None:
    handler.create(jobs[0])
    (seen,) = handler.read(jobs[:1])
    assert seen is not None
    settings = dict(seen.settings)
    assert (seen.owner, seen.condition) == (jobs[0].run, Condition.READY)
    assert settings["command"] == ["skerry-replica", "run"]
    assert settings["environment"] == jobs[0].settings["environment"]


def test_value_of_a_secret_is_sent_and_never_kept(
    handler: LabelledJobs, service: HfJobs, jobs: list[Desired], huggingface: HuggingFaceSandbox
) -> None:
    job = handler.create(jobs[0])["id"]
    assert "not-shown" in huggingface.variables_of(job).values()
    kept = json.dumps([jobs[0].to_record({"id": job}).settings, str(service.described("acme", job))])
    assert "not-shown" not in kept


def test_log_is_read_on_after_a_cursor(
    service: HfJobs, handler: LabelledJobs, jobs: list[Desired], huggingface: HuggingFaceSandbox
) -> None:
    record = jobs[0].to_record(handler.create(jobs[0]))
    job = record.outputs["id"]
    huggingface.jobs.write(job, "one")
    first = list(labelled_jobs.lines(service, record, None))
    assert [(line.text, line.slot, line.at_s > 0) for line in first] == [("one", "hf-0", True)]
    huggingface.jobs.write(job, "two")
    huggingface.jobs.finish(job, 0)
    assert [line.text for line in labelled_jobs.lines(service, record, first[0].cursor)] == ["two"]
    with pytest.raises(Invalid, match="not a place in a job's log"):
        list(labelled_jobs.lines(service, record, "x"))


@pytest.mark.parametrize("between", ["\r", "\f", "\x85", "\u2028"])
def test_line_of_a_log_ends_at_its_newline_only(
    service: HfJobs, handler: LabelledJobs, jobs: list[Desired], huggingface: HuggingFaceSandbox, between: str
) -> None:
    record = jobs[0].to_record(handler.create(jobs[0]))
    for text in (f"10%{between}20%", "next"):
        huggingface.jobs.write(record.outputs["id"], text)
    assert [line.text for line in labelled_jobs.lines(service, record, None)] == [f"10%{between}20%", "next"]


def test_busy_service_is_asked_again_for_a_minute(api: Hub, huggingface: HuggingFaceSandbox) -> None:
    huggingface.fail(how="throttle", on="huggingface:GetUser", times=3)
    assert api.user()["name"] == "ada"
    huggingface.fail(how="throttle", on="huggingface:GetUser", times=None)
    before = api.clock.now()
    with pytest.raises(Retryable, match="Hugging Face is busy: Too many requests"):
        api.user()
    assert 60 <= api.clock.now() - before < 65


def test_refusals_name_the_next_step(
    api: Hub, huggingface: HuggingFaceSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint = {"HF_ENDPOINT": huggingface.environment["HF_ENDPOINT"]}
    with pytest.raises(Unauthorized, match=r"does not accept the token: Invalid username.*; set HF_TOKEN to"):
        Hub(FakeClock(), {**endpoint, "HF_TOKEN": "hf_bad"}).user()
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(Unauthorized, match="set HF_TOKEN to a token that may write, or run `hf auth login`"):
        Hub(FakeClock(), endpoint).user()
    with pytest.raises(Unauthorized, match=r"Hugging Face refuses: You don't have the rights.*; set HF_TOKEN to"):
        list(api.jobs("other", []))
