"""Ctrl-C and SIGTERM in commands that change or watch clouds: the first one stops cleanly, a second one interrupts."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

from skerry.infra.deploy.restart_lost import StopRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

    from skerry.infra.provision.apply import ApplyRun


@contextlib.contextmanager
def stopping_applies() -> Generator[Callable[[ApplyRun], None]]:
    """Call the result with each apply that begins. Ctrl-C lets its calls in flight finish and begins no other.

    The state records what was done. A second Ctrl-C interrupts.
    """
    applies: list[ApplyRun] = []
    requested = threading.Event()

    def stop() -> None:
        if requested.is_set() or not any(work.running for work in applies):
            raise KeyboardInterrupt
        requested.set()
        for work in applies:
            work.stop()

    with on_signal(stop):
        yield applies.append


@contextlib.contextmanager
def stopping_watch() -> Generator[StopRequest]:
    """Ctrl-C ends the watch; a second one interrupts a restart in progress."""
    stop = StopRequest()

    def request() -> None:
        if stop.requested.is_set() and stop.restarting:
            raise KeyboardInterrupt
        stop()

    with on_signal(request):
        yield stop


@contextlib.contextmanager
def on_signal(act: Callable[[], None]) -> Generator[None]:
    """Call `act` on SIGINT and SIGTERM while the context is open. Main thread only."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        act()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
