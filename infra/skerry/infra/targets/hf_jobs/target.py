"""Implements the target kind `hf_jobs`: groups of replicas as jobs of Hugging Face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra import clouds
from skerry.infra.targets.hf_jobs import checks, costs
from skerry.infra.targets.hf_jobs.jobs_api import Hub
from skerry.infra.targets.hf_jobs.labelled_jobs_service import HfJobs
from skerry.infra.targets.hf_jobs.resource_graph import build_resources
from skerry.infra.targets.hf_jobs.resource_types import Job
from skerry.infra.targets.shared import labelled_jobs
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Handler, Observed, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import Check, JobView, LogLine, Rate, RunContext
    from skerry.infra.spec.model import Replicas


def open_target(access: OperatorAccess) -> HuggingFace:
    """Open the target `hf_jobs`, with the token in the environment. Does no I/O."""
    return HuggingFace(access)


class HuggingFace:
    """See Target."""

    job_kind: Final = Job.KIND

    def __init__(self, access: OperatorAccess) -> None:
        self._access = access
        self._hub = Hub(access.clock, access.environment, access.calls)
        self._service = HfJobs(self._hub, access.environment)

    def identity(self) -> Mapping[str, str]:
        """See Target.identity. The spec names the namespace of the jobs, so every user reaches the same ones."""
        return {}

    def resources(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources."""
        home = clouds.open_home(context.run_uri, self._access)
        return build_resources(context, groups, home.environment(context))

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {Job.KIND: labelled_jobs.LabelledJobs(self._service, Job)}

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See Target.claim."""
        del observed
        raise Invalid(f"cannot be imported: {desired.resource.address}; a job belongs to the run that created it")

    def rates(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates. The prices are those of the API, and do not vary."""
        try:
            hardware = self._hub.hardware()
        except SkerryError as error:
            return costs.rates(f"the prices could not be read: {error}", context.spec.limits, groups)
        return costs.rates(hardware, context.spec.limits, groups)

    def checks(self, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        del context
        return checks.checks(self._hub, self._access.environment, groups)

    def jobs(self, state_records: Sequence[StateRecord]) -> Sequence[JobView]:
        """See Target.jobs."""
        return labelled_jobs.views(self._service, state_records)

    def logs(self, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs."""
        return labelled_jobs.lines(self._service, state_record, cursor)
