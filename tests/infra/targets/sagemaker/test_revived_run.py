"""A run whose lost replica comes back with no operator: real processes, each with the rights of its role alone."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

import pytest
from tests.e2e.conftest import ROOT
from tests.e2e.deployed import Deployed, check_nothing_was_lost
from tests.infra.deploy.account import IMAGE, skerry

from skerry.runtime.store import open_store
from skerry.testing.processes import Processes
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

GROUPS: Final = """\
  - name: s
    count: 2
    target: {kind: sagemaker, region: us-east-1, instance: ml.c7i.2xlarge, revive: peers, revive_after: 2s}
"""
# The first job of s-1 is killed once a round has closed.
DRIVER: Final = """\
import os, runpy, signal, threading
from skerry.runtime.clock import SystemClock
from skerry.runtime.store import open_store

def die():
    store = open_store(os.environ["SKERRY_RUN"])
    while not store.list("commits/"):
        SystemClock().pause(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["SKERRY_SLOT"] == "s-1" and "-g" not in os.environ["TRAINING_JOB_NAME"]:
    threading.Thread(target=die, daemon=True).start()
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    with Sandbox(enforce_iam=True, registry="127.0.0.1:1", network="host", stop_grace_s=1000) as sandbox:
        sandbox.any_image = True
        sandbox.training.containers = Processes()
        for name, text in sandbox.environment.items():
            monkeypatch.setenv(name, text)
        yield sandbox


def test_lost_replica_comes_back_without_an_operator(aws: Sandbox, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "runtime/examples/tiny_gpt", tmp_path / "code")
    (tmp_path / "code/driver.py").write_text(DRIVER)
    run = Deployed.write(
        tmp_path, store="s3://skerry-revive/runs", image=IMAGE, groups=GROUPS, slots=("s-0", "s-1"), rounds=4
    )
    text = run.spec.read_text().replace(f"{ROOT}/runtime/examples/tiny_gpt", "code").replace("train.py", "driver.py")
    run.spec.write_text(text)
    run.apply()
    first = {slot: str(job["job"]) for slot, job in run.jobs().items()}
    aws.calls.clear()

    assert aws.training.wait(first["s-1"], within_s=120) == "FAILED"
    assert aws.training.wait(first["s-0"], within_s=120) == "SUCCEEDED"
    assert aws.training.wait(f"{first['s-1']}-g1", within_s=120) == "SUCCEEDED"
    (creator,) = [call.caller for call in aws.calls if call.operation == "CreateTrainingJob"]
    assert creator.startswith("role/skerry-tried-")
    check_nothing_was_lost(open_store("s3://skerry-revive/runs/tried"), run, killed={"s-1"})

    jobs = run.jobs()
    assert {slot: (job["job"], job["condition"]) for slot, job in jobs.items()} == {
        "s-0": (first["s-0"], "done"),
        "s-1": (f"{first['s-1']}-g1", "done"),
    }
    aws.calls.clear()
    run.apply()
    assert [call for call in aws.calls.writes if call.service != "s3"] == []
    log = skerry("logs", str(run.spec)).output
    assert log.count("s-1 is silent: its job") >= 1, log
    run.destroy()
    # SageMaker keeps the record of a failed job.
    assert aws.inventory() in ({}, {"training job": (first["s-1"],)})
