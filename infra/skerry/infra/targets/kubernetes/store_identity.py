"""Builds the access of replicas in a cluster to the store, without long-lived keys. Pure.

AWS: a role for each replica, which trusts the tokens that the cluster issues to the replica's service account. A token
is a file in the pod, which the kubelet renews. Google: entries of the bucket's policy for the same account, which GKE's
metadata server makes known to Google.
Sources: IAM user guide, "Create a role for OpenID Connect federation"; Kubernetes, "ServiceAccount token volume
projection"; GKE, "Workload Identity Federation: principal identifiers".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import s3 as aws_storage
from skerry.infra.clouds.aws.home import STORE
from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.input_policies import input_policy
from skerry.infra.clouds.aws.policies import Statement, replica_policy
from skerry.infra.clouds.cross_cloud import LONGEST_SESSION_S
from skerry.infra.clouds.google import gcs as google_storage
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.clouds.google.replica_rules import mirror_rules, replica_rules
from skerry.infra.provision.graph import Ref
from skerry.infra.targets.kubernetes.manifests import TOKEN_FILE
from skerry.infra.targets.shared.aws_replica_roles import mirror_policies

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.inputs import Inputs
    from skerry.infra.targets.kubernetes.resource_types import ServiceAccount

AUDIENCE: Final = "sts.amazonaws.com"
"""The audience of the tokens, for which IAM's OIDC provider of a cluster is made as well."""
# The name of a role of AWS, and of a binding in its title.
_LONGEST_NAME: Final = 64


@dataclass(frozen=True, kw_only=True)
class StoreIdentity:
    """The access of one replica. audience: of the token in its pod; None without one."""

    resources: tuple[Resource, ...] = ()
    environment: Mapping[str, Text] | None = None
    audience: str | None = None


@dataclass(frozen=True, kw_only=True)
class AwsTrust:
    """The account of a store in S3, and the cluster that it trusts. issuer: of its tokens, with https://."""

    account: Account
    issuer: str

    @property
    def provider(self) -> str:
        """The ARN of the account's OIDC provider of the cluster."""
        host = self.issuer.removeprefix("https://")
        return f"arn:{self.account.partition}:iam::{self.account.number}:oidc-provider/{host}"

    def identity(self, context: RunContext, account: ServiceAccount, inputs: Inputs) -> StoreIdentity:
        """The access of the replica with this service account. inputs: which its role may read as well."""
        bucket = Ref(address=f"{aws_storage.Bucket.KIND}.{STORE}", output="arn")
        policies = {"run": replica_policy(bucket_arn=bucket, prefix=_prefix(context), slots=(account.key,), group=None)}
        if read := input_policy(inputs, self.account.partition):
            policies["inputs"] = read
        if kept := mirror_policies(context):
            policies["mirrors"] = kept
        role = Role(
            key=account.key,
            name=name_with_room(f"{context.stem}-{account.key}", _LONGEST_NAME),
            region="",
            why=f"what {account.key} may do in the store, from the cluster",
            trust=(self._trust(account),),
            policies=policies,
            max_session_s=LONGEST_SESSION_S,
        )
        environment: dict[str, Text] = {
            "AWS_ROLE_ARN": role.ref("arn"),
            "AWS_WEB_IDENTITY_TOKEN_FILE": TOKEN_FILE,
        }
        return StoreIdentity(resources=(role,), environment=environment, audience=AUDIENCE)

    def _trust(self, account: ServiceAccount) -> Statement:
        host = self.issuer.removeprefix("https://")
        subject = f"system:serviceaccount:{account.region}:{account.name}"
        return Statement(
            actions=("sts:AssumeRoleWithWebIdentity",),
            principal={"Federated": (self.provider,)},
            conditions={"StringEquals": {f"{host}:sub": (subject,), f"{host}:aud": (AUDIENCE,)}},
        )


@dataclass(frozen=True, kw_only=True)
class GkeTrust:
    """The pool of a GKE cluster. number, project: of the cluster's project."""

    number: str
    project: str

    def identity(self, context: RunContext, account: ServiceAccount) -> StoreIdentity:
        """The access of the replica with this service account."""
        pool = f"projects/{self.number}/locations/global/workloadIdentityPools/{self.project}.svc.id.goog"
        store = f"{google_storage.Bucket.KIND}.{STORE}"
        binding = BucketBinding(
            key=account.key,
            name=name_with_room(f"{context.stem}-{account.key}", _LONGEST_NAME),
            region="",
            why=f"{account.key} may read the run, write own keys; cannot overwrite decisions, commits or receipts",
            after=(store,),
            bucket=context.run_uri.partition("://")[2].partition("/")[0],
            member=f"principal://iam.googleapis.com/{pool}/subject/ns/{account.region}/sa/{account.name}",
            rules=replica_rules(prefix=_prefix(context), slots=(account.key,), group=None),
        )
        kept = [
            replace(
                binding,
                key=f"{mirror.key}-{account.key}",
                why=f"{account.key} may keep the mirror in {mirror.bucket}; cannot overwrite its objects",
                after=(f"{google_storage.Bucket.KIND}.{mirror.key}",),
                bucket=mirror.bucket,
                rules=mirror_rules(mirror.prefix, goes_on=mirror.goes_on),
            )
            for mirror in context.mirrors("gs")
        ]
        return StoreIdentity(resources=(binding, *kept))


def _prefix(context: RunContext) -> str:
    return context.run_uri.partition("://")[2].partition("/")[2]
