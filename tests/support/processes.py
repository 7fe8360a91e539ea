"""Starts worker processes and kills them on exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

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
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self, index: int, *arguments: str) -> subprocess.Popen[bytes]:
        out = self._folder / f"{len(self._started)}-r{index}.out"
        command = [sys.executable, str(WORKER), "--store", self._store, "--slot", f"r-{index}", "--index", str(index)]
        with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
            process = subprocess.Popen([*command, *arguments], stdout=stdout, stderr=stderr, env=self._environment)
        self._started.append((process, out))
        return process

    def reports(self, process: subprocess.Popen[bytes], timeout: float = 90.0) -> dict[str, dict[str, object]]:
        """Wait until a worker has succeeded. Returns its reports by case."""
        code = process.wait(timeout)
        out = next(path for started, path in self._started if started is process)
        assert code == 0, f"exit code {code}:\n{out.with_suffix('.err').read_text()[-4000:]}"
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        return {line["case"]: line for line in lines}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, _ in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
