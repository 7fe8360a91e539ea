"""What is said to SageMaker to start a replica: a tree that may hold references. Pure.

Golden files show it; tests check it against botocore's own model of the service, and against what goes over the wire.
Source: SageMaker API reference, CreateTrainingJob.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from skerry.infra.clouds.aws.handling import tag_list
from skerry.infra.graph import Ref
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.infra.graph import Value
    from skerry.infra.handler import Wanted

Tree = dict[str, "Value"]


def training_job(wanted: Wanted) -> Tree:
    """CreateTrainingJob.

    The image's own entry point gets the word `train`, as SageMaker calls every image. Nothing is profiled: that would
    write to the bucket with rights that the role does not have.
    """
    said = wanted.settings
    optional: dict[str, Value] = {
        "HyperParameters": said["hyperparameters"],
        "RetryStrategy": {"MaximumRetryAttempts": said["retries"]} if said["retries"] else None,
        "VpcConfig": {"SecurityGroupIds": said["security_groups"], "Subnets": said["subnets"]}
        if said["subnets"]
        else None,
    }
    return {
        "TrainingJobName": wanted.name,
        "AlgorithmSpecification": {"TrainingImage": said["image"], "TrainingInputMode": "File"},
        "RoleArn": said["role"],
        "OutputDataConfig": {"S3OutputPath": said["output"]},
        "ResourceConfig": _given(
            InstanceType=said["instance"],
            InstanceCount=1,
            VolumeSizeInGB=said["volume_gib"],
            VolumeKmsKeyId=said["kms_key"],
        ),
        "StoppingCondition": _given(
            MaxRuntimeInSeconds=said["max_runtime_s"],
            MaxWaitTimeInSeconds=said["max_wait_s"],
            MaxPendingTimeInSeconds=said["max_pending_s"],
        ),
        "Environment": said["environment"],
        "EnableManagedSpotTraining": said["spot"],
        # A replica that reaches nobody cannot reach the store.
        "EnableNetworkIsolation": False,
        "ProfilerConfig": {"DisableProfiler": True},
        "Tags": [dict(one) for one in tag_list(wanted.tags)],
        **{name: value for name, value in optional.items() if value},
    }


def ready(tree: Tree) -> dict[str, object]:
    """`tree` as it is sent. Raises Invalid if something in it is not known yet."""
    return {name: _ready(value) for name, value in tree.items()}


def _given(**values: Value) -> Tree:
    return {name: value for name, value in values.items() if value is not None}


def _ready(value: Value) -> object:
    match value:
        case Ref():
            raise Invalid(f"cannot send a request that waits for {value}")
        case Mapping():
            return {name: _ready(inner) for name, inner in value.items()}
        case str() | None | bool() | int() | float():
            return value
        case _:
            return [_ready(inner) for inner in value]
