"""Tests that the chaos benchmark runs what its options ask for."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

from chaos import replica
from chaos.replica import Setting

from skerry.runtime.log.log import read_run
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    import pytest


def test_chaos_takes_a_codec_and_a_reduction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its model is so small that no link chooses reduce-scatter."""
    spec = spec_from_file_location("chaos_script", Path(replica.__file__).parents[1] / "chaos.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(script := module_from_spec(spec))
    options = ["--only", "ours", "--replicas", "4", "--codec", "int8", "--reduction", "reduce_scatter"]
    monkeypatch.setattr(sys, "argv", ["chaos", *options])
    for case in script.cases(script.arguments()):
        assert (case.codec, case.reduction) == ("int8", "reduce_scatter")
    setting = Setting(
        contestant="ours",
        replicas=4,
        rounds=2,
        sync_every=1,
        step_s=0.1,
        seed=0,
        codec="int8",
        reduction="reduce_scatter",
        fault_share=0.0,
        folder=str(tmp_path),
        lighthouse="",
    )
    replica.prepare(setting)
    run = read_run(DirectoryStore(setting.store))
    assert run is not None
    assert (run.codec, run.reduction) == ("int8", "reduce_scatter")
