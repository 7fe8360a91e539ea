"""Implements the target kind `modal`: groups of replicas as sandboxes of Modal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra import clouds
from skerry.infra.clouds.aws.iam import Role, Roles
from skerry.infra.clouds.aws.session import Account
from skerry.infra.cost import prices
from skerry.infra.targets.modal import checks, costs
from skerry.infra.targets.modal.labelled_jobs_service import Apps, ModalSandboxes
from skerry.infra.targets.modal.modal_client import ModalWorkspace
from skerry.infra.targets.modal.options import ModalTarget
from skerry.infra.targets.modal.resource_graph import build_resources
from skerry.infra.targets.modal.resource_types import App, Job
from skerry.infra.targets.shared import labelled_jobs
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Handler, Observed, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import Check, JobView, LogLine, Rate, RunContext
    from skerry.infra.spec.model import Replicas


def open_target(access: OperatorAccess) -> Modal:
    """Open the target `modal`, with the token of the SDK. Does no I/O, and imports no SDK."""
    return Modal(access)


class Modal:
    """See Target."""

    job_kind: Final = Job.KIND

    def __init__(self, access: OperatorAccess) -> None:
        self._access = access
        self._aws = access.aws
        self._workspace = ModalWorkspace(access.clock, access.environment, access.calls)
        self._service = ModalSandboxes(self._workspace)
        self._own_prices = prices.own_file(access.environment)

    def identity(self) -> Mapping[str, str]:
        """See Target.identity: the workspace."""
        return {"modal": self._workspace.name()}

    def resources(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources."""
        account = None
        if any(ModalTarget.of(group).workspace is not None for group in groups):
            caller = self._aws.identity()
            account = Account(number=caller.account, partition=caller.partition)
        home = clouds.open_home(context.run_uri, self._access)
        return build_resources(context, groups, home.environment(context), account)

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {
            Role.KIND: Roles(self._aws),
            App.KIND: Apps(self._workspace),
            Job.KIND: labelled_jobs.LabelledJobs(self._service, Job),
        }

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See Target.claim."""
        del observed
        raise Invalid(f"a {desired.resource.KIND} cannot be imported: stop it, and `skerry apply` creates another")

    def rates(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates."""
        return costs.rates(prices.load("modal", self._own_prices), context.spec.limits, groups)

    def checks(self, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        del context
        return checks.checks(self._workspace, self._aws, groups)

    def jobs(self, state_records: Sequence[StateRecord]) -> Sequence[JobView]:
        """See Target.jobs."""
        return labelled_jobs.views(self._service, state_records)

    def logs(self, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs."""
        return labelled_jobs.lines(self._service, state_record, cursor)
