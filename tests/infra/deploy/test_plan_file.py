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


def test_plan_of_another_format_is_named_as_such(spec: str, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    skerry("plan", spec, "--out", str(saved))
    document = json.loads(saved.read_text())
    # Format 1 had neither of these.
    older = {key: document[key] for key in document if key not in ("review", "replace", "destroy")} | {"format": 1}
    saved.write_text(json.dumps(older))
    assert (
        "written by another version of skerry (format 1, this one has 2)" in skerry("apply", str(saved), code=2).stderr
    )
    saved.write_text(json.dumps({**older, "format": 2}))
    assert "is a damaged plan: Field required" in skerry("apply", str(saved), code=2).stderr


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("total", "together $0.00/h", "cost: together $0.00/h -> together $0.10/h"),
        ("table", [], "what it shows of costs, groups and inputs"),
        ("remarks", [], "what it shows of costs, groups and inputs"),
    ],
)
def test_plan_with_an_edited_review_is_refused(
    spec: str, tmp_path: Path, skerry_sandbox: Sandbox, part: str, value: object, text: str
) -> None:
    saved = tmp_path / "plan.json"
    skerry("plan", spec, "-v", "--out", str(saved))
    document = json.loads(saved.read_text())
    document["review"][part] = value
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(document))
    skerry_sandbox.calls.clear()
    assert f"stale plan: {text}" in skerry("apply", str(edited), code=1).stderr
    assert skerry_sandbox.calls.writes == []
    if part == "remarks":
        skerry("apply", str(saved))


def test_plan_to_destroy_a_live_run_holds_while_it_writes(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    saved = tmp_path / "destroy.json"
    skerry("plan", spec, "--destroy", "--out", str(saved))
    s3 = skerry_sandbox.client("s3")
    s3.put_object(Bucket="acme-skerry", Key="runs/tiny/receipts/00000001/b-0.json", Body=b"{}", IfNoneMatch="*")
    # A further resource with the run's tag is none of the plan.
    tags = s3.get_bucket_tagging(Bucket="acme-skerry")["TagSet"]
    skerry_sandbox.client("iam").create_role(
        RoleName="stray", Path="/skerry/", AssumeRolePolicyDocument="{}", Tags=[*tags]
    )
    assert "beside the state, has changed" in skerry("apply", str(saved), code=1).stderr
    assert skerry_sandbox.inventory()["job queue"]
    skerry_sandbox.client("iam").delete_role(RoleName="stray")
    assert "of the run: kept: `--data` deletes it" in skerry("apply", str(saved), code=1).output
    assert set(skerry_sandbox.inventory()) == {"bucket"}
