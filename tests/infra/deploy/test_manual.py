"""infra/README.md shows the output of `skerry plan` for the spec that it shows; "..." leaves lines out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.command_line import invoke
from tests.support.page_examples import assert_shows, shown

from skerry.infra import targets
from skerry.infra.cli import plan_apply_import_commands
from skerry.infra.cli.app import app
from skerry.infra.spec.model import load

if TYPE_CHECKING:
    from skerry.testing.sandbox import Sandbox

pytestmark = pytest.mark.slow
MANUAL: Final = (Path(__file__).parents[3] / "infra/README.md").read_text()


@pytest.fixture
def spec(tmp_path: Path, skerry_sandbox: Sandbox) -> str:
    assert skerry_sandbox.inventory() == {}
    shown, *_rules = re.findall(r"```yaml\n(.*?)```", MANUAL, re.DOTALL)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train.py").write_text("print('training')\n")
    (tmp_path / "skerry.yaml").write_text(shown)
    return str(tmp_path / "skerry.yaml")


def skerry(*words: str) -> str:
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.output


def test_first_plan_in_the_manual_is_real_output(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.any_image = False
    assert_shows(skerry("plan", spec), shown(MANUAL, "skerry plan"))


def test_second_plan_in_the_manual_is_real_output(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    batch, (queue,) = skerry_sandbox.client("batch"), skerry_sandbox.inventory()["job queue"]
    batch.update_job_queue(jobQueue=queue, priority=77)
    jobs = batch.list_jobs(jobQueue=queue, jobStatus="RUNNABLE")["jobSummaryList"]
    lost = next(job["jobId"] for job in jobs if job["jobName"].endswith("-1"))
    skerry_sandbox.batch.start(lost)
    skerry_sandbox.batch.finish(lost, 20)
    command = "skerry plan --set 'replicas[0].count=3'"
    assert_shows(skerry("plan", spec, "--set", "replicas[0].count=3"), ["...", *shown(MANUAL, command)])


def test_manual_names_every_command(spec: str) -> None:
    assert load(Path(spec), targets.kinds()).deployed
    names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups if isinstance(group.name, str)} | {"image"}
    documented = set(re.findall(r"`skerry ([a-z]+)", MANUAL))
    assert names - documented == set()
    assert plan_apply_import_commands.CHANGES == 2
