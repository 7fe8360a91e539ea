from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from tests.runtime.test_carry import Pace
from tests.support import logs
from tests.support.managers import Island, commits, contributions, decisions, manager_of, receipts, together
from torch.distributed import TCPStore

from skerry.runtime import checkpoint, keys
from skerry.runtime.carry import Carry, Trained, kept_of
from skerry.runtime.clock import SystemClock
from skerry.runtime.codec.layout import Index, TensorSpec
from skerry.runtime.errors import Corrupt, Fenced, Invalid, Retryable
from skerry.runtime.exchange import Exchange, Interrupted
from skerry.runtime.ranks import Address, Alone, Nothing, RankLost, address_of, fold
from skerry.runtime.records import Contribution, Part, Record
from skerry.runtime.several import Several
from skerry.runtime.store.interface import buffers_of
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.exchange import Load
    from skerry.runtime.store import Data

RUN = "0" * 32


class Word(Record):
    text: str


class Hurried(SystemClock):
    """A second is a millisecond: deadlines pass at once."""

    def now(self) -> float:
        return super().now() * 1000


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Start:
    """One start of a replica's ranks."""

    def __init__(self, server: TCPStore, size: int = 2, incarnation: int = 0, clock: Clock | None = None) -> None:
        self.stops = [threading.Event() for _ in range(size)]
        self.groups: list[Several] = []
        self.incarnation = incarnation
        for rank in range(size):
            address = Address(rank=rank, size=size, host="localhost", port=server.port)
            self.groups.append(Several(address, clock or SystemClock(), deadline_s=20.0, connect_s=10.0))

    def seat(self, rank: int, slot: str = "r-0") -> Several:
        self.groups[rank].seat(RUN, slot, self.incarnation if rank == 0 else 0, self.stops[rank])
        return self.groups[rank]

    def seated(self) -> Start:
        for rank in range(len(self.groups)):
            self.seat(rank)
        return self

    def close(self) -> None:
        for group in self.groups:
            group.close()


@pytest.fixture
def start(server: TCPStore) -> Iterator[Start]:
    start = Start(server, 3).seated()
    yield start
    start.close()


def say(group: Several, text: str, what: str = "say") -> str:
    """Everybody says something; the answer is all of it."""

    def joined(words: Sequence[Word]) -> Word:
        return Word(text=" ".join(word.text for word in words))

    return group.line("train").consult(what, lambda: Word(text=text), joined, Word).text


def failures(works: Sequence[Callable[[], object]]) -> list[Exception]:
    def failure(work: Callable[[], object]) -> Exception:
        with pytest.raises(Exception, match=r".") as caught:
            work()
        return caught.value

    return together([lambda work=work: failure(work) for work in works])


def test_all_ranks_get_the_answer_to_what_all_have_said(start: Start) -> None:
    heard = together([lambda g=group: [say(g, f"{g.rank}-{i}") for i in range(5)] for group in start.groups])
    assert heard == [[f"0-{i} 1-{i} 2-{i}" for i in range(5)]] * 3


def test_what_rank_0_decides_holds_for_all(start: Start) -> None:
    def decide(group: Several) -> str:
        return group.line("exchange").first("decide", lambda: Word(text=f"by {group.rank}"), Word).text

    assert together([lambda g=group: decide(g) for group in start.groups]) == ["by 0"] * 3


def test_lines_do_not_wait_for_one_another(start: Start) -> None:
    """Rank 0 waits on one line for a rank that speaks on another first."""

    def exchange_then_record(group: Several, *, reverse: bool) -> list[str]:
        lines = [group.line("exchange"), group.line("record")]

        def talk(number: int) -> str:
            return lines[number].consult("talk", lambda: Word(text=f"{number}"), lambda words: words[-1], Word).text

        order = [1, 0] if reverse else [0, 1]
        if reverse:
            return [talk(number) for number in order]
        return together([lambda n=number: talk(n) for number in order])

    found = together([lambda g=group: exchange_then_record(g, reverse=g.rank > 0) for group in start.groups])
    assert found[0] == ["0", "1"]


@pytest.mark.parametrize("kind", [Invalid, Corrupt, Retryable, Interrupted, TimeoutError, Fenced])
@pytest.mark.parametrize("guilty", [0, 2])
def test_an_error_of_one_rank_is_the_same_on_all(start: Start, kind: type[Exception], guilty: int) -> None:
    def work(group: Several) -> Word:
        def mine() -> Nothing:
            if group.rank == guilty:
                raise kind("it broke")
            return Nothing()

        return group.line("train").consult("work", mine, lambda _: Word(text="done"), Word)

    found = failures([lambda g=group: work(g) for group in start.groups])
    assert [type(error) for error in found] == [kind] * 3
    assert all("it broke" in str(error) for error in found)
    assert together([lambda g=group: say(g, "on") for group in start.groups]) == ["on on on"] * 3


def test_an_error_that_the_runtime_does_not_know_keeps_its_words(start: Start) -> None:
    def work(group: Several) -> Nothing:
        def mine() -> Nothing:
            if group.rank == 1:
                raise MemoryError("4 GiB")
            return Nothing()

        return group.line("train").consult("work", mine, lambda _: Nothing(), Nothing)

    first, second, third = failures([lambda g=group: work(g) for group in start.groups])
    assert isinstance(second, MemoryError)
    for error in (first, third):
        assert isinstance(error, Retryable)
        assert "rank 1" in str(error) and "MemoryError: 4 GiB" in str(error)  # noqa: PT018


def test_a_rank_that_never_comes_is_named(server: TCPStore) -> None:
    start = Start(server, 3, clock=Hurried())
    groups = [start.seat(rank) for rank in (0, 2)]
    found = failures([lambda g=group: say(g, "here") for group in groups])
    assert isinstance(found[0], RankLost)
    assert isinstance(found[0], TimeoutError)
    assert "rank 1 of 3 of r-0 did not come" in str(found[0])
    assert 'status: Cancelled, message: "Timeout expired"' in str(found[0])
    with pytest.raises(RankLost, match="rank 1 of 3"):  # and for good
        say(groups[0], "again")
    start.close()


def test_a_rank_that_dies_between_two_calls_is_missed_before_the_deadline(server: TCPStore) -> None:
    start = Start(server).seated()
    together([lambda g=group: say(g, "here") for group in start.groups])
    start.groups[1].close()  # it beats no more
    start.groups[0]._lines["train"]._clock = Hurried()
    with pytest.raises(RankLost, match="rank 1 of 2 of r-0 is gone: no sign of life for 30 s at 'say'"):
        start.groups[0].line("train").consult("say", Nothing, lambda _: Nothing(), Nothing, timeout_s=1e9)
    start.close()


def test_a_new_incarnation_meets_nothing_of_the_old_one(server: TCPStore) -> None:
    """The TCPStore of torchrun's agent outlives the ranks: rank 1 is back first, and finds the old traces."""
    old = Start(server).seated()
    assert together([lambda g=group: say(g, "old") for group in old.groups]) == ["old old"] * 2
    old.close()
    new = Start(server, incarnation=1)

    def come(rank: int) -> str:
        if rank == 0:
            assert arrived.wait(10)
        return say(new.seat(rank), "new")

    arrived = threading.Event()
    hello = new.groups[1]._own.set

    def told(key: str, value: str) -> None:
        hello(key, value)
        arrived.set()

    new.groups[1]._own = _Listening(new.groups[1]._own, told)  # type: ignore[assignment]
    assert together([lambda: come(0), lambda: come(1)]) == ["new new"] * 2
    new.close()


class _Listening:
    """A TCPStore's client that tells what is set."""

    def __init__(self, store: TCPStore, told: Callable[[str, str], None]) -> None:
        self._store = store
        self.set = told

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_ranks_that_were_started_differently_are_refused_by_all(server: TCPStore) -> None:
    start = Start(server)
    groups = [start.seat(0, "r-0"), start.seat(1, "r-1")]
    found = failures([lambda g=group: say(g, "here") for group in groups])
    assert [type(error) for error in found] == [Invalid] * 2
    assert all("rank 0 is 'r-0' of 2; rank 1 says 'r-1' of 2" in str(error) for error in found)
    start.close()


def test_ranks_that_make_different_calls_are_told_so(start: Start) -> None:
    works = [lambda g=group: say(g, "here", what=f"place {min(g.rank, 1)}") for group in start.groups]
    found = failures(works)
    assert all(isinstance(error, RankLost) for error in found)
    assert "rank 1 of 3 of r-0 is at 'place 1', rank 0 at 'place 0'" in str(found[0])


def test_the_replicas_own_store_does_not_fill_up(server: TCPStore, start: Start) -> None:
    def talk(group: Several, times: int) -> None:
        for i in range(times):
            say(group, str(i))
            group.line("train").first("decide", Nothing, Nothing)

    together([lambda g=group: talk(g, 3) for group in start.groups])
    before = server.num_keys()
    together([lambda g=group: talk(g, 30) for group in start.groups])
    assert server.num_keys() <= before + 3  # a sign of life may be new


def test_a_stop_of_one_rank_reaches_all(start: Start) -> None:
    together([lambda g=group: say(g, "here") for group in start.groups])
    start.groups[2].ask_to_stop()
    assert all(stop.wait(10) for stop in start.stops)


def test_waiting_ends_when_a_rank_closes_its_own_lines(start: Start) -> None:
    together([lambda g=group: say(g, "here") for group in start.groups])
    group = start.groups[0]
    begun = threading.Event()

    def wait_for_others() -> Exception:
        line = group.line("record")
        with pytest.raises(RankLost, match="closed its lines") as caught:
            line.consult("save", lambda: (begun.set(), Nothing())[1], lambda _: Nothing(), Nothing)
        return caught.value

    def close() -> Exception | None:
        assert begun.wait(10)
        group.close()
        return None

    together([wait_for_others, close])


def test_a_store_that_is_gone_is_a_lost_rank() -> None:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    start = Start(server).seated()
    together([lambda g=group: say(g, "here") for group in start.groups])
    del server
    with pytest.raises(RankLost, match="the replica's own store is gone"):
        say(start.groups[0], "anybody?")
    start.close()


def test_one_rank_asks_nobody() -> None:
    alone = Alone().line("train")
    assert alone.consult("say", lambda: Word(text="me"), lambda words: words[0], Word).text == "me"
    with pytest.raises(MemoryError):
        alone.first("decide", _raise, Word)


def _raise() -> Word:
    raise MemoryError


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
    found = address_of(environment, **arguments)  # type: ignore[arg-type]
    assert (None if found is None else (found.rank, found.size, found.host, found.port)) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"rank=2 is not in \[0, world_size=2\)"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "start it with torchrun, or give store_addr and store_port"),
    ],
)
def test_an_incomplete_address_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        address_of(environment)


def test_nobody_at_the_address_can_be_tried_again() -> None:
    address = Address(rank=1, size=2, host="localhost", port=1)
    with pytest.raises(Retryable, match="the replica's own store does not answer: rank=1 localhost:1"):
        Several(address, SystemClock(), deadline_s=1.0, connect_s=0.1)


def test_a_fold_tells_ranks_and_their_order_apart() -> None:
    a, b = "a" * 32, "b" * 32
    assert fold([a]) == a
    assert len({fold([a, b]), fold([b, a]), fold([a, b, a]), a, b}) == 5


# Managers: every rank a thread of this process.


class Ranked:
    """One replica of several ranks that trains a linear model with DiLoCo; each rank has a model of its own seed."""

    made: ClassVar[list[Ranked]] = []

    def __init__(self, store: MemoryStore, slot: str, size: int = 2, **more: object) -> None:
        self.server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        address = {"world_size": size, "store_addr": "localhost", "store_port": self.server.port}
        self.made.append(self)
        self.islands = [Island(store, slot, seed=rank, rank=rank, **(address | more)) for rank in range(size)]

    def train(self, rounds: int, *, close: bool = True) -> None:
        together([lambda i=island: i.train(rounds, close=close) for island in self.islands])


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """The threads of replicas that a test left behind end before their TCPStore does."""
    yield
    for replica in Ranked.made:
        for island in replica.islands:
            island.manager._seat.group.close()
        for island in replica.islands:
            with suppress(RankLost):
                island.manager.shutdown(wait=False)
    Ranked.made.clear()


def shared(replica: Ranked) -> list[dict[str, torch.Tensor]]:
    return [island.originals for island in replica.islands]


def test_rank_k_of_every_replica_averages_the_same_shard() -> None:
    store = MemoryStore()
    replicas = [Ranked(store, slot, grace_s=20.0) for slot in ("a", "b")]
    together([lambda r=replica: r.train(3) for replica in replicas])
    first, second = (shared(replica) for replica in replicas)
    for rank in range(2):
        torch.testing.assert_close(first[rank], second[rank], rtol=0, atol=0)
    assert not torch.equal(first[0]["weight"], first[1]["weight"])
    for contribution in contributions(store):
        assert contribution.ranks == (1, 1)
        assert len(contribution.parts) == 2
    for number in range(3):
        ours, theirs = (receipts(store, number)[slot] for slot in ("a", "b"))
        assert (ours.averages, ours.state, ours.scope) == (theirs.averages, theirs.state, "fragments")
    assert [entry.key for entry in store.list(keys.MEMBERS)] == [keys.member(slot, 0) for slot in ("a", "b")]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=["even", "uneven"])
def test_an_average_is_over_the_same_shard(sizes: tuple[int, int]) -> None:
    """Of the sharded sizes, too: a rank may have more parts, or less, than another."""
    store = MemoryStore()
    replicas = [Ranked(store, slot, grace_s=20.0) for slot in ("a", "b")]

    def average(number: int, island: Island) -> torch.Tensor:
        rank = island.manager.rank
        tensor = torch.full((sizes[rank],), 10.0 * rank + 2 * number)
        island.manager.start_quorum()
        island.manager.allreduce(tensor).wait()
        assert island.manager.should_commit()
        return tensor

    works = [lambda n=n, i=island: average(n, i) for n, replica in enumerate(replicas) for island in replica.islands]
    for rank, found in enumerate(together(works)):
        assert found.tolist() == [10.0 * (rank % 2) + 1] * sizes[rank % 2]


def test_a_checkpoint_has_every_ranks_shard_and_gives_it_back() -> None:
    store = MemoryStore()
    first = Ranked(store, "a", minimum=1)
    first.train(2)
    manifest = checkpoint.manifest(store, 2)
    assert manifest is not None
    assert len(manifest.shards) == 2
    assert manifest.tree == ""
    again = Ranked(store, "a", minimum=1)
    again.train(2)
    for before, after in zip(shared(first), shared(again), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert again.islands[0].manager.presence.incarnation == 1


def test_a_damaged_shard_makes_all_ranks_take_the_checkpoint_before() -> None:
    store = MemoryStore()
    first = Ranked(store, "a", minimum=1)
    first.train(3)
    manifest = checkpoint.manifest(store, 3)
    assert manifest is not None
    store.delete(keys.checkpoint_part(3, manifest.shards[1].parts[0].digest))
    again = Ranked(store, "a", minimum=1)
    again.train(3)  # from checkpoint 2, and the log
    for before, after in zip(shared(first), shared(again), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_shard_that_was_replaced_makes_all_ranks_take_a_checkpoint_before(
    caplog: pytest.LogCaptureFixture, *, replaced: bool
) -> None:
    """The receipt folds the shards of all ranks: that of one is enough to tell."""
    store = MemoryStore()
    first = Ranked(store, "a", minimum=1)
    first.train(3)
    manifest, initial = checkpoint.manifest(store, 3), checkpoint.manifest(store, 0)
    assert manifest is not None
    assert initial is not None
    if replaced:
        shards = (manifest.shards[0], initial.shards[1])
        for part in shards[1].parts:
            store.create(keys.checkpoint_part(3, part.digest), store.read(keys.checkpoint_part(0, part.digest)) or b"")
        other = manifest.model_copy(
            update={
                "shards": shards,
                "parts": tuple(part for shard in shards for part in shard.parts),
                "index": fold([shard.index for shard in shards]),
            }
        )
        store.replace(keys.checkpoint_manifest(3), other.to_bytes())
    again = Ranked(store, "a", minimum=1)
    with caplog.at_level(logging.INFO, logger="skerry"):
        again.train(3)
    (loaded,) = [one.fields["round"] for one in caplog.records if getattr(one, "event", "") == "checkpoint_loaded"]  # type: ignore[attr-defined]
    assert (loaded == 3) is not replaced
    for before, after in zip(shared(first), shared(again), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_another_number_of_ranks_is_refused_by_every_rank() -> None:
    store = MemoryStore()
    Ranked(store, "a", minimum=1).train(1)
    other = Ranked(store, "b", size=3, minimum=1)
    found = failures([lambda i=island: i.train(2) for island in other.islands])
    assert [type(error) for error in found] == [Invalid] * 3
    assert all("of a replica of 2 ranks, this one has 3: world_size=3" in str(error) for error in found)
    with pytest.raises(Invalid, match="of a replica of 2 ranks, this one has 1"):
        Island(store, "c", minimum=1).train(2)


def test_one_rank_that_is_not_finite_makes_the_replica_abstain_as_a_whole() -> None:
    store = MemoryStore()
    good, bad = (Ranked(store, slot, minimum=1, grace_s=20.0) for slot in ("a", "b"))
    together([lambda r=replica: r.train(1, close=False) for replica in (good, bad)])

    def spoil(island: Island) -> None:
        if island.manager.rank == 1:
            with torch.no_grad():
                island.model.weight.fill_(float("inf"))
        island.train(2)

    together([lambda: good.train(2), lambda: together([lambda i=island: spoil(i) for island in bad.islands])])
    assert [share.slot for share in decisions(store)[-1].members] == ["a"]
    for ours, theirs in zip(shared(good), shared(bad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_an_upload_that_fails_on_one_rank_fails_the_round_on_all() -> None:
    store = MemoryStore()
    replica = Ranked(store, "a", minimum=1)
    replica.train(1, close=False)
    upload = Exchange.upload
    failed: list[int] = []

    def fail_once(self: Exchange, round_number: int, load: Load) -> None:
        if self is replica.islands[1].manager._seat.exchange and not failed:
            failed.append(round_number)
            raise Corrupt("the disk is full of bees")
        upload(self, round_number, load)

    commits: dict[int, list[bool]] = {0: [], 1: []}

    def round_of(island: Island) -> None:
        manager = island.manager
        tensor = torch.ones(2)
        for _ in range(2):
            manager.start_quorum()
            assert manager.allreduce(tensor).wait() is not bool(failed and not commits[manager.rank])
            commits[manager.rank].append(manager.should_commit())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "upload", fail_once)
        together([lambda i=island: round_of(i) for island in replica.islands])
    assert commits == {0: [False, True], 1: [False, True]}


def test_an_error_that_one_rank_reports_keeps_its_replica_out_of_the_round() -> None:
    store = MemoryStore()
    replica = Ranked(store, "a", minimum=1)

    def attempt(island: Island) -> list[bool]:
        manager, held = island.manager, []
        for number in range(2):
            manager.start_quorum()
            if number == 0 and manager.rank == 1:
                manager.report_error(RuntimeError("out of memory"))
            manager.allreduce(torch.ones(2)).wait()
            held.append(manager.should_commit())
        return held

    assert together([lambda i=island: attempt(i) for island in replica.islands]) == [[False, True]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(("units", "name"), [(1, "drifted"), (1 << 20, "diverged")])
def test_a_replica_heals_whichever_of_its_ranks_holds_another_shard(
    guilty: int, units: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="skerry")
    store, rounds = MemoryStore(), 20
    replicas = [Ranked(store, slot, minimum=3, grace_s=20.0) for slot in ("a", "b", "c")]

    def train(island: Island, *, harm: bool) -> None:
        island.train(3, close=False)
        if harm:
            weight = island.originals["weight"]
            weight.copy_((weight.view(torch.int32) + units).view(torch.float32))
        island.train(rounds)

    together(
        [
            lambda i=island, harm=harm: train(i, harm=harm)
            for number, replica in enumerate(replicas)
            for rank, island in enumerate(replica.islands)
            for harm in [number == 2 and rank == guilty]
        ]
    )
    told = [record for record in caplog.records if getattr(record, "event", "") in {"drifted", "diverged"}]
    assert [(one.event, one.fields["slot"]) for one in told] == [(name, "c")]  # type: ignore[attr-defined]
    assert f"rank {guilty}: " in told[0].fields["what"]  # type: ignore[attr-defined]
    assert f"rank {1 - guilty}: " not in told[0].fields["what"]  # type: ignore[attr-defined]
    states = [{one.state for one in receipts(store, number).values()} for number in range(rounds)]
    assert len(states[3]) == 2
    assert len(states[-1]) == 1
    for other in replicas[1:]:
        for ours, theirs in zip(shared(replicas[0]), shared(other), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


H = 6


def slow_round(island: Island, pace: Pace) -> None:
    """A third of the inner steps, and then no more until the others are done."""
    number = island.manager.current_step()
    for _ in range(H // 3):
        island.step()
    pace.allow(number + 1)
    while island.manager.current_step() == number:
        island.manager.catch_up(island.inner)


def race(store: MemoryStore, rounds: int, grace_s: float) -> list[Ranked]:
    """Three replicas of two ranks; r-9 takes a third of the others' inner steps."""
    pace = Pace()
    replicas = [Ranked(store, slot, minimum=2, grace_s=grace_s, sync_every=H) for slot in ("r-0", "r-1", "r-9")]

    def work(island: Island, *, slow: bool) -> None:
        with island.diloco:
            island.manager.catch_up(island.inner)
            while island.manager.current_step() < rounds:
                if slow:
                    slow_round(island, pace)
                else:
                    pace.until(island.manager.current_step())
                    island.step()
                    island.manager.catch_up(island.inner)
        island.manager.shutdown()

    together(
        [
            lambda i=island, slow=replica is replicas[2]: work(i, slow=slow)
            for replica in replicas
            for island in replica.islands
        ]
    )
    for number in range(rounds - 1):
        assert len({receipt.state for receipt in receipts(store, number).values()}) == 1
    return replicas


@pytest.mark.slow
def test_a_slow_replica_of_several_ranks_is_in_time_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.runtime.pace._MARGIN", 0.0)
    store = MemoryStore()
    race(store, 8, grace_s=10.0)
    shares = [share for decision in decisions(store) for share in decision.members if share.slot == "r-9"]
    assert len(shares) >= 6
    assert [share.weight for share in shares] == pytest.approx([1 / 3] * len(shares))


@pytest.mark.slow
def test_what_a_replica_of_several_ranks_brings_late_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="skerry")
    store = MemoryStore()
    replicas = race(store, 10, grace_s=0.1)
    brought = {record.fields["round"] for record in caplog.records if getattr(record, "event", "") == "delta_brought"}  # type: ignore[attr-defined]
    late = [one for one in contributions(store) if one.slot == "r-9" and one.round in brought]
    assert late
    assert all(len(one.ranks) == 2 for one in late)
    counted = {one.round for one in decisions(store) if "r-9" in {share.slot for share in one.members}}
    assert counted
    found = [one for one in contributions(store) if one.slot == "r-9" and one.round in counted]
    assert sum(one.inner_steps for one in found) <= 10 * H // 3, "nothing counts twice"
    for ours, theirs in zip(shared(replicas[0]), shared(replicas[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Slow(Ranked):
    """Replica a of two ranks. In rounds 0 and 1 the others are done after two of its six inner steps."""

    def __init__(self, store: MemoryStore, other: Ranked) -> None:
        super().__init__(store, "a", minimum=1, grace_s=0.0, sync_every=H)
        self.store = store
        self.other = other
        self.trained = [torch.zeros(0), torch.zeros(0)]

    def be_late_twice(self) -> None:
        """What was trained is then brought, to round 2. trained: by each rank, in the order of the parameters."""
        for number in range(2):
            together([lambda i=island: self._take(i) for island in self.islands])
            for rank, island in enumerate(self.islands):
                delta = [island.originals[name] - one.detach() for name, one in island.model.named_parameters()]
                flat = torch.cat([one.flatten() for one in delta])
                self.trained[rank] = flat if number == 0 else self.trained[rank] + flat
            self.other.train(number + 1, close=False)
            together([lambda i=island: self._catch_up(i) for island in self.islands])

    def _take(self, island: Island) -> None:
        with island.diloco:
            island.manager.catch_up(island.inner)
            for _ in range(2):
                island.step()

    def _catch_up(self, island: Island) -> None:
        """Until it sees that the others are done, and what it then does in the background is done."""
        with island.diloco:
            number = island.manager.current_step()
            while island.manager.current_step() == number:
                island.manager.catch_up(island.inner)
        island.manager._conduct._pool.submit(lambda: None).result(timeout=30)


def brought_by(store: MemoryStore, number: int, slot: str) -> list[torch.Tensor]:
    """What each rank's part of a contribution holds."""
    (found,) = [one for one in contributions(store) if (one.round, one.slot) == (number, slot)]
    values: list[torch.Tensor] = []
    for rank in range(2):
        (part,) = found.of_rank(rank)
        body = bytearray(store.read(keys.payload(number, slot, part.digest)) or b"")[part.header_bytes :]
        values.append(torch.frombuffer(body, dtype=torch.float32))
    return values


def test_what_two_ranks_bring_late_is_what_both_have_trained_and_counts_half_and_once() -> None:
    store = MemoryStore()
    other = Ranked(store, "b", minimum=1, grace_s=0.0, sync_every=H)
    late = Slow(store, other)
    late.be_late_twice()
    for ours, value in zip(late.trained, brought_by(store, 2, "a"), strict=True):
        torch.testing.assert_close(value[value != 0], ours)  # between tensors there are zeros
    assert not torch.equal(*brought_by(store, 2, "a"))
    other.train(3, close=False)
    shares = [{share.slot: share.weight for share in one.members} for one in decisions(store)]
    assert shares == [{"b": 1.0}, {"b": 1.0}, {"a": pytest.approx(0.5 * 4 / H), "b": 1.0}]
    together([lambda i=island: late._catch_up(i) for island in late.islands])
    assert [late.islands[rank].manager._carry.keeps(0) for rank in range(2)] == [False, False]  # type: ignore[union-attr]
    together([lambda r=replica: r.train(4, close=False) for replica in (late, other)])
    assert [one.inner_steps for one in contributions(store) if one.slot == "a"] in ([4], [4, H])
    for ours, theirs in zip(shared(late), shared(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("when", ["before its part is uploaded", "after all is brought"])
def test_a_rank_that_dies_while_late_work_is_brought_leaves_all_of_it_or_nothing(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    other = Ranked(store, "b", minimum=1, grace_s=0.0, sync_every=H)
    late = Slow(store, other)
    dying = late.islands[1].manager._seat
    upload = Exchange.upload

    def die(self: Exchange, round_number: int, load: Load) -> None:
        if self is dying.exchange and load.discount < 1.0:
            dying.group.close()  # it beats no more, and nothing of it is heard again
            late.islands[0].manager._seat.group._lines["exchange"]._clock = Hurried()  # type: ignore[attr-defined]
            raise SystemExit
        upload(self, round_number, load)

    if when == "before its part is uploaded":
        monkeypatch.setattr(Exchange, "upload", die)
    late.be_late_twice()
    stands = when == "after all is brought"
    assert [one.round for one in contributions(store) if one.slot == "a"] == [2] * stands
    for island in late.islands:
        island.manager._seat.group.close()
    other.train(3)
    again, other = (Ranked(store, slot, minimum=2, grace_s=20.0, sync_every=H) for slot in "ab")
    together([lambda r=replica: r.train(5, close=False) for replica in (again, other)])
    counted = [one for one in decisions(store) if "a" in {share.slot for share in one.members}]
    found = {one.round: one.inner_steps for one in contributions(store) if one.slot == "a"}
    assert {one.round for one in counted} >= {4}
    assert found.get(2) == (4 if stands else None)
    assert {found[one.round] for one in counted if one.round > 2} == {H}
    for ours, theirs in zip(shared(again), shared(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_what_is_late_is_kept_by_all_ranks_or_by_none() -> None:
    """One rank's part of it is not finite: half of a pseudo-gradient is none."""
    store = MemoryStore()
    replica = Ranked(store, "a", minimum=1)
    replica.train(1, close=False)
    index = Index((TensorSpec("0", "float32", (2,)),))
    carries = [island.manager._carry for island in replica.islands]

    def keep(rank: int) -> None:
        value = float("inf") if rank == 1 else 1.0
        kept = kept_of([torch.full((2,), value)], index, 0, Trained(inner_steps=2), 6)
        averager, carry = replica.islands[rank].manager._seat.averager, carries[rank]
        assert carry is not None
        averager.late.keep(carry, kept)

    together([lambda: keep(0), lambda: keep(1)])
    assert [carry is not None and carry.keeps(0) for carry in carries] == [False, False]


def test_a_norm_is_limited_over_all_ranks() -> None:
    replica = Ranked(MemoryStore(), "a", minimum=1, max_norm=4.5)
    index = Index((TensorSpec("0", "float32", (2,)),))

    def reason(rank: int) -> str | None:
        offering = replica.islands[rank].manager._seat.averager._offering
        return offering.try_encode([torch.tensor([3.0 + rank, 0.0])], index)[1]

    assert together([lambda: reason(0), lambda: reason(1)]) == ["norm above the limit: norm=5 max_norm=4.5"] * 2


@pytest.mark.parametrize("stands", [True, False])
def test_what_is_at_stake_counts_on_all_ranks_or_on_none(stands: bool) -> None:  # noqa: FBT001
    """Rank 0's part of it stands in the log, with another one of rank 1: that is an earlier attempt's."""
    replica = Ranked(MemoryStore(), "a", minimum=1)
    replica.train(1, close=False)
    index = Index((TensorSpec("0", "float32", (2,)),))
    parts = [Part(digest=name * 32, header_bytes=64, total_bytes=72) for name in "123"]
    sealed = logs.load(b"x")
    member = Contribution(
        run="0" * 32, round=1, exchange=0, slot="a", incarnation=0, base="0" * 64, index=sealed.index,
        parts=(parts[0], parts[1 if stands else 2]), tokens=0, inner_steps=2, ranks=(1, 1), nonce="0" * 32,
    )  # fmt: skip
    carries = [Carry(), Carry()]

    def settle(rank: int) -> None:
        carry = carries[rank]
        carry.keep(kept_of([torch.ones(2)], index, 0, Trained(inner_steps=2), 6))
        carry.stake(0, 1, 0, [parts[rank]])
        replica.islands[rank].manager._seat.averager.late.settle(carry, 0, lambda: member)

    together([lambda: settle(0), lambda: settle(1)])
    assert [carry.keeps(0) for carry in carries] == [not stands] * 2


class Torn(MemoryStore):
    """The first bytes of rank 1's part of a slot's contribution to a round are damaged on their way in."""

    def __init__(self, slot: str, round_number: int) -> None:
        super().__init__()
        self._folder = f"{keys.PAYLOADS}{round_number:08d}/{slot}/"
        self.guilty: object = None

    def create(self, key: str, data: Data) -> bool:
        if key.startswith(self._folder) and threading.current_thread() is self.guilty:
            body = bytearray(b"".join(buffers_of(data)))
            body[0] ^= 1
            return super().create(key, bytes(body))
        return super().create(key, data)


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_contribution_is_refused_whichever_ranks_part_begins_wrong(
    guilty: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="skerry")
    store = Torn("c", 1)
    replicas = [Ranked(store, slot, minimum=2, grace_s=20.0) for slot in ("a", "b", "c")]
    sick = replicas[2].islands[guilty].manager._seat.exchange
    upload = Exchange.upload

    def torn(self: Exchange, round_number: int, load: Load) -> None:
        store.guilty = threading.current_thread() if self is sick else None
        upload(self, round_number, load)
        store.guilty = None

    propose = Exchange._propose

    def not_its_own(self: Exchange, *facts: Any) -> None:
        if self is not replicas[2].islands[0].manager._seat.exchange:  # it would not read back what it has made itself
            propose(self, *facts)

    monkeypatch.setattr(Exchange, "upload", torn)
    monkeypatch.setattr(Exchange, "_propose", not_its_own)
    together([lambda r=replica: r.train(3) for replica in replicas])
    assert [[share.slot for share in one.members] for one in decisions(store)] == [
        ["a", "b", "c"],
        ["a", "b"],
        ["a", "b", "c"],
    ]
    told = [record for record in caplog.records if getattr(record, "event", "") == "contribution_refused"]
    assert {one.fields["slot"] for one in told} == {"c"}  # type: ignore[attr-defined]
    assert not [record for record in caplog.records if getattr(record, "event", "") == "round_failed"]


def test_private_state_comes_back_to_the_rank_that_saved_it() -> None:
    store = MemoryStore()
    seen: dict[int, list[object]] = {0: [], 1: []}

    def replica() -> Ranked:
        made = Ranked(store, "a", minimum=1)
        for rank, island in enumerate(made.islands):
            island.manager.register_private_state("own", seen[rank].append, lambda rank=rank: {"rank": rank})
        return made

    replica().train(2)
    assert seen == {0: [], 1: []}
    replica().train(3)
    assert seen == {0: [{"rank": 0}], 1: [{"rank": 1}]}


def test_all_ranks_know_how_many_take_part() -> None:
    store = MemoryStore()
    replicas = [Ranked(store, slot, grace_s=20.0) for slot in ("a", "b")]
    together([lambda r=replica: r.train(1, close=False) for replica in replicas])
    for replica in replicas:
        assert {island.manager.num_participants() for island in replica.islands} == {2}
        assert {island.manager.batches_committed() for island in replica.islands} == {2}
        together([lambda i=island: i.manager.shutdown() for island in replica.islands])


def test_all_ranks_end_with_the_round_that_has_made_up_for_lost_work() -> None:
    store = MemoryStore()
    run = logs.run_record(SystemClock(), slots=("a", "b"), rounds=2, min_replicas=1)
    store.create(keys.RUN, run.model_copy(update={"work": 4.0, "start_window_s": 0.0}).to_bytes())
    replica = Ranked(store, "a", minimum=1)

    def to_the_end(island: Island) -> int:
        with island.diloco:
            while not island.manager.finished:
                island.manager.catch_up(island.inner)
                island.step()
        return island.manager.current_step()

    assert together([lambda i=island: to_the_end(i) for island in replica.islands]) == [4, 4]
    assert [commit.work for commit in commits(store)] == [1.0, 2.0, 3.0, 4.0]


def test_a_lone_replica_asks_for_no_tcp_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    manager = manager_of(MemoryStore(), "a", minimum=1)
    assert (manager.rank, manager.world_size) == (0, 1)
    assert isinstance(manager._seat.group, Alone)
    manager.shutdown()
