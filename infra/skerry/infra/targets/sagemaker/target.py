"""Implements the target kind `sagemaker`: groups of replicas as training jobs of SageMaker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.ecr import Repositories, Repository
from skerry.infra.clouds.aws.iam import Role, Roles
from skerry.infra.clouds.aws.run_bucket_and_image_repository import repositories
from skerry.infra.targets.sagemaker import checks, costs, job_views, quotas
from skerry.infra.targets.sagemaker.jobs import Jobs
from skerry.infra.targets.sagemaker.machine_lookup import find_machine
from skerry.infra.targets.sagemaker.options import SageMakerTarget
from skerry.infra.targets.sagemaker.resource_graph import build_resources, runtime_s
from skerry.infra.targets.sagemaker.resource_types import Job
from skerry.infra.targets.shared.aws_target import AwsTarget
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Handler, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import Check, JobView, LogLine, Rate, RunContext
    from skerry.infra.spec.model import Replicas
    from skerry.infra.targets.sagemaker.machine_lookup import Machine


def open_target(access: OperatorAccess) -> SageMaker:
    """Open the target `sagemaker`. Does no I/O."""
    return SageMaker.open(access)


class SageMaker(AwsTarget):
    """See Target."""

    job_kind: Final = Job.KIND

    def resources(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources. Raises Invalid if a group's machines are not available, or not for its time."""
        machines = [self._machine(group) for group in groups]
        self._check_lengths(context, groups)
        graph = build_resources(context, self._account(), groups, machines, self._google_store(context))
        return (*repositories(context), *graph)

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {
            Repository.KIND: Repositories(self.aws),
            Role.KIND: Roles(self.aws),
            Job.KIND: Jobs(self.aws),
        }

    def rates(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates. All prices are from tables, and so do not change."""
        return costs.rates(self._prices(), context.spec.limits, groups)

    def checks(self, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        yield from checks.checks(self.aws, context, groups)
        yield from self._image_checks(context, groups)
        yield from self._data_checks(context, groups)

    def jobs(self, state_records: Sequence[StateRecord]) -> Sequence[JobView]:
        """See Target.jobs."""
        return job_views.views(self.aws, state_records)

    def logs(self, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs."""
        return job_views.lines(self.aws, state_record, cursor)

    def _check_lengths(self, context: RunContext, groups: Sequence[Replicas]) -> None:
        """Check the time of the longest job in each region."""
        longest: dict[str, int] = {}
        for target in map(SageMakerTarget.of, groups):
            longest[target.region] = max(runtime_s(context.hours, target), longest.get(target.region, 0))
        for region, seconds in longest.items():
            quotas.check_length(self.aws, region, seconds)

    def _machine(self, group: Replicas) -> Machine:
        try:
            return find_machine(self.aws, SageMakerTarget.of(group))
        except Invalid as error:
            raise Invalid(f"replicas {group.name}: {error}") from error
