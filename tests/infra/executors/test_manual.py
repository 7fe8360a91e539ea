"""The example and the table of executors in infra/README.md."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.batchplace import make_queue
from tests.support.clocks import FakeClock

from skerry.infra import executors
from skerry.infra.executors import Ending

if TYPE_CHECKING:
    import pytest
    from tests.support.batchplace import Place

MANUAL = Path(__file__).parents[3] / "infra/README.md"


def section() -> str:
    return MANUAL.read_text().partition("\n## Without a spec\n")[2].partition("\n## ")[0]


def test_example_of_the_manual_launches_and_collects(aws: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = section().partition("```python\n")[2].partition("```")[0]
    assert len([line for line in lines.splitlines() if line]) <= 10
    sandbox, clock = aws.sandbox, FakeClock()
    sandbox.client("s3").create_bucket(Bucket="acme-diloco")
    make_queue(sandbox, aws.environment, "gpu-spot")
    for name, text in sandbox.environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(executors, "BatchExecutor", functools.partial(executors.BatchExecutor, clock=clock))

    def finish_jobs() -> None:
        for job in sandbox.client("batch").list_jobs(jobQueue="gpu-spot", jobStatus="RUNNABLE")["jobSummaryList"]:
            sandbox.batch.finish(job["jobId"], 0)

    clock.on_pause = finish_jobs
    variables: dict[str, list[Ending]] = {}
    exec(compile(lines, "README.md", "exec"), variables)  # noqa: S102  our own text
    assert variables["endings"] == [Ending(exit_code=0)] * 4


def test_options_in_the_manual_exist() -> None:
    rows = [line.split("|")[1:3] for line in section().splitlines() if line.startswith("| `")]
    assert len(rows) == 9
    for name, options in rows:
        executor = getattr(executors, name.strip(" `"))
        fields = {field.name for field in dataclasses.fields(executor)}
        assert {option.strip(" `") for option in options.split(",")} <= fields
