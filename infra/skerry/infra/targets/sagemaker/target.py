"""Open the target `sagemaker`: implements Target for groups of replicas as training jobs of SageMaker.

SageMaker's SDK is imported when the first job is created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.ecr import Repositories, Repository
from skerry.infra.clouds.aws.home import image_checks, repositories
from skerry.infra.clouds.aws.iam import Role, Roles
from skerry.infra.clouds.aws.session import Account, Aws
from skerry.infra.clouds.aws.tag_imported import claim
from skerry.infra.clouds.cross_cloud import google_store
from skerry.infra.clouds.google import home as google_home
from skerry.infra.cost import prices
from skerry.infra.targets.sagemaker import checks, costs, job_views, quotas
from skerry.infra.targets.sagemaker.jobs import Jobs
from skerry.infra.targets.sagemaker.machine_lookup import survey
from skerry.infra.targets.sagemaker.resource_graph import layout, runtime_s, target_of
from skerry.infra.targets.sagemaker.resources import Job
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.clouds.cross_cloud import GoogleStore
    from skerry.infra.clouds.google.home import GoogleHome
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Handler, Observed, StateRecord
    from skerry.infra.provision.target import Check, JobView, LogLine, Rate, RunContext
    from skerry.infra.spec.model import Replicas
    from skerry.infra.targets.sagemaker.machine_lookup import Machine
    from skerry.runtime.clock import Clock

_S3: Final = "s3://"


def open_target(clock: Clock, environment: Mapping[str, str], _groups: Sequence[Replicas] = ()) -> SageMaker:
    """Open the target `sagemaker`, with the credentials in `environment`. Does no I/O."""
    aws = Aws(clock, environment)
    return SageMaker(
        aws, prices.own_file(environment), lambda groups: google_home.open_home(clock, environment, groups)
    )


class SageMaker:
    """See Target.

    own_prices: the user's file of prices. open_google: opens the cloud of a store in Cloud Storage.
    """

    def __init__(
        self,
        aws: Aws,
        own_prices: Path | None = None,
        open_google: Callable[[Sequence[Replicas]], GoogleHome] | None = None,
    ) -> None:
        self.aws = aws
        self._own_prices = own_prices
        self._open_google = open_google

    def identity(self) -> Mapping[str, str]:
        """See Target.identity."""
        return {"aws": self.aws.identity().account}

    def resources(self, ground: RunContext, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources. Raises Invalid if a group's machines are not available, or not for its time."""
        caller = self.aws.identity()
        account = Account(number=caller.account, partition=caller.partition)
        machines = [self._machine(group) for group in groups]
        self._check_lengths(ground, groups)
        graph = layout(ground, account, groups, machines, self._google_store(ground))
        return (*repositories(ground), *graph)

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {
            Repository.KIND: Repositories(self.aws),
            Role.KIND: Roles(self.aws),
            Job.KIND: Jobs(self.aws),
        }

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See Target.claim."""
        claim(self.aws, desired, observed)

    def rates(self, ground: RunContext, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates. All prices are from tables, and so do not change."""
        return costs.rates(prices.load("aws", self._own_prices), ground.spec.limits, groups)

    def checks(self, ground: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        yield from checks.checks(self.aws, ground, groups)
        if not ground.run_uri.startswith(_S3):
            # With a store in S3, the store's cloud checks the images.
            yield from image_checks(self.aws, ground.images_of(groups))

    def jobs(self, state_records: Sequence[StateRecord]) -> Sequence[JobView]:
        """See Target.jobs."""
        return job_views.views(self.aws, state_records)

    def logs(self, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs."""
        return job_views.lines(self.aws, state_record, cursor)

    def _google_store(self, ground: RunContext) -> GoogleStore | None:
        """Return the store if it is in Cloud Storage."""
        if ground.run_uri.startswith(_S3) or self._open_google is None:
            return None
        return google_store(self._open_google(ground.spec.replicas), ground)

    def _check_lengths(self, ground: RunContext, groups: Sequence[Replicas]) -> None:
        """Check the time of the longest job in each region."""
        longest: dict[str, int] = {}
        for target in map(target_of, groups):
            longest[target.region] = max(runtime_s(ground.hours, target), longest.get(target.region, 0))
        for region, seconds in longest.items():
            quotas.check_length(self.aws, region, seconds)

    def _machine(self, group: Replicas) -> Machine:
        try:
            return survey(self.aws, target_of(group))
        except Invalid as error:
            raise Invalid(f"replicas {group.name}: {error}") from error
