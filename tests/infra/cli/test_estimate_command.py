"""`skerry estimate` against an account in memory, and the rates of groups in AWS Batch."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.deploy.account import write_run
from tests.infra.targets.aws_batch.kit import LARGE, SMALL
from tests.support.clocks import FakeClock
from typer import Typer
from typer.testing import CliRunner

from skerry.infra import targets
from skerry.infra.cli import estimate_command
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.cost import prices
from skerry.infra.cost.estimate import hours_allowed, within
from skerry.infra.cost.prices import VARIABLE
from skerry.infra.deploy.deployment import prepare
from skerry.infra.run import local_preflight
from skerry.infra.spec.model import Limits, Replicas
from skerry.infra.targets.aws_batch import costs
from skerry.infra.targets.aws_batch.machine_sizing import Machine
from skerry.infra.targets.aws_batch.options import AwsBatchTarget
from skerry.runtime.clock import SystemClock
from skerry.testing.plugin import skerry_sandbox

if TYPE_CHECKING:
    from click.testing import Result

    from skerry.infra.provision.target import Rate
    from skerry.testing.sandbox import Sandbox

__all__ = ["skerry_sandbox"]

GROUPS = """\
  - name: east
    count: 8
    target: {{kind: aws_batch, region: us-east-1, instance_types: [g6e.xlarge, g6e.12xlarge], gpus: 1}}
  - {{name: west, count: 3, target: {{kind: aws_batch, region: us-west-2, instance_types: [{type}], spot: {spot}}}}}
"""


@pytest.fixture(autouse=True)
def _in_the_sandbox(skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in skerry_sandbox.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(VARIABLE, raising=False)


def write(folder: Path, *, kind: str = "c7i.2xlarge", spot: bool = False) -> str:
    path = write_run(
        folder,
        GROUPS.format(type=kind, spot=str(spot).lower()),
        outer="{rounds: 200, sync_every: 100, fragments: 4, codec: bf16}",
        more="faults: {checkpoint_every: 2, keep_every: 50}\nlimits: {max_cost_usd: 100}\n",
    )
    return str(path)


def skerry(*words: str, code: int = 0) -> Result:
    app = Typer()
    app.command()(estimate_command.estimate)
    app.callback()(lambda: None)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["estimate", *words])
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result


def test_run_in_two_regions_is_estimated_in_dollars(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    output = skerry(write(tmp_path), "--parameters", "1.3B").output
    # Eight small machines, or two large ones: 2 x (10.49264 + 100 GB x 0.08 / 730).
    assert "east: 8 x g6e.xlarge or g6e.12xlarge, on demand, in us-east-1: $21.01/h (at most; list price of" in output
    assert "west: 3 x c7i.2xlarge, on demand, in us-west-2: $1.10/h (undated list price by skypilot-scaled" in output
    assert "together $22.11/h; at most $100.00 at these prices, because they are stopped after 4.523 h" in output
    assert "each replica sends 650.0 MB and reads 6.5 GB" in output
    assert "from region to region 38.5 GB: $0.77" in output
    assert skerry_sandbox.calls.writes == []
    assert skerry_sandbox.inventory() == {}


def test_without_a_size_traffic_is_per_billion_parameters(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert "traffic of a round, for every billion parameters, sent as bf16, one of 4 fragments:" in skerry(path).output
    first = skerry(path, "--json").stdout
    assert skerry(path, "--json").stdout == first
    document = json.loads(first)
    assert document["per_hour_usd"] == pytest.approx(2 * (10.49264 + 8 / 730) + 3 * (0.357 + 8 / 730))
    assert (document["upkeep"]["parameters"], document["upkeep"]["given"], document["problems"]) == (1e9, False, [])


def test_unknown_price_with_a_cost_limit_needs_own_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, kind="c6i.2xlarge")
    output = skerry(path, code=1).output
    assert "west: 3 x c6i.2xlarge, on demand, in us-west-2: unknown (no price of c6i.2xlarge in us-west-2)" in output
    assert "together unknown, $21.01/h without west" in output
    assert "problem: limits.max_cost_usd cannot be enforced: unknown price of west (no price of" in output
    problems = json.loads(skerry(path, "--json", code=1).stdout)["problems"]
    assert len(problems) == 1
    own = tmp_path / "own.json"
    regions = {"us-west-2": {"machines": {"c6i.2xlarge": 0.34}}}
    own.write_text(json.dumps({"format": 1, "cloud": "aws", "regions": regions}))
    assert "$1.05/h (price in own.json, disk included)" in skerry(path, "--prices", str(own)).output
    monkeypatch.setenv(VARIABLE, str(own))
    assert "$1.05/h (price in own.json, disk included)" in skerry(path).output
    assert "$22.06/h" in skerry(path, "--set", "limits={max_hours: 2}").output


def test_invalid_own_prices_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"format": 1, "cloud": "aws", "regions": {"r": {"machines": {"a.b": "x"}}}}')
    output = skerry(write(tmp_path), "--prices", str(own), code=2).stderr
    assert "own.json: regions.r.machines.a.b: must be US dollars" in output


def test_invalid_size_is_refused_before_any_call(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    assert "write it like 124M or 1.3B" in skerry(write(tmp_path), "--parameters", "big", code=2).stderr
    assert not skerry_sandbox.calls.names


def test_spot_machines_cost_the_current_spot_price(tmp_path: Path) -> None:
    path = write(tmp_path, spot=True)
    output = skerry(path, "--set", "limits={max_hours: 2}").output
    # The account in memory gives every machine for a thousandth of a cent; the disks cost 3 x 100 GB x 0.08 / 730.
    assert "west: 3 x c7i.2xlarge, spot, in us-west-2: $0.033/h (spot price now, $0.36 each on demand, disk" in output
    # A cost limit uses on-demand prices, which do not change.
    output = skerry(path).output
    assert "$1.10/h (at most; on demand, undated list price by skypilot-scaled, $0.000010 each now, disk" in output


def test_region_of_an_existing_bucket_is_used(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    where = {"LocationConstraint": "us-west-2"}
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry", CreateBucketConfiguration=where)
    loaded = local_preflight.load_deployed(Path(write(tmp_path)), targets.kinds(), ("byo.bucket=true",))
    deployment = prepare(loaded, SystemClock(), skerry_sandbox.environment)
    assert estimate_command.estimate_of(deployment, (), {}).upkeep.volume.region == "us-west-2"


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
