"""Builds the parameters of the calls to AWS Batch and EC2, for each kind of resource. Pure.

They are trees that may hold references to other resources. Golden files show them, and tests check them against
botocore's own model of the services.
Sources: Batch API reference; EC2 API reference, CreateLaunchTemplate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from skerry.infra.provision.graph import Ref
from skerry.infra.targets.aws_batch import metadata_firewall
from skerry.infra.targets.shared.resolve_refs import Tree, environment_list
from skerry.runtime.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.provision.graph import Value
    from skerry.infra.provision.handler import Desired

ROOT_DISK: Final = "/dev/xvda"
"""The root disk's device name in Amazon's machine images with an ECS agent."""

HOPELESS: Final = (
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)
"""Batch's names of the reasons for which a waiting job can never run ("Jobs stuck in a RUNNABLE status")."""

ENDINGS: Final[Sequence[Mapping[str, str]]] = (
    {"onExitCode": str(int(ExitCode.DONE)), "action": "EXIT"},
    {"onExitCode": str(int(ExitCode.PERMANENT)), "action": "EXIT"},
    {"onExitCode": str(int(ExitCode.STOPPED)), "action": "EXIT"},
    {"onReason": "*", "action": "RETRY"},
)
"""What Batch does when an attempt ends: the first rule that matches counts. Batch accepts five rules.

A machine that shuts down stops its container first, which then ends with RETRY. STOPPED means that the time of the run
is over, or that the script ended itself. Batch never retries a job that was terminated (Batch user guide, "Automated
job retries").
"""


def launch_template(desired: Desired) -> Tree:
    """CreateLaunchTemplate."""
    settings = desired.settings
    disk: Tree = {
        "VolumeSize": settings["disk_gib"],
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    tags: Value = [{"Key": name, "Value": value} for name, value in desired.tags.items()]
    return {
        "LaunchTemplateName": desired.name,
        "LaunchTemplateData": {
            "BlockDeviceMappings": [{"DeviceName": ROOT_DISK, "Ebs": disk}],
            "MetadataOptions": {
                "HttpTokens": "required",
                "HttpPutResponseHopLimit": settings["hop_limit"],
                "HttpProtocolIpv6": "disabled",
            },
            "TagSpecifications": [{"ResourceType": "volume", "Tags": tags}],
            "UserData": metadata_firewall.encoded(metadata_firewall.document()),
        },
        "TagSpecifications": [{"ResourceType": "launch-template", "Tags": tags}],
    }


def compute_environment(desired: Desired) -> Tree:
    """CreateComputeEnvironment."""
    settings = desired.settings
    machines: Tree = {
        "type": "SPOT" if settings["spot"] else "EC2",
        "allocationStrategy": settings["allocation"],
        "minvCpus": settings["min_vcpus"],
        "maxvCpus": settings["max_vcpus"],
        "instanceTypes": settings["instance_types"],
        "ec2Configuration": [{"imageType": settings["image_type"]}],
        "subnets": settings["subnets"],
        "securityGroupIds": settings["security_groups"],
        "instanceRole": settings["instance_profile"],
        "launchTemplate": {"launchTemplateId": settings["launch_template"], "version": "$Default"},
        "tags": {"Name": desired.name, **desired.tags},
    }
    return {
        "computeEnvironmentName": desired.name,
        "type": "MANAGED",
        "state": _state(settings["enabled"]),
        "computeResources": machines,
        "serviceRole": settings["service_role"],
        "tags": desired.tags,
    }


def compute_environment_update(desired: Desired) -> Tree:
    """UpdateComputeEnvironment, for the settings that can change in place."""
    settings = desired.settings
    return {
        "computeEnvironment": desired.name,
        "state": _state(settings["enabled"]),
        "computeResources": {"minvCpus": settings["min_vcpus"], "maxvCpus": settings["max_vcpus"]},
    }


def queue(desired: Desired) -> Tree:
    """CreateJobQueue."""
    return {"jobQueueName": desired.name, "tags": desired.tags, **_queue(desired)}


def queue_update(desired: Desired) -> Tree:
    """UpdateJobQueue."""
    return {"jobQueue": desired.name, **_queue(desired)}


def job_definition(desired: Desired) -> Tree:
    """RegisterJobDefinition."""
    settings = desired.settings
    resource_requirements: list[tuple[str, Value]] = [("VCPU", settings["vcpus"]), ("MEMORY", settings["memory_mib"])]
    if settings["gpus"]:
        resource_requirements.append(("GPU", settings["gpus"]))
    container: Tree = {
        "image": settings["image"],
        "command": settings["command"],
        "user": settings["user"],
        "environment": environment_list(settings["environment"]),
        "resourceRequirements": [{"type": kind, "value": str(value)} for kind, value in resource_requirements],
        "linuxParameters": {"sharedMemorySize": settings["shared_memory_mib"]},
        "jobRoleArn": settings["job_role"],
        "executionRoleArn": settings["execution_role"],
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {
                "awslogs-group": settings["log_group"],
                "awslogs-region": settings["region"],
                "awslogs-stream-prefix": desired.name,
            },
        },
    }
    timeout: Tree = (
        {} if settings["timeout_s"] is None else {"timeout": {"attemptDurationSeconds": settings["timeout_s"]}}
    )
    return {
        "jobDefinitionName": desired.name,
        "type": "container",
        "platformCapabilities": ["EC2"],
        "containerProperties": container,
        "retryStrategy": {"attempts": settings["attempts"], "evaluateOnExit": [dict(rule) for rule in ENDINGS]},
        "propagateTags": True,
        "tags": desired.tags,
        **timeout,
    }


def job(desired: Desired) -> Tree:
    """SubmitJob."""
    settings = desired.settings
    variables = environment_list(settings["environment"])
    overrides: Tree = {"containerOverrides": {"environment": variables}} if variables else {}
    return {
        "jobName": desired.name,
        "jobQueue": settings["queue"],
        "jobDefinition": settings["definition"],
        "propagateTags": True,
        "tags": desired.tags,
        **overrides,
    }


def _queue(desired: Desired) -> Tree:
    settings = desired.settings
    return {
        "state": _state(settings["enabled"]),
        "priority": settings["priority"],
        "computeEnvironmentOrder": [
            {"order": order, "computeEnvironment": environment}
            for order, environment in enumerate(_as_list(settings["compute_environments"]), start=1)
        ],
        "jobStateTimeLimitActions": [
            {"reason": reason, "state": "RUNNABLE", "maxTimeSeconds": settings["hopeless_after_s"], "action": "CANCEL"}
            for reason in HOPELESS
        ],
    }


def _as_list(value: Value) -> Sequence[Value]:
    return [] if isinstance(value, Ref | Mapping | str | bool | int | float | None) else value


def _state(enabled: Value) -> str:
    return "ENABLED" if enabled else "DISABLED"
