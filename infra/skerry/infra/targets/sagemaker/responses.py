"""What SageMaker says of a training job, as the settings and conditions that a plan compares. Pure.

A job cannot change. So only what is always sent, and told again as it was sent, is compared with what is wanted; for
the rest what was made counts.
Source: SageMaker API reference, DescribeTrainingJob.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.handler import Condition, Seen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.graph import Json

LIVE: Final = ("InProgress", "Stopping")
"""Words for a job that has not ended."""
# "AlgorithmError: ..., exit code: 42"; our own file begins with "skerry: exit code 42: ...".
_CODE: Final = re.compile(r"exit code:? (\d+)")


def job(row: Mapping[str, Any], owner: str | None, region: str) -> Seen:
    """From DescribeTrainingJob. owner: the run that its tags name."""
    status = str(row["TrainingJobStatus"])
    match status:
        case "Completed":
            condition = Condition.DONE
        case "InProgress":
            condition = Condition.READY
        case _:  # stopped, or about to be: it will not go on
            condition = Condition.LOST
    return Seen(
        outputs={"name": str(row["TrainingJobName"]), "arn": str(row["TrainingJobArn"])},
        settings=_settings(row, region),
        owner=owner,
        condition=condition,
        detail=str(row.get("FailureReason") or secondary(row)),
    )


def secondary(row: Mapping[str, Any]) -> str:
    """The finer word for what it is doing."""
    return str(row.get("SecondaryStatus") or row["TrainingJobStatus"])


def exit_code(row: Mapping[str, Any]) -> int | None:
    """With what its container ended; None while it has not, or if nobody says."""
    if row["TrainingJobStatus"] == "Completed":
        return 0
    found = _CODE.findall(str(row.get("FailureReason", "")))
    return int(found[-1]) if found else None


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
