"""Replicas on this machine that do what a test tells them by a named pipe."""

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
        # Where a container finds it too: with the run.
        pipes = self.store / "tiny" / "pipes"
        pipes.mkdir(parents=True)
        self.folder = str(pipes)
        self._ends: dict[str, int] = {}
        for number in range(3):
            os.mkfifo(pipes / f"replica-{number}")
            # Both ends: nobody waits for the other then.
            self._ends[f"replica-{number}"] = os.open(pipes / f"replica-{number}", os.O_RDWR)

    def close(self) -> None:
        for end in self._ends.values():
            os.close(end)

    def options(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": self.run, "outer": OUTER, "work": self.root / "work", **more}

    def say(self, handle: ReplicaHandle, text: str) -> None:
        os.write(self._ends[handle.slot], f"{text}\n".encode())

    def write(self, handle: ReplicaHandle, text: str) -> None:
        self.say(handle, f"write {text}")
        until(lambda: text in self._log(handle))

    def finish(self, handle: ReplicaHandle, code: int) -> None:
        self.say(handle, f"exit {code}")

    def lose(self, handle: ReplicaHandle) -> None:
        self.say(handle, "kill")

    def told(self, handle: ReplicaHandle) -> Mapping[str, str]:
        return self.surroundings(handle)[1]

    def surroundings(self, handle: ReplicaHandle) -> tuple[str, Mapping[str, str]]:
        self.say(handle, "tell")
        until(lambda: "}]" in self._log(handle))
        folder, environment = json.loads(self._log(handle).splitlines()[-1])
        return folder, environment

    def _log(self, handle: ReplicaHandle) -> str:
        return (self.root / "work" / "tiny" / "logs" / f"{handle.slot}.{handle.attempt}.log").read_text()
