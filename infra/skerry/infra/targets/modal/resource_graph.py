"""Builds the resources of Modal from the options of the groups. Pure.

A run has one App. With `workspace` a role of AWS trusts the tokens that Modal gives to the App's sandboxes.
Sources: Modal, "OIDC integration"; IAM user guide, "Available keys for AWS OIDC federation".
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import s3
from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import Statement, replica_policy
from skerry.infra.clouds.aws.run_bucket_and_image_repository import STORE
from skerry.infra.clouds.aws.secret_and_data_policies import input_policy
from skerry.infra.clouds.cross_cloud import LONGEST_SESSION_S
from skerry.infra.clouds.google.generation_names import name_with_room
from skerry.infra.provision.graph import Ref
from skerry.infra.targets.modal.options import LONGEST, ModalTarget
from skerry.infra.targets.modal.resource_types import App, Job
from skerry.infra.targets.shared.aws_replica_roles import mirror_policies
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas, ReplicaSlot

COMMAND: Final = ("skerry-replica", "run")
TOKEN_VARIABLE: Final = "MODAL_IDENTITY_TOKEN"  # noqa: S105  the name of a variable
"""The variable with the token of a sandbox."""
ISSUER: Final = "oidc.modal.com"
_MIB: Final = 1 << 20
_HOUR_S: Final = 3600
# The name of a sandbox, and a tag that also has the generation.
_LONGEST_NAME: Final = 63
_LONGEST_ROLE: Final = 64


def build_resources(
    context: RunContext, groups: Sequence[Replicas], store_variables: Mapping[str, str], account: Account | None
) -> tuple[Resource, ...]:
    """Return all resources of these groups. account: of the store, if a group has a workspace."""
    return tuple(_resources(context, groups, store_variables, account))


def _resources(
    context: RunContext, groups: Sequence[Replicas], store_variables: Mapping[str, str], account: Account | None
) -> Iterator[Resource]:
    apps = {
        environment: App(
            key=app_key(environment),
            name=context.stem,
            region=environment,
            why="the App with the sandboxes of the run",
        )
        for environment in dict.fromkeys(ModalTarget.of(group).environment for group in groups)
    }
    yield from apps.values()
    for group in groups:
        target = ModalTarget.of(group)
        identity: dict[str, Text] = {}
        after = [apps[target.environment].address]
        if target.workspace is not None and account is not None:
            role = _role(context, group, account)
            yield role
            after.append(role.address)
            identity = {"AWS_ROLE_ARN": role.ref("arn"), contract.TOKEN_VARIABLE: TOKEN_VARIABLE}
        for replica in context.slots_of(group):
            variables = {
                **store_variables,
                **context.bucket_regions(s3.Bucket.KIND),
                **identity,
                **context.variables(group),
            }
            job = job_of(context, group, replica, variables)
            yield replace(job, after=tuple(after), identity=bool(identity))


def job_of(context: RunContext, group: Replicas, replica: ReplicaSlot, variables: Mapping[str, Text]) -> Job:
    """Return the sandbox of a replica without a token. variables: of every replica of its group."""
    target = ModalTarget.of(group)
    return Job(
        key=replica.slot,
        name=name_with_room(f"{context.stem}-{replica.slot}", _LONGEST_NAME),
        region=target.environment,
        why=f"replica {replica.index} of the run",
        app=context.stem,
        image=context.image_of(group),
        command=COMMAND,
        environment={contract.RANKS: str(target.ranks), **variables, contract.SLOT: replica.slot},
        gpu=None if target.gpu is None else f"{target.gpu}:{target.gpus}",
        cpu=target.cpu,
        memory_mib=target.memory // _MIB,
        timeout_s=timeout_s(context.hours, target),
        secrets=target.secrets,
    )


def app_key(environment: str) -> str:
    """The key of the run's App in an environment: the same in a graph and in a listing, whatever their order."""
    return f"run-{environment}"


def timeout_s(hours: float | None, target: ModalTarget) -> int:
    """The time limit of a sandbox: the shortest one of Modal's, the run's and of the option."""
    limits = [
        int(LONGEST.total_seconds()),
        *([] if hours is None else [int(hours * _HOUR_S)]),
        *([] if target.max_runtime is None else [int(target.max_runtime.total_seconds())]),
    ]
    return max(1, min(limits))


def _role(context: RunContext, group: Replicas, account: Account) -> Role:
    """The role of a group's sandboxes. A token names the App, so all groups of the App could take it."""
    target = ModalTarget.of(group)
    bucket = Ref(address=f"{s3.Bucket.KIND}.{STORE}", output="arn")
    prefix = context.run_uri.partition("://")[2].partition("/")[2]
    policies = {"run": replica_policy(bucket_arn=bucket, prefix=prefix, slots=(), group=group.name)}
    if read := input_policy(context.inputs(group), account.partition):
        policies["inputs"] = read
    if kept := mirror_policies(context):
        policies["mirrors"] = kept
    subject = f"modal:workspace_id:{target.workspace}:environment_name:{target.environment}:app_name:{context.stem}:*"
    return Role(
        key=group.name,
        name=name_with_room(f"{context.stem}-{group.name}", _LONGEST_ROLE),
        region="",
        why=f"what the replicas of {group.name} may do in the store, from Modal",
        trust=(
            Statement(
                actions=("sts:AssumeRoleWithWebIdentity",),
                principal={"Federated": (f"arn:{account.partition}:iam::{account.number}:oidc-provider/{ISSUER}",)},
                conditions={"StringLike": {f"{ISSUER}:sub": (subject,)}, "StringEquals": {f"{ISSUER}:aud": (ISSUER,)}},
            ),
        ),
        policies=policies,
        max_session_s=LONGEST_SESSION_S,
    )
