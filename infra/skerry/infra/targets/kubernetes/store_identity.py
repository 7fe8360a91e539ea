"""Builds the access of replicas in a cluster to the store, without long-lived keys. Pure.

AWS: a role for each replica, which trusts the tokens that the cluster issues to the replica's service account. A token
is a file in the pod, which the kubelet renews. Google: entries of the bucket's policy for the same account, which GKE's
metadata server makes known to Google; for a cluster elsewhere, a pool with a provider that trusts the cluster's tokens,
and a second file in the pod, with which Google's clients exchange them.
Sources: IAM user guide, "Create a role for OpenID Connect federation"; Kubernetes, "ServiceAccount token volume
projection"; GKE, "Workload Identity Federation: principal identifiers"; IAM (Google), "Configure Workload Identity
Federation with Kubernetes".
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import s3 as aws_storage
from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import Statement, replica_policy
from skerry.infra.clouds.aws.run_bucket_and_image_repository import STORE
from skerry.infra.clouds.aws.secret_and_data_policies import input_policy
from skerry.infra.clouds.cross_cloud import LONGEST_SESSION_S
from skerry.infra.clouds.google import gcs as google_storage
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.clouds.google.replica_rules import mirror_rules, replica_rules
from skerry.infra.clouds.google.secret_and_data_bindings import Reader, input_bindings
from skerry.infra.clouds.google.services import service
from skerry.infra.clouds.google.workload_identity import MOST_SUBJECT_BYTES, OidcProvider, Pool, pool_id
from skerry.infra.provision.graph import Ref
from skerry.infra.targets.kubernetes.manifests import CREDENTIALS_FILE, TOKEN_FILE
from skerry.infra.targets.shared.aws_replica_roles import mirror_policies
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.env_secrets_and_data import Inputs
    from skerry.infra.targets.kubernetes.resource_types import ServiceAccount

AUDIENCE: Final = "sts.amazonaws.com"
"""The audience of the tokens, for which IAM's OIDC provider of a cluster is made as well."""
# The name of a role of AWS, and of a binding in its title.
_LONGEST_NAME: Final = 64
# The cloud of the target, of which the run's namespaces are the regions; also the key of the pool and its provider.
_POOL: Final = "kubernetes"


@dataclass(frozen=True, kw_only=True)
class StoreIdentity:
    """The access of one replica. audience: of the token in its pod; None without one.

    credentials: the configuration of Google's clients in CREDENTIALS_FILE, without a secret; None without one.
    """

    resources: tuple[Resource, ...] = ()
    environment: Mapping[str, Text] | None = None
    audience: Text | None = None
    credentials: Text | None = None


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

    def identity(self, context: RunContext, account: ServiceAccount, inputs: Inputs) -> StoreIdentity:
        """The access of the replica with this service account. inputs: which it may read as well."""
        pool = f"projects/{self.number}/locations/global/workloadIdentityPools/{self.project}.svc.id.goog"
        member = f"principal://iam.googleapis.com/{pool}/subject/ns/{account.region}/sa/{account.name}"
        return StoreIdentity(resources=tuple(_google_bindings(context, account, inputs, member)))


@dataclass(frozen=True, kw_only=True)
class OidcTrust:
    """A cluster outside of GKE, by the issuer of its tokens, with https://. project: of the store.

    token_url: at which Google exchanges tokens.
    """

    issuer: str
    project: str
    token_url: str

    def identity(self, context: RunContext, account: ServiceAccount, inputs: Inputs) -> StoreIdentity:
        """The access of the replica with this service account. inputs: which it may read as well.

        Services, pool and provider are the run's: all replicas return equal ones. Raises Invalid for a name of the
        account that is too long for Google.
        """
        subject = f"system:serviceaccount:{account.region}:{account.name}"
        if len(subject) > MOST_SUBJECT_BYTES:
            raise Invalid(f"{subject} has more than the {MOST_SUBJECT_BYTES} characters of Google; shorten `namespace`")
        services = [service(short, "admits pods of the cluster") for short in ("iam", "sts")]
        pool = Pool(
            key=_POOL,
            name=pool_id(f"{context.stem}-{_POOL}"),
            region="",
            why="where pods are let in",
            after=tuple(each.address for each in services),
        )
        provider = OidcProvider(
            key=_POOL,
            name=f"{pool.name}/{_POOL}",
            region="",
            why="accounts of the cluster",
            pool=pool.ref("name"),
            issuer=self.issuer,
            subjects=tuple(
                f"system:serviceaccount:{namespace}:{context.stem}-" for namespace in context.regions(_POOL)
            ),
        )
        member = pool.ref("name", before="principal://iam.googleapis.com/", after=f"/subject/{subject}")
        source = {
            "type": "external_account",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": self.token_url,
            "credential_source": {"file": TOKEN_FILE},
        }
        return StoreIdentity(
            resources=(*services, pool, provider, *_google_bindings(context, account, inputs, member)),
            environment={"GOOGLE_APPLICATION_CREDENTIALS": CREDENTIALS_FILE, "GOOGLE_CLOUD_PROJECT": self.project},
            audience=provider.ref("audience", before="https:"),
            credentials=provider.ref("audience", before='{"audience": "', after=f'", {json.dumps(source)[1:]}'),
        )


def _google_bindings(context: RunContext, account: ServiceAccount, inputs: Inputs, member: Text) -> Iterator[Resource]:
    """The permissions of a replica's account in the store, in mirrors and on inputs."""
    store = f"{google_storage.Bucket.KIND}.{STORE}"
    binding = BucketBinding(
        key=account.key,
        name=name_with_room(f"{context.stem}-{account.key}", _LONGEST_NAME),
        region="",
        why=f"{account.key} may read the run, write own keys; cannot overwrite decisions, commits or receipts",
        after=(store,),
        bucket=context.run_uri.partition("://")[2].partition("/")[0],
        member=member,
        rules=replica_rules(prefix=_prefix(context), slots=(account.key,), group=None),
    )
    yield binding
    for mirror in context.mirrors("gs"):
        yield replace(
            binding,
            key=f"{mirror.key}-{account.key}",
            why=f"{account.key} may keep the mirror in {mirror.bucket}; cannot overwrite its objects",
            after=(f"{google_storage.Bucket.KIND}.{mirror.key}",),
            bucket=mirror.bucket,
            rules=mirror_rules(mirror.prefix, goes_on=mirror.goes_on),
        )
    reader = Reader(key=account.key, name=binding.name, member=member, text=account.key)
    yield from input_bindings(inputs, reader, (store, binding.bucket))


def _prefix(context: RunContext) -> str:
    return context.run_uri.partition("://")[2].partition("/")[2]
