from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from google.api_core.exceptions import GoogleAPICallError, RetryError
from google.auth.exceptions import RefreshError, TransportError
from google.protobuf.json_format import ParseError
from tests.infra.targets.vertex.kit import REGION, Scene, context_of

from skerry.infra.clouds.google.session import Google
from skerry.infra.provision.handler import Condition, Desired
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.infra.targets.vertex import requests
from skerry.infra.targets.vertex.jobs import Jobs, described
from skerry.infra.targets.vertex.sdk_create import Creator
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.testing.google.refusals import Refusal, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from skerry.infra.provision.handler import Observed
    from skerry.testing.google.sandbox import GoogleSandbox

JOBS = "aiplatform.projects.locations.customJobs"
CREATE = f"{JOBS}.create"


@pytest.fixture
def scene(google: Google, tmp_path: Path) -> Scene:
    scene = Scene(google, context_of(tmp_path))
    scene.make()
    return scene


@pytest.fixture
def lost(google: Google, scene: Scene) -> Desired:
    """Return the first job, whose record is deleted."""
    desired, _ = scene.wanted_jobs()
    Jobs(google).delete(scene.record("vertex_job.vertex-0"))
    return desired


def take_calls(sandbox: GoogleSandbox) -> list[str]:
    names = [call.name.removeprefix(f"{JOBS}.") for call in sandbox.calls]
    sandbox.calls.clear()
    return names


def by_rest(google: Google) -> Callable[[str, str, Mapping[str, object]], str]:
    """Create jobs with the request that the SDK sends, without the SDK."""

    def create(project: str, region: str, body: Mapping[str, Any]) -> str:
        path = f"v1/projects/{project}/locations/{region}/customJobs"
        return str(google.call_once("aiplatform", "POST", path, body=body)["name"])

    return create


def read(google: Google, desired: Desired) -> Observed:
    (seen,) = Jobs(google).read([desired])
    assert seen is not None
    return seen


def test_ended_job_is_done_or_lost(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    desired, failed = scene.wanted_jobs()
    sandbox.jobs.finish(failed.outputs["id"], 20)
    lost = read(google, failed)
    assert lost.condition is Condition.LOST
    assert "non-zero status of 20" in lost.detail
    job = desired.outputs["id"]
    for act, condition, detail in (
        (lambda: None, Condition.READY, "pending"),
        (lambda: sandbox.jobs.queue(job), Condition.READY, "queued"),
        (lambda: sandbox.jobs.start(job), Condition.READY, "running"),
        (lambda: sandbox.jobs.finish(job), Condition.DONE, "succeeded"),
    ):
        act()
        seen = read(google, desired)
        assert (seen.condition, seen.detail, seen.owner) == (condition, detail, desired.run)
        assert seen.outputs == desired.outputs
    assert scene.differing("vertex_job.vertex-0") == set()


def test_many_jobs_are_read_in_one_listing(google: Google, sandbox: GoogleSandbox, tmp_path: Path) -> None:
    scene = Scene(google, context_of(tmp_path, count=150))
    jobs = Jobs(google, by_rest(google))
    scene.make(jobs=False)
    for wanted_job in scene.wanted_jobs():
        scene.outputs[wanted_job.resource.address] = jobs.create(wanted_job)
    take_calls(sandbox)
    known = jobs.read(scene.wanted_jobs())
    assert take_calls(sandbox) == ["list", "list"]
    lost = jobs.read([replace(wanted_job, outputs={}) for wanted_job in scene.wanted_jobs()])
    assert take_calls(sandbox) == ["list", "list"]
    assert [seen and seen.outputs for seen in known] == [wanted_job.outputs for wanted_job in scene.wanted_jobs()]
    assert [seen and seen.outputs for seen in lost] == [wanted_job.outputs for wanted_job in scene.wanted_jobs()]


def test_job_missing_from_the_listing_is_read_by_name(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    desired, _ = scene.wanted_jobs()
    take_calls(sandbox)
    (seen,) = Jobs(google).read([replace(desired, run="gs://acme/runs/renamed")])
    assert seen is not None
    assert seen.owner == "with the label " + requests.labels(desired)["skerry-run"]
    assert take_calls(sandbox) == ["list", "get"]


def test_disabled_service_has_no_jobs(google: Google, sandbox: GoogleSandbox, tmp_path: Path) -> None:
    scene = Scene(google, context_of(tmp_path))
    assert list(Jobs(google).read(scene.wanted_jobs())) == [None, None]
    assert list(Jobs(google).list_owned(scene.context.run_uri, [REGION])) == []
    assert not sandbox.violations


def test_creation_with_a_lost_answer_is_not_repeated(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    desired, _ = scene.wanted_jobs()
    job = desired.outputs["id"]
    for act in (lambda: None, lambda: sandbox.jobs.start(job), lambda: sandbox.jobs.finish(job)):
        act()
        take_calls(sandbox)
        assert Jobs(google).create(replace(desired, outputs={})) == desired.outputs
        assert take_calls(sandbox) == ["list"]


@pytest.mark.parametrize("how", ["timeout", "lost_reply"])
def test_creation_without_an_answer_is_found_in_the_listing(
    google: Google, sandbox: GoogleSandbox, lost: Desired, how: Any
) -> None:
    take_calls(sandbox)
    sandbox.fail(how=how, on=CREATE)
    began = google.clock.now()
    if how == "timeout":
        with pytest.raises(Retryable, match="no answer from Google: create a custom job in us-central1"):
            Jobs(google).create(lost)
        assert google.clock.now() - began >= 10
    else:
        assert Jobs(google).create(lost)["id"] != lost.outputs["id"]
    assert take_calls(sandbox).count("create") == 1
    outputs = Jobs(google).create(replace(lost, outputs={}))
    assert take_calls(sandbox).count("create") == (1 if how == "timeout" else 0)
    assert len(sandbox.inventory()["job"]) == 2
    assert read(google, replace(lost, outputs={})).outputs == outputs


def test_lost_or_foreign_job_is_not_adopted(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    desired, other = scene.wanted_jobs()
    sandbox.jobs.finish(desired.outputs["id"], 10)
    assert Jobs(google).create(desired)["id"] != desired.outputs["id"]
    again = Jobs(google).create(replace(desired, generation=1))
    assert again["id"] != desired.outputs["id"]
    assert Jobs(google).create(replace(other, run="gs://other/run"))["id"] != other.outputs["id"]


def test_running_job_with_other_settings_is_ended_first(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    desired, _ = scene.wanted_jobs()
    sandbox.jobs.start(desired.outputs["id"])
    anew = replace(desired, outputs={}, settings={**desired.settings, "disk_gb": 200})
    assert list(Jobs(google).read([anew])) == [None]
    outputs = Jobs(google).create(anew)
    assert outputs["id"] != desired.outputs["id"]
    assert described(google, desired.outputs["name"]) is None
    assert read(google, replace(anew, outputs=outputs)).condition is Condition.READY


@pytest.mark.parametrize(
    "refusal",
    [
        invalid("Service account a@b does not exist.", "custom_job.job_spec.service_account"),
        Refusal(403, "You do not have permission to act as service_account: a@b", reason="forbidden"),
        Refusal(400, "Service agents are being provisioned (https://...).", status="FAILED_PRECONDITION"),
    ],
)
def test_create_waits_for_a_new_account(
    google: Google, sandbox: GoogleSandbox, lost: Desired, refusal: Refusal
) -> None:
    sandbox.jobs.refuse(refusal)
    began = google.clock.now()
    with pytest.raises((Invalid, Unauthorized)):
        Jobs(google).create(lost)
    assert 120 <= google.clock.now() - began < 150
    real = google.clock.pause

    def pause(*positional: Any) -> None:
        sandbox.jobs.refuse(None)
        real(*positional)

    google.clock.pause = pause  # type: ignore[method-assign]
    assert read(google, replace(lost, outputs=Jobs(google).create(lost))).condition is Condition.READY


def test_permanent_refusal_is_reported_at_once(google: Google, sandbox: GoogleSandbox, lost: Desired) -> None:
    sandbox.jobs.refuse(invalid("Machine type 'g2-standard-8' is not supported.", "custom_job.job_spec"))
    began = google.clock.now()
    with pytest.raises(Invalid, match=r"Google refuses: create a custom job in us-central1: .*is not supported"):
        Jobs(google).create(lost)
    sandbox.jobs.refuse(Refusal(403, "Permission 'aiplatform.customJobs.create' denied on resource x."))
    with pytest.raises(Unauthorized, match=r"lack the permission aiplatform.customJobs.create"):
        Jobs(google).create(lost)
    assert google.clock.now() == began


def test_errors_of_the_sdk_are_translated(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    desired, _ = scene.wanted_jobs()
    body = ready(requests.job(desired))
    stranger = Google(google.clock, {**sandbox.environment, "CLOUDSDK_AUTH_ACCESS_TOKEN": "unknown"})
    with pytest.raises(Unauthorized, match=r"no valid credentials of Google Cloud: .*; run `gcloud auth"):
        Creator(stranger).create(sandbox.project, REGION, body)
    nowhere = Google(
        google.clock, {**sandbox.environment, "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": "http://127.0.0.1:9"}
    )
    with pytest.raises(Retryable, match="no answer from Google: create a custom job in us-central1"):
        Creator(nowhere).create(sandbox.project, REGION, body)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RetryError("Timeout of 60.0s exceeded", None), Retryable),
        (GoogleAPICallError("the answer broke off"), Retryable),
        (ParseError("Failed to parse the answer"), Retryable),
        (TransportError("no way to the metadata server"), Retryable),
        (RefreshError("invalid_grant: Bad Request"), Unauthorized),
        (KeyError("no error of a library"), KeyError),
    ],
)
def test_only_credential_errors_are_unauthorized(
    google: Google,
    sandbox: GoogleSandbox,
    lost: Desired,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: type[Exception],
) -> None:
    """The request was sent before the error, so the job exists and is read."""
    from google.cloud.aiplatform_v1 import JobServiceClient  # noqa: PLC0415  takes a second in every collecting process

    create: Any = JobServiceClient.create_custom_job  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def broken(client: JobServiceClient, **parameters: Any) -> None:
        create(client, **parameters)
        raise error

    monkeypatch.setattr(JobServiceClient, "create_custom_job", broken)
    if expected is Retryable:
        assert Jobs(google).create(lost)["id"] != lost.outputs["id"]
    else:
        with pytest.raises(expected):
            Jobs(google).create(lost)
    assert len(sandbox.inventory()["job"]) == 2


def test_rate_limited_creation_is_retried(google: Google, sandbox: GoogleSandbox, lost: Desired) -> None:
    take_calls(sandbox)
    sandbox.fail(how="throttle", on=CREATE, times=2)
    assert Jobs(google).create(lost)["id"]
    assert take_calls(sandbox).count("create") == 3
    assert len(sandbox.inventory()["job"]) == 2


def test_delete_stops_and_removes_a_job_and_is_idempotent(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    for slot, prepare in (("vertex-0", sandbox.jobs.start), ("vertex-1", sandbox.jobs.finish)):
        record = scene.record(f"vertex_job.{slot}")
        prepare(record.outputs["id"])
        take_calls(sandbox)
        Jobs(google).delete(record)
        calls = take_calls(sandbox)
        assert ("cancel" in calls) == (slot == "vertex-0")
        assert calls.count("delete") == 1
        assert described(google, record.outputs["name"]) is None
        take_calls(sandbox)
        Jobs(google).delete(record)
        assert take_calls(sandbox) == ["get", "delete"]
    assert "job" not in sandbox.inventory()


def test_job_that_ends_while_it_is_stopped_is_removed(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    record = scene.record("vertex_job.vertex-0")
    sandbox.jobs.start(record.outputs["id"])

    def heard(when: str, what: str) -> None:
        if when == "before" and what.endswith(":cancel"):
            sandbox.jobs.finish(record.outputs["id"])

    take_calls(sandbox)
    Jobs(Google(google.clock, sandbox.environment, heard=heard)).delete(record)
    assert take_calls(sandbox)[:4] == ["get", "cancel", "get", "get"]
    assert described(google, record.outputs["name"]) is None


def test_forbidden_stop_is_reported(google: Google, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    record, real = scene.record("vertex_job.vertex-0"), google.call

    def call(service: str, method: str, path: str, **parameters: Any) -> dict[str, Any]:
        if path.endswith(":cancel"):
            raise Invalid("it cannot be canceled")
        return real(service, method, path, **parameters)

    monkeypatch.setattr(google, "call", call)
    with pytest.raises(Invalid, match="it cannot be canceled"):
        Jobs(google).delete(record)


def test_unrecorded_job_is_ended_by_its_name(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    record = scene.record("vertex_job.vertex-0")
    Jobs(google).delete(replace(record, outputs={}))
    assert described(google, record.outputs["name"]) is None
    assert len(sandbox.inventory()["job"]) == 1
    # A job without a recorded run is not deleted.
    Jobs(google).delete(replace(scene.record("vertex_job.vertex-1"), outputs={}, settings={}))
    assert len(sandbox.inventory()["job"]) == 1


def test_list_owned_returns_jobs_of_the_run_only(google: Google, sandbox: GoogleSandbox, scene: Scene) -> None:
    desired, other = scene.wanted_jobs()
    sandbox.jobs.finish(other.outputs["id"])
    run = scene.context.run_uri
    owned = sorted(Jobs(google).list_owned(run, [REGION, "us-east-1"]), key=lambda job: job.address)
    assert [(job.address, job.name, job.outputs, job.generation) for job in owned] == [
        (each.resource.address, each.name, each.outputs, 0) for each in (desired, other)
    ]
    assert list(Jobs(google).list_owned("gs://other/run", [REGION])) == []
    take_calls(sandbox)
    assert list(Jobs(google).list_owned(run, ["us-east-1", "eu-west-3"])) == []
    assert take_calls(sandbox) == []


def test_update_of_a_job_is_rejected(google: Google, scene: Scene) -> None:
    desired, _ = scene.wanted_jobs()
    with pytest.raises(Invalid, match=r"a job cannot change: vertex_job\.vertex-0: image"):
        Jobs(google).update(desired, {"image"})


def test_missing_sdk_is_reported_with_the_install_command(
    google: Google, lost: Desired, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform_v1", None)
    with pytest.raises(Invalid, match=r"pip install 'skerry\[vertex\]'"):
        Jobs(google).create(lost)
