"""A pytest plugin that runs torchft's own test modules with ours in place of `torchft.manager.Manager`.

`-p tests.compat.plugin`, with COMPAT_REPORT=FILE. Each test has a folder of its own, and in it one run for each
lighthouse that the test starts. torchft's tests announce failures to the process group, which ours ignores; here they
strike ours. What each test came to and what happened in it is written to FILE as JSON; nothing is skipped or mended.

COMPAT_FAULT: where an announced failure strikes. "report": it is reported before the contribution is offered, and the
replica abstains. "exchange": the store raises it while the contribution is uploaded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torchft.manager
from torch.distributed.distributed_c10d import ReduceOp
from torchft.process_group import FakeProcessGroupWrapper

from skerry.runtime.log import keys
from skerry.runtime.log.records import Commit
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Generator
    from datetime import timedelta

    import torch
    from torch.distributed.distributed_c10d import Work

    from skerry.runtime.store import Data

THEIRS = torchft.manager.Manager
REPORT = Path(os.environ["COMPAT_REPORT"])
FAULT = os.environ.get("COMPAT_FAULT", "report")


class Scene:
    """One test being played: its folder, its managers, and what happened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.managers: list[Manager] = []
        self.happened: Counter[str] = Counter()
        self.participants: list[int] = []
        self._lock = threading.Lock()

    def count(self, what: str) -> None:
        with self._lock:
            self.happened[what] += 1

    def close(self) -> None:
        """End what the test left running: its threads must not reach into the next one. Then read the log."""
        for manager in self.managers:
            manager.request_stop()
            manager.shutdown()
        for store in {manager.store.uri: manager.store for manager in self.managers}.values():
            for entry in store.list(keys.COMMITS):
                data = store.read(entry.key)
                assert data is not None
                self.participants.append(Commit.parse(data, entry.key).participants)


class Stage:
    """The scene of the moment, and the report of all before it."""

    scene: Scene | None = None
    report: dict[str, dict[str, Any]]

    def __init__(self) -> None:
        self.report = {}

    def current(self) -> Scene:
        assert self.scene is not None, "a torchft module makes a Manager outside of a test"
        return self.scene


STAGE = Stage()


class BreakingStore(DirectoryStore):
    """A folder in which the next upload of a payload raises what was announced."""

    announced: Exception | None = None

    def create(self, key: str, data: Data) -> bool:
        if self.announced is not None and key.startswith(keys.PAYLOADS):
            error, self.announced = self.announced, None
            STAGE.current().count("struck")
            raise error
        return super().create(key, data)


class Manager(ObjectStoreManager):
    """The shipped manager with its defaults, created from torchft's arguments: the lighthouse is a folder."""

    def __init__(self, *, pg: object, lighthouse_addr: str, **arguments: Any) -> None:
        self.scene = STAGE.current()
        self.announced: Exception | None = None
        self.store = BreakingStore(self.scene.folder / _name(lighthouse_addr))
        super().__init__(self.store, pg=pg, lighthouse_addr=lighthouse_addr, **arguments)
        self.scene.managers.append(self)
        if isinstance(pg, FakeProcessGroupWrapper):
            pg.manager = self

    def announce(self, error: Exception) -> None:
        """Make the next exchange fail."""
        self.scene.count("announced")
        if FAULT == "exchange":
            self.store.announced = error
        else:
            self.announced = error

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,  # noqa: FBT001, FBT002  torchft's signature
        reduce_op: Any = ReduceOp.AVG,
    ) -> Work:
        work = super().allreduce(tensor, should_quantize, reduce_op)
        if self.announced is not None:
            error, self.announced = self.announced, None
            self.scene.count("struck")
            self.report_error(error)
        return work

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        committed = super().should_commit(timeout)
        self.scene.count("committed" if committed else "refused")
        return committed


class Events(logging.Handler):
    """Counts what the runtime tells, by the event's name; a second start of a replica also as "restarted"."""

    def emit(self, record: logging.LogRecord) -> None:
        if STAGE.scene is None or (event := getattr(record, "event", None)) is None:
            return
        STAGE.scene.count(event)
        if event == "joined" and record.__dict__["fields"]["incarnation"] > 0:
            STAGE.scene.count("restarted")


def announce(pg: Any, error: Exception) -> None:
    """In place of `FakeProcessGroupWrapper.report_future_error`."""
    pg.manager.announce(error)


def pytest_configure() -> None:
    for module in _torchft_modules():
        if getattr(module, "Manager", None) is THEIRS:
            module.Manager = Manager
    FakeProcessGroupWrapper.report_future_error = announce
    logger = logging.getLogger("skerry")
    logger.setLevel(logging.INFO)
    logger.addHandler(Events())
    logger.addHandler(logging.StreamHandler())


def pytest_collection_finish() -> None:
    left = [module.__name__ for module in _torchft_modules() if getattr(module, "Manager", Manager) is not Manager]
    assert not left, f"torchft's own Manager would be tested by {', '.join(left)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    STAGE.scene = scene = Scene(REPORT.parent / _name(item.nodeid))
    STAGE.report[_case(item.nodeid)] = {
        "outcome": "lost",
        "message": "",
        "happened": scene.happened,
        "participants": scene.participants,
    }
    _write()  # if this test hangs, it is the one that is lost
    try:
        return (yield)
    finally:
        scene.close()
        STAGE.scene = None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        STAGE.report[_case(report.nodeid)] |= {"outcome": report.outcome, "message": _message(report)}


def pytest_sessionfinish() -> None:
    _write()


def _torchft_modules() -> list[Any]:
    return [module for name, module in sys.modules.items() if name.partition(".")[0] == "torchft"]


def _write() -> None:
    REPORT.write_text(json.dumps(STAGE.report, indent=1))


def _message(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else crash.message


def _case(nodeid: str) -> str:
    return nodeid.removeprefix("torchft/")


def _name(text: str) -> str:
    return re.sub(r"\W+", "-", text)
