"""Builds the rights with which the replicas of a group start each other's lost jobs. Pure.

The role of the group may create jobs of the group's names alone, tagged as the run's, on its type of machine, for its
time, in its network, and only with itself as their role. So such a job can do what the role can do, and no more. IAM
has no condition for the image: SageMaker pulls it with the role, which may pull the images of the group only.
Source: Service Authorization Reference, "Amazon SageMaker", CreateTrainingJob.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.clouds.aws.policies import Statement
from skerry.infra.provision.handler import RUN_TAG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.clouds.aws.session import Account
    from skerry.infra.targets.sagemaker.options import SageMakerTarget


def revive_policy(
    target: SageMakerTarget, account: Account, run_uri: str, *, jobs: str, count: int, role: str, runtime_s: int
) -> Iterator[Statement]:
    """The statements. jobs: the beginning of the names of the group's jobs. count: of its replicas.

    role: path and name of its role.
    """
    job = f"arn:{account.partition}:sagemaker:{target.region}:{account.number}:training-job/{jobs}-"
    # A number, a digest, a generation. `*` for the number would give the group gpu the names of gpu-b, too.
    numbers = ["?" * digits for digits in range(1, len(str(count - 1)) + 1)]
    names = tuple(f"{job}{number}-??????{generation}" for number in numbers for generation in ("", "-g*"))
    role_arn = f"arn:{account.partition}:iam::{account.number}:role{role}"
    tagged = {f"aws:RequestTag/{RUN_TAG}": (run_uri,)}
    networks = {
        key: tuple(sorted(ids or ()))
        for key, ids in {
            "sagemaker:VpcSecurityGroupIds": target.byo.security_groups,
            "sagemaker:VpcSubnets": target.byo.subnets,
        }.items()
    }
    values = {"sagemaker:InstanceTypes": (target.instance,), **{key: ids for key, ids in networks.items() if ids}}
    # A machine that is kept after its job costs more than the job's time.
    absent = (*(key for key in networks if key not in values), "sagemaker:KeepAlivePeriod")
    yield Statement(
        sid="ReviveJobs",
        actions=("sagemaker:CreateTrainingJob",),
        resources=names,
        conditions={
            "StringEquals": tagged,
            # Of keys with several values: true as well if the request has none, which Null excludes.
            "ForAllValues:StringEquals": values,
            "Null": {**dict.fromkeys(values, ("false",)), **dict.fromkeys(absent, ("true",))},
            "NumericLessThanEquals": {"sagemaker:MaxRuntimeInSeconds": (str(runtime_s),)},
        },
    )
    yield Statement(
        sid="TagRevivedJobs",
        actions=("sagemaker:AddTags",),
        resources=names,
        # Only while it creates a job: the tags of the others say which one is cancelled.
        conditions={"StringEquals": {**tagged, "sagemaker:TaggingAction": ("CreateTrainingJob",)}},
    )
    yield Statement(
        sid="LookAtLostJobs", actions=("sagemaker:DescribeTrainingJob", "sagemaker:ListTags"), resources=names
    )
    yield Statement(sid="ListJobs", actions=("sagemaker:ListTrainingJobs",), resources=("*",))
    yield Statement(
        sid="PassOwnRole",
        actions=("iam:PassRole",),
        # A replaced role has a generation in its name.
        resources=(role_arn, f"{role_arn}-g?", f"{role_arn}-g??"),
        conditions={"StringEquals": {"iam:PassedToService": ("sagemaker.amazonaws.com",)}},
    )
