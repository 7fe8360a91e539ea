"""Runs replicas as sandboxes of Modal, each in one container that is started once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta  # noqa: TC003  a field of a dataclass
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.executors.cloud_executor_base import CloudExecutor
from skerry.infra.provision.handler import NamedJob
from skerry.infra.provision.target_and_store_interfaces import stem_of
from skerry.infra.targets.modal.labelled_jobs_service import ModalSandboxes
from skerry.infra.targets.modal.modal_client import ModalWorkspace
from skerry.infra.targets.modal.options import LONGEST, ModalTarget
from skerry.infra.targets.modal.resource_graph import job_of
from skerry.infra.targets.modal.resource_types import Job
from skerry.infra.targets.shared.labelled_jobs import LabelledJobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from skerry.infra.provision.handler import Desired, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import ReplicaSlot


@dataclass(kw_only=True)
class ModalExecutor(CloudExecutor):
    """Runs replicas as sandboxes of an App that is named after the run.

    modal_environment: of the workspace. gpu: a type, without a number. secrets: Secrets of Modal, by name; a store in
    S3 needs one with its two keys. max_runtime: at most 24 hours. The App stays; `App.stop` of the SDK removes it.
    """

    SDK: ClassVar[tuple[str, str] | None] = ("modal", "modal")
    NAMES: ClassVar[Mapping[str, str]] = {"environment": "modal_environment", "memory": "memory_mib"}

    max_runtime: timedelta = LONGEST
    modal_environment: str = "main"
    gpu: str | None = None
    gpus: int = 1
    cpu: float = 1.0
    memory_mib: int = 4096
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """See CloudExecutor."""
        super().__post_init__()
        self._jobs = _NumberedJobs(ModalWorkspace(self.clock, self.environment))

    def _as_target(self) -> ModalTarget:
        return self._options_of(
            ModalTarget,
            environment=self.modal_environment,
            memory=f"{self.memory_mib}MiB",
            secrets=tuple(self.secrets),
        )

    def _describe(self, context: RunContext, variables: Mapping[str, str]) -> Callable[[ReplicaSlot], Job]:
        (group,) = context.spec.replicas
        return lambda replica: job_of(context, group, replica, {**variables, **self.own_variables(replica)})


class _NumberedJobs(LabelledJobs):
    """Sandboxes whose newest name in each slot is a tag of the App: no listing has ended ones."""

    def __init__(self, workspace: ModalWorkspace) -> None:
        super().__init__(ModalSandboxes(workspace), Job)
        self._workspace = workspace

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        outputs = super().create(desired)
        app, resource = str(desired.settings["app"]), desired.resource
        self._workspace.note(app, resource.region, resource.key, desired.name)
        return outputs

    def names(self, like: StateRecord, run: str) -> Iterator[NamedJob]:
        """See JobHandler.names."""
        yield from super().names(like, run)
        for name in self._workspace.notes(stem_of(run), like.region).values():
            yield NamedJob(name, over=True)
