"""Parses descriptions of AWS Batch and EC2 into the settings and conditions that a plan compares. Pure.

Settings that a service does not report are left out; values that it reports in another form are converted back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.tags import owner_of, tags_in
from skerry.infra.provision.graph import Json
from skerry.infra.provision.handler import Condition, Observed
from skerry.infra.targets.aws_batch import metadata_firewall
from skerry.infra.targets.aws_batch.requests import HOPELESS, ROOT_DISK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIVE: Final = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
"""The states of a job that has not ended."""


def launch_template(row: Mapping[str, Any], version: Mapping[str, Any], region: str) -> Observed:
    """From DescribeLaunchTemplates, and from DescribeLaunchTemplateVersions for its default version."""
    data: Mapping[str, Any] = version.get("LaunchTemplateData", {})
    disks = [disk for disk in data.get("BlockDeviceMappings", []) if disk.get("DeviceName") == ROOT_DISK]
    metadata: Mapping[str, Any] = data.get("MetadataOptions", {})
    sealed = metadata.get("HttpTokens") == "required"
    return Observed(
        outputs={"id": str(row["LaunchTemplateId"]), "name": str(row["LaunchTemplateName"])},
        settings={
            "region": region,
            "disk_gib": int(disks[0]["Ebs"]["VolumeSize"]) if disks and disks[0]["Ebs"].get("Encrypted") else 0,
            "hop_limit": int(metadata.get("HttpPutResponseHopLimit", 0)) if sealed else 0,
            "boot": metadata_firewall.digest(metadata_firewall.decoded(str(data.get("UserData", "")))),
        },
        owner=owner_of(tags_in(row.get("Tags", []))),
    )


def compute_environment(row: Mapping[str, Any], region: str) -> Observed:
    """From DescribeComputeEnvironments."""
    resources: Mapping[str, Any] = row.get("computeResources", {})
    allocation = str(resources.get("allocationStrategy", "BEST_FIT"))
    types = [str(instance_type) for instance_type in resources.get("instanceTypes", [])]
    images: Sequence[Mapping[str, Any]] = resources.get("ec2Configuration") or [{}]
    settings: dict[str, Json] = {
        "region": region,
        "spot": resources.get("type") == "SPOT",
        "allocation": allocation,
        "instance_types": list[Json](types if allocation.endswith("_ORDERED") else sorted(types)),
        "image_type": str(images[0].get("imageType", "")),
        "min_vcpus": int(resources.get("minvCpus", 0)),
        "max_vcpus": int(resources.get("maxvCpus", 0)),
        "subnets": sorted(map(str, resources.get("subnets", []))),
        "security_groups": sorted(map(str, resources.get("securityGroupIds", []))),
        "instance_profile": str(resources.get("instanceRole", "")),
        "launch_template": str(resources.get("launchTemplate", {}).get("launchTemplateId", "")),
        "service_role": str(row.get("serviceRole", "")),
        "enabled": row.get("state") == "ENABLED",
    }
    outputs = {"name": str(row["computeEnvironmentName"]), "arn": str(row["computeEnvironmentArn"])}
    return _observed(row, outputs, settings)


def queue(row: Mapping[str, Any], region: str) -> Observed:
    """From DescribeJobQueues."""
    order = sorted(row.get("computeEnvironmentOrder", []), key=lambda entry: int(entry["order"]))
    settings: dict[str, Json] = {
        "region": region,
        "compute_environments": [str(entry["computeEnvironment"]) for entry in order],
        "priority": int(row.get("priority", 0)),
        "enabled": row.get("state") == "ENABLED",
    }
    if "jobStateTimeLimitActions" in row:
        actions: Sequence[Mapping[str, Any]] = row["jobStateTimeLimitActions"]
        times = {int(action["maxTimeSeconds"]) for action in actions if action["reason"] in HOPELESS}
        whole = len(times) == 1 and {action["reason"] for action in actions} >= set(HOPELESS)
        settings["hopeless_after_s"] = times.pop() if whole else 0
    return _observed(row, {"name": str(row["jobQueueName"]), "arn": str(row["jobQueueArn"])}, settings)


def job_definition(row: Mapping[str, Any], region: str) -> Observed:
    """From DescribeJobDefinitions."""
    container: Mapping[str, Any] = row.get("containerProperties", {})
    requirements = {str(item["type"]): int(float(item["value"])) for item in container.get("resourceRequirements", [])}
    log: Mapping[str, Any] = container.get("logConfiguration", {}).get("options", {})
    timeout = row.get("timeout", {}).get("attemptDurationSeconds")
    return Observed(
        outputs={"name": str(row["jobDefinitionName"]), "arn": str(row["jobDefinitionArn"])},
        settings={
            "region": region,
            "image": str(container.get("image", "")),
            "command": [str(word) for word in container.get("command", [])],
            "user": str(container.get("user", "")),
            "environment": {str(item["name"]): str(item["value"]) for item in container.get("environment", [])},
            "gpus": requirements.get("GPU", 0),
            "vcpus": requirements.get("VCPU", int(container.get("vcpus", 0))),
            "memory_mib": requirements.get("MEMORY", int(container.get("memory", 0))),
            "shared_memory_mib": int(container.get("linuxParameters", {}).get("sharedMemorySize", 0)),
            "job_role": str(container.get("jobRoleArn", "")),
            "execution_role": str(container.get("executionRoleArn", "")),
            "log_group": str(log.get("awslogs-group", "")),
            "attempts": int(row.get("retryStrategy", {}).get("attempts", 1)),
            "timeout_s": None if timeout is None else int(timeout),
        },
        owner=owner_of(row.get("tags", {})),
    )


def job(row: Mapping[str, Any], region: str) -> Observed:
    """From DescribeJobs."""
    status, reason = str(row["status"]), str(row.get("statusReason", ""))
    match status:
        case "SUCCEEDED":
            condition = Condition.DONE
        case "FAILED":
            condition = Condition.LOST
        case _:
            condition = Condition.READY
    settings: dict[str, Json] = {
        "region": region,
        "definition": str(row["jobDefinition"]),
        "queue": str(row["jobQueue"]),
    }
    return Observed(
        outputs={"id": str(row["jobId"]), "arn": str(row.get("jobArn", ""))},
        settings=settings,
        owner=owner_of(row.get("tags", {})),
        condition=condition,
        detail=reason or status.lower(),
    )


def _observed(row: Mapping[str, Any], outputs: Mapping[str, str], settings: Mapping[str, Json]) -> Observed:
    """Return a resource that Batch validates after its creation."""
    status, reason = str(row.get("status", "VALID")), str(row.get("statusReason", ""))
    broken = status in {"INVALID", "DELETING"}
    return Observed(
        outputs=outputs,
        settings=settings,
        owner=owner_of(row.get("tags", {})),
        condition=Condition.BROKEN if broken else Condition.READY,
        detail=f"{status.lower()}: {reason}".rstrip(": ") if broken else "",
    )
