"""A store whose requests fail now and then, as a bucket's do: put between the retrying wrapper and the engine."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, TypeVar

from skerry.runtime.errors import Ambiguous, Retryable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store.interface import Data, Entry, Profile, Span, Store

T = TypeVar("T")


class Faulty:
    """A share of all requests fails, in one of three ways with equal odds. Thread-safe, seeded.

    503: refused before anything happened. reset: the connection broke before anything happened, and the caller cannot
    know that. lost: it happened, and the reply was lost.
    """

    def __init__(self, store: Store, share: float, seed: str) -> None:
        self._store = store
        self._share = share
        self._random = random.Random(seed)  # noqa: S311  repeatable faults are the point
        self._lock = threading.Lock()
        self.injected = 0

    @property
    def uri(self) -> str:
        """The wrapped store's."""
        return self._store.uri

    @property
    def profile(self) -> Profile:
        """The wrapped store's."""
        return self._store.profile

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """See Store.read."""
        return self._ask(lambda: self._store.read(key, span, into), Retryable)

    def create(self, key: str, data: Data) -> bool:
        """See Store.create."""
        return self._ask(lambda: self._store.create(key, data), Ambiguous)

    def replace(self, key: str, data: Data) -> None:
        """See Store.replace."""
        self._ask(lambda: self._store.replace(key, data), Retryable)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """See Store.list."""
        return self._ask(lambda: self._store.list(prefix, after), Retryable)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        self._ask(lambda: self._store.delete(key), Retryable)

    def _ask(self, request: Callable[[], T], doubt: type[Retryable]) -> T:
        """doubt: what a broken connection means for this verb."""
        with self._lock:
            fails, kind = self._random.random() < self._share, self._random.choice(["503", "reset", "lost"])
            self.injected += fails
        if fails and kind == "503":
            raise Retryable("injected: 503 slow down")
        if fails and kind == "reset":
            raise doubt("injected: connection reset")
        answer = request()
        if fails:
            raise doubt("injected: the reply was lost")
        return answer
