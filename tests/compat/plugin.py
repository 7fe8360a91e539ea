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
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torchft.manager
from torch.distributed.distributed_c10d import ReduceOp
from torchft.manager_integ_test import EventInjector, EventInjectorEvent
from torchft.process_group import FakeProcessGroupWrapper

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.log import keys
from skerry.runtime.log.records import Commit, Heartbeat
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import torch
    from torch.distributed.distributed_c10d import Work

    from skerry.runtime.store import Data

THEIRS = torchft.manager.Manager
CHECK = EventInjector.check
REPORT = Path(os.environ["COMPAT_REPORT"])
FAULT = os.environ.get("COMPAT_FAULT", "report")
# For what takes milliseconds here; where it never happens the replica that waits for it fails, and the test with it.
_PATIENCE_S = 10.0


class Scene:
    """One test being played: its folder, its managers, and what happened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.managers: list[Manager] = []
        self.happened: Counter[str] = Counter()
        self.participants: list[int] = []
        self._met: list[Manager] = []
        self._lock = threading.Lock()

    def count(self, what: str) -> None:
        with self._lock:
            self.happened[what] += 1

    def meet(self, manager: Manager) -> None:
        """This one waits at the test's barrier now, and trains with the others from there."""
        with self._lock:
            self._met.append(manager)

    def met(self, manager: Manager) -> list[Manager]:
        """Return the managers that this one met; none before it has come to the barrier."""
        with self._lock:
            return list(self._met) if manager in self._met else []

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
    """Our manager, created from torchft's arguments: the lighthouse is a folder."""

    def __init__(self, *, pg: object, lighthouse_addr: str, replica_id: str | None = None, **arguments: Any) -> None:
        self.scene = STAGE.current()
        self.announced: Exception | None = None
        self.store = BreakingStore(self.scene.folder / _name(lighthouse_addr))
        # torchft makes up a name where none is given; ours wants to be told one.
        slot = replica_id or "unnamed"
        if not arguments.get("rank") and self.store.list(f"{keys.MEMBERS}{slot}/"):  # rank 0 represents its replica
            self._let_the_checkpoint_land()
        super().__init__(
            self.store,
            replica_id=slot,
            pg=pg,
            lighthouse_addr=lighthouse_addr,
            heartbeat_interval=timedelta(milliseconds=50),
            grace=Grace(floor_s=10.0, cap_s=10.0),
            **arguments,
        )
        self.scene.managers.append(self)
        if isinstance(pg, FakeProcessGroupWrapper):
            pg.manager = self

    def _let_the_checkpoint_land(self) -> None:
        """Wait for the checkpoint of the last closed round, because a replica restarts here within milliseconds.

        A job takes seconds, and then it exists; without this wait a test of torchft's would be a race.
        """
        newest = keys.checkpoint_manifest(len(self.store.list(keys.COMMITS)))
        _until(lambda: self.store.read(newest) is not None)

    def _let_those_i_met_come(self) -> None:
        """Wait until all replicas that left a barrier with this one are in its round.

        A round takes milliseconds here, and by design no replica waits for one that is still joining. Without
        this wait the first round of a joining replica would be a race.
        """
        for other in self.scene.met(self):
            _until(lambda other=other: other.trains(self.current_step()))

    def trains(self, round_number: int) -> bool:
        """Return True if this replica's published heartbeat is in this round or beyond."""
        key = keys.heartbeat(self.presence.slot)
        data = self.store.read(key)
        if data is None:
            return False
        beat = Heartbeat.parse(data, key)
        return beat.round >= round_number and beat.phase != "joining"

    def start_quorum(
        self,
        allow_heal: bool = True,  # noqa: FBT001, FBT002  torchft's signature
        shrink_only: bool = False,  # noqa: FBT001, FBT002
        timeout: timedelta | None = None,
    ) -> None:
        self._let_those_i_met_come()
        super().start_quorum(allow_heal, shrink_only, timeout)

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


def check(injector: Any, rank: int, step: int) -> None:
    """In place of `EventInjector.check`, which waits at a barrier if the test has set one for this step."""
    due = injector._events.get((rank, step))
    if due is not None and due.event is EventInjectorEvent.Barrier:
        STAGE.current().meet(injector._pg.manager)
    CHECK(injector, rank, step)


def pytest_configure() -> None:
    for module in _torchft_modules():
        if getattr(module, "Manager", None) is THEIRS:
            module.Manager = Manager
    FakeProcessGroupWrapper.report_future_error = announce
    EventInjector.check = check
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


def _until(condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    wait_until(clock, lambda: condition() or None, clock.now() + _PATIENCE_S, Backoff(first=0.005, cap=0.05))


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
