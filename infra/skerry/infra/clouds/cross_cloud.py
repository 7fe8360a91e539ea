"""Replicas in one cloud with their store in the other: who trusts whom for what, and what their jobs are told. Pure.

No key lasts. From Google to AWS: a role that trusts `accounts.google.com`, which AWS knows without being told, for one
service account's number and one audience. From AWS to Google: a pool that lets in these roles of this account, and the
bucket's own rules for each of them. What jobs are told `skerry.runtime.store.visiting` turns into credentials.
Sources: IAM user guide, "Available keys for AWS OIDC federation": `aud` is compared with the token's azp, which for
Google's tokens is the account's number or its address (google-auth issue 746), and `oaud` with its audience; decision
0009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.identity import Role
from skerry.infra.clouds.aws.policies import Statement, replica_policy
from skerry.infra.clouds.google.bindings import BucketBinding
from skerry.infra.clouds.google.federation import (
    MOST_SUBJECT_BYTES,
    Pool,
    Provider,
    condition,
    members_prefix,
    pool_id,
    provider_name,
    sessions,
)
from skerry.infra.clouds.google.handling import name_with_room
from skerry.infra.clouds.google.home import place
from skerry.infra.clouds.google.policies import replica_rules
from skerry.infra.clouds.google.services import service
from skerry.runtime.contract import AWS_AUDIENCE, AWS_ROLE, GOOGLE_AUDIENCE
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.clouds.google.home import GoogleHome
    from skerry.infra.graph import Resource, Text
    from skerry.infra.target import Ground

AWS_REGION: Final = "AWS_REGION"

GOOGLE: Final = "accounts.google.com"
LONGEST_SESSION_S: Final = 43_200
"""Twelve hours, the most that IAM gives; a job takes the role anew before that, for as long as it runs."""
MOST_VISITORS: Final = 100
"""Roles of a group, each with three entries in the bucket's policy, which holds 1,500 for all runs in it together."""

_POOL: Final = "aws"
# Of a role of AWS (IAM quotas); a binding's is the beginning of a title.
_LONGEST_NAME: Final = 64
# ECS names a session by a slash and the 32 digits of a task's id; SageMaker's are shorter.
_SESSION: Final = 1 + 32


@dataclass(frozen=True, kw_only=True)
class Guest:
    """Replicas that act as one, and what is made for them. slots, group: as policies have them.

    key: of the resources. part: of their physical names.
    """

    key: str
    part: str
    slots: tuple[str, ...]
    group: str | None


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What the store's cloud needs so that they are let in, and what their jobs are told besides."""

    resources: tuple[Resource, ...]
    environment: Mapping[str, Text]


@dataclass(frozen=True, kw_only=True)
class GoogleStore:
    """A run's store in Cloud Storage, for those who visit it. number: of its project. prefix: the run's, within."""

    number: str
    bucket: Resource
    prefix: str


def google_store(home: GoogleHome, ground: Ground) -> GoogleStore:
    """Where a run is whose store lies in the home's cloud. Asks for the project's number."""
    _, prefix = place(ground.run_uri)
    return GoogleStore(number=home.google.identity().number, bucket=home.resources(ground)[0], prefix=prefix)


def google_into_aws(
    ground: Ground,
    guest: Guest,
    *,
    account: str,
    bucket_arn: Text,
    prefix: str,
    region: str,
    email: Text,
    unique_id: Text,
) -> Crossing:
    """For jobs on Google that act as one service account, with their store in S3.

    account: of AWS. prefix: the run's, within the bucket. region: the bucket's. email, unique_id: of the service
    account.
    """
    audience = f"skerry/{account}/{ground.stem}"
    role = Role(
        key=guest.key,
        name=name_with_room(f"{ground.stem}-{guest.part}", _LONGEST_NAME),
        region="",
        why=f"what {guest.part} may do in the store, from Google",
        trust=(trust_google(email=email, unique_id=unique_id, audience=audience),),
        policies={
            "replica": replica_policy(bucket_arn=bucket_arn, prefix=prefix, slots=guest.slots, group=guest.group)
        },
        max_session_s=LONGEST_SESSION_S,
    )
    told: dict[str, Text] = {AWS_ROLE: role.ref("arn"), AWS_AUDIENCE: audience, AWS_REGION: region}
    return Crossing(resources=(role,), environment=told)


def trust_google(*, email: Text, unique_id: Text, audience: str) -> Statement:
    """Whoever holds a token of this one service account, made out for this audience, may act as the role."""
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
    ground: Ground,
    visitors: Sequence[tuple[Role, Guest]],
    *,
    group: str,
    own: str,
    account: str,
    partition: str,
    number: str,
    bucket: Resource,
    prefix: str,
) -> Crossing:
    """For the jobs of a group on AWS, with their store in Cloud Storage.

    visitors: roles, and whose each is. own: the field with which a user brings his role. account, partition: of AWS.
    number: of the project. bucket: the run's. prefix: the run's, within the bucket. The services and the pool are the
    run's: several groups give equal ones. Raises Invalid for more roles than the bucket's policy or a provider's
    condition has room for, or one whose sessions get too long a name.
    """
    if len(visitors) > MOST_VISITORS:
        raise Invalid(
            f"{group} has {len(visitors)} roles, and the bucket's policy has room for {MOST_VISITORS} of a group; say "
            "`role: group`"
        )
    most = _longest_role(account, partition)
    for role, _ in visitors:
        if len(role.name) > most:
            raise Invalid(
                f"the role {role.name} of replicas {group} has too long a name for a store in Cloud Storage: {most} "
                f"characters at most; bring another at `{own}`"
            )
    # Told now, and not when the provider is made.
    condition([role.name for role, _ in visitors], sessions(account, partition))
    services = [service(short, "lets jobs of AWS in") for short in ("iam", "sts")]
    pool = Pool(
        key=_POOL,
        name=pool_id(ground.stem),
        region="",
        why="where jobs of AWS are let in",
        after=tuple(one.address for one in services),
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
        _binding(ground, role, guest, number=number, bucket=bucket, pool=pool, prefix=prefix)
        for role, guest in visitors
    ]
    told: dict[str, Text] = {GOOGLE_AUDIENCE: provider.ref("audience")}
    return Crossing(resources=(*services, pool, provider, *bindings), environment=told)


def visitor_name(name: str, account: str, partition: str) -> str:
    """The name of a role of AWS whose sessions Google takes in every generation. account, partition: its own."""
    return name_with_room(name, _longest_role(account, partition))


def _longest_role(account: str, partition: str) -> int:
    """How long a name may be so that the ARNs of its sessions have room in a subject."""
    return MOST_SUBJECT_BYTES - len(sessions(account, partition)) - _SESSION


def _binding(
    ground: Ground, role: Role, guest: Guest, *, number: str, bucket: Resource, pool: Pool, prefix: str
) -> BucketBinding:
    return BucketBinding(
        key=guest.key,
        name=name_with_room(f"{ground.stem}-{guest.part}", _LONGEST_NAME),
        region="",
        why=f"what {guest.part} may do in the store, from AWS",
        # A policy takes no member of a pool that is not there.
        after=(bucket.address, pool.address),
        bucket=bucket.name,
        member=role.ref("name", before=members_prefix(number, pool.name)),
        rules=replica_rules(prefix=prefix, slots=guest.slots, group=guest.group),
    )
