"""The rate of a group of jobs in AWS Batch, from list prices, spot prices and the user's own."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.targets.aws_batch.kit import LARGE, SMALL
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.cost import prices
from skerry.infra.cost.time_limit_from_cost import hours_allowed, within
from skerry.infra.spec.model import Limits, Replicas
from skerry.infra.targets.aws_batch import costs
from skerry.infra.targets.aws_batch.machine_sizing import Machine
from skerry.infra.targets.aws_batch.options import AwsBatchTarget

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target_and_store_interfaces import Rate


def group(count: int = 8, **options: object) -> Replicas:
    target = {"kind": "aws_batch", "region": "us-east-1", "instance_types": ("g6e.xlarge",), "gpus": 1, **options}
    return Replicas(name="g", count=count, target=AwsBatchTarget.model_validate(target))


def rate(replicas: Replicas, *machines: Machine, spot: dict[str, float] | None = None, firm: bool = False) -> Rate:
    return costs.group_rate(prices.load("aws"), replicas, machines, spot or {}, firm=firm)


UNLISTED = Machine(type="p5e.48xlarge", vcpus=192, memory_mib=2 << 20, gpus=8)
DISK = 8 / 730  # 100 GB for an hour
SPOT_OF_UNLISTED = {"p5e.48xlarge": 20.0}


def test_replicas_share_a_machine_of_several_gpus() -> None:
    small, large = rate(group(), SMALL), rate(group(instance_types=("g6e.12xlarge",)), LARGE)
    assert small.per_hour == pytest.approx(8 * (1.861 + DISK))
    assert large.per_hour == pytest.approx(2 * (10.49264 + DISK))
    assert not small.source.startswith("at most")
    both = rate(group(instance_types=("g6e.xlarge", "g6e.12xlarge")), SMALL, LARGE)
    assert both.per_hour == large.per_hour
    assert both.source.startswith("at most; list price of")


@pytest.mark.parametrize(
    ("options", "machines", "usd", "source"),
    [
        ({"disk": "730GiB"}, [SMALL], 1.861 + 0.08, "disk included"),
        ({"byo": {"queue": "mine"}}, [SMALL], 1.861, "your own disks not counted"),
        ({"region": "sa-east-1"}, [SMALL], None, "no price of g6e.xlarge and a disk in sa-east-1"),
        ({}, [SMALL, UNLISTED], None, "no price of p5e.48xlarge in us-east-1"),
        ({"spot": True}, [SMALL], 1.861 + DISK, "at most; on demand, list price of 2026-07-20 by karpenter, disk"),
        ({"spot": True}, [UNLISTED], 20 + DISK, "spot price now, disk included"),
    ],
    ids=["large disk", "own disk", "region", "unknown type", "no spot price", "spot price only"],
)
def test_rate_of_a_group(options: dict[str, object], machines: list[Machine], usd: float | None, source: str) -> None:
    replicas = group(1, instance_types=tuple(machine.type for machine in machines), **options)
    actual = rate(replicas, *machines, spot=SPOT_OF_UNLISTED)
    assert actual.per_hour == (None if usd is None else pytest.approx(usd))
    assert source in actual.source


def test_firm_rate_needs_a_list_price() -> None:
    replicas = group(spot=True, instance_types=("p5e.48xlarge",))
    assert rate(replicas, UNLISTED, spot=SPOT_OF_UNLISTED, firm=True).per_hour is None


def test_own_spot_price_overrides_the_clouds(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"format": 1, "cloud": "aws", "regions": {"us-east-1": {"spot": {"g6e.xlarge": 0.5}}}}')
    actual = costs.group_rate(prices.load("aws", own), group(spot=True), [SMALL], {"g6e.xlarge": 0.9}, firm=False)
    assert actual.per_hour == pytest.approx(8 * (0.5 + DISK))
    assert actual.source == "spot price in own.json, disk included"


def test_cost_limit_caps_the_hours() -> None:
    uncapped = rate(group(1, max_runtime="2h", attempts=3), SMALL)
    assert uncapped.cap_hours == pytest.approx(6)
    (capped,) = within(hours_allowed(Limits(max_cost_usd=50, max_hours=100), [uncapped]), [uncapped])
    assert capped.per_hour is not None
    assert capped.cap_hours == pytest.approx(50 / capped.per_hour)
    (capped,) = within(hours_allowed(Limits(max_hours=1), [uncapped]), [uncapped])
    assert capped.cap_hours == 1
    assert within(hours_allowed(Limits(), [uncapped]), [uncapped]) == (uncapped,)


@given(st.integers(1, 200), st.integers(0, 200), st.sampled_from([1, 2, 4]))
def test_more_replicas_are_never_cheaper(count: int, more: int, gpus: int) -> None:
    few, many = (
        rate(group(replicas, gpus=gpus, instance_types=("g6e.12xlarge",)), LARGE).per_hour or 0
        for replicas in (count, count + more)
    )
    assert 0 < few <= many


def test_newest_price_of_the_dearest_allowed_zone_is_used() -> None:
    def row(zone: str, usd: str, hour: int) -> dict[str, object]:
        when = dt.datetime(2026, 1, 1, hour, tzinfo=dt.UTC)
        return {"InstanceType": "g6e.xlarge", "AvailabilityZone": zone, "SpotPrice": usd, "Timestamp": when}

    rows = [row("us-east-1a", "0.9", 1), row("us-east-1a", "0.6", 2), row("us-east-1b", "0.7", 1)]
    assert costs.highest_current(rows, None) == {"g6e.xlarge": 0.7}
    assert costs.highest_current(rows, ("us-east-1a",)) == {"g6e.xlarge": 0.6}
    assert costs.highest_current(rows, ()) == {}


def test_unreachable_cloud_gives_no_spot_prices() -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_MAX_ATTEMPTS": "1",
    }
    assert costs.spot_prices(Aws(FakeClock(), environment), AwsBatchTarget.of(group(spot=True))) == {}
