"""The interface between a rank and the other ranks of its replica.

Rank 0 represents the replica: only it writes records, and all ranks follow its decisions. Every rank makes the same
calls in the same order, on one channel for each of its threads; an error on one rank is raised on all. `SingleRank`
serves a replica of one rank without any cost; `tcpstore` serves the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, TypeVar

import xxhash

from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from skerry.runtime.log.record_parsing import Record

Plain: TypeAlias = "bool | int | float | str | tuple[Plain, ...] | None"
"""The values that ranks may exchange, apart from a Record; a tuple may contain tuples, but no Record."""
M = TypeVar("M", bound="Plain | Record")
A = TypeVar("A", bound="Plain | Record")
ChannelName: TypeAlias = Literal["train", "exchange", "record"]
"""One channel for each thread of a rank that communicates; calls on a channel are in order."""

CHANNELS: Final[tuple[ChannelName, ...]] = ("train", "exchange", "record")


class RankLost(SkerryError, TimeoutError):  # noqa: N818  names what happened; the next step is a restart
    """A rank of this replica is lost or out of step; the replica must be restarted."""


class Channel(Protocol):
    """Connects one thread of a rank with the same thread of the other ranks. For one thread at a time."""

    @property
    def rank(self) -> int:
        """This rank's number; 0 represents the replica."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks of the replica."""
        ...

    def reduce_on_rank0(
        self,
        call: str,
        work: Callable[[], M],
        decide: Callable[[Sequence[M]], A],
        record: type[A] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> A:
        """Run `work` on every rank and `decide` on rank 0, with all results in order; every rank returns its result.

        call: a name for errors; it must be the same on all ranks. record: class of the result, if it is a Record. An
        error of `work` or `decide` is raised on all ranks, with the same type if the runtime knows it. Raises RankLost
        if a rank does not make the call.
        """
        ...

    def broadcast_from_rank0(self, call: str, decide: Callable[[], A], record: type[A] | None = None) -> A:
        """Run `decide` on rank 0; every rank returns its result or raises its error. Rank 0 waits for no other rank."""
        ...


class Group(Protocol):
    """The ranks of this replica, as seen by one of them."""

    @property
    def rank(self) -> int:
        """This rank's number; 0 represents the replica."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks of the replica."""
        ...

    def channel(self, name: ChannelName) -> Channel:
        """The channel for one of this rank's threads."""
        ...

    def join(self, run: str, slot: str, incarnation: int, stop: threading.Event) -> None:
        """Join the group. incarnation: used on rank 0, which claimed it. stop: set by `request_stop` of any rank."""
        ...

    def request_stop(self) -> None:
        """Set every rank's `stop`."""
        ...

    def close(self) -> None:
        """End this rank's calls."""
        ...


class SingleRank:
    """The group and the channel of a replica of one rank."""

    rank = 0
    size = 1

    def channel(self, name: ChannelName) -> Channel:
        """This object."""
        del name
        return self

    def join(self, run: str, slot: str, incarnation: int, stop: threading.Event) -> None:
        """Does nothing."""

    def request_stop(self) -> None:
        """Does nothing: there is no other rank."""

    def close(self) -> None:
        """Does nothing."""

    def reduce_on_rank0(
        self,
        call: str,
        work: Callable[[], M],
        decide: Callable[[Sequence[M]], A],
        record: type[A] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> A:
        """The decision on this rank's own work."""
        del call, record, timeout_s
        return decide([work()])

    def broadcast_from_rank0(self, call: str, decide: Callable[[], A], record: type[A] | None = None) -> A:
        """This rank's decision."""
        del call, record
        return decide()


@dataclass(frozen=True, kw_only=True)
class Address:
    """This rank's number, the number of ranks, and the address of the replica's TCPStore."""

    rank: int
    size: int
    host: str
    port: int


def read_address(
    environment: Mapping[str, str],
    rank: int | None = None,
    size: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> Address | None:
    """This rank's address; None if the replica has one rank. Arguments win over torchrun's variables, as in torchft.

    Raises Invalid, naming the variable that is missing or wrong.
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
            f"address of the replica's TCPStore is missing: rank={rank} world_size={size} MASTER_ADDR={host} "
            f"MASTER_PORT={port or None}; start it with torchrun, or give store_addr and store_port"
        )
    return Address(rank=rank, size=size, host=host, port=port)


def combine_digests(digests: Sequence[str]) -> str:
    """A digest (xxh3-128) of the digests of all ranks, in rank order; a single digest is returned unchanged."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("\n".join(digests).encode())


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise Invalid(f"{name}={text!r} is not a whole number")
    return int(text)
