"""Implements the target kind `slurm`: groups of replicas as batch jobs of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra import clouds
from skerry.infra.cost import prices
from skerry.infra.targets.slurm import checks, costs, job_views
from skerry.infra.targets.slurm.cluster import HERE, Cluster
from skerry.infra.targets.slurm.jobs import Jobs
from skerry.infra.targets.slurm.options import SlurmTarget
from skerry.infra.targets.slurm.resource_graph import build_resources
from skerry.infra.targets.slurm.resource_types import Job
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Handler, Observed, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import Check, JobView, LogLine, Rate, RunContext
    from skerry.infra.spec.model import Replicas

_WHO: Final = 'printf "%s " "$(id -un)" && scontrol show config | sed -n "s/^ClusterName *= *//p"'


def open_target(access: OperatorAccess) -> Slurm:
    """Open the target `slurm`, with the commands of Slurm or of ssh in the environment. Does no I/O."""
    regions = [SlurmTarget.of(group).region for group in access.groups if isinstance(group.target, SlurmTarget)]

    def cluster_of(region: str) -> Cluster:
        return Cluster(access.clock, access.environment, None if region == HERE else region, calls=access.calls)

    def variables_of(context: RunContext) -> Mapping[str, str]:
        return clouds.open_home(context.run_uri, access).environment(context)

    return Slurm(cluster_of, tuple(dict.fromkeys(regions)), variables_of, prices.own_file(access.environment))


class Slurm:
    """See Target. regions: those of the spec's groups. variables_of: to open a run's store with, without credentials.

    own_prices: the user's file of prices.
    """

    job_kind: Final = Job.KIND

    def __init__(
        self,
        cluster_of: Callable[[str], Cluster],
        regions: Sequence[str],
        variables_of: Callable[[RunContext], Mapping[str, str]],
        own_prices: Path | None = None,
    ) -> None:
        self._cluster_of = cluster_of
        self._regions = regions
        self._variables_of = variables_of
        self._own_prices = own_prices

    def identity(self) -> Mapping[str, str]:
        """See Target.identity: user@cluster for each login of the spec. Only its own user may cancel a job."""
        return {f"slurm/{region}": "@".join(self._cluster_of(region).call(_WHO).split()) for region in self._regions}

    def resources(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources. Calls no cluster."""
        return build_resources(context, groups, self._variables_of(context))

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {Job.KIND: Jobs(self._cluster_of)}

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See Target.claim."""
        del observed
        raise Invalid(f"cannot be imported: {desired.resource.address}; a job belongs to the run that submitted it")

    def rates(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates."""
        return costs.rates(prices.load("slurm", self._own_prices), context.spec.limits, groups)

    def checks(self, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        del context
        return checks.checks(self._cluster_of, groups)

    def jobs(self, state_records: Sequence[StateRecord]) -> Sequence[JobView]:
        """See Target.jobs."""
        return job_views.views(self._cluster_of, state_records)

    def logs(self, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs."""
        return job_views.lines(self._cluster_of(state_record.region), state_record, cursor)
