"""Runs several requests to a store at once, as many as its profile recommends."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from skerry.runtime.daemon_executors import BackgroundThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.store.interface import Store

T = TypeVar("T")


def run_parallel(store: Store, count: int, work: Callable[[int], T]) -> list[T]:
    """The results of `work(0)` to `work(count - 1)`, in order; at most `store.profile.streams` run at once."""
    streams = min(store.profile.streams, count)
    if streams <= 1:
        return [work(number) for number in range(count)]
    with BackgroundThreads(streams, "parts") as pool:
        return list(pool.map(work, range(count)))
