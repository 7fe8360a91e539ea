"""A run whose lost replica comes back with no operator: real processes, each with the rights of its role alone."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.e2e.conftest import ROOT
from tests.e2e.deployed import Deployed, check_nothing_was_lost
from tests.infra.deploy.account import IMAGE, skerry
from tests.infra.targets.runs import VertexRun
from tests.infra.targets.vertex.kit import bind, trainer

from skerry.runtime.store import open_store
from skerry.testing.google.sandbox import GoogleSandbox
from skerry.testing.processes import Processes
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

GROUPS: Final = """\
  - name: s
    count: 2
    target: {{{target}, revive: peers, revive_after: 2s}}
"""
SAGEMAKER: Final = "kind: sagemaker, region: us-east-1, instance: ml.c7i.2xlarge"
VERTEX: Final = "kind: vertex, project: {}, region: us-central1, machine: n2-standard-4, byo: {{service_account: {}}}"
# The first process of s-1 is killed before its next step once a round has closed: it has three rounds left then.
DRIVER: Final = """\
import os, runpy, signal
from torch.optim.optimizer import register_optimizer_step_pre_hook
from skerry.runtime.store import open_store

store = open_store(os.environ["SKERRY_RUN"])

def die(*_):
    if store.list("commits/"):
        os.kill(os.getpid(), signal.SIGKILL)

if os.environ["SKERRY_SLOT"] == "s-1" and not store.list("members/s-1/"):
    register_optimizer_step_pre_hook(die)
runpy.run_path("train.py", run_name="__main__")
"""


def write_run(folder: Path, store: str, image: str, target: str) -> Deployed:
    shutil.copytree(ROOT / "runtime/examples/tiny_gpt", folder / "code")
    (folder / "code/driver.py").write_text(DRIVER)
    groups = GROUPS.format(target=target)
    run = Deployed.write(folder, store=store, image=image, groups=groups, slots=("s-0", "s-1"), rounds=4)
    text = run.spec.read_text().replace(f"{ROOT}/runtime/examples/tiny_gpt", "code").replace("train.py", "driver.py")
    run.spec.write_text(text)
    return run


def check_end(run: Deployed, sandbox: Any, first: dict[str, str], revived: str) -> None:
    """The revived job is the job of its slot, an apply changes nothing, and no round has lost anything."""
    jobs = {slot: (job["job"], job["condition"]) for slot, job in run.jobs().items()}
    assert jobs == {"s-0": (first["s-0"], "done"), "s-1": (revived, "done")}
    sandbox.calls.clear()
    run.apply()
    assert [call for call in sandbox.calls.writes if call.service not in {"s3", "storage"}] == []
    assert "s-1 is silent: its job" in skerry("logs", str(run.spec)).output


def jobs_of(run: Deployed) -> dict[str, str]:
    return {slot: str(job["job"]) for slot, job in run.jobs().items()}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    with Sandbox(enforce_iam=True, registry="127.0.0.1:1", network="host", stop_grace_s=1000) as sandbox:
        sandbox.any_image = True
        sandbox.training.containers = Processes()
        for name, text in sandbox.environment.items():
            monkeypatch.setenv(name, text)
        yield sandbox


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleSandbox]:
    with GoogleSandbox(registry="127.0.0.1:1") as sandbox:
        sandbox.any_image = True
        sandbox.job_runs.containers = Processes()
        for name, text in sandbox.environment.items():
            monkeypatch.setenv(name, text)
        yield sandbox
        assert sandbox.violations == []


def test_lost_replica_on_sagemaker_comes_back(aws: Sandbox, tmp_path: Path) -> None:
    run = write_run(tmp_path, "s3://skerry-revive/runs", IMAGE, SAGEMAKER)
    run.apply()
    first = jobs_of(run)
    aws.calls.clear()
    assert aws.training.wait(first["s-1"], within_s=120) == "FAILED"
    assert aws.training.wait(first["s-0"], within_s=120) == "SUCCEEDED"
    revived = f"{first['s-1']}-g1"
    assert aws.training.wait(revived, within_s=120) == "SUCCEEDED"
    (creator,) = [call.caller for call in aws.calls if call.operation == "CreateTrainingJob"]
    assert creator.startswith("role/skerry-tried-")
    check_nothing_was_lost(open_store("s3://skerry-revive/runs/tried"), run, killed={"s-1"})
    check_end(run, aws, first, revived)
    run.destroy()
    # SageMaker keeps the record of a failed job.
    assert aws.inventory() in ({}, {"training job": (first["s-1"],)})


def test_lost_replica_on_vertex_comes_back(google: GoogleSandbox, tmp_path: Path) -> None:
    email = trainer(google)
    # The user's own account has its rights on the store by the user.
    for role in ("roles/storage.objectUser", "roles/storage.objectViewer"):
        bind(google, f"/v1/projects/{google.project}", role, f"serviceAccount:{email}")
    run = write_run(tmp_path, "gs://skerry-revive/runs", VertexRun.IMAGE, VERTEX.format(google.project, email))
    run.apply()
    first = jobs_of(run)
    google.calls.clear()
    assert google.jobs.wait(first["s-1"], within_s=120) == "JOB_STATE_FAILED"
    assert google.jobs.wait(first["s-0"], within_s=120) == "JOB_STATE_SUCCEEDED"
    (creator,) = [call.caller for call in google.calls if call.name.endswith("customJobs.create")]
    assert creator == f"serviceAccount:{email}"
    revived = jobs_of(run)["s-1"]
    assert google.jobs.wait(revived, within_s=120) == "JOB_STATE_SUCCEEDED"
    check_nothing_was_lost(open_store("gs://skerry-revive/runs/tried"), run, killed={"s-1"})
    check_end(run, google, first, revived)
    run.destroy()
    assert google.inventory() == {"service account": (email,)}
