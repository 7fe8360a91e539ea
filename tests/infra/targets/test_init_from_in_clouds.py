"""`init_from` in clouds: the plan shows the copy, and jobs with the enforced rights of their role read it alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import Operator, skerry
from tests.infra.targets.runs import BatchRun, SageMakerRun, TargetRun, VertexRun
from tests.infra.targets.test_inputs_reach_jobs import aws_account, google_project, run
from tests.kit.managers import Island, begin_run

from skerry.infra.run.run_record import load_run
from skerry.runtime.log import keys
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.store import Store

__all__ = ["aws_account", "google_project", "run"]

pytestmark = pytest.mark.slow

SCRIPT = """\
import os
from skerry.runtime.checkpointing.warm_start import read_initial_model
from skerry.runtime.errors import SkerryError
from skerry.runtime.log.log import read_run
from skerry.runtime.store import open_store

store = open_store(os.environ["SKERRY_RUN"])
run = read_run(store)
print("MODEL", sorted(read_initial_model(store, run.init_from)))
try:
    print("SOURCE", open_store(run.init_from.uri).read("run.json"))
except SkerryError as error:
    print("SOURCE", type(error).__name__)
"""


def source_in(run: TargetRun, folder: Path) -> Store:
    """A finished run of two rounds in the bucket acme-data, which is not the run's own."""
    trained = open_store(folder.as_uri())
    begin_run(trained, ["a-0"], rounds=2)
    Island(trained, "a-0", minimum=1).train(2)
    scheme = "gs" if isinstance(run, VertexRun) else "s3"
    source = open_store(f"{scheme}://acme-data/runs/base", environment=run.environment)
    for entry in trained.list(""):
        source.create(entry.key, bytes(trained.read(entry.key) or b""))
    return source


@pytest.mark.parametrize("run", [BatchRun, SageMakerRun, VertexRun], indirect=True, ids=lambda kind: kind.KIND)
def test_jobs_read_the_copy_and_get_no_right_to_the_source(
    run: TargetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in run.environment.items():
        monkeypatch.setenv(name, text)
    source = source_in(run, tmp_path / "source")
    path = str(run.write_spec(count=1, more=f"limits: {{max_hours: 24}}\ninit_from: {source.uri}\n"))
    (run.folder / "train" / "train.py").write_text(SCRIPT)
    output = skerry("plan", path).output
    assert f"init_from: the checkpoint of {source.uri}@2, " in output
    assert "apply copies it into the run\n  replicas read the copy; they get no right to that run\n" in output
    rights = output.partition("rights that change:")[2].partition("\ncode: ")[0]
    assert "acme-data" not in rights
    assert rights
    saved = tmp_path / "plan.json"
    skerry("plan", path, "--out", str(saved))
    binding = json.loads(saved.read_text())["binding"]["init_from"]
    assert binding.startswith(f"{source.uri}@2 sha256 ")

    skerry("apply", str(saved))
    operator = Operator(run.folder / "skerry.yaml", run.environment)
    store = operator.deployment().open_store()
    record = load_run(store)
    assert record is not None
    assert record.init_from is not None
    assert store.read(keys.checkpoint_manifest(2, keys.INITIAL)) == source.read(keys.checkpoint_manifest(2))
    (job,) = run.jobs(operator).values()
    run.driver.wait(job, within_s=120)
    lines = skerry("logs", path).output
    assert "MODEL ['bias', 'weight']" in lines, lines
    assert "SOURCE Unauthorized" in lines, lines

    for entry in source.list(""):
        source.delete(entry.key)
    assert json.loads(skerry("plan", path, "--json").stdout)["binding"]["init_from"] == binding
    skerry("destroy", path, "--yes", "--data")


@pytest.mark.parametrize("run", [BatchRun, VertexRun], indirect=True, ids=lambda kind: kind.KIND)
def test_plan_refuses_a_source_and_creates_nothing(run: TargetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in run.environment.items():
        monkeypatch.setenv(name, text)
    scheme = "gs" if isinstance(run, VertexRun) else "s3"
    before = run.sandbox.inventory()
    for bucket in ("acme-data", "acme-absent"):
        path = str(
            run.write_spec(count=1, more=f"limits: {{max_hours: 24}}\ninit_from: {scheme}://{bucket}/runs/base@7\n")
        )
        assert "problem: init_from: " in skerry("plan", path, code=1).output
        output = skerry("apply", path, "--auto-approve", code=2)
        assert f"{scheme}://{bucket}" in output.stderr
    assert run.sandbox.inventory() == before


def test_stale_plan_names_a_source_that_has_changed(
    aws_account: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = BatchRun(tmp_path, aws_account)
    for name, text in batch.environment.items():
        monkeypatch.setenv(name, text)
    source = source_in(batch, tmp_path / "source")
    path = str(batch.write_spec(count=1, more=f"limits: {{max_hours: 24}}\ninit_from: {source.uri}\n"))
    saved = tmp_path / "plan.json"
    skerry("plan", path, "--out", str(saved))
    source.delete(keys.checkpoint_manifest(2))
    changed = skerry("apply", str(saved), code=1).stderr
    assert "stale plan: init_from: " in changed
    skerry("destroy", path, "--yes", "--data")
