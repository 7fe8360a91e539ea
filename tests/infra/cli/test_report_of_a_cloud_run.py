"""`skerry report` of a spec for clouds, against an account in memory: dollars against the estimate."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from tests.infra.accounts import aws_account, aws_sandbox, quick, skerry_sandbox
from tests.infra.deploy.account import skerry, write_run
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.kit.records import receipt

from skerry.infra import targets
from skerry.infra.deploy.prepared_deployment import prepare
from skerry.infra.run import check_machine_and_store
from skerry.infra.run.run_record import load_run
from skerry.runtime.clock import SystemClock
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.runtime.store import Store
    from skerry.testing.sandbox import Sandbox

__all__ = ["aws_account", "aws_sandbox", "quick", "skerry_sandbox"]

GROUPS = """\
  - {name: a, count: 2, target: {kind: aws_batch, region: us-east-1, instance_types: [c7i.2xlarge]}}
"""


# Three rounds of a gigabyte to the bucket of another region, and one from it.
TRAFFIC_USD = 3 * len(SLOTS) * 2 * 0.02
USD = r"\$[\d.,]+"


def deployed(path: Path, sandbox: Sandbox) -> Deployment:
    return prepare(check_machine_and_store.load_deployed(path, targets.kinds(), ()), SystemClock(), sandbox.environment)


@pytest.fixture(autouse=True)
def _in_the_sandbox(skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    del skerry_sandbox
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def spec(tmp_path: Path, skerry_sandbox: Sandbox) -> Path:
    """A spec whose run has three closed rounds in its bucket."""
    path = write_run(tmp_path, GROUPS, outer="{rounds: 8}", more="limits: {max_hours: 24}\n")
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry")
    fleet = Fleet(tmp_path / "run")
    train_three_rounds(fleet)
    copy(fleet, deployed(path, skerry_sandbox).open_store())
    return path


def train_three_rounds(fleet: Fleet) -> None:
    for number in range(3):
        fleet.train(number, *SLOTS)
    for slot in SLOTS:
        fleet.end(slot)


def copy(fleet: Fleet, store: Store, region: str | None = None) -> None:
    """Copy a run. region: of its machines, each of which then reports a gigabyte each way in each round."""
    place = {"cloud": "aws", "region": region, "machine": "c7i.2xlarge"}
    for entry in fleet.store.list(""):
        data = bytes(fleet.store.read(entry.key) or b"")
        if region is not None and entry.key.startswith("members/"):
            data = json.dumps(json.loads(data) | {"place": place}).encode()
        if entry.key != keys.RUN or store.read(keys.RUN) is None:
            store.create(entry.key, data)
    for number in range(3 if region is not None else 0):
        for slot in SLOTS:
            sent = receipt(slot, number, run=fleet.nonce, uploaded_bytes=10**9, downloaded_bytes=10**9)
            store.create(keys.receipt(number, slot), sent.to_bytes())


def test_cost_is_compared_with_the_estimate_of_the_spec(spec: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    result = skerry("report", str(spec), "-o", str(page), "--parameters", "1.3B", "--json")
    facts = json.loads(result.stdout.splitlines()[-1])["facts"]
    estimate = facts["costs"]["estimate"]
    assert estimate["usd_an_hour"] == pytest.approx(2 * (0.357 + 8 / 730))
    assert estimate["usd_limit"] == pytest.approx(24 * estimate["usd_an_hour"])
    # Each sends and reads 5.2 GB; a checkpoint and the moments of both optimizers are added.
    assert estimate["bytes_a_round"] > 4 * 5.2e9
    assert any(text.startswith("Estimate: $0.74 an hour") for text in facts["answers"][2]["sentences"])
    assert facts["costs"]["usd"] is None, "the log names no machine"
    assert facts["answers"][2]["short"] == "unknown: no prices"
    assert "The limit is $17.66." in page.read_text()


def test_traffic_out_of_the_region_is_in_the_dollars(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    path = write_run(tmp_path, GROUPS, outer="{rounds: 8}")
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry")
    fleet = Fleet(tmp_path / "run")
    train_three_rounds(fleet)
    copy(fleet, deployed(path, skerry_sandbox).open_store(), "us-west-2")
    result = skerry("report", str(path), "-o", str(tmp_path / "run.html"), "--json")
    costs = json.loads(result.stdout.splitlines()[-1])["facts"]["costs"]
    assert costs["traffic_usd"] == pytest.approx(TRAFFIC_USD)
    assert costs["unpriced"] == []
    assert costs["requests_usd"] == pytest.approx(3 * len(SLOTS) * 0.005 / 1000)
    once = json.loads(skerry("watch", str(path), "--once", "--json").stdout.splitlines()[-1])
    assert once["usd"] == pytest.approx(TRAFFIC_USD, rel=0.01)
    assert re.search(rf"^dollars: {USD}; estimate {USD} for", skerry("status", str(path)).stdout, re.MULTILINE)
    document = json.loads(skerry("status", str(path), "--json").stdout.splitlines()[-1])
    assert document["usd"] == pytest.approx(TRAFFIC_USD, rel=0.01)
    # A URI names no region of the bucket.
    by_uri = skerry("report", "s3://acme-skerry/runs/tiny", "-o", str(tmp_path / "run.html"), "--json")
    assert json.loads(by_uri.stdout.splitlines()[-1])["facts"]["costs"]["traffic_usd"] is None


def test_up_ends_with_the_dollars_of_a_finished_run(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    path = write_run(tmp_path, GROUPS, outer="{rounds: 3}")
    skerry("apply", str(path), "--auto-approve")
    store = deployed(path, skerry_sandbox).open_store()
    run = load_run(store)
    assert run is not None
    # It trains in a folder, and is copied to the bucket: not as a user may do.
    fleet = Fleet(tmp_path / "run", run.model_copy(update={"store": None}))
    train_three_rounds(fleet)
    copy(fleet, store, "us-west-2")
    result = skerry("up", str(path), "--auto-approve", "--json")
    assert json.loads(result.stdout.splitlines()[-1])["usd"] == pytest.approx(TRAFFIC_USD, rel=0.01)
    assert re.search(rf"^dollars: {USD}; estimate {USD} for the machines", result.stderr, re.MULTILINE)


def test_estimate_that_cannot_be_made_does_not_prevent_the_report(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.json"
    own.write_text("no prices")
    monkeypatch.delenv("SKERRY_PRICES", raising=False)
    changed = spec.read_text().replace("c7i.2xlarge", "z9.unheard").replace("max_hours: 24", "max_cost_usd: 5")
    spec.write_text(changed)
    page = tmp_path / "run.html"
    result = skerry("report", str(spec), "-o", str(page), "--json")
    facts = json.loads(result.stdout.splitlines()[-1])["facts"]
    assert facts["costs"]["estimate"]["note"].startswith("The estimate is unknown: ")
    assert facts["closed"] == 3
