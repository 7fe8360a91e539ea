"""Limits of time and cost, from the spec to the settings of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest
from moto.core.responses import ActionResult
from moto.ec2.responses.spot_instances import SpotInstances
from tests.infra.deploy.account import Operator, write_spec

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.deploy.plan_and_apply import Planned
    from skerry.testing.sandbox import Sandbox


def operator(folder: Path, sandbox: Sandbox, limits: str) -> Operator:
    path = write_spec(folder)
    text = path.read_text().replace("limits: {max_hours: 24}\n", limits)
    path.write_text(text.replace("region: us-east-1\n", "region: us-east-1\n      spot: true\n"))
    return Operator(path, sandbox.environment)


def hours_of(planned: Planned) -> set[tuple[object, object]]:
    """The run's hours and an attempt's seconds, from every job definition."""
    limits: list[tuple[object, object]] = []
    for change in planned.plan.changes:
        if change.kind == "aws_batch_definition":
            environment = change.settings["environment"]
            assert isinstance(environment, Mapping)
            limits.append((environment.get("SKERRY_MAX_HOURS"), change.settings["timeout_s"]))
    assert len(limits) == 2
    return set(limits)


def set_spot_price(monkeypatch: pytest.MonkeyPatch, usd: str) -> None:
    row = {
        "InstanceType": "c7i.large",
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": usd,
        "AvailabilityZone": "us-east-1a",
        "Timestamp": "2026-01-02T15:04:05.999Z",
    }

    def answer(_: SpotInstances) -> ActionResult:
        return ActionResult({"SpotPriceHistory": [row]})

    monkeypatch.setattr(SpotInstances, "describe_spot_price_history", answer)


def test_cost_limit_sets_a_time_limit_that_spot_prices_do_not_move(
    tmp_path: Path, skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = operator(tmp_path, skerry_sandbox, "limits: {max_cost_usd: 2}\n")
    set_spot_price(monkeypatch, "0.0400")
    before = user.plan()
    set_spot_price(monkeypatch, "0.0800")
    after = user.plan()
    assert before.plan == after.plan
    assert before.plan.problems == ()
    per_hour = sum(rate.per_hour or 0.0 for rate in before.resolved.rates)
    ((hours, seconds),) = hours_of(before)
    assert float(str(hours)) == pytest.approx(2 / per_hour, rel=1e-5)
    assert seconds == int(2 / per_hour * 3600)
    # The hours shown are those of the jobs.
    assert [rate.cap_hours for rate in before.resolved.rates] == [pytest.approx(2 / per_hour)]


def test_machine_without_offer_is_reported_before_its_price(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    user = operator(tmp_path, skerry_sandbox, "limits: {max_cost_usd: 50}\n")
    user.path.write_text(user.path.read_text().replace("c7i.large", "c99.large"))
    with pytest.raises(Invalid, match=r"c99\.large is not offered in us-east-1: nor in any large region"):
        user.plan()


def test_the_lower_of_both_limits_applies(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    user = operator(tmp_path, skerry_sandbox, "limits: {max_cost_usd: 100000, max_hours: 5}\n")
    assert hours_of(user.plan()) == {("5", 18000)}


def test_each_plan_reads_spot_prices_once_and_destroy_never(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    for limits in ("", "limits: {max_hours: 24}\n", "limits: {max_cost_usd: 50}\n"):
        skerry_sandbox.calls.clear()
        user = operator(tmp_path, skerry_sandbox, limits)
        user.plan()
        assert skerry_sandbox.calls.names.count("ec2:DescribeSpotPriceHistory") == 1
    skerry_sandbox.calls.clear()
    assert user.destroy().ok
    assert "ec2:DescribeSpotPriceHistory" not in skerry_sandbox.calls.names


def test_impossible_cost_limit_is_a_problem_next_to_others(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    user = operator(tmp_path, skerry_sandbox, "limits: {max_cost_usd: 0.0001}\n")
    iam = skerry_sandbox.client("iam")
    (role,) = [change.name for change in user.plan().plan.changes if change.address == "aws_role.b-0"]
    iam.create_role(RoleName=role, Path="/skerry/", AssumeRolePolicyDocument="{}")
    problems = user.plan().plan.problems
    assert len(problems) == 2
    assert problems[0].startswith("aws_role.b-0: ")
    assert problems[1].startswith("limits.max_cost_usd is used up after ")
