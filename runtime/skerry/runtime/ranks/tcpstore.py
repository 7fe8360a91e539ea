"""Agreement of several ranks through the replica's TCPStore (torchrun's, or a given one).

    {prefix}/incarnation                the incarnation that rank 0 has claimed; overwritten by the next one
    {prefix}/{incarnation}/...          all other keys, so that a restart never reads values from before it
    .../hello/{rank}  .../welcome/{nonce}  .../alive/{rank}  .../stop
    .../{channel}/{number}/{rank}  .../{channel}/{number}/result

Values are deleted once all ranks have read them. A rank that does not make a call, has no heartbeat or makes another
call is lost for good. Never accesses the bucket.
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented, not listed

from skerry.runtime import errors
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Invalid, Retryable, SkerryError
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import Count, Name, Nonce
from skerry.runtime.protocol.exchange import Interrupted
from skerry.runtime.protocol.quorum import Undecided
from skerry.runtime.ranks.interface import CHANNELS, RankLost, SingleRank
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.ranks.interface import Address, Channel, ChannelName, Group, Plain

M = TypeVar("M", bound="Plain | Record")
A = TypeVar("A", bound="Plain | Record")
T = TypeVar("T")

_BEAT_S: Final = 0.5
# Sixty missed heartbeats: a rank may hold the interpreter's lock for long (while it compiles a kernel).
_LOST_S: Final = 30.0
# With a stop requested, four: the replica must have ended within the budget of the stop.
_LOST_STOPPING_S: Final = 2.0
# A poll takes 65 us on loopback; after 20 ms the interval stays constant.
_POLL: Final = Backoff(first=0.0005, cap=0.02, factor=1.5)
# torchft's message, which its users' scripts match.
_EXPIRED: Final = 'status: Cancelled, message: "Timeout expired"'


_ERRORS: Final[Mapping[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in (
        *(
            kind
            for kind in vars(errors).values()
            if isinstance(kind, type) and issubclass(kind, SkerryError) and kind is not SkerryError
        ),
        Interrupted,
        Undecided,
        RankLost,
        TimeoutError,
    )
}


class Failure(Record):
    """An error, as sent to the other ranks."""

    kind: str
    text: str


class Hello(Record):
    """A rank's first message to rank 0; all fields but the nonce must be equal on all ranks."""

    nonce: Nonce
    slot: Name
    size: Count


class Joined(Record):
    """The incarnation of the replica, from rank 0."""

    incarnation: Count


def join_group(address: Address | None, clock: Clock, deadline_s: float, connect_s: float) -> Group:
    """Connect to the ranks of the replica. address: None for one rank. Raises Retryable if there is no TCPStore."""
    return (
        SingleRank() if address is None else TcpStoreGroup(address, clock, deadline_s=deadline_s, connect_s=connect_s)
    )


class TcpStoreGroup:
    """One of several ranks, connected to the replica's TCPStore.

    No request blocks in the TCPStore, so one client serves all channels. Connecting takes 5 s if DNS does not respond,
    because torch looks up the name of the address.
    """

    def __init__(self, address: Address, clock: Clock, *, deadline_s: float, connect_s: float) -> None:
        """deadline_s: the longest wait for a rank to make a call. Raises Retryable if there is no TCPStore."""
        self.rank = address.rank
        self.size = address.size
        self._address = address
        self._clock = clock
        self._deadline_s = deadline_s
        self._connect_s = connect_s
        self._store = self._connect()
        self._channels = {name: _TcpStoreChannel(self, name, self._store, clock) for name in CHANNELS}
        self._prefix = ""
        self._slot = ""
        self._incarnation: int | None = None
        self._stop = threading.Event()
        self._closed = threading.Event()
        self._join_lock = threading.Lock()
        self._joined = False
        self._lost: RankLost | None = None

    def channel(self, name: ChannelName) -> Channel:
        """The channel for one of this rank's threads."""
        return self._channels[name]

    def join(self, run: str, slot: str, incarnation: int, stop: threading.Event) -> None:
        """Join the group. Returns at once; the ranks wait for each other at their first call."""
        self._prefix, self._slot, self._stop = f"skerry/{run}", slot, stop
        if self.rank == 0:
            self._incarnation = incarnation
            self._store.set(f"{self._prefix}/incarnation", Joined(incarnation=incarnation).to_bytes().decode())

    def request_stop(self) -> None:
        """Set `stop` on every rank, within two seconds on the others. Returns at once; safe in a signal's thread."""
        self._stop.set()
        if self._joined:
            with suppress(RuntimeError):  # without the TCPStore the other ranks notice the loss
                self._store.set(self.key("stop"), "1")

    def close(self) -> None:
        """End this rank's calls and waits. Its results stay readable in the TCPStore."""
        self._closed.set()

    # For the channels.

    @property
    def deadline_s(self) -> float:
        """The longest wait for a rank to make a call."""
        return self._deadline_s

    @property
    def lost_s(self) -> float:
        """The silence after which a rank counts as lost."""
        return _LOST_STOPPING_S if self._stop.is_set() else _LOST_S

    def key(self, *path: object) -> str:
        """A key of this incarnation."""
        return "/".join(str(part) for part in (self._prefix, self._incarnation, *path))

    def name_of(self, rank: int) -> str:
        """The name of a rank in an error."""
        return f"rank {rank} of {self.size} of {self._slot}"

    def check(self) -> None:
        """Raises RankLost if a rank was lost before, or if this rank has closed the group."""
        if self._lost is not None:
            raise RankLost(str(self._lost)) from self._lost
        if self._closed.is_set():
            raise RankLost(f"{self.name_of(self.rank)} has closed its channels")

    def lose(self, error: RankLost) -> RankLost:
        """Record that a rank is lost, and return the error."""
        self._lost = self._lost or error
        return error

    def wait_for_all(self, timeout_s: float) -> None:
        """At the first call, wait until all ranks of this incarnation have joined.

        Raises Invalid if they were started differently, RankLost if one does not join.
        """
        with self._join_lock:
            if self._joined:
                return
            began = self._clock.now()
            try:
                if self.rank == 0:
                    self._welcome(began, timeout_s)
                else:
                    self._arrive(began, timeout_s)
            except RuntimeError as error:
                raise self.lose(RankLost(f"the replica's TCPStore is lost: {error}")) from error
            self._joined = True
            threading.Thread(target=self._beat, name=f"rank-{self.rank}", daemon=True).start()

    def _welcome(self, began: float, timeout_s: float) -> None:
        mine = Hello(nonce=self._clock.nonce(), slot=self._slot, size=self.size)
        hellos = [
            Hello.parse(self._read_hello(rank, began, timeout_s), f"hello/{rank}") for rank in range(1, self.size)
        ]
        text = "".join(
            f"; rank {rank} is {hello.slot!r} of {hello.size}"
            for rank, hello in enumerate(hellos, start=1)
            if (hello.slot, hello.size) != (mine.slot, mine.size)
        )
        refusal = (
            Invalid(f"ranks of one replica differ: rank 0 is {mine.slot!r} of {mine.size}{text}") if text else None
        )
        for hello in hellos:
            self._store.set(self.key("welcome", hello.nonce), _encode(refusal))
        if refusal is not None:
            raise refusal

    def _read_hello(self, rank: int, began: float, timeout_s: float) -> bytes:
        key, attempt = self.key("hello", rank), 0
        while not self._store.check([key]):
            self._pause(attempt, began, timeout_s, self.name_of(rank))
            attempt += 1
        return self._store.get(key)

    def _arrive(self, began: float, timeout_s: float) -> None:
        """Greet rank 0's incarnation, and the next one if the first turns out to be from before a restart."""
        mine = Hello(nonce=self._clock.nonce(), slot=self._slot, size=self.size)
        key, attempt = f"{self._prefix}/incarnation", 0
        while True:
            if self._store.check([key]):
                incarnation = Joined.parse(self._store.get(key), key).incarnation
                if incarnation != self._incarnation:
                    self._incarnation = incarnation
                    self._store.set(self.key("hello", self.rank), mine.to_bytes().decode())
                welcome = self.key("welcome", mine.nonce)
                if self._store.check([welcome]):
                    _raise_failure(self._store.get(welcome))
                    return
            self._pause(attempt, began, timeout_s, self.name_of(0))
            attempt += 1

    def _pause(self, attempt: int, began: float, timeout_s: float, name: str) -> None:
        # A rank has no heartbeat before it has joined, so a stop shortens the whole wait.
        left = began + (min(timeout_s, _LOST_STOPPING_S) if self._stop.is_set() else timeout_s) - self._clock.now()
        if left <= 0:
            raise self.lose(RankLost(f"{name} did not make the first call: {_EXPIRED}"))
        self._clock.pause(min(left, _POLL.delay(attempt, self._clock)))

    def _beat(self) -> None:
        """Write heartbeats and watch for a stop, in a thread."""
        count, store = 0, self._store
        while not self._closed.is_set():
            try:
                store.set(self.key("alive", self.rank), str(count))
                if not self._stop.is_set() and store.check([self.key("stop")]):
                    self._stop.set()
            except RuntimeError as error:  # the next call notices it, too, and raises
                if not self._closed.is_set():
                    fields = {"slot": self._slot, "rank": self.rank, "error": str(error)[:200]}
                    emit("heartbeat_failed", fields, level=logging.WARNING)
                return
            count += 1
            self._clock.pause(_BEAT_S, self._closed)

    def _connect(self) -> TCPStore:
        try:
            return TCPStore(
                self._address.host,
                self._address.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._connect_s),
            )
        except RuntimeError as error:
            raise Retryable(
                f"the replica's TCPStore does not respond: rank={self.rank} "
                f"address={self._address.host}:{self._address.port}: {error}"
            ) from error


class _TcpStoreChannel:
    """A channel through the TCPStore."""

    def __init__(self, group: TcpStoreGroup, name: ChannelName, store: TCPStore, clock: Clock) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._name = name
        self._store = store
        self._clock = clock
        self._number = 0
        self._results: list[str] = []

    def reduce_on_rank0(
        self,
        call: str,
        work: Callable[[], M],
        decide: Callable[[Sequence[M]], A],
        record: type[A] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> A:
        """See `Channel`."""
        deadline = self._begin(timeout_s)
        mine, error = _try(work)
        if self.rank > 0:
            self._send(self._key(self.rank), call, mine if error is None else error)
            return self._receive_result(call, record, deadline, error)

        def decide_on_all() -> A:
            return decide(self._gather(call, mine, error, deadline))

        result, error = _try(decide_on_all)
        self._delete_read_keys()
        return self._send_result(call, result, error)

    def broadcast_from_rank0(self, call: str, decide: Callable[[], A], record: type[A] | None = None) -> A:
        """See `Channel`."""
        deadline = self._begin(None)
        if self.rank > 0:
            return self._receive_result(call, record, deadline, None)
        return self._send_result(call, *_try(decide))

    def _begin(self, timeout_s: float | None) -> float:
        self._group.check()
        timeout_s = self._group.deadline_s if timeout_s is None else timeout_s
        deadline = self._clock.now() + timeout_s
        self._group.wait_for_all(timeout_s)
        self._number += 1
        return deadline

    def _gather(self, call: str, mine: M | None, error: Exception | None, deadline: float) -> list[M]:
        """The results of all ranks. Once all have sent theirs, raises this rank's error or the first of another."""
        sent = [self._receive(self._key(rank), call, rank, deadline) for rank in range(1, self.size)]
        if error is not None:
            raise error
        for rank, text in enumerate(sent, start=1):
            _raise_failure(text, f"rank {rank}: ")
        mine = cast("M", mine)
        record = type(mine) if isinstance(mine, Record) else None
        return [mine, *(cast("M", _decode(text, record, self._key(rank))) for rank, text in enumerate(sent, start=1))]

    def _send_result(self, call: str, result: A | None, error: Exception | None) -> A:
        key = self._key("result")
        self._send(key, call, result if error is None else error)
        self._results.append(key)
        if isinstance(error, RankLost):
            self._group.lose(error)
        if error is not None:
            raise error
        return cast("A", result)

    def _receive_result(self, call: str, record: type[A] | None, deadline: float, mine: Exception | None) -> A:
        # Rank 0 may first wait for another rank and then for the other replicas, each up to the deadline.
        text = self._receive(self._key("result"), call, 0, deadline + 2 * self._group.deadline_s)
        try:
            _raise_failure(text)
        except Exception as error:
            if isinstance(error, RankLost):
                self._group.lose(error)
            if mine is not None:
                raise mine from error  # with its own type and traceback
            raise
        return cast("A", _decode(text, cast("type[Record] | None", record), self._key("result")))

    def _delete_read_keys(self) -> None:
        """Delete the results of earlier calls: all ranks have made this call, so they have read them."""
        keys = [*self._results, *(self._key(rank) for rank in range(1, self.size))]
        self._results.clear()
        for key in keys:
            self._guarded(lambda key=key: self._store.delete_key(key))

    def _key(self, last: object) -> str:
        return self._group.key(self._name, self._number, last)

    def _send(self, key: str, call: str, value: Plain | Record | Exception) -> None:
        self._guarded(lambda: self._store.set(key, f"{call}\n{_encode(value)}"))

    def _receive(self, key: str, call: str, rank: int, deadline: float) -> bytes:
        """Wait for a rank's value under `key`. Raises RankLost if the rank does not send it, or makes another call."""
        heartbeat = _RankHeartbeat(self._store, self._group.key("alive", rank), self._clock)
        attempt = 0
        while not self._guarded(lambda: self._store.check([key])):
            now = self._clock.now()
            self._group.check()
            if now >= deadline:
                raise self._lost(rank, f"did not call {call!r}: {_EXPIRED}")
            lost_s = self._group.lost_s
            if self._guarded(heartbeat.silent_s) > lost_s:
                raise self._lost(rank, f"has had no heartbeat for {lost_s:g} s, at {call!r}")
            self._clock.pause(min(deadline - now, _POLL.delay(attempt, self._clock)))
            attempt += 1
        head, _, body = self._guarded(lambda: self._store.get(key)).partition(b"\n")
        if head.decode() != call:
            raise self._lost(rank, f"called {head.decode()!r}, rank {self.rank} called {call!r}")
        return body

    def _lost(self, rank: int, reason: str) -> RankLost:
        return self._group.lose(RankLost(f"{self._group.name_of(rank)} {reason}; restart the replica"))

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:  # also torch's subclasses: the connection is lost
            raise self._group.lose(RankLost(f"the replica's TCPStore is lost: {error}")) from error


class _RankHeartbeat:
    """A rank's heartbeat, read twice a second and timed on the local clock."""

    def __init__(self, store: TCPStore, key: str, clock: Clock) -> None:
        self._store = store
        self._key = key
        self._clock = clock
        self._value: Any = None
        self._changed_at = self._read_at = clock.now()

    def silent_s(self) -> float:
        """Seconds since it was last seen to change."""
        now = self._clock.now()
        if now - self._read_at >= _BEAT_S:
            self._read_at = now
            value = self._store.get(self._key) if self._store.check([self._key]) else None
            if value != self._value:
                self._value, self._changed_at = value, now
        return now - self._changed_at


def _try(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  it is raised on every rank, here with its own type and traceback
        return None, error


def _encode(value: Plain | Record | Exception) -> str:
    """A record or a plain value as JSON, or an error with a "!" before it."""
    if isinstance(value, Record):
        return value.to_bytes().decode()
    if not isinstance(value, Exception):
        return json.dumps(value)
    kind = type(value).__name__
    if kind in _ERRORS:
        return "!" + Failure(kind=kind, text=str(value)[:4000]).to_bytes().decode()
    return "!" + Failure(kind=Retryable.__name__, text=f"{kind}: {value}"[:4000]).to_bytes().decode()


def _decode(text: bytes, record: type[Record] | None, key: str) -> Plain | Record:
    """Decode a value from `_encode`. Raises Corrupt if it is not such a record."""
    if record is None or text == b"null":
        return _tuples(json.loads(text))
    return record.parse(text, key)


def _tuples(value: Any) -> Plain:
    return tuple(map(_tuples, cast("list[Any]", value))) if isinstance(value, list) else value


def _raise_failure(data: bytes, prefix: str = "") -> None:
    """Raises the error, if the data is one."""
    if data.startswith(b"!"):
        failure = Failure.parse(data[1:], "failure")
        raise _ERRORS[failure.kind](f"{prefix}{failure.text}")
