"""Plans saved by `plan --out` and applied by `apply FILE`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import queue_of, skerry

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox


def test_saved_plan_is_applied_once(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    saved = tmp_path / "plan.json"
    skerry("plan", spec, "--out", str(saved))
    skerry("apply", str(saved))
    assert skerry_sandbox.inventory()["job queue"]
    skerry_sandbox.calls.clear()
    assert "stale plan: lineage" in skerry("apply", str(saved), code=1).stderr
    assert skerry_sandbox.calls.writes == []


@pytest.mark.parametrize("moved", ["spec", "code", "cloud"])
def test_stale_plan_is_refused(spec: str, tmp_path: Path, skerry_sandbox: Sandbox, moved: str) -> None:
    skerry("apply", spec, "--auto-approve")
    text = (tmp_path / "skerry.yaml").read_text()
    (tmp_path / "skerry.yaml").write_text(text.replace("count: 1", "count: 2"))
    saved = tmp_path / "plan.json"
    skerry("plan", spec, "--out", str(saved))
    match moved:
        case "spec":
            (tmp_path / "skerry.yaml").write_text(text.replace("count: 1", "count: 3"))
        case "code":
            (tmp_path / "train" / "train.py").write_text("print('other')\n")
        case _:
            skerry_sandbox.client("batch").update_job_queue(jobQueue=queue_of(skerry_sandbox), priority=77)
    skerry_sandbox.calls.clear()
    output = skerry("apply", str(saved), code=1).stderr
    assert "stale plan" in output
    assert {"spec": "spec: ", "code": "code: ", "cloud": "the resources have changed"}[moved] in output
    assert skerry_sandbox.calls.writes == []


def test_plan_does_not_overwrite_other_files(spec: str, tmp_path: Path) -> None:
    before = (tmp_path / "skerry.yaml").read_bytes()
    assert "is not a plan" in skerry("plan", spec, "--out", spec, code=2).stderr
    assert (tmp_path / "skerry.yaml").read_bytes() == before
    saved = tmp_path / "saved.json"
    skerry("plan", spec, "--out", str(saved))
    skerry("plan", spec, "--out", str(saved))
    # A spec may be JSON, too: it is output from a plan by what it says.
    (tmp_path / "spec.json").write_text(json.dumps({"run": "x"}))
    assert "store" in skerry("apply", str(tmp_path / "spec.json"), code=2).stderr
