"""`skerry report` of a spec for clouds, against an account in memory: dollars against the estimate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import skerry, write_run
from tests.infra.observe.fleet import SLOTS, Fleet

from skerry.infra import targets
from skerry.infra.deploy.deployment import prepare
from skerry.infra.run import local_preflight
from skerry.runtime.clock import SystemClock
from skerry.testing.plugin import skerry_sandbox

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

__all__ = ["skerry_sandbox"]

GROUPS = """\
  - {name: a, count: 2, target: {kind: aws_batch, region: us-east-1, instance_types: [c7i.2xlarge]}}
"""


@pytest.fixture(autouse=True)
def _in_the_sandbox(skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**skerry_sandbox.environment, "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def spec(tmp_path: Path, skerry_sandbox: Sandbox) -> Path:
    """A spec whose run has three closed rounds in its bucket."""
    path = write_run(tmp_path, GROUPS, outer="{rounds: 8}", more="limits: {max_hours: 24}\n")
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry")
    fleet = Fleet(tmp_path / "run")
    for number in range(3):
        fleet.train(number, *SLOTS)
    for slot in SLOTS:
        fleet.end(slot)
    deployment = prepare(
        local_preflight.load_deployed(path, targets.kinds(), ()), SystemClock(), skerry_sandbox.environment
    )
    store = deployment.open_store()
    for entry in fleet.store.list(""):
        store.create(entry.key, bytes(fleet.store.read(entry.key) or b""))
    return path


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
