"""Implements the target kind `kubernetes`: groups of replicas as Jobs of a cluster.

Reads no kubeconfig and imports no client before the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra import clouds
from skerry.infra.clouds.aws.iam import Role, Roles
from skerry.infra.clouds.aws.session import Account
from skerry.infra.clouds.google import run_bucket_and_image_repository as google_home
from skerry.infra.clouds.handler_helpers import Absent
from skerry.infra.spec.store_uri import FILE
from skerry.infra.targets.kubernetes import checks, job_views, unknown_costs
from skerry.infra.targets.kubernetes.cluster import Cluster
from skerry.infra.targets.kubernetes.jobs import Jobs, ServiceAccounts
from skerry.infra.targets.kubernetes.options import KubernetesTarget
from skerry.infra.targets.kubernetes.resource_graph import build_resources
from skerry.infra.targets.kubernetes.resource_types import Job, ServiceAccount
from skerry.infra.targets.kubernetes.store_identity import AwsTrust, GkeTrust, OidcTrust
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Handler, Observed, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import Check, JobView, LogLine, Rate, RunContext
    from skerry.infra.spec.model import Replicas
    from skerry.infra.targets.kubernetes.resource_graph import Trust


def open_target(access: OperatorAccess) -> Kubernetes:
    """Open the target `kubernetes`, in the cluster that the groups name. Does no I/O."""
    own = [group.target for group in access.groups if isinstance(group.target, KubernetesTarget)]
    cluster = Cluster(access.clock, access.environment, own[0].context if own else None, access.calls)
    namespaces = tuple(dict.fromkeys(target.namespace for target in own))
    return Kubernetes(cluster, namespaces, clouds_of_store=CloudsOfStore(access))


class CloudsOfStore:
    """The clouds that may hold the store, and what they trust. Makes no calls when it is built."""

    def __init__(self, access: OperatorAccess) -> None:
        self._access = access
        self.aws = access.aws
        self.google = access.google

    def variables(self, context: RunContext) -> Mapping[str, str]:
        """The variables that a process needs to open the store, without credentials."""
        return clouds.open_home(context.run_uri, self._access).environment(context)

    def trust(self, cluster: Cluster, context: RunContext) -> Trust | None:
        """Give a replica without a Secret its access to the store. Asks the cluster for the issuer of its tokens.

        A folder in a volume needs none.
        """
        if context.run_uri.startswith(FILE):
            return None
        if context.run_uri.startswith("gs://"):
            issuer = checks.issuer_of(cluster)
            return lambda context, group, account: self._google_trust(issuer, group).identity(
                context, account, context.inputs(group)
            )
        caller = self.aws.identity()
        account = Account(number=caller.account, partition=caller.partition)
        aws = AwsTrust(account=account, issuer=checks.issuer_of(cluster))
        return lambda context, group, account: aws.identity(context, account, context.inputs(group))

    def _google_trust(self, issuer: str, group: Replicas) -> GkeTrust | OidcTrust:
        own, other = self.google.identity(), KubernetesTarget.of(group).gke_project
        if other is None and not checks.is_gke(issuer):
            token_url = f"{self.google.endpoint('sts')}/v1/token"
            return OidcTrust(issuer=issuer, project=own.project, token_url=token_url)
        number = own.number if other in {None, own.project} else self._number_of(str(other))
        return GkeTrust(number=number, project=other or own.project)

    def _number_of(self, project: str) -> str:
        row = self.google.call("cloudresourcemanager", "GET", f"v1/projects/{project}")
        return str(row["projectNumber"])


class Kubernetes:
    """See Target. namespaces: of the run."""

    job_kind: Final = Job.KIND

    def __init__(self, cluster: Cluster, namespaces: Sequence[str], clouds_of_store: CloudsOfStore) -> None:
        self._cluster = cluster
        self._namespaces = namespaces
        self._clouds = clouds_of_store

    def identity(self) -> Mapping[str, str]:
        """See Target.identity. An operator may read the namespaces of the run, not more, so those are the account."""
        return {f"kubernetes/{name}": self._uid(name) for name in self._namespaces}

    def _uid(self, namespace: str) -> str:
        try:
            return str(self._cluster.get(f"/api/v1/namespaces/{namespace}")["metadata"]["uid"])
        except Absent:
            return "a cluster without it"

    def resources(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources."""
        keyless = any(KubernetesTarget.of(group).secret is None for group in groups)
        trust = self._clouds.trust(self._cluster, context) if keyless else None
        return build_resources(context, groups, self._clouds.variables(context), trust)

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {
            **google_home.handlers(self._clouds.google),
            Role.KIND: Roles(self._clouds.aws),
            ServiceAccount.KIND: ServiceAccounts(self._cluster),
            Job.KIND: Jobs(self._cluster),
        }

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See Target.claim."""
        del observed
        raise Invalid(f"a {desired.resource.KIND} cannot be imported: delete it, and `skerry apply` creates another")

    def rates(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates."""
        return unknown_costs.rates(context.spec.limits, groups)

    def checks(self, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        yield from checks.checks(self._cluster, context.run_uri, groups, self.resources(context, groups))
        keyless = [target for group in groups if (target := KubernetesTarget.of(group)).secret is None]
        if keyless and context.run_uri.startswith("s3://"):
            yield checks.provider_check(self._cluster, self._clouds.aws)
        elif context.run_uri.startswith("gs://") and any(target.gke_project is None for target in keyless):
            yield checks.issuer_check(self._cluster, self._clouds.google)

    def jobs(self, state_records: Sequence[StateRecord]) -> Sequence[JobView]:
        """See Target.jobs."""
        return job_views.views(self._cluster, state_records)

    def logs(self, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs."""
        return job_views.lines(self._cluster, state_record, cursor)
