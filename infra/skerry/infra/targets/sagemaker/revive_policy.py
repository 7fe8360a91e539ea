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
    target: SageMakerTarget, account: Account, run_uri: str, *, jobs: str, role: str, runtime_s: int
) -> Iterator[Statement]:
    """The statements. jobs: the beginning of the names of the group's jobs. role: path and name of its role."""
    names = (f"arn:{account.partition}:sagemaker:{target.region}:{account.number}:training-job/{jobs}-*",)
    role_arn = f"arn:{account.partition}:iam::{account.number}:role{role}"
    tagged = {f"aws:RequestTag/{RUN_TAG}": (run_uri,)}
    networks = {
        key: tuple(sorted(ids))
        for key, ids in {
            "sagemaker:VpcSecurityGroupIds": target.byo.security_groups,
            "sagemaker:VpcSubnets": target.byo.subnets,
        }.items()
        if ids is not None
    }
    yield Statement(
        sid="ReviveJobs",
        actions=("sagemaker:CreateTrainingJob",),
        resources=names,
        conditions={
            "StringEquals": tagged,
            # Of keys with several values: true as well if the request has none, which Null excludes.
            "ForAllValues:StringEquals": {"sagemaker:InstanceTypes": (target.instance,), **networks},
            "Null": dict.fromkeys(("sagemaker:InstanceTypes", *networks), ("false",)),
            "NumericLessThanEquals": {"sagemaker:MaxRuntimeInSeconds": (str(runtime_s),)},
        },
    )
    yield Statement(
        sid="TagRevivedJobs", actions=("sagemaker:AddTags",), resources=names, conditions={"StringEquals": tagged}
    )
    yield Statement(
        sid="LookAtLostJobs", actions=("sagemaker:DescribeTrainingJob", "sagemaker:ListTags"), resources=names
    )
    yield Statement(sid="ListJobs", actions=("sagemaker:ListTrainingJobs",), resources=("*",))
    yield Statement(
        sid="PassOwnRole",
        actions=("iam:PassRole",),
        # A replaced role has a generation in its name.
        resources=(role_arn, f"{role_arn}-g?"),
        conditions={"StringEquals": {"iam:PassedToService": ("sagemaker.amazonaws.com",)}},
    )
