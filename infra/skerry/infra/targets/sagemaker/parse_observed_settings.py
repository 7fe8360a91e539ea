"""Parses the description of a training job into the settings and condition that a plan compares. Pure.

A job cannot change. So only settings that are always sent, and reported as they were sent, are compared; for the others
the state's record counts.
Source: SageMaker API reference, DescribeTrainingJob.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.provision.handler import Condition, Observed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.provision.graph import Json

LIVE: Final = ("InProgress", "Stopping")
"""The states of a job that has not ended."""
# "AlgorithmError: ..., exit code: 42"; our own file begins with "skerry: exit code 42: ...".
_CODE: Final = re.compile(r"exit code:? (\d+)")


def job(row: Mapping[str, Any], owner: str | None, region: str) -> Observed:
    """From DescribeTrainingJob. owner: the run that its tags name."""
    status = str(row["TrainingJobStatus"])
    match status:
        case "Completed":
            condition = Condition.DONE
        case "InProgress":
            condition = Condition.READY
        case _:  # stopped, or being stopped
            condition = Condition.LOST
    return Observed(
        outputs={"name": str(row["TrainingJobName"]), "arn": str(row["TrainingJobArn"])},
        settings=_settings(row, region),
        owner=owner,
        condition=condition,
        detail=str(row.get("FailureReason") or secondary(row)),
    )


def secondary(row: Mapping[str, Any]) -> str:
    """Return the secondary status, which is more precise."""
    return str(row.get("SecondaryStatus") or row["TrainingJobStatus"])


def exit_code(row: Mapping[str, Any]) -> int | None:
    """Return the exit code of its container; None while it runs, or if it is unknown."""
    if row["TrainingJobStatus"] == "Completed":
        return 0
    codes = _CODE.findall(str(row.get("FailureReason", "")))
    return int(codes[-1]) if codes else None


def _settings(row: Mapping[str, Any], region: str) -> dict[str, Json]:
    network: Mapping[str, Any] = row.get("VpcConfig", {})
    settings: dict[str, Json] = {
        "region": region,
        "image": str(row["AlgorithmSpecification"].get("TrainingImage", "")),
        "role": str(row["RoleArn"]),
        "instance": str(row["ResourceConfig"].get("InstanceType", "")),
        "spot": row.get("EnableManagedSpotTraining") is True,
        "max_runtime_s": int(row["StoppingCondition"]["MaxRuntimeInSeconds"]),
        "output": str(row["OutputDataConfig"]["S3OutputPath"]),
        "subnets": sorted(map(str, network.get("Subnets", []))),
        "security_groups": sorted(map(str, network.get("SecurityGroupIds", []))),
    }
    if "Environment" in row:
        settings["environment"] = {str(name): str(text) for name, text in row["Environment"].items()}
    return settings
