"""Builds the request that starts a training job of SageMaker. Pure.

It is a tree that may hold references to other resources. Golden files show it; tests check it against botocore's own
model of the service, and against what is sent.
Source: SageMaker API reference, CreateTrainingJob.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.clouds.aws.tags import tag_list

if TYPE_CHECKING:
    from skerry.infra.provision.graph import Value
    from skerry.infra.provision.handler import Desired
    from skerry.infra.targets.shared.resolve_refs import Tree


def job(desired: Desired) -> Tree:
    """CreateTrainingJob.

    SageMaker starts the image's own entry point with the argument `train`. The profiler is off, because it would write
    to the bucket with rights that the role does not have.
    """
    settings = desired.settings
    optional: dict[str, Value] = {
        "HyperParameters": settings["hyperparameters"],
        "RetryStrategy": {"MaximumRetryAttempts": settings["retries"]} if settings["retries"] else None,
        "VpcConfig": {"SecurityGroupIds": settings["security_groups"], "Subnets": settings["subnets"]}
        if settings["subnets"]
        else None,
    }
    return {
        "TrainingJobName": desired.name,
        "AlgorithmSpecification": {"TrainingImage": settings["image"], "TrainingInputMode": "File"},
        "RoleArn": settings["role"],
        "OutputDataConfig": {"S3OutputPath": settings["output"]},
        "ResourceConfig": _without_none(
            InstanceType=settings["instance"],
            InstanceCount=1,
            VolumeSizeInGB=settings["volume_gib"],
            VolumeKmsKeyId=settings["kms_key"],
        ),
        "StoppingCondition": _without_none(
            MaxRuntimeInSeconds=settings["max_runtime_s"],
            MaxWaitTimeInSeconds=settings["max_wait_s"],
            MaxPendingTimeInSeconds=settings["max_pending_s"],
        ),
        "Environment": settings["environment"],
        "EnableManagedSpotTraining": settings["spot"],
        # An isolated replica could not reach the store.
        "EnableNetworkIsolation": False,
        "ProfilerConfig": {"DisableProfiler": True},
        "Tags": [dict(tag) for tag in tag_list(desired.tags)],
        **{name: value for name, value in optional.items() if value},
    }


def _without_none(**values: Value) -> Tree:
    return {name: value for name, value in values.items() if value is not None}
