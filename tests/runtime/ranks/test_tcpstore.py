"""Channels between ranks over a real TCPStore; every rank is a thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import pytest
from tests.kit.managers import together
from tests.runtime.ranks.replicas import FastClock, failures
from torch.distributed import TCPStore

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Corrupt, Fenced, Invalid, Retryable
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.protocol.exchange import Interrupted
from skerry.runtime.ranks.interface import Address, RankLost, SingleRank, combine_digests, read_address
from skerry.runtime.ranks.tcpstore import TcpStoreGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.runtime.clock import Clock
    from skerry.runtime.ranks.interface import Plain

T = TypeVar("T")
RUN = "0" * 32


class Word(Record):
    text: str


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class RankGroups:
    """The groups of all ranks in one start of a replica."""

    def __init__(self, server: TCPStore, size: int = 2, incarnation: int = 0, clock: Clock | None = None) -> None:
        self.stops = [threading.Event() for _ in range(size)]
        self.groups: list[TcpStoreGroup] = []
        self.incarnation = incarnation
        for rank in range(size):
            address = Address(rank=rank, size=size, host="localhost", port=server.port)
            self.groups.append(TcpStoreGroup(address, clock or SystemClock(), deadline_s=20.0, connect_s=10.0))

    def join(self, rank: int, slot: str = "r-0") -> TcpStoreGroup:
        self.groups[rank].join(RUN, slot, self.incarnation if rank == 0 else 0, self.stops[rank])
        return self.groups[rank]

    def join_all(self) -> RankGroups:
        for rank in range(len(self.groups)):
            self.join(rank)
        return self

    def run(self, work: Callable[[TcpStoreGroup], T]) -> list[T]:
        """Run the work on all ranks at the same time."""
        return together([lambda g=group: work(g) for group in self.groups])

    def failures(self, work: Callable[[TcpStoreGroup], object]) -> list[Exception]:
        return failures([lambda g=group: work(g) for group in self.groups])

    def close(self) -> None:
        for group in self.groups:
            group.close()


@pytest.fixture
def ranks(server: TCPStore) -> Iterator[RankGroups]:
    ranks = RankGroups(server, 3).join_all()
    yield ranks
    ranks.close()


def concatenate(group: TcpStoreGroup, text: str = "here", call: str = "concatenate") -> str:
    """Every rank contributes a text; returns all of them."""
    return group.channel("train").reduce_on_rank0(call, lambda: text, " ".join)


def test_all_ranks_get_the_result_of_all(ranks: RankGroups) -> None:
    results = ranks.run(lambda group: [concatenate(group, f"{group.rank}-{i}") for i in range(5)])
    assert results == [[f"0-{i} 1-{i} 2-{i}" for i in range(5)]] * 3


@pytest.mark.parametrize("value", [None, True, 3, 0.1, float("inf"), "a\nb", (1, None, ("b", (), 2.5))], ids=repr)
def test_plain_values_arrive_unchanged(ranks: RankGroups, value: Plain) -> None:
    def exchange(group: TcpStoreGroup) -> tuple[Plain, Plain]:
        channel = group.channel("train")
        broadcast = channel.broadcast_from_rank0("value", lambda: value)
        return broadcast, channel.reduce_on_rank0("values", lambda: value, tuple)

    assert ranks.run(exchange) == [(value, (value,) * 3)] * 3


@pytest.mark.parametrize(("decided", "expected"), [(True, Word(text="by 0")), (False, None)])
def test_rank_0_decides_on_a_record_or_none(ranks: RankGroups, expected: Word | None, *, decided: bool) -> None:
    def decide(group: TcpStoreGroup) -> Word | None:
        channel = group.channel("exchange")
        return channel.broadcast_from_rank0("word", lambda: Word(text=f"by {group.rank}") if decided else None, Word)

    assert ranks.run(decide) == [expected] * 3


def test_channels_do_not_wait_for_each_other(ranks: RankGroups) -> None:
    """Rank 0 waits on a channel for ranks that use another one first."""

    def use_both_channels(group: TcpStoreGroup) -> list[str]:
        channels = [group.channel("exchange"), group.channel("record")]

        def call(number: int) -> str:
            return channels[number].reduce_on_rank0("call", lambda: f"{number}", lambda texts: texts[-1])

        if group.rank > 0:
            return [call(number) for number in (1, 0)]
        return together([lambda n=number: call(n) for number in (0, 1)])

    assert ranks.run(use_both_channels)[0] == ["0", "1"]


def fail_on(rank: int, error: Exception) -> Callable[[TcpStoreGroup], str]:
    """A call in which one rank raises an error."""

    def work(group: TcpStoreGroup) -> str:
        def fail() -> None:
            if group.rank == rank:
                raise error

        return group.channel("train").reduce_on_rank0("work", fail, lambda _: "done")

    return work


@pytest.mark.parametrize("kind", [Invalid, Corrupt, Retryable, Interrupted, TimeoutError, Fenced])
@pytest.mark.parametrize("failing", [0, 2])
def test_error_of_a_rank_is_raised_on_all(ranks: RankGroups, kind: type[Exception], failing: int) -> None:
    errors = ranks.failures(fail_on(failing, kind("it broke")))
    assert [type(error) for error in errors] == [kind] * 3
    assert all("it broke" in str(error) for error in errors)
    assert ranks.run(concatenate) == ["here here here"] * 3


def test_unknown_error_arrives_as_retryable_with_its_text(ranks: RankGroups) -> None:
    errors = ranks.failures(fail_on(1, MemoryError("4 GiB")))
    assert [type(error) for error in errors] == [Retryable, MemoryError, Retryable]
    assert all("rank 1: MemoryError: 4 GiB" in str(error) for error in (errors[0], errors[2]))


def test_missing_rank_is_named_after_the_deadline(server: TCPStore) -> None:
    ranks = RankGroups(server, 3, clock=FastClock())
    groups = [ranks.join(rank) for rank in (0, 2)]
    error = failures([lambda g=group: concatenate(g) for group in groups])[0]
    assert isinstance(error, RankLost)
    assert isinstance(error, TimeoutError)
    assert "rank 1 of 3 of r-0 did not make the first call" in str(error)
    assert 'status: Cancelled, message: "Timeout expired"' in str(error)
    with pytest.raises(RankLost, match="rank 1 of 3"):  # and at every later call
        concatenate(groups[0])
    ranks.close()


def test_rank_without_heartbeat_is_lost_before_the_deadline(server: TCPStore) -> None:
    clock = FastClock(speed=1.0)
    ranks = RankGroups(server, clock=clock).join_all()
    ranks.run(concatenate)
    ranks.groups[1].close()
    clock.speed = 1000.0
    with pytest.raises(RankLost, match="rank 1 of 2 of r-0 has had no heartbeat for 30 s, at 'wait'"):
        ranks.groups[0].channel("train").reduce_on_rank0("wait", lambda: None, lambda _: None, timeout_s=1e9)
    ranks.close()


@pytest.mark.parametrize("has_joined", [True, False])
def test_stop_shortens_the_wait_for_a_silent_rank(server: TCPStore, *, has_joined: bool) -> None:
    """Otherwise the replica is killed at the end of its stop budget, and leaves no outcome."""
    clock = FastClock(speed=1.0)
    ranks = RankGroups(server, clock=clock)
    group = ranks.join(0)
    if has_joined:
        ranks.join(1)
        ranks.run(concatenate)
        ranks.groups[1].close()
    ranks.stops[0].set()
    began = SystemClock().now()
    with pytest.raises(RankLost, match="no heartbeat for 2 s, at 'wait'" if has_joined else "did not make the first"):
        group.channel("train").reduce_on_rank0("wait", lambda: None, lambda _: None)
    assert SystemClock().now() - began < 15, "well before the deadline of 20 s"
    ranks.close()


def test_new_incarnation_reads_nothing_of_the_old_one(server: TCPStore) -> None:
    """The TCPStore of torchrun's agent outlives the ranks: rank 1 restarts first, and finds the old keys."""
    old = RankGroups(server).join_all()
    assert old.run(concatenate) == ["here here"] * 2
    old.close()
    new, clock = RankGroups(server, incarnation=1), SystemClock()
    hello = f"skerry/{RUN}/0/hello/1"
    old_hello = server.get(hello)

    def join_last() -> str:
        wait_until(clock, lambda: server.get(hello) != old_hello or None, clock.now() + 10, Backoff(first=0.001))
        return concatenate(new.join(0), "new")

    assert together([join_last, lambda: concatenate(new.join(1), "new")]) == ["new new"] * 2
    new.close()


def test_ranks_with_different_settings_are_refused_by_all(server: TCPStore) -> None:
    ranks = RankGroups(server)
    groups = [ranks.join(0, "r-0"), ranks.join(1, "r-1")]
    errors = failures([lambda g=group: concatenate(g) for group in groups])
    assert [type(error) for error in errors] == [Invalid] * 2
    assert all("rank 0 is 'r-0' of 2; rank 1 is 'r-1' of 2" in str(error) for error in errors)
    ranks.close()


def test_different_calls_are_reported_as_out_of_step(ranks: RankGroups) -> None:
    errors = ranks.failures(lambda group: concatenate(group, call=f"call {min(group.rank, 1)}"))
    assert all(isinstance(error, RankLost) for error in errors)
    assert "rank 1 of 3 of r-0 called 'call 1', rank 0 called 'call 0'" in str(errors[0])


def test_tcpstore_does_not_fill_up(server: TCPStore, ranks: RankGroups) -> None:
    def call_and_decide(group: TcpStoreGroup) -> None:
        concatenate(group)
        group.channel("train").broadcast_from_rank0("decide", lambda: None)

    ranks.run(lambda group: [call_and_decide(group) for _ in range(3)])
    before = server.num_keys()
    ranks.run(lambda group: [call_and_decide(group) for _ in range(30)])
    assert server.num_keys() <= before + 3  # each rank's heartbeat may be new


def test_stop_of_a_rank_reaches_all(ranks: RankGroups) -> None:
    ranks.run(concatenate)
    ranks.groups[2].request_stop()
    assert all(stop.wait(300) for stop in ranks.stops)


def test_closed_group_ends_its_waiting_calls(ranks: RankGroups) -> None:
    ranks.run(concatenate)
    group = ranks.groups[0]
    started = threading.Event()

    def wait_for_others() -> None:
        with pytest.raises(RankLost, match="closed its channels"):
            group.channel("record").reduce_on_rank0("save", started.set, lambda _: None)

    def close() -> None:
        assert started.wait(300)
        group.close()

    together([wait_for_others, close])


def test_lost_tcpstore_is_a_lost_rank() -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = RankGroups(server).join_all()
    ranks.run(concatenate)
    del server
    with pytest.raises(RankLost, match="the replica's TCPStore is lost"):
        concatenate(ranks.groups[0])
    ranks.close()


def test_single_rank_runs_calls_itself() -> None:
    def fail() -> str:
        raise MemoryError

    channel = SingleRank().channel("train")
    assert channel.reduce_on_rank0("call", lambda: "own", lambda texts: texts[0]) == "own"
    with pytest.raises(MemoryError):
        channel.broadcast_from_rank0("decide", fail)


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        ({}, {}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"}, {}, (1, 2, "h", 7)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"},
            {"rank": 0, "port": 8},
            (0, 2, "h", 8),
        ),
        ({"RANK": "3", "WORLD_SIZE": "4"}, {"rank": 0, "size": 1}, None),
    ],
)
def test_arguments_win_over_torchruns_variables(
    environment: dict[str, str], arguments: dict[str, int], expected: tuple[int, int, str, int] | None
) -> None:
    address = read_address(environment, **arguments)  # type: ignore[arg-type]
    assert (None if address is None else (address.rank, address.size, address.host, address.port)) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"rank=2 is not in \[0, world_size=2\)"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "start it with torchrun, or give store_addr and store_port"),
    ],
)
def test_incomplete_address_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        read_address(environment)


def test_unreachable_tcpstore_is_retryable() -> None:
    address = Address(rank=1, size=2, host="localhost", port=1)
    with pytest.raises(Retryable, match="the replica's TCPStore does not respond: rank=1 address=localhost:1"):
        TcpStoreGroup(address, SystemClock(), deadline_s=1.0, connect_s=0.1)


def test_combined_digest_depends_on_ranks_and_order() -> None:
    a, b = "a" * 32, "b" * 32
    assert combine_digests([a]) == a
    assert len({combine_digests([a, b]), combine_digests([b, a]), combine_digests([a, b, a]), a, b}) == 5
