"""Runs the shipped exchange of many replicas in virtual time, each behind a link of its own to one store.

Replicas and their threads are fibers of the simulation (tests/simulation), so a second of a slow link takes no second
here, and every run has the same figures. A link carries the bytes of requests one after the other in each direction;
computing takes no time. What is not modelled: TCP's ramp, and a store that is slower than the links.
"""
# ruff: noqa: D102  the verbs of a store are described there
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
import weakref
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the simulation is part of the tests

from tests.simulation.session import FiberJob

from skerry.runtime.store import parallel
from skerry.runtime.store.interface import size_of
from skerry.runtime.tensors import payload_reader, prefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from tests.simulation.world import Fiber, World

    from skerry.runtime.store.interface import Data, Entry, Profile, Span
    from skerry.runtime.store.memory import MemoryStore

REQUEST_BYTES = 700
"""Of the headers of a request, and of those of its answer."""


@dataclass(kw_only=True)
class Traffic:
    """Of one replica. reads, writes: requests. held_bytes: of answers that it has, and most_held_bytes at once."""

    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    reads: int = 0
    writes: int = 0
    held_bytes: int = 0
    most_held_bytes: int = 0

    def hold(self, data: memoryview) -> memoryview:
        """A copy, as a client over a network returns it; its bytes are held until the last view of them is gone."""
        body = _Body(data)
        self.held_bytes += len(body)
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        weakref.finalize(body, self._let_go, len(body))
        return memoryview(body).toreadonly()

    def _let_go(self, size: int) -> None:
        self.held_bytes -= size


class _Body(bytearray):
    """An answer; unlike a plain bytearray it can be watched."""


@dataclass(kw_only=True)
class Link:
    """Bytes a second in each direction, and when each direction is free again."""

    rate: float
    rtt_s: float
    traffic: Traffic = field(default_factory=Traffic)
    up_free_s: float = 0.0
    down_free_s: float = 0.0

    def arrival(self, now: float, size: int) -> float:
        """The time at which the store has a request of so many bytes that is sent now."""
        self.up_free_s = max(self.up_free_s, now) + (size + REQUEST_BYTES) / self.rate
        self.traffic.uploaded_bytes += size
        return self.up_free_s + self.rtt_s / 2

    def answered(self, sent: float, size: int) -> float:
        """The time at which an answer of so many bytes, which the store sends then, is here."""
        self.down_free_s = max(self.down_free_s, sent + self.rtt_s / 2) + (size + REQUEST_BYTES) / self.rate
        self.traffic.downloaded_bytes += size
        return self.down_free_s


class LinkStore:
    """A store behind a link."""

    def __init__(self, world: World, engine: MemoryStore, link: Link, profile: Profile) -> None:
        self.profile = profile
        self.uri = engine.uri
        self.link = link
        self._world = world
        self._engine = engine

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self.link.traffic.reads += 1
        self._send(0)
        data = self._engine.read(key, span, into)
        self._receive(0 if data is None else len(data))
        return data if data is None or into is not None else self.link.traffic.hold(data)

    def create(self, key: str, data: Data) -> bool:
        self.link.traffic.writes += 1
        self._send(size_of(data))
        created = self._engine.create(key, data)
        self._receive(0)
        return created

    def replace(self, key: str, data: Data) -> None:
        self.link.traffic.writes += 1
        self._send(size_of(data))
        self._engine.replace(key, data)
        self._receive(0)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self.link.traffic.reads += 1
        self._send(0)
        entries = self._engine.list(prefix, after)
        self._receive(200 * len(entries))
        return entries

    def delete(self, key: str) -> None:
        self.link.traffic.writes += 1
        self._send(0)
        self._engine.delete(key)
        self._receive(0)

    def _send(self, size: int) -> None:
        self._world.sleep(self.link.arrival(self._world.now, size) - self._world.now)

    def _receive(self, size: int) -> None:
        self._world.sleep(self.link.answered(self._world.now, size) - self._world.now)


class FiberThreads(Executor):
    """Takes the place of `BackgroundThreads`: up to `count` jobs at a time, in fibers of the process that submits."""

    def __init__(self, world: World, count: int, name: str) -> None:
        del name
        self._world = world
        self._count = count
        self._running = 0
        self._jobs: list[FiberJob] = []
        self._queued: deque[tuple[FiberJob, Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> FiberJob:
        job = FiberJob(self._world)
        self._jobs.append(job)
        self._queued.append((job, lambda: function(*args, **named)))
        if self._running < self._count:
            self._running += 1
            self._world.current.process.spawn(self._run)
        return job

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Any:
        jobs = [self.submit(fn, *args) for args in zip(*iterables, strict=False)]
        return [job.result() for job in jobs]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  of Executor
        while cancel_futures and self._queued:
            self._queued.popleft()[0].cancel()
        if wait:
            for job in self._jobs:
                if not job.cancelled():
                    job.exception()
        self._jobs.clear()

    def _run(self) -> None:
        while self._queued:
            job, work = self._queued.popleft()
            if job.set_running_or_notify_cancel():
                job.work(work)
        self._running -= 1


@contextmanager
def fibers_for_threads(world: World) -> Generator[None]:
    """The requests that run at once are fibers."""

    def threads(count: int, name: str) -> FiberThreads:
        return FiberThreads(world, count, name)

    def wait(jobs: Iterable[Future[Any]], return_when: str = "ALL_COMPLETED") -> Any:
        return _wait(world, list(jobs), first=return_when == FIRST_COMPLETED)

    with (
        mock.patch.object(parallel, "BackgroundThreads", threads),
        mock.patch.object(payload_reader, "BackgroundThreads", threads),
        mock.patch.object(prefetch, "BackgroundThreads", threads),
        mock.patch.object(parallel, "wait", wait),
        mock.patch.object(payload_reader, "wait", wait),
    ):
        yield


@dataclass(frozen=True)
class _Waited:
    done: list[Future[Any]]


def _wait(world: World, jobs: list[Future[Any]], *, first: bool) -> _Waited:
    waiting: list[tuple[Fiber, int]] = []

    def woken(_: Future[Any]) -> None:
        world.wake(waiting)

    while pending := [job for job in jobs if not job.done()]:
        if first and len(pending) < len(jobs):
            break
        for job in pending:
            job.add_done_callback(woken)
        world.wait(waiting)
    return _Waited([job for job in jobs if job.done()])
