"""Access of replicas in one cloud to a store in the other: the trust resources, and the jobs' environment. Pure.

There are no long-lived keys. From Google to AWS: a role that trusts `accounts.google.com`, a built-in provider of AWS,
for one service account's number and one audience. From AWS to Google: a pool that admits these roles of this account,
and bucket bindings for each of them. `skerry.runtime.store.credentials` turns a job's environment into credentials.
Sources: IAM user guide, "Available keys for AWS OIDC federation": `aud` is compared with the token's azp, which for
Google's tokens is the account's number or its address (google-auth issue 746), and `oaud` with its audience; decision
0009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import Statement, replica_policy
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.clouds.google.replica_rules import mirror_rules, replica_rules
from skerry.infra.clouds.google.run_bucket_and_image_repository import place
from skerry.infra.clouds.google.services import service
from skerry.infra.clouds.google.workload_identity import (
    MOST_SUBJECT_BYTES,
    Pool,
    Provider,
    condition,
    members_prefix,
    pool_id,
    provider_name,
    sessions,
)
from skerry.runtime.contract import AWS_AUDIENCE, AWS_ROLE, GOOGLE_AUDIENCE
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.google.run_bucket_and_image_repository import GoogleHome
    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target_and_store_interfaces import MirrorPlace, RunContext

AWS_REGION: Final = "AWS_REGION"

GOOGLE: Final = "accounts.google.com"
LONGEST_SESSION_S: Final = 43_200
"""Twelve hours, the most that IAM allows; a running job assumes the role again before they end."""
MOST_VISITORS: Final = 100
"""Roles of a group, each with three entries in the bucket's policy, which holds 1,500 for all runs in it together."""

_POOL: Final = "aws"
# Of an AWS role (IAM quotas). Bindings have their names at the beginning of a title.
_LONGEST_NAME: Final = 64
# ECS names a session by a slash and the 32 digits of the task's id; SageMaker's are shorter.
_SESSION: Final = 1 + 32


@dataclass(frozen=True, kw_only=True)
class ForeignReplica:
    """Replicas that share one identity. slots, group: as for policies. key: of the resources. part: of their names."""

    key: str
    part: str
    slots: tuple[str, ...]
    group: str | None


@dataclass(frozen=True, kw_only=True)
class CrossCloudAccess:
    """The resources that admit foreign replicas to the store's cloud, and environment variables of their jobs."""

    resources: tuple[Resource, ...]
    environment: Mapping[str, Text]


@dataclass(frozen=True, kw_only=True)
class GoogleStore:
    """A run's places in Cloud Storage. number: of its project. prefix: the run's, within the bucket.

    bucket: None if the store is elsewhere. mirrors: buckets with the mirrors in them.
    """

    number: str
    bucket: Resource | None
    prefix: str
    mirrors: tuple[tuple[Resource, MirrorPlace], ...] = ()


def google_store(home: GoogleHome, context: RunContext) -> GoogleStore:
    """The store and the mirrors of a run in the home's cloud. Reads the project's number."""
    is_home = context.run_uri.startswith("gs://")
    return GoogleStore(
        number=home.google.identity().number,
        bucket=home.resources(context)[0] if is_home else None,
        prefix=place(context.run_uri)[1] if is_home else "",
        mirrors=tuple(zip(home.mirrors(context), context.mirrors("gs"), strict=True)),
    )


def google_into_aws(
    context: RunContext,
    guest: ForeignReplica,
    *,
    account: str,
    bucket_arn: Text | None,
    prefix: str,
    region: Text,
    email: Text,
    unique_id: Text,
    mirrors: tuple[Statement, ...] = (),
) -> CrossCloudAccess:
    """Access of jobs on Google, with one service account, to a store in S3.

    account: of AWS. bucket_arn: None if the store is not in S3. prefix: the run's, within the bucket. region: the
    bucket's. email, unique_id: of the account. mirrors: the permissions on mirrors in S3.
    """
    policies: dict[str, tuple[Statement, ...]] = {}
    if bucket_arn is not None:
        policies["replica"] = replica_policy(bucket_arn=bucket_arn, prefix=prefix, slots=guest.slots, group=guest.group)
    if mirrors:
        policies["mirrors"] = mirrors
    audience = f"skerry/{account}/{context.stem}"
    role = Role(
        key=guest.key,
        name=name_with_room(f"{context.stem}-{guest.part}", _LONGEST_NAME),
        region="",
        why=f"what {guest.part} may do in the store, from Google",
        trust=(trust_google(email=email, unique_id=unique_id, audience=audience),),
        policies=policies,
        max_session_s=LONGEST_SESSION_S,
    )
    environment: dict[str, Text] = {AWS_ROLE: role.ref("arn"), AWS_AUDIENCE: audience, AWS_REGION: region}
    return CrossCloudAccess(resources=(role,), environment=environment)


def trust_google(*, email: Text, unique_id: Text, audience: str) -> Statement:
    """Lets holders of a token of this service account for this audience act as the role."""
    return Statement(
        actions=("sts:AssumeRoleWithWebIdentity",),
        principal={"Federated": (GOOGLE,)},
        conditions={
            "StringEquals": {
                f"{GOOGLE}:sub": (unique_id,),
                f"{GOOGLE}:oaud": (audience,),
                f"{GOOGLE}:aud": (unique_id, email),
            }
        },
    )


def aws_into_google(
    context: RunContext,
    visitors: Sequence[tuple[Role, ForeignReplica]],
    *,
    group: str,
    own: str,
    account: str,
    partition: str,
    store: GoogleStore,
) -> CrossCloudAccess:
    """Access of the jobs of a group on AWS to a store, and to mirrors, in Cloud Storage.

    visitors: roles with their replicas. own: the spec field for a user's own role. account, partition: of AWS. Services
    and pool are the run's: all groups return equal ones. Raises Invalid for more roles than fit into the bucket's
    policy or a provider's condition, or for a role name that makes the names of its sessions too long.
    """
    if len(visitors) > MOST_VISITORS:
        raise Invalid(
            f"{group} has {len(visitors)} roles, and the bucket's policy takes {MOST_VISITORS} of a group; set "
            "`role: group`"
        )
    most = _longest_role(account, partition)
    for role, _ in visitors:
        if len(role.name) > most:
            raise Invalid(
                f"the name of role {role.name} of replicas {group} is too long for a store in Cloud Storage: at most "
                f"{most} characters; set another role at `{own}`"
            )
    # Fails now, not when the provider is created.
    condition([role.name for role, _ in visitors], sessions(account, partition))
    services = [service(short, "admits jobs from AWS") for short in ("iam", "sts")]
    pool = Pool(
        key=_POOL,
        name=pool_id(context.stem),
        region="",
        why="where jobs of AWS are let in",
        after=tuple(service.address for service in services),
    )
    provider = Provider(
        key=group,
        name=provider_name(pool.name, group),
        region="",
        why=f"roles of {group}",
        pool=pool.ref("name"),
        account=account,
        sessions=sessions(account, partition),
        roles=tuple(role.ref("name") for role, _ in visitors),
    )
    bindings = [
        binding for role, guest in visitors for binding in _bindings(context, role, guest, pool=pool, store=store)
    ]
    environment: dict[str, Text] = {GOOGLE_AUDIENCE: provider.ref("audience")}
    return CrossCloudAccess(resources=(*services, pool, provider, *bindings), environment=environment)


def visitor_name(name: str, account: str, partition: str) -> str:
    """The name of an AWS role, short enough for Google in every generation. account, partition: the role's."""
    return name_with_room(name, _longest_role(account, partition))


def _longest_role(account: str, partition: str) -> int:
    """The longest role name with session ARNs that fit into a subject."""
    return MOST_SUBJECT_BYTES - len(sessions(account, partition)) - _SESSION


def _bindings(
    context: RunContext, role: Role, guest: ForeignReplica, *, pool: Pool, store: GoogleStore
) -> Iterator[BucketBinding]:
    """The role's permissions in the store, if it is there, and in each mirror."""
    member = role.ref("name", before=members_prefix(store.number, pool.name))
    name = name_with_room(f"{context.stem}-{guest.part}", _LONGEST_NAME)
    if store.bucket is not None:
        yield BucketBinding(
            key=guest.key,
            name=name,
            region="",
            why=f"access of {guest.part} to the store, from AWS",
            # A policy takes no member of a pool that does not exist.
            after=(store.bucket.address, pool.address),
            bucket=store.bucket.name,
            member=member,
            rules=replica_rules(prefix=store.prefix, slots=guest.slots, group=guest.group),
        )
    for bucket, mirror in store.mirrors:
        yield BucketBinding(
            key=f"{bucket.key}-{guest.key}",
            name=name,
            region="",
            why=f"access of {guest.part} to the mirror in {bucket.name}, from AWS",
            after=(bucket.address, pool.address),
            bucket=bucket.name,
            member=member,
            rules=mirror_rules(mirror.prefix, goes_on=mirror.goes_on),
        )
