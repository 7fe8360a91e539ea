"""AWS Batch: groups of replicas as jobs, one for each, on machines that are there only while they run.

Importing this asks nobody and needs no SDK; `open_target` neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra import prices
from skerry.infra.clouds.aws.claiming import claim
from skerry.infra.clouds.aws.home import image_checks, repositories
from skerry.infra.clouds.aws.identity import (
    InstanceProfile,
    InstanceProfiles,
    Role,
    Roles,
    ServiceLinkedRole,
    ServiceLinkedRoles,
)
from skerry.infra.clouds.aws.logs import LogGroup, LogGroups
from skerry.infra.clouds.aws.network import SecurityGroup, SecurityGroups
from skerry.infra.clouds.aws.registry import Repositories, Repository
from skerry.infra.clouds.aws.session import Account, Aws
from skerry.infra.clouds.crossing import google_store
from skerry.infra.clouds.google import home as google_home
from skerry.infra.targets.aws_batch import checks, costs, watching
from skerry.infra.targets.aws_batch.handlers import ComputeEnvironments, JobDefinitions, LaunchTemplates, Queues
from skerry.infra.targets.aws_batch.layout import layout, target_of
from skerry.infra.targets.aws_batch.resources import ComputeEnvironment, Job, JobDefinition, LaunchTemplate, Queue
from skerry.infra.targets.aws_batch.survey import survey
from skerry.infra.targets.aws_batch.working import Jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.clouds.crossing import GoogleStore
    from skerry.infra.clouds.google.home import GoogleHome
    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Made, Seen, Wanted
    from skerry.infra.spec import Replicas
    from skerry.infra.target import Check, Ground, JobView, LogLine, Rate
    from skerry.runtime.clock import Clock

_S3: Final = "s3://"


def open_target(clock: Clock, environment: Mapping[str, str], _groups: Sequence[Replicas] = ()) -> AwsBatch:
    """The target `aws_batch`, with the credentials that `environment` names. Asks nothing yet."""
    aws = Aws(clock, environment)
    return AwsBatch(aws, prices.own_file(environment), lambda groups: google_home.open_home(clock, environment, groups))


class AwsBatch:
    """See Target.

    own_prices: the user's file of them, if there is one. abroad: opens the home of a store that lies at Google's.
    """

    def __init__(
        self,
        aws: Aws,
        own_prices: Path | None = None,
        abroad: Callable[[Sequence[Replicas]], GoogleHome] | None = None,
    ) -> None:
        self.aws = aws
        self._own_prices = own_prices
        self._abroad = abroad

    def identity(self) -> Mapping[str, str]:
        """See Target.identity."""
        return {"aws": self.aws.identity().account}

    def resources(self, ground: Ground, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources. Raises Invalid if a group's machines cannot be had, saying what can."""
        who = self.aws.identity()
        account = Account(number=who.account, partition=who.partition)
        terrains = [survey(self.aws, target_of(group)) for group in groups]
        return (*repositories(ground), *layout(ground, account, groups, terrains, self._place_abroad(ground)))

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

    def claim(self, wanted: Wanted, seen: Seen) -> None:
        """See Target.claim."""
        claim(self.aws, wanted, seen)

    def rates(self, ground: Ground, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates."""
        return costs.rates(self.aws, prices.load("aws", self._own_prices), ground, groups)

    def checks(self, ground: Ground, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        yield from checks.checks(self.aws, ground, groups)
        if not ground.run_uri.startswith(_S3):
            # Elsewhere the home is AWS's, and looks itself.
            yield from image_checks(self.aws, ground.images_of(groups))

    def jobs(self, made: Sequence[Made]) -> Sequence[JobView]:
        """See Target.jobs."""
        return watching.views(self.aws, made)

    def logs(self, made: Made, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs. Raises Invalid if Batch does not know the job any more."""
        return watching.lines(self.aws, made, cursor)

    def _place_abroad(self, ground: Ground) -> GoogleStore | None:
        """Where the store is, if it is not in S3."""
        if ground.run_uri.startswith(_S3) or self._abroad is None:
            return None
        return google_store(self._abroad(ground.spec.replicas), ground)
