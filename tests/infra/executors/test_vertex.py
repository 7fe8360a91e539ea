from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.executors.clouds import CloudStage, CloudSuite
from tests.infra.executors.golden import check_golden
from tests.infra.executors.suite import LONG

from skerry.infra.clouds.google.session import Absent, Google
from skerry.infra.executors import Ending, VertexExecutor
from skerry.infra.testing.google.calls import GoogleCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.executors import ReplicaHandle
    from skerry.infra.executors.cloud import Seen
    from skerry.infra.testing.google.sandbox import GoogleSandbox

IMAGE = f"us-central1-docker.pkg.dev/skerry-sandbox/skerry/replica@sha256:{'1' * 64}"


class VertexStage(CloudStage):
    CREATE = "aiplatform.projects.locations.customJobs.create"

    def __init__(self, sandbox: GoogleSandbox) -> None:
        super().__init__("gs://acme")
        self.sandbox = sandbox
        project = sandbox.project
        sandbox.enable("aiplatform.googleapis.com")
        for path, body in (
            (f"/storage/v1/b?project={project}", {"name": "acme"}),
            (f"/v1/projects/{project}/serviceAccounts", {"accountId": "replica"}),
        ):
            status, told = sandbox.call("POST", path, body)
            assert status == 200, told

    def executor(self, **options: Any) -> VertexExecutor:
        own = {
            "image": IMAGE,
            "project": self.sandbox.project,
            "region": "us-central1",
            "service_account": f"replica@{self.sandbox.project}.iam.gserviceaccount.com",
            "machine": "g2-standard-8",
        }
        return VertexExecutor(**self.common({**own, **options}))

    def environment(self) -> Mapping[str, str]:
        return self.sandbox.environment

    def write(self, handle: ReplicaHandle, text: str) -> None:
        self.sandbox.jobs.write(handle.job, text)

    def finish(self, handle: ReplicaHandle, code: int) -> None:
        self.sandbox.jobs.finish(handle.job, code)

    def lose(self, handle: ReplicaHandle) -> None:
        self.finish(handle, 137)

    def told(self, handle: ReplicaHandle) -> Mapping[str, str]:
        _, row = self.sandbox.call("GET", f"/v1/{handle.job}")
        (pool,) = row["jobSpec"]["workerPoolSpecs"]
        assert "$" not in "".join(one["value"] for one in pool["containerSpec"]["env"])
        return {one["name"]: one["value"] for one in pool["containerSpec"]["env"]}


@pytest.fixture
def stage(google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> VertexStage:
    # google-auth looks for credentials in the process's own environment.
    for name, text in google.environment.items():
        monkeypatch.setenv(name, text)
    return VertexStage(google)


class TestVertex(CloudSuite):
    pass


def test_a_machine_that_was_taken_away_is_a_kill_with_a_reason(stage: VertexStage) -> None:
    with stage.executor() as executor:
        handles = stage.launch(executor, 1)
        stage.sandbox.jobs.start(handles[0].job)
        stage.sandbox.jobs.interrupt(handles[0].job)
        (ending,) = executor.collect(handles, LONG)
        assert ending == Ending(signal=9)
        assert "STOCKOUT" in ending.why


def test_what_is_built_into_a_machine_need_not_be_said(stage: VertexStage) -> None:
    with stage.executor(machine="g2-standard-24", scheduling="spot") as executor:
        (handle,) = stage.launch(executor, 1)
        _, row = stage.sandbox.call("GET", f"/v1/{handle.job}")
        machine = row["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]
        assert (machine["acceleratorType"], machine["acceleratorCount"]) == ("NVIDIA_L4", 2)
        assert stage.told(handle)["SKERRY_RANKS"] == "2"


def test_a_job_that_ends_when_it_is_to_be_stopped_is_stopped(stage: VertexStage) -> None:
    with stage.executor() as executor:
        (handle,) = stage.launch(executor, 1)
        look = executor._look

        def just_before(jobs: Sequence[str]) -> Sequence[Seen | None]:
            seen = look(jobs)
            stage.finish(handle, 0)
            return seen

        executor._look = just_before  # type: ignore[method-assign]
        executor.cancel(handle)
        assert "aiplatform.projects.locations.customJobs.cancel" in [one.name for one in stage.sandbox.calls]
        assert executor.collect([handle], LONG) == [Ending(exit_code=0)]


def test_a_job_that_vertex_does_not_know_yet_is_stopped_when_it_does(
    stage: VertexStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = stage.executor()
    stage.launch(executor, 1)
    call, unknown = Google.call, iter([True] * 4)

    def late(google: Google, service: str, method: str, path: str, **more: Any) -> Any:
        if "/customJobs/" in path and next(unknown, False):
            raise Absent(f"not there: {path}")
        return call(google, service, method, path, **more)

    monkeypatch.setattr(Google, "call", late)
    executor.close()
    assert next(unknown, None) is None
    assert stage.live() == 0


def test_what_is_asked_of_vertex(stage: VertexStage) -> None:
    with stage.executor(run="gs://acme/golden/tiny", scheduling="spot") as executor:
        executor.launch_replicas(1, "python", ["train.py"])
        asked = [one.body for one in stage.sandbox.calls if isinstance(one, GoogleCall) and one.name == stage.CREATE]
        check_golden("vertex", asked)
