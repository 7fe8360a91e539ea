"""Keeps the bytes of the newest records that a replica has read or written, so that it need not read them again.

Records of rounds are written once and never changed, so their bytes are as good as the store's. Thread-safe.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from skerry.runtime.log import keys

if TYPE_CHECKING:
    from typing_extensions import Buffer

# 64 replicas write 13 MB of records in 100 rounds.
MAX_BYTES: Final = 32 << 20
_KEPT: Final = (keys.EXCHANGES, keys.COMMITS, keys.CONTRIBUTIONS, keys.RECEIPTS)


class RecentRecords:
    """Bytes of records by their keys, at most MAX_BYTES: the oldest are dropped first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: dict[str, bytes] = {}
        self._size = 0

    def keep(self, key: str, data: Buffer) -> None:
        """Keep the stored bytes of a record of a round; records of other kinds are ignored."""
        if not key.startswith(_KEPT):
            return
        with self._lock:
            if key in self._bodies:
                return
            body = self._bodies[key] = bytes(data)
            self._size += len(body)
            while self._size > MAX_BYTES:
                self._size -= len(self._bodies.pop(next(iter(self._bodies))))

    def get(self, key: str) -> bytes | None:
        """The bytes of a record; None if they are not kept."""
        with self._lock:
            return self._bodies.get(key)

    def forget(self, before: int) -> None:
        """Drop the records of the rounds before this one."""
        with self._lock:
            for key in [key for key in self._bodies if keys.round_of(key) < before]:
                self._size -= len(self._bodies.pop(key))
