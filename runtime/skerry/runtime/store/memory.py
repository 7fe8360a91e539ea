"""A store in this process's memory, for simulations and tests.

Atomic because one lock guards one dict. Bodies are copied on write and never changed afterwards, so a reader may keep
the view that it received.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from skerry.runtime.store.interface import Data, Entry, Profile, Span, buffers_of
from skerry.runtime.store.validation import check_key, check_prefix, check_span, limit_span, write_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.clock import Clock

PROFILE: Final = Profile(piece_bytes=1 << 20, streams=1, poll_first=0.001, poll_cap=0.05, is_local=True)

_named: Final[dict[str, MemoryStore]] = {}
_named_lock: Final = threading.Lock()


class MemoryStore:
    """Objects in a dict. Each instance is separate; `open_memory_store(name)` returns the process's shared ones.

    clock: sets `Entry.modified`, in seconds on its own scale; without a clock it is 0.0.
    """

    def __init__(self, uri: str = "memory://", clock: Clock | None = None) -> None:
        self._uri = uri
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    @property
    def uri(self) -> str:
        """See Store.uri."""
        return self._uri

    @property
    def profile(self) -> Profile:
        """Small pieces and short polls, because a read costs a microsecond."""
        return PROFILE

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """See Store.read. Without `into` the result is a read-only view of the stored bytes, not a copy."""
        check_key(key)
        check_span(span)
        with self._lock:
            stored = self._objects.get(key)
        if stored is None:
            return None
        part = limit_span(span, len(stored[0]))
        return write_into(into, memoryview(stored[0])[part.start : part.stop])

    def create(self, key: str, data: Data) -> bool:
        """See Store.create."""
        check_key(key)
        with self._lock:  # before the copy, which the loser of a race should not make
            if key in self._objects:
                return False
        stored = self._stamp(data)
        with self._lock:
            return self._objects.setdefault(key, stored) is stored

    def replace(self, key: str, data: Data) -> None:
        """See Store.replace."""
        check_key(key)
        stored = self._stamp(data)
        with self._lock:
            self._objects[key] = stored

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """See Store.list."""
        check_prefix(prefix)
        with self._lock:
            return [
                Entry(key, len(body), modified)
                for key, (body, modified) in sorted(self._objects.items())
                if key.startswith(prefix) and (after is None or key > after)
            ]

    def delete(self, key: str) -> None:
        """See Store.delete."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def _stamp(self, data: Data) -> tuple[bytes, float]:
        return b"".join(buffers_of(data)), self._clock.now() if self._clock else 0.0


def open_memory_store(name: str, clock: Clock | None = None) -> MemoryStore:
    """The process's only store of this name; `clock` is used if this call creates it."""
    with _named_lock:
        if name not in _named:
            _named[name] = MemoryStore(f"memory://{name}", clock)
        return _named[name]
