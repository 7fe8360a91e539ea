"""The permissions that infra/examples/operator-policy-sagemaker.json adds: enough for a run on SageMaker, and no more.

moto checks permissions on S3 and roles only, so this compares the names of all calls with the policy. It does not test
AWS itself: the resources of each action are from the Service Authorization Reference.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from skerry.infra.clouds.aws.errors import action_of
from skerry.infra.deploy import list_and_stop_jobs as working
from skerry.testing.aws.conditions import glob, holds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.infra.deploy.account import Operator
    from tests.infra.targets.runs import SageMakerRun

    from skerry.testing.calls import Call
    from skerry.testing.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("quick")
EXAMPLES: Final = Path(__file__).parents[4] / "infra/examples"
JOB: Final = "arn:aws:sagemaker:us-east-1:123456789012:training-job/"
LOGS: Final = "arn:aws:logs:us-east-1:123456789012:log-group:"
# Characters of a managed policy, white space not counted (IAM quotas).
LONGEST: Final = 6144
# Any caller may ask for its own identity.
FREE: Final = {"sts:GetCallerIdentity"}
# The service model has another name than the signatures, so the operation is one of these two.
QUOTAS: Final = {"servicequotas:ListAWSDefaultServiceQuotas", "servicequotas:ListServiceQuotas"}


def statements(name: str) -> list[dict[str, Any]]:
    return json.loads((EXAMPLES / f"{name}.json").read_text().replace("acme-diloco", "acme-skerry"))["Statement"]


OURS: Final = statements("operator-policy-sagemaker")


def life(operator: Operator, sandbox: Sandbox) -> list[Call]:
    """Return the calls of an operator during a run: a job fails, is recreated and logs, and the run is destroyed."""
    assert operator.apply().ok
    lost = sandbox.inventory()["training job"][0]
    sandbox.training.finish(lost, 10)
    assert operator.apply().ok
    deployment = operator.deployment()
    (record, _), *_ = working.list_jobs(deployment)
    sandbox.training.write(record.outputs["name"], "hello")
    assert [line.text for line in working.read_log(deployment, record, None)] == ["hello"]
    for target, groups in deployment.groups():
        list(target.checks(deployment.context, groups))
    assert operator.destroy().ok
    return [call for call in sandbox.calls if not call.caller.startswith("role/")]


def permissions_of(call: Call) -> Iterator[tuple[str, str]]:
    """Yield the permissions that a call needs, each with its resource."""
    if call.service == "sagemaker":
        arn = str(call.params.get("ResourceArn") or JOB + str(call.params.get("TrainingJobName", "")))
        yield call.name, "*" if call.operation == "ListTrainingJobs" else arn
    if call.name == "sagemaker:CreateTrainingJob":
        yield "sagemaker:AddTags", JOB + str(call.params["TrainingJobName"])
        yield "iam:PassRole", str(call.params["RoleArn"])
    if call.name in {"logs:DescribeLogStreams", "logs:GetLogEvents"}:
        yield call.name, f"{LOGS}{call.params['logGroupName']}:log-stream:{call.params.get('logStreamName', '')}"


def allowed(action: str, on: str) -> bool:
    context = {"iam:passedtoservice": "sagemaker.amazonaws.com"}
    return any(
        action in statement["Action"]
        and any(
            glob(pattern, on)
            for pattern in (
                [statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"]
            )
        )
        and holds(statement.get("Condition", {}), context)
        for statement in OURS
    )


def needed(calls: list[Call]) -> set[str]:
    """Return the names of the permissions that these calls need."""
    names: set[str] = set()
    for call in calls:
        if "quotas" in call.service:
            names |= QUOTAS
        else:
            names.add(action_of(call.service, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", call.operation).lower()))
        names |= {action for action, _ in permissions_of(call)}
    return names - FREE


@pytest.mark.slow
def test_operator_policy_is_sufficient_and_minimal(sagemaker_run: SageMakerRun) -> None:
    sandbox = sagemaker_run.sandbox
    calls = life(sagemaker_run.operator(options="spot: true"), sandbox)
    assert sandbox.inventory() == {}
    here = [pair for call in calls for pair in permissions_of(call)]
    assert {action for action, _ in here} >= {f"sagemaker:{verb}TrainingJob" for verb in ("Create", "Stop", "Delete")}
    assert [pair for pair in here if not allowed(*pair)] == []
    granted = {action for statement in OURS for action in statement["Action"]}
    beside = {action for statement in statements("operator-policy") for action in statement["Action"]}
    assert needed(calls) - granted - beside == set(), "used, and in neither policy"
    assert granted - needed(calls) == set(), "in the policy, and never used"


def test_operator_policy_covers_only_own_resources() -> None:
    assert not allowed("sagemaker:StopTrainingJob", f"{JOB}theirs")
    assert not allowed("logs:GetLogEvents", f"{LOGS}/aws/sagemaker/Endpoints:log-stream:one")
    assert not allowed("iam:PassRole", "arn:aws:iam::123456789012:role/Administrator")
    passing = next(statement for statement in OURS if statement["Action"] == ["iam:PassRole"])
    assert not holds(passing["Condition"], {"iam:passedtoservice": "lambda.amazonaws.com"})


def test_operator_policy_fits_a_managed_policy() -> None:
    assert len(json.dumps({"Version": "2012-10-17", "Statement": OURS}, separators=(",", ":"))) <= LONGEST
    (everywhere,) = [statement for statement in OURS if statement["Resource"] == "*"]
    assert all(action.partition(":")[2].startswith(("Describe", "List")) for action in everywhere["Action"])
    assert not [action for statement in OURS for action in statement["Action"] if "*" in action]
