"""Wraps a store: retries failed calls, makes the answers of `create` reliable, and counts requests.

The reply to a conditional write cannot be trusted. A reset after the commit, a client's own repeat or a 409 each report
the opposite of what happened (measured for three clients). So every answer to `create` except a clean success is
resolved by reading the key back: our bytes mean that we won, other bytes that we lost, no object that we try again. An
earlier attempt that arrives late is harmless because it has the same key and the same bytes.

Consequence: two writers of the SAME bytes may both get True. A record that must have one author contains a nonce.
"""

from __future__ import annotations

import functools
import itertools
import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, TypeVar

from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Ambiguous, Retryable, Unauthorized
from skerry.runtime.store.interface import Data, Entry, Profile, Span, Store, buffers_of, size_of
from skerry.runtime.store.link_meter import LinkMeter, LinkSpeed
from skerry.runtime.store.outage_log import OutageTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.clock import Clock

T = TypeVar("T")

# Longer than a throttled prefix takes to split (30 to 60 s on S3) or a cloud load balancer to be replaced.
DEADLINE_S: Final = 120.0
# After a change, rights and keys take minutes to be the same on all servers of a cloud.
REFUSAL_PATIENCE_S: Final = 180.0
# Longer than any pause between two attempts of one call: after it, a refusal begins a new series.
REFUSAL_GAP_S: Final = 60.0
# Three final writes of a replica (receipt, checkpoint, heartbeat) must fit between a stop request and the kill.
STOPPING_S: Final = 5.0
_ABSENT_AGAIN: Final = Backoff(first=0.1, cap=1.0)
# Up to this size the whole body is compared. Larger objects are named by their digest: size and ends identify them.
WHOLE_BYTES: Final = 1 << 20
END_BYTES: Final = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counters of the requests to a store, retries included. Subtract an earlier value for the usage in between.

    uploaded_bytes: passed to the store. downloaded_bytes: returned by `read`.
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


def read_existing(
    store: Store, key: str, span: Span | None = None, into: memoryview | None = None
) -> memoryview | None:
    """`Retrying.read_existing` where the store is one, else its `read`."""
    return (store.read_existing if isinstance(store, Retrying) else store.read)(key, span, into)


def apart(store: Store, deadline_s: float) -> Store:
    """`Retrying.apart` where the store is one, else the store."""
    return store.apart(deadline_s) if isinstance(store, Retrying) else store


def speed_of(store: Store) -> LinkSpeed | None:
    """The speed of the link to a store, by its last reads; None if they were too few, or it is not a `Retrying`."""
    return store.meter.speed if isinstance(store, Retrying) else None


class Retrying:
    """A Store over another one: Retryable is retried until a deadline, and `create` is reliable. Thread-safe.

    deadline_s: from a call's start to the last moment at which a new attempt begins. Then the last error is raised
    (Ambiguous for a create, which may have happened). stop: once set, a call is retried for at most STOPPING_S.
    Invalid is raised at once, and so is Unauthorized. But with a stop event, which a replica has once it is in its run,
    a refusal after the first success is an outage until the verb was refused under this prefix for REFUSAL_PATIENCE_S.
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
        # A store that is polled every millisecond is retried sooner than after a tenth of a second.
        self._backoff = backoff or Backoff(first=min(0.1, 10 * store.profile.poll_first))
        self._lock = threading.Lock()
        self._counts = {field.name: 0 for field in fields(Usage)}
        self.meter = LinkMeter()
        self._outage = OutageTracker(store.uri, clock)
        self._refusals = _Refusals(clock)

    @property
    def uri(self) -> str:
        """The wrapped store's URI."""
        return self._store.uri

    @property
    def profile(self) -> Profile:
        """The wrapped store's profile."""
        return self._store.profile

    def with_deadline(self, deadline_s: float, stop: threading.Event) -> Retrying:
        """The same store, counters and outage tracking with another deadline and stop event."""
        other = Retrying(self._store, self._clock, deadline_s=deadline_s, backoff=self._backoff, stop=stop)
        other._lock, other._counts, other.meter = self._lock, self._counts, self.meter
        other._outage, other._refusals = self._outage, self._refusals
        return other

    def apart(self, deadline_s: float) -> Retrying:
        """The same store and counters for work that no round depends on: its failures are no outage of the replica.

        A refusal is raised at once.
        """
        other = Retrying(self._store, self._clock, deadline_s=deadline_s, backoff=self._backoff)
        other._lock, other._counts, other.meter = self._lock, self._counts, self.meter
        return other

    def reachable_since(self, longer_than_s: float) -> float:
        """The end of the last outage on the clock; the current time during one; 0 without an outage.

        Outages of at most `longer_than_s` are ignored.
        """
        return self._outage.reachable_since(longer_than_s)

    @property
    def usage(self) -> Usage:
        """The counters up to now."""
        with self._lock:
            return Usage(**self._counts)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """See Store.read. A retry starts over, so `into` contains the bytes of one attempt only."""
        return self._call("read", key, lambda: self._read(key, span, into))

    def read_existing(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """`read` of an object that a record proves to exist: while the store may have missed it, it is read again."""
        until = self._clock.now() + self.profile.absence_s
        for number in itertools.count():
            body = self.read(key, span, into)
            left_s = until - self._clock.now()
            if body is not None or left_s <= 0 or (self._stop is not None and self._stop.is_set()):
                return body
            self._clock.pause(min(left_s, _ABSENT_AGAIN.delay(number, self._clock)), self._stop)
        raise AssertionError("itertools.count ended")

    def create(self, key: str, data: Data) -> bool:
        """See Store.create. True and False are both reliable."""
        buffers = buffers_of(data)
        return self._call("create", key, lambda: self._create(key, buffers))

    def replace(self, key: str, data: Data) -> None:
        """See Store.replace. May write the same bytes more than once."""
        buffers = buffers_of(data)

        def attempt() -> None:
            self._count(replaces=1, uploaded_bytes=size_of(buffers))
            self._store.replace(key, buffers)

        self._call("replace", key, attempt)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """See Store.list."""

        def attempt() -> Sequence[Entry]:
            self._count(lists=1)
            return self._store.list(prefix, after)

        return self._call("list", prefix, attempt)

    def delete(self, key: str) -> None:
        """See Store.delete."""

        def attempt() -> None:
            self._count(deletes=1)
            self._store.delete(key)

        self._call("delete", key, attempt)

    def _read(self, key: str, span: Span | None, into: memoryview | None = None) -> memoryview | None:
        size, began = 0, self._clock.now()
        try:
            body = self._store.read(key, span, into)
            size = 0 if body is None else body.nbytes
            self.meter.record(began, self._clock.now(), size)
        finally:
            self._count(reads=1, downloaded_bytes=size)
        return body

    def _create(self, key: str, buffers: Sequence[memoryview]) -> bool:
        """One attempt and, unless it clearly succeeded, one comparison with the stored object."""
        self._count(creates=1, uploaded_bytes=size_of(buffers))
        failure: Retryable | None = None
        try:
            if self._store.create(key, buffers):
                return True
        except Retryable as error:
            failure = error
        is_ours = self._is_stored(key, buffers)
        if is_ours is None:  # the request was lost, a 409 wrote nothing, or the object was deleted since
            raise failure or Retryable("the store reported that the key exists, but the object is absent")
        return is_ours

    def _is_stored(self, key: str, buffers: Sequence[memoryview]) -> bool | None:
        """True if the stored object has these bytes; None if there is no object."""
        size = size_of(buffers)
        # One byte more than our size is requested, so that a longer object is recognised as different.
        ends = [Span(0, END_BYTES), Span(size - END_BYTES, size + 1)]
        for span in ends if size > WHOLE_BYTES else [Span(0, size + 1)]:
            stored = self._read(key, span)
            if stored is None:
                return None
            if bytes(stored) != _slice(buffers, span):
                return False
        return True

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def _call(self, verb: str, key: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, which is repeated after growing pauses until the deadline."""
        if self._stop is not None:
            attempt = functools.partial(self._refusals.call, verb, key, attempt)
        sent_at = self._clock.now()
        try:
            result = attempt()
        except Retryable as error:
            return self._retry(verb, key, attempt, error, sent_at)
        self._outage.record_success(verb, key, was_retried=False)
        return result

    def _retry(self, verb: str, key: str, attempt: Callable[[], T], error: Retryable, sent_at: float) -> T:
        began_at = self._clock.now()
        self._outage.record_first_failure(verb, key, error, sent_at)
        succeeded = False
        try:
            for number in itertools.count():
                stopping = self._stop is not None and self._stop.is_set()
                deadline_s = min(STOPPING_S, self._deadline_s) if stopping else self._deadline_s
                left_s = began_at + deadline_s - self._clock.now()
                if left_s <= 0:
                    raise _deadline_error(verb, key, self.uri, number + 1, self._deadline_s, error) from error
                pause_s = min(left_s, self._backoff.delay(number, self._clock))
                self._clock.pause(pause_s, None if stopping else self._stop)
                self._count(retries=1)
                sent_at = self._clock.now()
                try:
                    result = attempt()
                except Retryable as again:
                    error = again
                    self._outage.record_failed_retry(verb, key, error, sent_at)
                else:
                    succeeded = True
                    return result
            raise AssertionError("itertools.count ended")
        finally:
            if succeeded:
                self._outage.record_success(verb, key, was_retried=True)
            else:
                self._outage.record_abort()


@dataclass
class _RefusalSeries:
    """Refusals of one right without a success between them. Times by the clock's `now`."""

    first: float
    last: float


class _Refusals:
    """Tells a refusal that may pass from one that is final. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._was_accepted = False
        self._series: dict[tuple[str, str], _RefusalSeries] = {}

    def call(self, verb: str, key: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt`. Raises Retryable for a refusal that may pass."""
        # Rights are given by verb and prefix: the success of another one proves nothing for this one.
        right, sent_at = (verb, key.partition("/")[0]), self._clock.now()
        try:
            result = attempt()
        except Unauthorized as error:
            with self._lock:
                now = self._clock.now()
                series = self._series.get(right)
                if series is None or sent_at - series.last > REFUSAL_GAP_S:
                    series = self._series[right] = _RefusalSeries(first=now, last=now)
                series.last = now
                is_final = not self._was_accepted or now - series.first >= REFUSAL_PATIENCE_S
            if is_final:
                raise
            raise Retryable(f"refused, although this store accepted these credentials before: {error}") from error
        self._was_accepted = True
        if right in self._series:
            with self._lock:
                self._series.pop(right, None)
        return result


def _slice(buffers: Sequence[memoryview], span: Span) -> bytes:
    """The bytes of `span` in the concatenated buffers; copies only these."""
    parts: list[memoryview] = []
    start = 0
    for buffer in buffers:
        if start < span.stop and start + buffer.nbytes > span.start:
            parts.append(buffer[max(0, span.start - start) : span.stop - start])
        start += buffer.nbytes
    return b"".join(parts)


def _deadline_error(verb: str, key: str, uri: str, attempts: int, deadline_s: float, error: Retryable) -> Retryable:
    kind = Ambiguous if verb == "create" else Retryable
    return kind(f"timed out after {deadline_s:g} s: {verb} key={key} store={uri} attempts={attempts}: {error}")
