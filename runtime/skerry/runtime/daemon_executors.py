"""Executors whose threads do not keep a process alive.

Python joins the threads of a `ThreadPoolExecutor` before a process ends, and before any function of `atexit` runs. An
exchange may wait for half an hour, so a script that raised would live on for as long.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]] | None"

_unfinished: Final[set[Future[Any]]] = set()
_unfinished_lock: Final = threading.Lock()


def wait_for_jobs(timeout_s: float) -> None:
    """Wait until every job of this process that was submitted to `BackgroundThreads` is over, or for so long."""
    with _unfinished_lock:
        jobs = list(_unfinished)
    wait(jobs, timeout_s)


class BackgroundThreads(Executor):
    """Runs jobs in the order of `submit`, on up to `count` daemon threads. With one thread also one after another."""

    def __init__(self, count: int, name: str) -> None:
        """Start no thread yet. name: of the threads, which get a number."""
        self._count = count
        self._name = name
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        """See Executor. Raises RuntimeError after `shutdown`."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"cannot submit a job after shutdown: threads={self._name}")
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=_run, args=(self._jobs, self._idle), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            job: Future[T] = Future()
            with _unfinished_lock:
                _unfinished.add(job)
            job.add_done_callback(_forget)
            self._jobs.put((job, partial(function, *args, **named)))
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  of Executor
        """See Executor. wait: until all jobs are over."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                self._cancel_waiting()
            for _ in self._threads:
                self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def __del__(self) -> None:
        self.shutdown(wait=False)

    def _cancel_waiting(self) -> None:
        while True:
            try:
                waiting = self._jobs.get_nowait()
            except Empty:
                return
            if waiting is not None:
                waiting[0].cancel()


def _forget(job: Future[Any]) -> None:
    with _unfinished_lock:
        _unfinished.discard(job)


def _run(jobs: SimpleQueue[_Job], idle: threading.Semaphore) -> None:
    """One thread: runs jobs until it gets None. Holds no executor, so that a forgotten one ends its threads."""
    while (next_job := jobs.get()) is not None:
        job, work = next_job
        if job.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  as in every executor: raised by the job's `result`
                job.set_exception(error)
            else:
                job.set_result(result)
                del result
        del next_job, job, work  # an idle thread must not hold a job's tensors
        idle.release()
