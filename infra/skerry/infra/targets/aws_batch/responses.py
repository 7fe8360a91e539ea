"""What AWS Batch and EC2 say of their things, as the settings and conditions that a plan compares. Pure.

A setting that a service does not tell is left out; what it writes in another way than it was asked is put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.handling import owner_of, tags_in
from skerry.infra.graph import Json
from skerry.infra.handler import Condition, Seen
from skerry.infra.targets.aws_batch import boot
from skerry.infra.targets.aws_batch.requests import HOPELESS, ROOT_DISK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIVE: Final = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
"""Words for a job that has not ended."""


def launch_template(row: Mapping[str, Any], version: Mapping[str, Any], region: str) -> Seen:
    """From DescribeLaunchTemplates, and from DescribeLaunchTemplateVersions for its default version."""
    data: Mapping[str, Any] = version.get("LaunchTemplateData", {})
    disks = [disk for disk in data.get("BlockDeviceMappings", []) if disk.get("DeviceName") == ROOT_DISK]
    metadata: Mapping[str, Any] = data.get("MetadataOptions", {})
    sealed = metadata.get("HttpTokens") == "required"
    return Seen(
        outputs={"id": str(row["LaunchTemplateId"]), "name": str(row["LaunchTemplateName"])},
        settings={
            "region": region,
            "disk_gib": int(disks[0]["Ebs"]["VolumeSize"]) if disks and disks[0]["Ebs"].get("Encrypted") else 0,
            "hop_limit": int(metadata.get("HttpPutResponseHopLimit", 0)) if sealed else 0,
            "boot": boot.digest(boot.decoded(str(data.get("UserData", "")))),
        },
        owner=owner_of(tags_in(row.get("Tags", []))),
    )


def compute_environment(row: Mapping[str, Any], region: str) -> Seen:
    """From DescribeComputeEnvironments."""
    said: Mapping[str, Any] = row.get("computeResources", {})
    allocation = str(said.get("allocationStrategy", "BEST_FIT"))
    types = [str(one) for one in said.get("instanceTypes", [])]
    images: Sequence[Mapping[str, Any]] = said.get("ec2Configuration") or [{}]
    settings: dict[str, Json] = {
        "region": region,
        "spot": said.get("type") == "SPOT",
        "allocation": allocation,
        "instance_types": list[Json](types if allocation.endswith("_ORDERED") else sorted(types)),
        "image_type": str(images[0].get("imageType", "")),
        "max_vcpus": int(said.get("maxvCpus", 0)),
        "subnets": sorted(map(str, said.get("subnets", []))),
        "security_groups": sorted(map(str, said.get("securityGroupIds", []))),
        "instance_profile": str(said.get("instanceRole", "")),
        "launch_template": str(said.get("launchTemplate", {}).get("launchTemplateId", "")),
        "service_role": str(row.get("serviceRole", "")),
        "enabled": row.get("state") == "ENABLED",
    }
    outputs = {"name": str(row["computeEnvironmentName"]), "arn": str(row["computeEnvironmentArn"])}
    return _seen(row, outputs, settings)


def queue(row: Mapping[str, Any], region: str) -> Seen:
    """From DescribeJobQueues."""
    order = sorted(row.get("computeEnvironmentOrder", []), key=lambda one: int(one["order"]))
    settings: dict[str, Json] = {
        "region": region,
        "compute_environments": [str(one["computeEnvironment"]) for one in order],
        "priority": int(row.get("priority", 0)),
        "enabled": row.get("state") == "ENABLED",
    }
    if "jobStateTimeLimitActions" in row:
        actions: Sequence[Mapping[str, Any]] = row["jobStateTimeLimitActions"]
        times = {int(one["maxTimeSeconds"]) for one in actions if one["reason"] in HOPELESS}
        whole = len(times) == 1 and {one["reason"] for one in actions} >= set(HOPELESS)
        settings["hopeless_after_s"] = times.pop() if whole else 0
    return _seen(row, {"name": str(row["jobQueueName"]), "arn": str(row["jobQueueArn"])}, settings)


def job_definition(row: Mapping[str, Any], region: str) -> Seen:
    """From DescribeJobDefinitions."""
    said: Mapping[str, Any] = row.get("containerProperties", {})
    needs = {str(one["type"]): int(float(one["value"])) for one in said.get("resourceRequirements", [])}
    log: Mapping[str, Any] = said.get("logConfiguration", {}).get("options", {})
    timeout = row.get("timeout", {}).get("attemptDurationSeconds")
    return Seen(
        outputs={"name": str(row["jobDefinitionName"]), "arn": str(row["jobDefinitionArn"])},
        settings={
            "region": region,
            "image": str(said.get("image", "")),
            "command": [str(word) for word in said.get("command", [])],
            "user": str(said.get("user", "")),
            "environment": {str(one["name"]): str(one["value"]) for one in said.get("environment", [])},
            "gpus": needs.get("GPU", 0),
            "vcpus": needs.get("VCPU", int(said.get("vcpus", 0))),
            "memory_mib": needs.get("MEMORY", int(said.get("memory", 0))),
            "shared_memory_mib": int(said.get("linuxParameters", {}).get("sharedMemorySize", 0)),
            "job_role": str(said.get("jobRoleArn", "")),
            "execution_role": str(said.get("executionRoleArn", "")),
            "log_group": str(log.get("awslogs-group", "")),
            "attempts": int(row.get("retryStrategy", {}).get("attempts", 1)),
            "timeout_s": None if timeout is None else int(timeout),
        },
        owner=owner_of(row.get("tags", {})),
    )


def job(row: Mapping[str, Any], region: str) -> Seen:
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
    return Seen(
        outputs={"id": str(row["jobId"]), "arn": str(row.get("jobArn", ""))},
        settings=settings,
        owner=owner_of(row.get("tags", {})),
        condition=condition,
        detail=reason or status.lower(),
    )


def _seen(row: Mapping[str, Any], outputs: Mapping[str, str], settings: Mapping[str, Json]) -> Seen:
    """Of what Batch validates by itself after it was made."""
    status, reason = str(row.get("status", "VALID")), str(row.get("statusReason", ""))
    broken = status in {"INVALID", "DELETING"}
    return Seen(
        outputs=outputs,
        settings=settings,
        owner=owner_of(row.get("tags", {})),
        condition=Condition.BROKEN if broken else Condition.READY,
        detail=f"{status.lower()}: {reason}".rstrip(": ") if broken else "",
    )
