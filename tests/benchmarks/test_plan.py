"""The benchmark of plans measures every place and prints every mark."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import plan
import pytest

if TYPE_CHECKING:
    from pathlib import Path

MARKS = [
    "plan_cold_s",
    "plan_warm_s",
    "apply_s",
    "kubernetes_plan_cold_s",
    "kubernetes_plan_warm_s",
    "kubernetes_apply_s",
    "start_s",
    "six_places_plan_cpu_s",
    "second_apply_writes",
]
KINDS = {"aws_batch_job", "sagemaker_job", "vertex_job", "kubernetes_job", "hf_jobs_job", "modal_job"}


@pytest.mark.slow
def test_small_run_prints_every_mark_and_plans_a_job_in_six_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, planned = subprocess.run, tmp_path / "planned"

    def recorded(words: list[str], **more: object) -> None:
        with planned.open("a") as file:
            run(words, **{**more, "stdout": file})  # type: ignore[call-overload]

    monkeypatch.setattr(plan.subprocess, "run", recorded)
    monkeypatch.setattr(sys, "argv", ["plan", "--replicas", "1", "2", "--turns", "1"])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    assert ended.value.code == 0
    assert re.findall(r"(?m)^(\w+): .* below .*: (?:NOT )?met$", capsys.readouterr().out) == MARKS
    assert set(re.findall(r"\b(\w+_job)\.", planned.read_text())) == KINDS
