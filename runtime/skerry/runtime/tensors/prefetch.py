"""Reads payload objects before the decision that will name them, as soon as their contributions are recorded.

What is read here is verified like everything else when it is used, and thrown away if it is not used. Needs no torch.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.store.interface import Span
from skerry.runtime.store.retrying import read_existing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from skerry.runtime.log.records import Part
    from skerry.runtime.store.interface import Store

LIMIT_BYTES: Final = 32 << 20
"""Held before the decision, at most: the rest is read after it."""


class Prefetch:
    """The objects of one exchange that are read ahead. `finish` ends it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._left = LIMIT_BYTES
        self._jobs: dict[str, Future[memoryview | None]] = {}
        # Not all that the link carries: small requests of the replica queue behind them, and others wait for those.
        self._pool = BackgroundThreads(max(1, store.profile.streams // 2), "skerry-prefetch")

    def offer(self, round_number: int, slot: str, parts: Sequence[Part]) -> None:
        """Read these parts of a contribution in the background, as far as the limit goes."""
        for part in parts:
            key = keys.payload(round_number, slot, part.digest)
            if key not in self._jobs and part.total_bytes <= self._left:
                self._left -= part.total_bytes
                self._jobs[key] = self._pool.submit(self._read, key, part.total_bytes)

    def finish(self) -> dict[str, memoryview]:
        """Begin no more, wait for what is in flight, and return the objects that were read, by key."""
        self._pool.shutdown(cancel_futures=True)
        done = {key: job.result() for key, job in self._jobs.items() if not job.cancelled()}
        return {key: data for key, data in done.items() if data is not None}

    def _read(self, key: str, size: int) -> memoryview | None:
        with suppress(SkerryError):  # it is read again when it is used, and the error is raised there
            return read_existing(self._store, key, Span(0, size))
        return None
