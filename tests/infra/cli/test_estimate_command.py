"""`skerry estimate` against an account in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import skerry, write_run

from skerry.infra import targets
from skerry.infra.cli import estimate_command
from skerry.infra.cost.prices import VARIABLE
from skerry.infra.deploy.prepared_deployment import prepare
from skerry.infra.run import check_machine_and_store
from skerry.runtime.clock import SystemClock
from skerry.testing.plugin import skerry_sandbox

if TYPE_CHECKING:
    from click.testing import Result

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
    for name, value in {**skerry_sandbox.environment, "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(VARIABLE, raising=False)


def write(folder: Path, *, kind: str = "c7i.2xlarge", spot: bool = False) -> str:
    path = write_run(
        folder,
        GROUPS.format(type=kind, spot=str(spot).lower()),
        outer="{rounds: 200, sync_every: 100, fragments: 4, codec: bf16, reduction: all_gather}",
        more="faults: {checkpoint_every: 2, keep_every: 50}\nlimits: {max_cost_usd: 100}\n",
    )
    return str(path)


def estimate(*words: str, code: int = 0) -> Result:
    return skerry("estimate", *words, code=code)


def test_run_in_two_regions_is_estimated_in_dollars(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    output = estimate(write(tmp_path), "--parameters", "1.3B").output
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
    assert (
        "traffic of a round, for every billion parameters, sent as bf16, one of 4 fragments:" in estimate(path).output
    )
    first = estimate(path, "--json").stdout
    assert estimate(path, "--json").stdout == first
    document = json.loads(first)
    assert document["per_hour_usd"] == pytest.approx(2 * (10.49264 + 8 / 730) + 3 * (0.357 + 8 / 730))
    assert (document["upkeep"]["parameters"], document["upkeep"]["given"], document["problems"]) == (1e9, False, [])


def test_unknown_price_with_a_cost_limit_needs_own_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, kind="c6i.2xlarge")
    output = estimate(path, code=1).output
    assert "west: 3 x c6i.2xlarge, on demand, in us-west-2: unknown (no price of c6i.2xlarge in us-west-2)" in output
    assert "together unknown, $21.01/h without west" in output
    assert "problem: limits.max_cost_usd cannot be enforced: unknown price of west (no price of" in output
    problems = json.loads(estimate(path, "--json", code=1).stdout)["problems"]
    assert len(problems) == 1
    own = tmp_path / "own.json"
    regions = {"us-west-2": {"machines": {"c6i.2xlarge": 0.34}}}
    own.write_text(json.dumps({"format": 1, "cloud": "aws", "regions": regions}))
    assert "$1.05/h (price in own.json, disk included)" in estimate(path, "--prices", str(own)).output
    monkeypatch.setenv(VARIABLE, str(own))
    assert "$1.05/h (price in own.json, disk included)" in estimate(path).output
    assert "$22.06/h" in estimate(path, "--set", "limits={max_hours: 2}").output


def test_invalid_own_prices_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"format": 1, "cloud": "aws", "regions": {"r": {"machines": {"a.b": "x"}}}}')
    output = estimate(write(tmp_path), "--prices", str(own), code=2).stderr
    assert "own.json: regions.r.machines.a.b: must be US dollars" in output


def test_invalid_size_is_refused_before_any_call(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    assert "write it like 124M or 1.3B" in estimate(write(tmp_path), "--parameters", "big", code=2).stderr
    assert not skerry_sandbox.calls.names


def test_spot_machines_cost_the_current_spot_price(tmp_path: Path) -> None:
    path = write(tmp_path, spot=True)
    output = estimate(path, "--set", "limits={max_hours: 2}").output
    # The account in memory gives every machine for a thousandth of a cent; the disks cost 3 x 100 GB x 0.08 / 730.
    assert "west: 3 x c7i.2xlarge, spot, in us-west-2: $0.033/h (spot price now, $0.36 each on demand, disk" in output
    # A cost limit uses on-demand prices, which do not change.
    output = estimate(path).output
    assert "$1.10/h (at most; on demand, undated list price by skypilot-scaled, $0.000010 each now, disk" in output


def test_region_of_an_existing_bucket_is_used(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    where = {"LocationConstraint": "us-west-2"}
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry", CreateBucketConfiguration=where)
    loaded = check_machine_and_store.load_deployed(Path(write(tmp_path)), targets.kinds(), ("byo.bucket=true",))
    deployment = prepare(loaded, SystemClock(), skerry_sandbox.environment)
    assert estimate_command.estimate_of(deployment, (), {}).upkeep.volume.region == "us-west-2"
