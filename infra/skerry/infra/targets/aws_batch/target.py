"""Implements the target kind `aws_batch`: groups of replicas as jobs of AWS Batch. Imports no SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.ecr import Repositories, Repository
from skerry.infra.clouds.aws.iam import (
    InstanceProfile,
    InstanceProfiles,
    Role,
    Roles,
    ServiceLinkedRole,
    ServiceLinkedRoles,
)
from skerry.infra.clouds.aws.logs import LogGroup, LogGroups
from skerry.infra.clouds.aws.run_bucket_and_image_repository import repositories
from skerry.infra.clouds.aws.security_group_in_existing_vpc import SecurityGroup, SecurityGroups
from skerry.infra.targets.aws_batch import checks, costs, job_views
from skerry.infra.targets.aws_batch.handlers import ComputeEnvironments, JobDefinitions, LaunchTemplates, Queues
from skerry.infra.targets.aws_batch.jobs import Jobs
from skerry.infra.targets.aws_batch.options import AwsBatchTarget
from skerry.infra.targets.aws_batch.region_offer import find_region_offer
from skerry.infra.targets.aws_batch.resource_graph import build_resources
from skerry.infra.targets.aws_batch.resource_types import ComputeEnvironment, Job, JobDefinition, LaunchTemplate, Queue
from skerry.infra.targets.shared.aws_target import AwsTarget

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Handler, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import Check, JobView, LogLine, Rate, RunContext
    from skerry.infra.spec.model import Replicas


def open_target(access: OperatorAccess) -> AwsBatch:
    """Open the target `aws_batch`. Does no I/O."""
    return AwsBatch.open(access)


class AwsBatch(AwsTarget):
    """See Target."""

    job_kind: Final = Job.KIND

    def resources(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources. Raises Invalid, with alternatives, if a group's machines are not available."""
        offers = [find_region_offer(self.aws, AwsBatchTarget.of(group)) for group in groups]
        graph = build_resources(context, self._account(), groups, offers, self._google_store(context))
        return (*repositories(context), *graph)

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {
            ServiceLinkedRole.KIND: ServiceLinkedRoles(self.aws),
            Repository.KIND: Repositories(self.aws),
            Role.KIND: Roles(self.aws),
            InstanceProfile.KIND: InstanceProfiles(self.aws),
            LogGroup.KIND: LogGroups(self.aws),
            SecurityGroup.KIND: SecurityGroups(self.aws),
            LaunchTemplate.KIND: LaunchTemplates(self.aws),
            ComputeEnvironment.KIND: ComputeEnvironments(self.aws),
            Queue.KIND: Queues(self.aws),
            JobDefinition.KIND: JobDefinitions(self.aws),
            Job.KIND: Jobs(self.aws),
        }

    def rates(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates."""
        return costs.rates(self.aws, self._prices(), context, groups)

    def checks(self, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        yield from checks.checks(self.aws, context, groups)
        yield from self._image_checks(context, groups)
        yield from self._data_checks(context, groups)

    def jobs(self, state_records: Sequence[StateRecord]) -> Sequence[JobView]:
        """See Target.jobs."""
        return job_views.views(self.aws, state_records)

    def logs(self, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs. Raises Invalid if Batch has no record of the job any more."""
        return job_views.lines(self.aws, state_record, cursor)
