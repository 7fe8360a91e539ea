"""Runs several requests to a store at once, as many as its profile recommends, or while the caller does other work."""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from skerry.runtime.daemon_executors import BackgroundThreads

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from skerry.runtime.store.interface import Store

K = TypeVar("K")
T = TypeVar("T")


_SMALL_REQUESTS: Final = 16
"""Small requests in flight to a store that takes several: they wait for the round trip alone."""


def run_parallel(store: Store, count: int, work: Callable[[int], T], *, small: bool = False) -> list[T]:
    """The results of `work(0)` to `work(count - 1)`, in order; at most `store.profile.streams` run at once.

    small: more of them, since each is a request for a few bytes.
    """
    streams = store.profile.streams
    streams = min(_SMALL_REQUESTS if small and streams > 1 else streams, count)
    if streams <= 1:
        return [work(number) for number in range(count)]
    with BackgroundThreads(streams, "parts") as pool:
        return list(pool.map(work, range(count)))


class BackgroundRequests:
    """Requests to a store while the caller goes on; for one that takes one at a time, in the caller's own thread.

    A context: its end waits for all requests and raises the first error. After an exception those that have not begun
    are dropped.
    """

    def __init__(self, store: Store) -> None:
        streams = store.profile.streams
        self._pool = BackgroundThreads(streams, "requests") if streams > 1 else None
        self._limit = 2 * streams
        self._jobs: deque[Future[object]] = deque()

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` now or soon. Waits if there are too many already; raises an error of an earlier one."""
        if self._pool is None:
            work()
            return
        self._jobs.append(self._pool.submit(work))
        while len(self._jobs) > self._limit:
            self._jobs.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            for job in self._jobs:
                job.result()


class RequestWindow(Generic[K, T]):
    """Requests in flight, answered in the order in which they end; with one stream, each in the caller's own thread.

    A context: its end waits for those that run.
    """

    def __init__(self, store: Store) -> None:
        self._streams = max(1, store.profile.streams)
        self._pool = BackgroundThreads(self._streams, "requests") if self._streams > 1 else None
        self._jobs: dict[Future[T], K] = {}

    @property
    def has_room(self) -> bool:
        """Fewer are in flight than the store's profile recommends."""
        return len(self._jobs) < self._streams

    def submit(self, key: K, work: Callable[[], T]) -> None:
        """Begin a request. key: comes with its answer."""
        if self._pool is not None:
            self._jobs[self._pool.submit(work)] = key
            return
        done: Future[T] = Future()
        done.set_result(work())
        self._jobs[done] = key

    def next(self) -> tuple[K, T] | None:
        """Wait for the next answer, and return it with its key; None if nothing is in flight. Raises its error."""
        if not self._jobs:
            return None
        job = next(iter(wait(self._jobs, return_when=FIRST_COMPLETED).done))
        return self._jobs.pop(job), job.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
