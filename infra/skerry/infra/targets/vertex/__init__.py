"""Vertex AI: groups of replicas as custom jobs, one for each, on machines that are there only while they run.

Importing this asks nobody and needs no SDK; `open_target` neither. Google's own is loaded when the first job is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra import prices
from skerry.infra.clouds.aws import claiming as aws_claiming
from skerry.infra.clouds.aws.home import AwsHome
from skerry.infra.clouds.aws.identity import Role, Roles
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.google import home
from skerry.infra.clouds.google.claiming import claim
from skerry.infra.clouds.google.session import Google
from skerry.infra.targets.vertex import checks, costs, watching
from skerry.infra.targets.vertex.layout import Abroad, layout
from skerry.infra.targets.vertex.resources import Job
from skerry.infra.targets.vertex.working import Jobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Made, Seen, Wanted
    from skerry.infra.spec import Replicas
    from skerry.infra.target import Check, Ground, JobView, LogLine, Rate
    from skerry.runtime.clock import Clock

_S3: Final = "s3://"


def open_target(clock: Clock, environment: Mapping[str, str], groups: Sequence[Replicas] = ()) -> Vertex:
    """The target `vertex`, with the credentials that `environment` names. Asks nothing yet.

    groups: the first that names a project says which it is; else the environment does.
    """
    google = Google(clock, environment, project=home.project_of(groups))
    return Vertex(google, Aws(clock, environment), prices.own_file(environment))


class Vertex:
    """See Target. aws: asked only for runs whose store is in S3. own_prices: the user's file, if there is one."""

    def __init__(self, google: Google, aws: Aws, own_prices: Path | None = None) -> None:
        self.google = google
        self.aws = aws
        self._own_prices = own_prices

    def identity(self) -> Mapping[str, str]:
        """See Target.identity."""
        return {"google": self.google.identity().project}

    def resources(self, ground: Ground, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources. The spec's project goes before that of the environment, and it has one."""
        return (*home.repositories(ground, self.google.project), *layout(ground, groups, self._abroad(ground)))

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {**home.handlers(self.google), Role.KIND: Roles(self.aws), Job.KIND: Jobs(self.google)}

    def claim(self, wanted: Wanted, seen: Seen) -> None:
        """See Target.claim."""
        if wanted.resource.KIND == Role.KIND:
            aws_claiming.claim(self.aws, wanted, seen)
        else:
            claim(self.google, wanted, seen)

    def rates(self, ground: Ground, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates. Asks nothing."""
        return costs.rates(prices.load("google", self._own_prices), ground.spec.limits, groups)

    def checks(self, ground: Ground, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        yield from checks.checks(self.google, groups)
        if ground.run_uri.startswith(_S3):
            # Elsewhere the home is Google's, and looks itself.
            yield from home.image_checks(self.google, ground.images_of(groups))

    def jobs(self, made: Sequence[Made]) -> Sequence[JobView]:
        """See Target.jobs."""
        return watching.views(self.google, made)

    def logs(self, made: Made, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs."""
        return watching.lines(self.google, made, cursor)

    def _abroad(self, ground: Ground) -> Abroad | None:
        if not ground.run_uri.startswith(_S3):
            return None
        region = AwsHome(self.aws).environment(ground)["AWS_REGION"]
        return Abroad(account=self.aws.identity().account, region=region)
