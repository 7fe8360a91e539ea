"""Replicas on this machine that a test controls through named pipes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from tests.infra.executors.suite import OUTER, Stage, until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from skerry.infra.executors import ReplicaHandle


class PipedStage(Stage):
    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.store = folder / "store"
        self.run = f"{self.store.as_uri()}/tiny"
        # Below the run, so that a container also sees it.
        pipes = self.store / "tiny" / "pipes"
        pipes.mkdir(parents=True)
        self.folder = str(pipes)
        self._ends: dict[str, int] = {}
        for number in range(3):
            os.mkfifo(pipes / f"replica-{number}")
            # Open for reading and writing: opening never blocks then.
            self._ends[f"replica-{number}"] = os.open(pipes / f"replica-{number}", os.O_RDWR)

    def close(self) -> None:
        for end in self._ends.values():
            os.close(end)

    def options(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": self.run, "outer": OUTER, "work": self.root / "work", **more}

    def send(self, handle: ReplicaHandle, text: str) -> None:
        os.write(self._ends[handle.slot], f"{text}\n".encode())

    def write(self, handle: ReplicaHandle, text: str) -> None:
        self.send(handle, f"write {text}")
        until(lambda: text in self._log(handle))

    def finish(self, handle: ReplicaHandle, code: int) -> None:
        self.send(handle, f"exit {code}")

    def lose(self, handle: ReplicaHandle) -> None:
        self.send(handle, "kill")

    def variables_of(self, handle: ReplicaHandle) -> Mapping[str, str]:
        return self.folder_and_variables(handle)[1]

    def folder_and_variables(self, handle: ReplicaHandle) -> tuple[str, Mapping[str, str]]:
        self.send(handle, "tell")
        until(lambda: "}]" in self._log(handle))
        # Lines of the other stream may follow.
        answers = [line for line in self._log(handle).splitlines() if line.endswith("}]")]
        folder, environment = json.loads(answers[-1])
        return folder, environment

    def _log(self, handle: ReplicaHandle) -> str:
        return (self.root / "work" / "tiny" / "logs" / f"{handle.slot}.{handle.attempt}.log").read_text()
