"""What the ranks of one replica owe each other: the seam between one rank and the rest of its replica.

Rank 0 speaks for the replica: it alone writes records, and what it decides all ranks do. Every rank makes the same
calls in the same order, on one line for each of its threads; an error of one rank is the same error on all. `Alone`
is a replica of one rank, at no cost; `several` is the other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, TypeVar

import xxhash

from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.records import Record

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

M = TypeVar("M", bound=Record)
A = TypeVar("A", bound=Record)
T = TypeVar("T")
Line: TypeAlias = Literal["train", "exchange", "record"]
"""One for each thread of a rank that asks the others: calls on a line are in order."""

LINES: Final[tuple[Line, ...]] = ("train", "exchange", "record")


class RankLost(SkerryError, TimeoutError):  # noqa: N818  named for what happened; the next step is a restart
    """A rank of this replica is gone, or went another way; nothing can be agreed any more."""


class Nothing(Record):
    """There is nothing to say beyond being here."""


class Ranks(Protocol):
    """One line between the ranks of a replica. For one thread at a time."""

    @property
    def rank(self) -> int:
        """My own number; 0 speaks for the replica."""
        ...

    @property
    def size(self) -> int:
        """How many ranks the replica has."""
        ...

    def consult(
        self,
        what: str,
        work: Callable[[], M],
        answer: Callable[[Sequence[M]], A],
        kind: type[A],
        *,
        timeout_s: float | None = None,
    ) -> A:
        """Every rank does `work`; rank 0 makes the `answer` of all results, in rank order; every rank returns it.

        what: for errors; it must be the same on all ranks. Where any of this raises, it raises on all ranks, with the
        same type where the runtime knows it. Raises RankLost if a rank does not come.
        """
        ...

    def first(self, what: str, decide: Callable[[], A], kind: type[A]) -> A:
        """What rank 0 decides, on every rank; an error of it on every rank. Rank 0 waits for nobody."""
        ...


class Group(Protocol):
    """All ranks of this replica, as one of them sees them."""

    @property
    def rank(self) -> int:
        """My own number; 0 speaks for the replica."""
        ...

    @property
    def size(self) -> int:
        """How many ranks the replica has."""
        ...

    def line(self, name: Line) -> Ranks:
        """The line of one of my threads."""
        ...

    def seat(self, run: str, slot: str, incarnation: int, stop: threading.Event) -> None:
        """I am ready. incarnation: of rank 0's claim; others are told. stop: what `ask_to_stop` of any rank sets."""
        ...

    def ask_to_stop(self) -> None:
        """Set every rank's `stop`."""
        ...

    def close(self) -> None:
        """I make no more calls."""
        ...


class Alone:
    """A replica of one rank, which has nobody to ask."""

    rank = 0
    size = 1

    def line(self, name: Line) -> Ranks:
        """Myself."""
        del name
        return self

    def seat(self, run: str, slot: str, incarnation: int, stop: threading.Event) -> None:
        """Nobody need know."""

    def ask_to_stop(self) -> None:
        """Nobody else is to stop."""

    def close(self) -> None:
        """Nothing is open."""

    def consult(
        self,
        what: str,
        work: Callable[[], M],
        answer: Callable[[Sequence[M]], A],
        kind: type[A],
        *,
        timeout_s: float | None = None,
    ) -> A:
        """The answer to my own work."""
        del what, kind, timeout_s
        return answer([work()])

    def first(self, what: str, decide: Callable[[], A], kind: type[A]) -> A:
        """What I decide."""
        del what, kind
        return decide()


@dataclass(frozen=True, kw_only=True)
class Address:
    """Which rank this is, of how many, and where the replica's TCPStore listens."""

    rank: int
    size: int
    host: str
    port: int


def address_of(
    environment: Mapping[str, str],
    rank: int | None = None,
    size: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> Address | None:
    """Where this rank is: arguments win over torchrun's variables, as in torchft. None: the replica has one rank.

    Raises Invalid, naming what is missing or wrong.
    """
    size = size or _number(environment, "WORLD_SIZE", 1)
    rank = _number(environment, "RANK", 0) if rank is None else rank
    if not 0 <= rank < size:
        raise Invalid(f"rank={rank} is not in [0, world_size={size})")
    if size == 1:
        return None
    host = host or environment.get("MASTER_ADDR")
    port = port or _number(environment, "MASTER_PORT", 0)
    if not host or not port:
        raise Invalid(
            f"rank {rank} of {size} does not know the replica's own store: start it with torchrun, or give "
            f"store_addr and store_port: MASTER_ADDR={host} MASTER_PORT={port or None}"
        )
    return Address(rank=rank, size=size, host=host, port=port)


def fold(digests: Sequence[str]) -> str:
    """One digest (xxh3-128) for those of all ranks, in rank order; of one rank it is its own."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("\n".join(digests).encode())


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise Invalid(f"{name}={text!r} is not a whole number")
    return int(text)
