from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.executors.clouds import CloudStage, CloudSuite, check_requests
from tests.infra.executors.suite import LONG

from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.handler_helpers import Absent
from skerry.infra.executors import Ending, VertexExecutor
from skerry.testing.google.calls import GoogleCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.executors import ReplicaHandle
    from skerry.infra.provision.target_and_store_interfaces import JobView
    from skerry.testing.google.sandbox import GoogleSandbox

IMAGE = f"us-central1-docker.pkg.dev/skerry-sandbox/skerry/replica@sha256:{'1' * 64}"


class VertexStage(CloudStage):
    CREATE = "aiplatform.projects.locations.customJobs.create"
    RECLAIMED = "STOCKOUT"

    @property
    def driver(self) -> Any:
        return self.sandbox.jobs

    def __init__(self, sandbox: GoogleSandbox) -> None:
        super().__init__("gs://acme")
        self.sandbox = sandbox
        project = sandbox.project
        sandbox.enable("aiplatform.googleapis.com")
        for path, body in (
            (f"/storage/v1/b?project={project}", {"name": "acme"}),
            (f"/v1/projects/{project}/serviceAccounts", {"accountId": "replica"}),
        ):
            status, response = sandbox.call("POST", path, body)
            assert status == 200, response

    def executor(self, **options: Any) -> VertexExecutor:
        own = {
            "image": IMAGE,
            "project": self.sandbox.project,
            "region": "us-central1",
            "service_account": f"replica@{self.sandbox.project}.iam.gserviceaccount.com",
            "machine": "g2-standard-8",
        }
        return VertexExecutor(**self.with_defaults({**own, **options}))

    def environment(self) -> Mapping[str, str]:
        return self.sandbox.environment

    def variables_of(self, handle: ReplicaHandle) -> Mapping[str, str]:
        _, row = self.sandbox.call("GET", f"/v1/{handle.job}")
        (pool,) = row["jobSpec"]["workerPoolSpecs"]
        assert "$" not in "".join(variable["value"] for variable in pool["containerSpec"]["env"])
        return {variable["name"]: variable["value"] for variable in pool["containerSpec"]["env"]}


@pytest.fixture
def stage(google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> VertexStage:
    # google-auth looks for credentials in the process's own environment.
    for name, text in google.environment.items():
        monkeypatch.setenv(name, text)
    return VertexStage(google)


class TestVertex(CloudSuite):
    pass


def test_built_in_accelerators_are_filled_in(stage: VertexStage) -> None:
    with stage.executor(machine="g2-standard-24", scheduling="spot") as executor:
        (handle,) = stage.launch(executor, 1)
        _, row = stage.sandbox.call("GET", f"/v1/{handle.job}")
        machine = row["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]
        assert (machine["acceleratorType"], machine["acceleratorCount"]) == ("NVIDIA_L4", 2)
        assert stage.variables_of(handle)["SKERRY_RANKS"] == "2"


def test_one_job_is_read_and_several_are_listed(stage: VertexStage) -> None:
    with stage.executor() as executor:
        handles = stage.launch(executor)
        for number, verb in ((1, "get"), (2, "list")):
            stage.sandbox.calls.clear()
            assert len(executor.read_jobs([handle.job for handle in handles[:number]])) == number
            assert [call.name.rpartition(".")[2] for call in stage.sandbox.calls] == [verb]


def test_cancel_of_a_job_that_ends_meanwhile_succeeds(stage: VertexStage) -> None:
    with stage.executor() as executor:
        (handle,) = stage.launch(executor, 1)
        read_jobs = executor.read_jobs

        def just_before(jobs: Sequence[str]) -> Sequence[JobView | None]:
            states = read_jobs(jobs)
            stage.finish(handle, 0)
            return states

        executor.read_jobs = just_before  # type: ignore[method-assign]
        executor.cancel(handle)
        assert "aiplatform.projects.locations.customJobs.cancel" in [call.name for call in stage.sandbox.calls]
        assert executor.collect([handle], LONG) == [Ending(exit_code=0)]


def test_close_retries_until_vertex_knows_the_job(stage: VertexStage, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_vertex_requests_match_the_golden_file(stage: VertexStage) -> None:
    with stage.executor(run="gs://acme/golden/tiny", scheduling="spot") as executor:
        executor.launch_replicas(1, "python", ["train.py"])
        requests = [
            call.body for call in stage.sandbox.calls if isinstance(call, GoogleCall) and call.name == stage.CREATE
        ]
        check_requests("vertex", requests)
