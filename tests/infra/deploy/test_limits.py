"""What a run may take and cost, from the spec to the jobs that keep to it."""

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

    from skerry.infra.deploy.planning import Planned
    from skerry.infra.testing.sandbox import Sandbox


def operator(folder: Path, sandbox: Sandbox, limits: str) -> Operator:
    path = write_spec(folder)
    text = path.read_text().replace("limits: {max_hours: 24}\n", limits)
    path.write_text(text.replace("region: us-east-1\n", "region: us-east-1\n      spot: true\n"))
    return Operator(path, sandbox.environment)


def hours_of(planned: Planned) -> set[tuple[object, object]]:
    """What every job definition says: the run's hours, and an attempt's seconds."""
    told: list[tuple[object, object]] = []
    for change in planned.plan.changes:
        if change.kind == "aws_batch_definition":
            environment = change.settings["environment"]
            assert isinstance(environment, Mapping)
            told.append((environment.get("SKERRY_MAX_HOURS"), change.settings["timeout_s"]))
    assert len(told) == 2
    return set(told)


def prices_now(monkeypatch: pytest.MonkeyPatch, usd: str) -> None:
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


def test_a_limit_of_cost_is_a_limit_of_time_that_spot_prices_do_not_move(
    tmp_path: Path, skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = operator(tmp_path, skerry_sandbox, "limits: {max_cost_usd: 2}\n")
    prices_now(monkeypatch, "0.0400")
    before = one.plan()
    prices_now(monkeypatch, "0.0800")
    after = one.plan()
    assert before.plan == after.plan
    assert before.plan.problems == ()
    per_hour = sum(rate.per_hour or 0.0 for rate in before.rates)
    ((hours, seconds),) = hours_of(before)
    assert float(str(hours)) == pytest.approx(2 / per_hour, rel=1e-5)
    assert seconds == int(2 / per_hour * 3600)
    # What a reader is told is what holds.
    assert [rate.cap_hours for rate in before.rates] == [pytest.approx(2 / per_hour)]


def test_machines_that_are_not_offered_are_told_as_such_before_their_price_is_asked(
    tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    one = operator(tmp_path, skerry_sandbox, "limits: {max_cost_usd: 50}\n")
    one.path.write_text(one.path.read_text().replace("c7i.large", "c99.large"))
    with pytest.raises(Invalid, match=r"c99\.large is not offered in us-east-1: nor in any large region"):
        one.plan()


def test_the_sooner_of_both_limits_holds(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    one = operator(tmp_path, skerry_sandbox, "limits: {max_cost_usd: 100000, max_hours: 5}\n")
    assert hours_of(one.plan()) == {("5", 18000)}


def test_without_a_limit_of_cost_no_price_is_needed_and_with_one_each_is_asked_once(
    tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    for limits in ("", "limits: {max_hours: 24}\n", "limits: {max_cost_usd: 50}\n"):
        skerry_sandbox.calls.clear()
        one = operator(tmp_path, skerry_sandbox, limits)
        one.plan()
        assert skerry_sandbox.calls.names.count("ec2:DescribeSpotPriceHistory") == 1
    skerry_sandbox.calls.clear()
    assert one.destroy().ok
    assert "ec2:DescribeSpotPriceHistory" not in skerry_sandbox.calls.names


def test_a_cost_that_cannot_be_kept_is_a_problem_beside_the_others(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    one = operator(tmp_path, skerry_sandbox, "limits: {max_cost_usd: 0.0001}\n")
    iam = skerry_sandbox.client("iam")
    (role,) = [change.name for change in one.plan().plan.changes if change.address == "aws_role.b-0"]
    iam.create_role(RoleName=role, Path="/skerry/", AssumeRolePolicyDocument="{}")
    problems = one.plan().plan.problems
    assert len(problems) == 2
    assert problems[0].startswith("aws_role.b-0: ")
    assert problems[1].startswith("limits.max_cost_usd is used up after ")
