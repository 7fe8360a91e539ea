"""Stores for tests: calls of each verb, racing creates, a memory store that fails on demand, damage."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Data, Entry, Profile, Span, Store

VERBS: Final[Mapping[str, Callable[[Store], object]]] = {
    "read": lambda store: store.read("a"),
    "create": lambda store: store.create("b", b"body"),
    "replace": lambda store: store.replace("a", b"body"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("a"),
}
"""One call of each verb."""


class HookedStore(MemoryStore):
    """A memory store that calls `hook(verb, key)` before each verb; the hook may raise the verb's error."""

    def __init__(self, hook: Callable[[str, str], None], clock: Clock | None = None) -> None:
        super().__init__(clock=clock)
        self.hook = hook

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self.hook("read", key)
        return super().read(key, span, into)

    def create(self, key: str, data: Data) -> bool:
        self.hook("create", key)
        return super().create(key, data)

    def replace(self, key: str, data: Data) -> None:
        self.hook("replace", key)
        super().replace(key, data)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self.hook("list", prefix)
        return super().list(prefix, after)

    def delete(self, key: str) -> None:
        self.hook("delete", key)
        super().delete(key)


class CountingStore(MemoryStore):
    """A memory store that records the keys of its requests."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__("memory://", clock)
        self.read_keys: list[str] = []
        self.created_keys: list[str] = []
        self.listings = 0

    @property
    def requests(self) -> int:
        """Reads, listings and creates since the last `forget`."""
        return len(self.read_keys) + len(self.created_keys) + self.listings

    def forget(self) -> None:
        """Count from zero again."""
        self.read_keys.clear()
        self.created_keys.clear()
        self.listings = 0

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self.read_keys.append(key)
        return super().read(key, span, into)

    def create(self, key: str, data: Data) -> bool:
        self.created_keys.append(key)
        return super().create(key, data)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self.listings += 1
        return super().list(prefix, after)


class View:
    """One replica's own way into a store that others share. Subclasses change what it reads or writes."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class ReadRecorder(View):
    """Keeps the keys that this view has read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.reads: list[str] = []

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self.reads.append(key)
        return self.store.read(key, span, into)


class ForgetfulStore(View):
    """Answers that an object is absent until `seconds` after it was asked first, as a cache of NFS does."""

    def __init__(self, clock: Clock, seconds: float, store: Store | None = None) -> None:
        super().__init__(store or MemoryStore())
        self._clock, self._seconds = clock, seconds
        self._asked: dict[str, float] = {}

    @property
    def profile(self) -> Profile:
        return replace(self.store.profile, absence_s=10.0)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        now = self._clock.now()
        if now - self._asked.setdefault(key, now) < self._seconds and not key.startswith(("run.json", "members/")):
            return None
        return self.store.read(key, span, into)


def flip(data: bytes, position: int = -1) -> bytes:
    """The bytes with one bit changed."""
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


def damage(store: Store, key: str, position: int = -1) -> bytes:
    """Change one bit of an object: only its digest reveals that. Returns what it was."""
    before = bytes(store.read(key) or b"")
    store.replace(key, flip(before, position))
    return before


def race(stores: Sequence[Store], key: str, bodies: Sequence[bytes]) -> list[int]:
    """The writers, by number, whose `create` returned True; all start at once, each on its own store of `stores`."""
    start = threading.Barrier(len(bodies))
    winners: list[int] = []
    errors: list[BaseException] = []

    def write(number: int) -> None:
        start.wait()
        try:
            if stores[number].create(key, bodies[number]):
                winners.append(number)
        except BaseException as error:  # noqa: BLE001  a thread's entry: the test raises the error
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return winners


class StoreView:
    """A store as one process sees it: `create` is replaced, the rest is the shared store's."""

    def __init__(self, store: Store, create: Callable[[Store, str, Data], bool]) -> None:
        self._store = store
        self._create = create

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, data: Data) -> bool:
        return self._create(self._store, key, data)
