"""What is said to AWS Batch and EC2 for each kind of resource: trees that may hold references. Pure.

Golden files show them; tests check them against botocore's own model of the services.
Sources: Batch API reference; EC2 API reference, CreateLaunchTemplate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from skerry.infra.graph import Ref
from skerry.infra.targets.aws_batch import boot
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.graph import Value
    from skerry.infra.handler import Wanted

Tree = dict[str, "Value"]

ROOT_DISK: Final = "/dev/xvda"
"""What Amazon's own machine images with an ECS agent call their root disk."""

HOPELESS: Final = (
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)
"""Why a job waits that no waiting helps, in Batch's words ("Jobs stuck in a RUNNABLE status")."""

ENDINGS: Final[Sequence[Mapping[str, str]]] = (
    {"onExitCode": str(int(ExitCode.DONE)), "action": "EXIT"},
    {"onExitCode": str(int(ExitCode.PERMANENT)), "action": "EXIT"},
    {"onExitCode": str(int(ExitCode.STOPPED)), "action": "EXIT"},
    {"onReason": "*", "action": "RETRY"},
)
"""The first that matches counts; what none matches is tried again. There is room for five.

A machine that goes down stops its container first, which then ends with RETRY. STOPPED is said only by a run that has
had its time, or by the script itself. A job that is terminated is never tried again (Batch user guide, "Automated job
retries").
"""


def launch_template(wanted: Wanted) -> Tree:
    """CreateLaunchTemplate."""
    said = wanted.settings
    disk: Tree = {"VolumeSize": said["disk_gib"], "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    tags: Value = [{"Key": name, "Value": value} for name, value in wanted.tags.items()]
    return {
        "LaunchTemplateName": wanted.name,
        "LaunchTemplateData": {
            "BlockDeviceMappings": [{"DeviceName": ROOT_DISK, "Ebs": disk}],
            "MetadataOptions": {
                "HttpTokens": "required",
                "HttpPutResponseHopLimit": said["hop_limit"],
                "HttpProtocolIpv6": "disabled",
            },
            "TagSpecifications": [{"ResourceType": "volume", "Tags": tags}],
            "UserData": boot.encoded(boot.document()),
        },
        "TagSpecifications": [{"ResourceType": "launch-template", "Tags": tags}],
    }


def compute_environment(wanted: Wanted) -> Tree:
    """CreateComputeEnvironment."""
    said = wanted.settings
    machines: Tree = {
        "type": "SPOT" if said["spot"] else "EC2",
        "allocationStrategy": said["allocation"],
        "minvCpus": 0,
        "maxvCpus": said["max_vcpus"],
        "instanceTypes": said["instance_types"],
        "ec2Configuration": [{"imageType": said["image_type"]}],
        "subnets": said["subnets"],
        "securityGroupIds": said["security_groups"],
        "instanceRole": said["instance_profile"],
        "launchTemplate": {"launchTemplateId": said["launch_template"], "version": "$Default"},
        "tags": {"Name": wanted.name, **wanted.tags},
    }
    return {
        "computeEnvironmentName": wanted.name,
        "type": "MANAGED",
        "state": _state(said["enabled"]),
        "computeResources": machines,
        "serviceRole": said["service_role"],
        "tags": wanted.tags,
    }


def changed_environment(wanted: Wanted) -> Tree:
    """UpdateComputeEnvironment, for what can change where it stands."""
    said = wanted.settings
    return {
        "computeEnvironment": wanted.name,
        "state": _state(said["enabled"]),
        "computeResources": {"maxvCpus": said["max_vcpus"]},
    }


def queue(wanted: Wanted) -> Tree:
    """CreateJobQueue."""
    return {"jobQueueName": wanted.name, "tags": wanted.tags, **_queue(wanted)}


def changed_queue(wanted: Wanted) -> Tree:
    """UpdateJobQueue."""
    return {"jobQueue": wanted.name, **_queue(wanted)}


def job_definition(wanted: Wanted) -> Tree:
    """RegisterJobDefinition."""
    said = wanted.settings
    needs: list[tuple[str, Value]] = [("VCPU", said["vcpus"]), ("MEMORY", said["memory_mib"])]
    if said["gpus"]:
        needs.append(("GPU", said["gpus"]))
    container: Tree = {
        "image": said["image"],
        "command": said["command"],
        "user": said["user"],
        "environment": _variables(said["environment"]),
        "resourceRequirements": [{"type": kind, "value": str(value)} for kind, value in needs],
        "linuxParameters": {"sharedMemorySize": said["shared_memory_mib"]},
        "jobRoleArn": said["job_role"],
        "executionRoleArn": said["execution_role"],
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {
                "awslogs-group": said["log_group"],
                "awslogs-region": said["region"],
                "awslogs-stream-prefix": wanted.name,
            },
        },
    }
    timeout: Tree = {} if said["timeout_s"] is None else {"timeout": {"attemptDurationSeconds": said["timeout_s"]}}
    return {
        "jobDefinitionName": wanted.name,
        "type": "container",
        "platformCapabilities": ["EC2"],
        "containerProperties": container,
        "retryStrategy": {"attempts": said["attempts"], "evaluateOnExit": [dict(one) for one in ENDINGS]},
        "propagateTags": True,
        "tags": wanted.tags,
        **timeout,
    }


def job(wanted: Wanted) -> Tree:
    """SubmitJob."""
    said = wanted.settings
    variables = _variables(said["environment"])
    overrides: Tree = {"containerOverrides": {"environment": variables}} if variables else {}
    return {
        "jobName": wanted.name,
        "jobQueue": said["queue"],
        "jobDefinition": said["definition"],
        "propagateTags": True,
        "tags": wanted.tags,
        **overrides,
    }


def ready(tree: Tree) -> dict[str, object]:
    """`tree` as it is sent. Raises Invalid if something in it is not known yet."""
    return {name: _ready(value) for name, value in tree.items()}


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


def _queue(wanted: Wanted) -> Tree:
    said = wanted.settings
    return {
        "state": _state(said["enabled"]),
        "priority": said["priority"],
        "computeEnvironmentOrder": [
            {"order": number, "computeEnvironment": one}
            for number, one in enumerate(_listed(said["compute_environments"]), start=1)
        ],
        "jobStateTimeLimitActions": [
            {"reason": reason, "state": "RUNNABLE", "maxTimeSeconds": said["hopeless_after_s"], "action": "CANCEL"}
            for reason in HOPELESS
        ],
    }


def _variables(environment: Value) -> list[Value]:
    if not isinstance(environment, Mapping):
        return []
    return [{"name": name, "value": environment[name]} for name in sorted(environment)]


def _listed(value: Value) -> Sequence[Value]:
    return [] if isinstance(value, Ref | Mapping | str | bool | int | float | None) else value


def _state(enabled: Value) -> str:
    return "ENABLED" if enabled else "DISABLED"
