"""The wrapper that makes any engine safe to believe: it retries, resolves lost replies, and counts.

A conditional put's reply cannot be trusted: a reset after the commit, a client's own repeat or a 409 each say the
opposite of what happened (measured for three clients). So every answer to `create` but a clean success is settled by
reading the key back: our bytes are ours, other bytes are theirs, no bytes are another try with the same ones. A first
attempt that lands late is then harmless: same key, same bytes.

It follows that two writers of the SAME bytes may both be told True. A record that must have one author carries a nonce.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, TypeVar

from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Ambiguous, Retryable
from skerry.runtime.store.interface import Data, Entry, Profile, Span, Store, buffers_of
from skerry.runtime.store.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.clock import Clock

T = TypeVar("T")

# Longer than a throttled prefix takes to split (30 to 60 s on S3) or a cloud load balancer to be replaced.
DEADLINE_S: Final = 120.0
# Three last words of a replica (receipt, checkpoint, heartbeat) must fit the time between a stop request and the kill.
STOPPING_S: Final = 5.0
# Up to this size the whole body is compared. Larger objects are named by their digest: size and ends tell them apart.
WHOLE_BYTES: Final = 1 << 20
END_BYTES: Final = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was asked of a store so far, repeats included. Subtract two for what lies between them.

    uploaded_bytes: handed to the engine. downloaded_bytes: came back from `read`.
    """

    reads: int = 0
    creates: int = 0
    replaces: int = 0
    lists: int = 0
    deletes: int = 0
    retries: int = 0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0

    @property
    def requests(self) -> int:
        """All calls of the five verbs; a listing of several pages counts once."""
        return self.reads + self.creates + self.replaces + self.lists + self.deletes

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(**{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)})


class Retrying:
    """A Store over another: Retryable is retried until a call's deadline, and `create` never lies. Thread-safe.

    deadline_s: from a call's start to the last moment at which a new attempt begins; then the last error is raised
    (Ambiguous for a create, which may have happened). stop: once set, a call is given STOPPING_S at most, which is
    enough for one sick reply and short enough for a good-bye. Unauthorized and Invalid pass at once.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        deadline_s: float = DEADLINE_S,
        backoff: Backoff | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._deadline_s = deadline_s
        self._stop = stop
        # A store that is polled every millisecond is not left alone for a tenth of a second after one sick reply.
        self._backoff = backoff or Backoff(first=min(0.1, 10 * store.profile.poll_first))
        self._lock = threading.Lock()
        self._counts = {field.name: 0 for field in fields(Usage)}
        self._outage = Outage(store.uri, clock)

    @property
    def uri(self) -> str:
        """The wrapped store's."""
        return self._store.uri

    @property
    def profile(self) -> Profile:
        """The wrapped store's."""
        return self._store.profile

    def insisting(self, deadline_s: float, stop: threading.Event) -> Retrying:
        """The same engine, counts and outages with another patience: for a loop that can wait where a start cannot."""
        patient = Retrying(self._store, self._clock, deadline_s=deadline_s, backoff=self._backoff, stop=stop)
        patient._lock, patient._counts, patient._outage = self._lock, self._counts, self._outage
        return patient

    def steady_since(self, longer_than_s: float) -> float:
        """Since when the store answers, on the clock; now while it does not: nobody could be heard before.

        longer_than_s: a shorter time in which nothing went through does not count.
        """
        return self._outage.steady_since(longer_than_s)

    @property
    def usage(self) -> Usage:
        """What was asked of the store up to now."""
        with self._lock:
            return Usage(**self._counts)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """See Store.read. A repeat starts over, so `into` holds the bytes of one attempt only."""
        return self._until_clear("read", key, lambda: self._read(key, span, into))

    def create(self, key: str, data: Data) -> bool:
        """See Store.create; True and False are both facts here."""
        buffers = buffers_of(data)
        return self._until_clear("create", key, lambda: self._create(key, buffers))

    def replace(self, key: str, data: Data) -> None:
        """See Store.replace. May write the same bytes more than once."""
        buffers = buffers_of(data)
        self._until_clear("replace", key, lambda: self._replace(key, buffers))

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """See Store.list."""
        return self._until_clear("list", prefix, lambda: self._list(prefix, after))

    def delete(self, key: str) -> None:
        """See Store.delete."""
        self._until_clear("delete", key, lambda: self._delete(key))

    def _read(self, key: str, span: Span | None, into: memoryview | None = None) -> memoryview | None:
        body: memoryview | None = None
        try:
            body = self._store.read(key, span, into)
        finally:
            with self._lock:
                self._counts["reads"] += 1
                self._counts["downloaded_bytes"] += 0 if body is None else body.nbytes
        return body

    def _create(self, key: str, buffers: Sequence[memoryview]) -> bool:
        """One attempt and, unless it clearly won, one look at what is there."""
        self._count("creates")
        self._count("uploaded_bytes", _total(buffers))
        doubt: Retryable | None = None
        try:
            if self._store.create(key, buffers):
                return True
        except Retryable as error:
            doubt = error
        mine = self._is_mine(key, buffers)
        if mine is None:  # lost on the way, a 409 with nothing written, or deleted since
            raise doubt or Retryable("the store said that the key exists, and then that it does not")
        return mine

    def _is_mine(self, key: str, buffers: Sequence[memoryview]) -> bool | None:
        """Whether the stored object is these bytes; None if there is no object."""
        size = _total(buffers)
        # Each look asks for one byte more than ours has, so that a longer object is seen to be another.
        ends = [Span(0, END_BYTES), Span(size - END_BYTES, size + 1)]
        looks = ends if size > WHOLE_BYTES else [Span(0, size + 1)]
        for span in looks:
            stored = self._read(key, span)
            if stored is None:
                return None
            if bytes(stored) != _slice(buffers, span):
                return False
        return True

    def _replace(self, key: str, buffers: Sequence[memoryview]) -> None:
        self._count("replaces")
        self._count("uploaded_bytes", _total(buffers))
        self._store.replace(key, buffers)

    def _list(self, prefix: str, after: str | None) -> Sequence[Entry]:
        self._count("lists")
        return self._store.list(prefix, after)

    def _delete(self, key: str) -> None:
        self._count("deletes")
        self._store.delete(key)

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def _until_clear(self, verb: str, key: str, once: Callable[[], T]) -> T:
        """The first clear answer of `once`, asked again after growing pauses until the deadline."""
        asked = self._clock.now()
        try:
            answer = once()
        except Retryable as error:
            return self._insist(verb, key, once, error, asked)
        self._outage.went_through(verb, key, at_last=False)
        return answer

    def _insist(self, verb: str, key: str, once: Callable[[], T], error: Retryable, asked: float) -> T:
        began = self._clock.now()
        self._outage.began(verb, key, error, asked)
        answered = False
        try:
            for attempt in itertools.count():
                stopping = self._stop is not None and self._stop.is_set()
                left = began + (min(STOPPING_S, self._deadline_s) if stopping else self._deadline_s) - self._clock.now()
                if left <= 0:
                    raise _given_up(verb, key, self.uri, attempt + 1, self._deadline_s, error) from error
                self._clock.pause(
                    min(left, self._backoff.delay(attempt, self._clock)), None if stopping else self._stop
                )
                self._count("retries")
                asked = self._clock.now()
                try:
                    answer = once()
                except Retryable as again:
                    error = again
                    self._outage.goes_on(verb, key, error, asked)
                else:
                    answered = True
                    return answer
            raise AssertionError("itertools.count ended")
        finally:
            if answered:
                self._outage.went_through(verb, key, at_last=True)
            else:
                self._outage.gave_up()


def _total(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _slice(buffers: Sequence[memoryview], span: Span) -> bytes:
    """The bytes of `span` as if the buffers were one; copies no more than that."""
    parts: list[memoryview] = []
    start = 0
    for buffer in buffers:
        if start < span.stop and start + buffer.nbytes > span.start:
            parts.append(buffer[max(0, span.start - start) : span.stop - start])
        start += buffer.nbytes
    return b"".join(parts)


def _given_up(verb: str, key: str, uri: str, attempts: int, deadline_s: float, error: Retryable) -> Retryable:
    kind = Ambiguous if verb == "create" else Retryable
    return kind(f"no clear answer for {deadline_s:g} s: {verb} key={key} store={uri} attempts={attempts}: {error}")
