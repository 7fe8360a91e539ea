"""Several ranks of one replica, agreeing through the replica's own TCPStore (torchrun's, or one that is given).

    {prefix}/seat                       the incarnation that rank 0 has claimed; overwritten by the next one
    {prefix}/{incarnation}/...          everything else, so that a restart never meets what was told before it
    .../hello/{rank}  .../welcome/{nonce}  .../alive/{rank}  .../stop
    .../{line}/{number}/{rank}  .../{line}/{number}/answer

What was told is deleted once all have read it. A rank that does not come, beats no more or is at another call is lost
for good. Never touches the bucket.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented, not listed

from skerry.runtime import errors
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Invalid, Retryable, SkerryError
from skerry.runtime.events import emit
from skerry.runtime.exchange import Interrupted
from skerry.runtime.ranks import LINES, Alone, Nothing, RankLost
from skerry.runtime.records import Count, Name, Nonce, Record
from skerry.runtime.rounds import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.ranks import Address, Group, Line, Ranks

M = TypeVar("M", bound=Record)
A = TypeVar("A", bound=Record)
T = TypeVar("T")

_BEAT_S: Final = 1.0
# Thirty missed beats: a rank may hold the interpreter's lock for long (a kernel being compiled).
_GONE_S: Final = 30.0
# A look costs 65 us on loopback; a rank that comes later than 20 ms is waited for at that pace.
_LOOKS: Final = Backoff(first=0.0005, cap=0.02, factor=1.5)
# torchft's own words, which its users' scripts match.
_EXPIRED: Final = 'status: Cancelled, message: "Timeout expired"'


_KNOWN: Final[Mapping[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in (
        *(
            one
            for one in vars(errors).values()
            if isinstance(one, type) and issubclass(one, SkerryError) and one is not SkerryError
        ),
        Interrupted,
        Unreachable,
        RankLost,
        TimeoutError,
    )
}


class Failure(Record):
    """An error on its way to the other ranks."""

    kind: str
    text: str


class Hello(Record):
    """What a rank says of itself when it meets the others; all but the nonce must be equal on all ranks."""

    nonce: Nonce
    slot: Name
    size: Count


class Seated(Record):
    """Which incarnation of the replica this is."""

    incarnation: Count


def join_group(address: Address | None, clock: Clock, deadline_s: float, connect_s: float) -> Group:
    """This rank's view of its replica. Raises Retryable if nobody listens at the address."""
    return Alone() if address is None else Several(address, clock, deadline_s=deadline_s, connect_s=connect_s)


class Several:
    """One of several ranks, connected to the replica's TCPStore.

    No request of ours blocks there, so one client serves all lines. Connecting, torch asks DNS for the address's name:
    where that gets no answer, it takes 5 s.
    """

    def __init__(self, address: Address, clock: Clock, *, deadline_s: float, connect_s: float) -> None:
        """deadline_s: how long a rank may take to come to a call. Raises Retryable if nobody listens."""
        self.rank = address.rank
        self.size = address.size
        self._address = address
        self._clock = clock
        self._deadline_s = deadline_s
        self._connect_s = connect_s
        self._own = self._connect()
        self._lines = {name: _Line(self, name, self._own, clock) for name in LINES}
        self._prefix = ""
        self._slot = ""
        self._incarnation: int | None = None
        self._stop = threading.Event()
        self._closed = threading.Event()
        self._meeting = threading.Lock()
        self._met = False
        self._lost: RankLost | None = None

    def line(self, name: Line) -> Ranks:
        """The line of one of my threads."""
        return self._lines[name]

    def seat(self, run: str, slot: str, incarnation: int, stop: threading.Event) -> None:
        """I am ready; returns at once. The ranks meet at their first call."""
        self._prefix, self._slot, self._stop = f"skerry/{run}", slot, stop
        if self.rank == 0:
            self._incarnation = incarnation
            self._own.set(f"{self._prefix}/seat", Seated(incarnation=incarnation).to_bytes().decode())

    def ask_to_stop(self) -> None:
        """Set every rank's `stop`, the others' within a second or two. Returns at once; safe in a signal's thread."""
        self._stop.set()
        if self._met:
            with suppress(RuntimeError):  # without the store the others find out that it is gone
                self._own.set(self.key("stop"), "1")

    def close(self) -> None:
        """I make no more calls, and waiting ends. What I have answered stays to be read while the TCPStore does."""
        self._closed.set()

    # For the lines.

    @property
    def deadline_s(self) -> float:
        """How long a rank may take to come."""
        return self._deadline_s

    def key(self, *path: object) -> str:
        """A key of this incarnation."""
        return "/".join(str(one) for one in (self._prefix, self._incarnation, *path))

    def name_of(self, rank: int) -> str:
        """A rank in an error."""
        return f"rank {rank} of {self.size} of {self._slot}"

    def check(self) -> None:
        """Raises what was lost: a group that lost a rank never agrees again. Nor does one that I have closed."""
        if self._lost is not None:
            raise RankLost(str(self._lost)) from self._lost
        if self._closed.is_set():
            raise RankLost(f"{self.name_of(self.rank)} has closed its lines")

    def lose(self, lost: RankLost) -> RankLost:
        """Remember that a rank is lost."""
        self._lost = self._lost or lost
        return lost

    def meet(self, timeout_s: float) -> None:
        """Once, at the first call: all ranks are here, and are of one incarnation.

        Raises Invalid if they were started differently, RankLost if one does not come.
        """
        with self._meeting:
            if self._met:
                return
            deadline = self._clock.now() + timeout_s
            try:
                if self.rank == 0:
                    self._welcome(deadline)
                else:
                    self._arrive(deadline)
            except RuntimeError as error:
                raise self.lose(RankLost(f"the replica's own store is gone: {error}")) from error
            self._met = True
            threading.Thread(target=self._beat, name=f"rank-{self.rank}", daemon=True).start()

    def _welcome(self, deadline: float) -> None:
        mine = Hello(nonce=self._clock.nonce(), slot=self._slot, size=self.size)
        found = [Hello.parse(self._hello(rank, deadline), f"hello/{rank}") for rank in range(1, self.size)]
        odd = [(rank, one) for rank, one in enumerate(found, start=1) if (one.slot, one.size) != (mine.slot, mine.size)]
        text = "".join(f"; rank {rank} says {one.slot!r} of {one.size}" for rank, one in odd)
        refusal = Invalid(f"ranks of one replica differ: rank 0 is {mine.slot!r} of {mine.size}{text}")
        for one in found:
            self._own.set(self.key("welcome", one.nonce), _body(refusal if odd else Nothing()))
        if odd:
            raise refusal

    def _hello(self, rank: int, deadline: float) -> bytes:
        key, attempt = self.key("hello", rank), 0
        while not self._own.check([key]):
            self._pause(attempt, deadline, self.name_of(rank))
            attempt += 1
        return self._own.get(key)

    def _arrive(self, deadline: float) -> None:
        """Say hello to the incarnation that rank 0 has, and to the next one should that be an old one's trace."""
        mine = Hello(nonce=self._clock.nonce(), slot=self._slot, size=self.size)
        seat, attempt = f"{self._prefix}/seat", 0
        while True:
            if self._own.check([seat]):
                incarnation = Seated.parse(self._own.get(seat), seat).incarnation
                if incarnation != self._incarnation:
                    self._incarnation = incarnation
                    self._own.set(self.key("hello", self.rank), mine.to_bytes().decode())
                welcome = self.key("welcome", mine.nonce)
                if self._own.check([welcome]):
                    _raise_failure(self._own.get(welcome))
                    return
            self._pause(attempt, deadline, self.name_of(0))
            attempt += 1

    def _pause(self, attempt: int, deadline: float, whom: str) -> None:
        left = deadline - self._clock.now()
        if left <= 0:
            raise self.lose(RankLost(f"{whom} did not come to the first call: {_EXPIRED}"))
        self._clock.pause(min(left, _LOOKS.delay(attempt, self._clock)))

    def _beat(self) -> None:
        """In a thread of its own: I am alive; and pass on a stop."""
        beats, store = 0, self._own
        while not self._closed.is_set():
            try:
                store.set(self.key("alive", self.rank), str(beats))
                if not self._stop.is_set() and store.check([self.key("stop")]):
                    self._stop.set()
            except RuntimeError as error:  # whoever waits for an answer finds out, and raises
                if not self._closed.is_set():
                    fields = {"slot": self._slot, "rank": self.rank, "error": str(error)[:200]}
                    emit("heartbeat_failed", fields, level=logging.WARNING)
                return
            beats += 1
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
                f"the replica's own store does not answer: rank={self.rank} {self._address.host}:{self._address.port}: "
                f"{error}"
            ) from error


class _Line:
    """One line of a rank of several."""

    def __init__(self, group: Several, name: Line, store: TCPStore, clock: Clock) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._name = name
        self._store = store
        self._clock = clock
        self._number = 0
        self._answers: list[str] = []

    def consult(
        self,
        what: str,
        work: Callable[[], M],
        answer: Callable[[Sequence[M]], A],
        kind: type[A],
        *,
        timeout_s: float | None = None,
    ) -> A:
        """As `Ranks` says."""
        deadline = self._begin(timeout_s)
        mine, error = _try(work)
        if self.rank > 0:
            self._tell(self._key(self.rank), what, mine if error is None else error)
            return self._hear_answer(what, kind, deadline, error)

        def of_all() -> A:
            return answer(self._gather(what, mine, error, deadline))

        result, error = _try(of_all)
        self._forget()
        return self._give_answer(what, result, error)

    def first(self, what: str, decide: Callable[[], A], kind: type[A]) -> A:
        """As `Ranks` says."""
        deadline = self._begin(None)
        if self.rank > 0:
            return self._hear_answer(what, kind, deadline, None)
        return self._give_answer(what, *_try(decide))

    def _begin(self, timeout_s: float | None) -> float:
        self._group.check()
        patience = self._group.deadline_s if timeout_s is None else timeout_s
        deadline = self._clock.now() + patience
        self._group.meet(patience)
        self._number += 1
        return deadline

    def _gather(self, what: str, mine: M | None, error: Exception | None, deadline: float) -> list[M]:
        """What all ranks bring. Raises my own error, or the first one's that another brings, once all are here."""
        told = [self._hear(self._key(rank), what, rank, deadline) for rank in range(1, self.size)]
        if error is not None:
            raise error
        for rank, text in enumerate(told, start=1):
            _raise_failure(text, f"rank {rank}: ")
        mine = cast("M", mine)
        return [mine, *(type(mine).parse(text, self._key(rank)) for rank, text in enumerate(told, start=1))]

    def _give_answer(self, what: str, result: A | None, error: Exception | None) -> A:
        key = self._key("answer")
        self._tell(key, what, result if error is None else error)
        self._answers.append(key)
        if isinstance(error, RankLost):
            self._group.lose(error)
        if error is not None:
            raise error
        return cast("A", result)

    def _hear_answer(self, what: str, kind: type[A], deadline: float, mine: Exception | None) -> A:
        # Rank 0 may first wait for another rank, and then for the other replicas, each as long as it may take.
        text = self._hear(self._key("answer"), what, 0, deadline + 2 * self._group.deadline_s)
        try:
            _raise_failure(text)
        except Exception as error:
            if isinstance(error, RankLost):
                self._group.lose(error)
            if mine is not None:
                raise mine from error  # with its own type and trace
            raise
        return kind.parse(text, self._key("answer"))

    def _forget(self) -> None:
        """All ranks have come to this call, so they have read the answers to those before it."""
        keys = [*self._answers, *(self._key(rank) for rank in range(1, self.size))]
        self._answers.clear()
        for key in keys:
            self._guarded(lambda key=key: self._store.delete_key(key))

    def _key(self, last: object) -> str:
        return self._group.key(self._name, self._number, last)

    def _tell(self, key: str, what: str, told: Record | Exception | None) -> None:
        self._guarded(lambda: self._store.set(key, f"{what}\n{_body(told or Nothing())}"))

    def _hear(self, key: str, what: str, rank: int, deadline: float) -> bytes:
        """What a rank told under `key`, once it has. Raises RankLost if it does not, or is at another call."""
        alive = _Sign(self._store, self._group.key("alive", rank), self._clock)
        attempt = 0
        while not self._guarded(lambda: self._store.check([key])):
            now = self._clock.now()
            self._group.check()
            if now >= deadline:
                raise self._lost(rank, f"did not come to {what!r}: {_EXPIRED}")
            if self._guarded(alive.silent_s) > _GONE_S:
                raise self._lost(rank, f"is gone: no sign of life for {_GONE_S:g} s at {what!r}")
            self._clock.pause(min(deadline - now, _LOOKS.delay(attempt, self._clock)))
            attempt += 1
        head, _, body = self._guarded(lambda: self._store.get(key)).partition(b"\n")
        if head.decode() != what:
            raise self._lost(rank, f"is at {head.decode()!r}, rank {self.rank} at {what!r}")
        return body

    def _lost(self, rank: int, what: str) -> RankLost:
        return self._group.lose(RankLost(f"{self._group.name_of(rank)} {what}; the replica must be started again"))

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:  # torch's own kinds of it: the connection is gone
            raise self._group.lose(RankLost(f"the replica's own store is gone: {error}")) from error


class _Sign:
    """A rank's sign of life, looked at once a second on my own clock."""

    def __init__(self, store: TCPStore, key: str, clock: Clock) -> None:
        self._store = store
        self._key = key
        self._clock = clock
        self._seen: Any = None
        self._changed = self._looked = clock.now()

    def silent_s(self) -> float:
        """How long it has not changed since I began to look."""
        now = self._clock.now()
        if now - self._looked >= _BEAT_S:
            self._looked = now
            found = self._store.get(self._key) if self._store.check([self._key]) else None
            if found != self._seen:
                self._seen, self._changed = found, now
        return now - self._changed


def _try(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  it is raised on every rank, here with its own type and trace
        return None, error


def _body(told: Record | Exception) -> str:
    """A record as text, or an error behind a mark."""
    if isinstance(told, Record):
        return told.to_bytes().decode()
    kind = type(told).__name__
    if kind in _KNOWN:
        return "!" + Failure(kind=kind, text=str(told)[:4000]).to_bytes().decode()
    return "!" + Failure(kind=Retryable.__name__, text=f"{kind}: {told}"[:4000]).to_bytes().decode()


def _raise_failure(told: bytes, whose: str = "") -> None:
    """Raises the error that was told instead of a record, if it was one."""
    if told.startswith(b"!"):
        failure = Failure.parse(told[1:], "failure")
        raise _KNOWN[failure.kind](f"{whose}{failure.text}")
