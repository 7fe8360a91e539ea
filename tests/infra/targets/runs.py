"""A run on each target as an operator has it: its spec, commands that each begin anew, and its jobs in a sandbox."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from tests.infra.deploy import account
from tests.infra.deploy.account import DIGEST, IMAGE, Operator, write_run
from tests.support.clocks import FakeClock

from skerry.infra.cli import show_resources_commands, up_status_destroy_in_clouds
from skerry.infra.deploy import list_and_stop_jobs
from skerry.infra.deploy.lock_owner_identity import this_process
from skerry.infra.deploy.read_clouds import read_state
from skerry.infra.provision.graph import Life
from skerry.infra.provision.state import StatePhase

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from skerry.testing.calls import Calls
    from skerry.testing.google.sandbox import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

SAGEMAKER_GROUP = """\
  - name: a
    count: {count}
    target: {{kind: sagemaker, region: us-east-1, instance: ml.g5.xlarge, {options}}}
"""
KUBERNETES_GROUP = """\
  - name: a
    count: {count}
    target: {{kind: kubernetes, namespace: train, {secret}}}
"""
HF_JOBS_GROUP = """\
  - name: a
    count: {count}
    target:
      kind: hf_jobs
      namespace: acme
      flavor: cpu-basic
      secrets: {{AWS_ACCESS_KEY_ID: REPLICA_KEY_ID, AWS_SECRET_ACCESS_KEY: REPLICA_SECRET_KEY}}
"""
MODAL_GROUP = """\
  - name: a
    count: {count}
    target: {{kind: modal, secrets: [store-keys]}}
"""
VERTEX_GROUP = """\
  - name: a
    count: {count}
    target: {{kind: vertex, project: {project}, region: us-central1, machine: n2-standard-4, {options}}}
"""


class TargetRun(ABC):
    """The run `tiny` with one group, in an account of its own.

    KIND: of its jobs. CREATE: the call that creates a job. CREATED: the number of resources of each kind, without those
    of the replicas. REPEATS: its SDK repeats a creation that had no answer.
    """

    KIND: ClassVar[str]
    CREATE: ClassVar[str]
    CREATED: ClassVar[dict[str, int]]
    REPEATS: ClassVar[bool] = False
    IMAGE: str = IMAGE

    def __init__(self, folder: Path, sandbox: Any) -> None:
        self.folder = folder
        self.sandbox = sandbox
        self.environment: dict[str, str] = sandbox.environment

    @property
    @abstractmethod
    def driver(self) -> Any:
        """The part of the sandbox with which a test drives the jobs."""

    @abstractmethod
    def group(self, count: int, options: str) -> str:
        """The entry of `replicas`."""

    def write_spec(self, *, count: int = 2, options: str = "role: replica", others: str = "", **sections: str) -> Path:
        """Write the spec. others: other groups. sections: see write_run."""
        return write_run(self.folder, self.group(count, options) + others, **{"image": self.IMAGE, **sections})

    def operator(self, **values: Any) -> Operator:
        """Write the spec, and return its operator. values: see write_spec."""
        return Operator(self.write_spec(**values), self.environment)

    def jobs(self, operator: Operator) -> dict[str, str]:
        """The newest job of each slot."""
        return {view.slot: view.job for _, view in list_and_stop_jobs.list_jobs(operator.deployment())}

    def live(self) -> int:
        """The number of jobs that wait or run."""
        inventory = self.sandbox.inventory()
        return len(inventory.get("job", ())) + len(inventory.get("training job", ()))

    def creations(self) -> int:
        """The number of jobs that were created since the previous call."""
        created = sum(call.name == self.CREATE for call in self.sandbox.calls)
        self.sandbox.calls.clear()
        return created


class BatchRun(TargetRun):
    KIND = "aws_batch_job"
    CREATE = "batch:SubmitJob"
    CREATED: ClassVar = {
        "bucket": 1,
        "compute environment": 1,
        "instance profile": 1,
        "job queue": 1,
        "launch template": 1,
        "log group": 1,
        "repository": 1,
        "role": 2,
        "security group": 1,
    }
    sandbox: Sandbox

    @property
    def driver(self) -> Any:
        return self.sandbox.batch

    def group(self, count: int, options: str) -> str:
        return account.GROUP.format(count=count, role=options.removeprefix("role: ")).replace("name: b", "name: a")


class SageMakerRun(TargetRun):
    KIND = "sagemaker_job"
    CREATE = "sagemaker:CreateTrainingJob"
    CREATED: ClassVar = {"bucket": 1, "repository": 1}
    sandbox: Sandbox

    @property
    def driver(self) -> Any:
        return self.sandbox.training

    def group(self, count: int, options: str) -> str:
        return SAGEMAKER_GROUP.format(count=count, options=options)


class VertexRun(TargetRun):
    KIND = "vertex_job"
    CREATE = "aiplatform.projects.locations.customJobs.create"
    CREATED: ClassVar = {"bucket": 1, "repository": 1}
    IMAGE = f"us-central1-docker.pkg.dev/skerry-sandbox/skerry/replica@sha256:{DIGEST}"
    sandbox: GoogleSandbox

    @property
    def driver(self) -> Any:
        return self.sandbox.jobs

    def group(self, count: int, options: str) -> str:
        return VERTEX_GROUP.format(count=count, project=self.sandbox.project, options=options)

    def write_spec(self, **values: Any) -> Path:
        return super().write_spec(**{"store": "gs://acme-skerry/runs", **values})


class ClusterAndAccount:
    """A cluster or another service, and the AWS account with the store: as one sandbox."""

    def __init__(self, cluster: Any, account: Sandbox) -> None:
        self.cluster = cluster
        self.account = account
        keys = {"REPLICA_KEY_ID": "AWS_ACCESS_KEY_ID", "REPLICA_SECRET_KEY": "AWS_SECRET_ACCESS_KEY"}
        own = {name: account.environment[variable] for name, variable in keys.items()}
        self.environment = {**account.environment, **cluster.environment, **own}
        self.settling = 0

    @property
    def calls(self) -> Calls:
        return self.cluster.calls

    @property
    def jobs(self) -> Any:
        return self.cluster.jobs

    def inventory(self) -> dict[str, tuple[str, ...]]:
        return {**self.account.inventory(), **self.cluster.inventory()}

    def fail(self, **values: Any) -> None:
        """See CloudSandbox. Without `on` both fail."""
        for sandbox in (self.cluster,) if "on" in values else (self.cluster, self.account):
            sandbox.fail(**values)

    def heal(self) -> None:
        self.cluster.heal()
        self.account.heal()

    def reset(self) -> None:
        self.cluster.reset()
        self.account.reset()


class RunBesideAccount(TargetRun):
    """A run on a cluster or another service, with the store in AWS."""

    CREATED: ClassVar = {"bucket": 1}
    IMAGE = f"ghcr.io/acme/skerry@sha256:{DIGEST}"
    sandbox: ClusterAndAccount

    @property
    def driver(self) -> Any:
        return self.sandbox.jobs


class KubernetesRun(RunBesideAccount):
    KIND = "kubernetes_job"
    CREATE = "kubernetes:apply jobs"

    def group(self, count: int, options: str) -> str:
        """options: of the target; the Secret of the sandbox unless it is `keyless`."""
        secret = "" if options == "keyless" else "secret: store-keys"
        return KUBERNETES_GROUP.format(count=count, secret=secret)

    def live(self) -> int:
        jobs = self.sandbox.cluster.objects.list("jobs", "")
        conditions = [[each["type"] for each in job["status"].get("conditions", ())] for job in jobs]
        return sum(not {"Complete", "Failed"} & set(types) for types in conditions)


class HfJobsRun(RunBesideAccount):
    KIND = "hf_jobs_job"
    CREATE = "huggingface:RunJob"

    def group(self, count: int, options: str) -> str:
        del options
        return HF_JOBS_GROUP.format(count=count)


class ModalRun(RunBesideAccount):
    KIND = "modal_job"
    CREATE = "modal:SandboxCreateV2"
    CREATED: ClassVar = {"bucket": 1, "app": 1}
    REPEATS = True

    def group(self, count: int, options: str) -> str:
        del options
        return MODAL_GROUP.format(count=count)


def start_one(run: TargetRun, monkeypatch: pytest.MonkeyPatch) -> Operator:
    """Start the only job of the run; commands of this process then act on it and do not wait."""
    for module in (show_resources_commands, up_status_destroy_in_clouds):
        monkeypatch.setattr(module, "SystemClock", FakeClock)
    for name, value in {**run.environment, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    operator = run.operator(count=1)
    assert operator.apply().ok
    (job,) = run.jobs(operator).values()
    run.driver.start(job)
    return operator


def delete_state(operator: Operator) -> None:
    store = operator.deployment().open_store()
    for entry in list(store.list("state/")):
        store.delete(entry.key)
    assert read_state(operator.deployment()) is None


def begin_deletions(operator: Operator) -> None:
    """Leave the state as a destroy does that is killed before its first call."""
    deployment, state = operator.deployment(), read_state(operator.deployment())
    assert state is not None
    with deployment.open_state().hold(this_process("destroy", deployment.clock), state, deployment.run) as hold:
        for entry in state.entries:
            if entry.record.life is not Life.DATA:
                hold.note(entry.id, replace(entry, phase=StatePhase.DELETING))
