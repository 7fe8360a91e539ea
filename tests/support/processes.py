"""Starts worker processes and kills them on exit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support.forked import ForkedProcess

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

WORKER = Path(__file__).with_name("worker.py")
ROOT = WORKER.parents[2]


class Workers:
    """Starts replicas as processes. Kills those that still run on exit."""

    def __init__(self, folder: Path, store: str, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._store = store
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "runtime"), str(ROOT / "infra"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self._started: list[ForkedProcess] = []

    def start(self, index: int, *arguments: str) -> ForkedProcess:
        out = self._folder / f"{len(self._started)}-r{index}.out"
        command = [str(WORKER), "--store", self._store, "--slot", f"r-{index}", "--index", str(index), *arguments]
        process = ForkedProcess(command, self._environment, out, errors=out.with_suffix(".err"))
        self._started.append(process)
        return process

    def reports(self, process: ForkedProcess, timeout: float = 300.0) -> dict[str, dict[str, object]]:
        """Wait until a worker has succeeded. Returns its reports by case."""
        code = process.wait(timeout)
        assert code == 0, f"exit code {code}:\n{process.errors.read_text()[-4000:]}"
        lines = [json.loads(line) for line in process.output.read_text().splitlines()]
        return {line["case"]: line for line in lines}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.kill()
