"""Runs replicas as sandboxes of Modal, each in one container that is started once."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta  # noqa: TC003  a field of a dataclass
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.executors.cloud_executor_base import JobCreator, NamedJob
from skerry.infra.executors.labelled_base import LabelledExecutor
from skerry.infra.provision.target_and_store_interfaces import stem_of
from skerry.infra.targets.modal.labelled_jobs_service import ModalSandboxes
from skerry.infra.targets.modal.modal_client import ModalWorkspace
from skerry.infra.targets.modal.options import LONGEST
from skerry.infra.targets.modal.resource_graph import COMMAND
from skerry.infra.targets.modal.resource_types import Job
from skerry.infra.targets.shared.labelled_jobs import LabelledJobs
from skerry.runtime import contract
from skerry.runtime.errors import Invalid
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.provision.handler import Desired
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.targets.shared.labelled_jobs import JobService

_LONGEST_NAME = 63


@dataclass(kw_only=True)
class ModalExecutor(LabelledExecutor):
    """Runs replicas as sandboxes of an App that is named after the run.

    modal_environment: of the workspace. gpu: a type, without a number. secrets: Secrets of Modal, by name; a store in
    S3 needs one with its two keys. max_runtime: at most 24 hours. The App stays; `App.stop` of the SDK removes it.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("modal", "modal")
    KIND: ClassVar = Job

    max_runtime: timedelta = LONGEST
    modal_environment: str = "main"
    gpu: str | None = None
    gpus: int = 1
    cpu: float = 1.0
    memory_mib: int = 4096
    secrets: tuple[str, ...] = ()
    _workspace: ModalWorkspace = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions. Raises Invalid for a longer time than Modal gives."""
        super().__post_init__()
        if self.max_runtime > LONGEST:
            raise Invalid(f"max_runtime is {self.max_runtime}: a sandbox of Modal runs at most {LONGEST}")
        self._workspace = ModalWorkspace(self.clock, self.environment)

    @property
    def place(self) -> Place:
        """See CloudExecutor."""
        return Place(cloud="modal", accelerator=self.gpu, accelerators=0 if self.gpu is None else self.gpus)

    @property
    def service(self) -> JobService:
        """See LabelledExecutor."""
        return ModalSandboxes(self._workspace)

    @property
    def region(self) -> str:
        """See LabelledExecutor."""
        return self.modal_environment

    def _creator(self, context: RunContext, variables: Mapping[str, str]) -> JobCreator:
        creator = super()._creator(context, variables)
        handler = _NumberedJobs(self._workspace, self.service)
        return JobCreator(handler=handler, resource=creator.resource, output=creator.output, run=creator.run)

    def _list_jobs(self, context: RunContext) -> Iterator[NamedJob]:
        yield from super()._list_jobs(context)
        # No listing has ended sandboxes.
        for name in self._workspace.notes(stem_of(self.run), self.modal_environment).values():
            yield NamedJob(name=name, over=True)

    def _job(self, name: str, replica: ReplicaSlot, variables: Mapping[str, str]) -> Job:
        return Job(
            key=replica.slot,
            name=name_with_room(name, _LONGEST_NAME),
            region=self.modal_environment,
            app=stem_of(self.run),
            image=self.image,
            command=COMMAND,
            environment={
                contract.RANKS: "1" if self.gpu is None else str(self.gpus),
                **variables,
                **self.own_variables(replica),
            },
            gpu=None if self.gpu is None else f"{self.gpu}:{self.gpus}",
            cpu=self.cpu,
            memory_mib=self.memory_mib,
            timeout_s=int(self.max_runtime.total_seconds()),
            secrets=self.secrets,
        )


class _NumberedJobs(LabelledJobs):
    """Sandboxes whose newest name in each slot is a tag of the App, so that the next attempt is known."""

    def __init__(self, workspace: ModalWorkspace, service: JobService) -> None:
        super().__init__(service, Job)
        self._workspace = workspace

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        outputs = super().create(desired)
        app, resource = str(desired.settings["app"]), desired.resource
        self._workspace.note(app, resource.region, resource.key, desired.name)
        return outputs
