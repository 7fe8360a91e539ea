"""SageMaker: groups of replicas as training jobs, one for each.

Importing this asks nobody and needs no SDK; `open_target` neither. SageMaker's own is loaded when a job is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra import prices
from skerry.infra.clouds.aws.claiming import claim
from skerry.infra.clouds.aws.home import image_checks, repositories
from skerry.infra.clouds.aws.identity import Role, Roles
from skerry.infra.clouds.aws.registry import Repositories, Repository
from skerry.infra.clouds.aws.session import Account, Aws
from skerry.infra.clouds.crossing import google_store
from skerry.infra.clouds.google import home as google_home
from skerry.infra.targets.sagemaker import checks, costs, quotas, watching
from skerry.infra.targets.sagemaker.layout import layout, runtime_s, target_of
from skerry.infra.targets.sagemaker.resources import TrainingJob
from skerry.infra.targets.sagemaker.survey import survey
from skerry.infra.targets.sagemaker.working import TrainingJobs
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.clouds.crossing import GoogleStore
    from skerry.infra.clouds.google.home import GoogleHome
    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Made, Seen, Wanted
    from skerry.infra.spec import Replicas
    from skerry.infra.target import Check, Ground, JobView, LogLine, Rate
    from skerry.infra.targets.sagemaker.survey import Machine
    from skerry.runtime.clock import Clock

_S3: Final = "s3://"


def open_target(clock: Clock, environment: Mapping[str, str], _groups: Sequence[Replicas] = ()) -> SageMaker:
    """The target `sagemaker`, with the credentials that `environment` names. Asks nothing yet."""
    aws = Aws(clock, environment)
    return SageMaker(
        aws, prices.own_file(environment), lambda groups: google_home.open_home(clock, environment, groups)
    )


class SageMaker:
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
        """See Target.resources. Raises Invalid if a group's machines cannot be had, or not for so long."""
        who = self.aws.identity()
        account = Account(number=who.account, partition=who.partition)
        machines = [self._machine(group) for group in groups]
        self._check_lengths(ground, groups)
        found = layout(ground, account, groups, machines, self._place_abroad(ground))
        return (*repositories(ground), *found)

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {
            Repository.KIND: Repositories(self.aws),
            Role.KIND: Roles(self.aws),
            TrainingJob.KIND: TrainingJobs(self.aws),
        }

    def claim(self, wanted: Wanted, seen: Seen) -> None:
        """See Target.claim."""
        claim(self.aws, wanted, seen)

    def rates(self, ground: Ground, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates. Asks nothing: every price is of a table, and so firm."""
        return costs.rates(prices.load("aws", self._own_prices), ground.spec.limits, groups)

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
        """See Target.logs."""
        return watching.lines(self.aws, made, cursor)

    def _place_abroad(self, ground: Ground) -> GoogleStore | None:
        """Where the store is, if it is not in S3."""
        if ground.run_uri.startswith(_S3) or self._abroad is None:
            return None
        return google_store(self._abroad(ground.spec.replicas), ground)

    def _check_lengths(self, ground: Ground, groups: Sequence[Replicas]) -> None:
        """Once for each region: the longest of its jobs."""
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
