"""Copies of a rank's state on its machine and at its peers: saves, losses, damage, and what is made up again."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.ranks import RankError, on_ranks, outcomes_of

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS
from skerry.runtime.ranks.interface import Address, SingleRank
from skerry.runtime.ranks.tcpstore import join_group
from skerry.runtime.replication.local_and_peer_checkpoints import LocalCheckpoints, LocalCopies
from skerry.runtime.replication.transport import Phase
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from skerry.runtime.ranks.interface import Group
    from skerry.runtime.replication.transport import Transfers

RUN = "0123456789abcdef" * 2


def state_of(rank: int, number: int) -> dict[str, Any]:
    weights = torch.arange(300_000.0).view(3, -1) * (rank + 1) + number
    return {"weights": weights, "moments": [weights.t() / 2, (3, 1.5)], "rank": rank}


def assert_is(state: Any, rank: int, number: int) -> None:
    expected = state_of(rank, number)
    assert state["weights"].equal(expected["weights"])
    assert state["moments"][0].equal(expected["moments"][0])
    assert (state["moments"][1], state["rank"]) == ((3, 1.5), rank)


def single(folder: Path) -> LocalCheckpoints:
    return LocalCheckpoints.open(LocalCopies(folder=folder), RUN, "a", SystemClock(), SingleRank())


def files(folder: Path, kind: str = "unfinished") -> list[Path]:
    return sorted(path for path in folder.glob(f"{RUN}/a/local/{kind}/**/*") if path.is_file())


def saved(copies: LocalCheckpoints, *numbers: int, rank: int = 0) -> LocalCheckpoints:
    for number in numbers:
        copies.save("unfinished", number, GENESIS, state_of(rank, number))
    copies.close(wait=True)
    return copies


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(bytes(data))


def complete(folder: Path, owner: int) -> list[int]:
    return checkpoint.complete(DirectoryStore(folder / RUN / "a"), keys.local_prefix("unfinished", owner))


def part_of(folder: Path, owner: int, number: int) -> Path:
    (part,) = [
        path for path in files(folder) if f"rank{owner}/{number:08d}" in path.as_posix() and path.suffix != ".json"
    ]
    return part


def test_next_process_loads_the_newest_save_of_a_machine(tmp_path: Path) -> None:
    saved(single(tmp_path), 1, 2, 3)
    restarted = single(tmp_path)
    assert restarted.newest("unfinished") == (3, 3)
    copy = restarted.load("unfinished", 3)
    assert copy is not None
    assert copy.commit == GENESIS
    assert_is(copy.state, 0, 3)
    assert restarted.newest("private") == (-1, 0)


def test_two_saves_of_each_kind_stay(tmp_path: Path) -> None:
    saved(single(tmp_path), 1, 2, 3, 4)
    assert {path.parent.name for path in files(tmp_path)} == {"00000003", "00000004"}


@pytest.mark.parametrize("harm", [damage, lambda path: path.write_bytes(path.read_bytes()[:-1000]), Path.unlink])
def test_damaged_save_is_not_used_and_is_removed(tmp_path: Path, harm: Any) -> None:
    saved(single(tmp_path), 1, 2)
    harm(part_of(tmp_path, 0, 2))
    restarted = single(tmp_path)
    assert restarted.load("unfinished", 2) is None
    assert restarted.newest("unfinished") == (1, 1)


def test_save_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a machine that loses its power may keep a name without its bytes."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    saved(single(tmp_path), 1)
    assert {path.parent for path in files(tmp_path)} <= set(synced)


def test_save_after_one_that_was_killed_has_the_same_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that the killed process has left do not count, and do not keep the next save from being written."""

    def save_and_die(_: int) -> None:
        create = DirectoryStore.create

        def die_before_the_manifest(store: DirectoryStore, key: str, data: Any) -> bool:
            return os._exit(9) if key.endswith(keys.MANIFEST) else create(store, key, data)

        monkeypatch.setattr(DirectoryStore, "create", die_before_the_manifest)
        copies = single(tmp_path)
        copies.save("unfinished", 1, GENESIS, state_of(3, 7))
        copies.close(wait=True)

    (ended,) = outcomes_of(1, save_and_die)
    assert isinstance(ended, RankError)
    assert files(tmp_path)
    restarted = single(tmp_path)
    assert restarted.newest("unfinished") == (-1, 0)
    saved(restarted, 1)
    copy = single(tmp_path).load("unfinished", 1)
    assert copy is not None
    assert_is(copy.state, 0, 1)


def test_save_of_another_run_is_not_used(tmp_path: Path) -> None:
    saved(single(tmp_path), 1)
    other = LocalCheckpoints.open(LocalCopies(folder=tmp_path), RUN[::-1], "a", SystemClock(), SingleRank())
    assert other.newest("unfinished") == (-1, 0)


def test_copies_at_peers_need_a_process_group(tmp_path: Path) -> None:
    class TwoRanks(SingleRank):
        size = 2

    with pytest.raises(Invalid, match="call init_process_group first"):
        LocalCheckpoints.open(LocalCopies(folder=tmp_path), RUN, "a", SystemClock(), TwoRanks())


class Job:
    """The ranks of a replica, each on a machine of its own."""

    def __init__(self, root: Path, world: int, jump: int) -> None:
        self.root, self.world, self.jump = root, world, jump
        self._servers = 0

    def folder(self, rank: int) -> Path:
        return self.root / f"machine{rank}"

    def start(self, rank: int) -> LocalCheckpoints:
        """A new incarnation of one rank."""
        self._servers += 1
        file = self.root / f"port{self._servers}"
        if rank == 0:
            self.server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            (self.root / "new").write_text(str(self.server.port))
            (self.root / "new").rename(file)
        dist.barrier()
        address = Address(rank=rank, size=self.world, host="localhost", port=int(file.read_text()))
        group: Group = join_group(address, SystemClock(), 30.0, 10.0)
        group.join(RUN, "a", self._servers, threading.Event())
        settings = LocalCopies(folder=self.folder(rank), apart=self.jump)
        return LocalCheckpoints.open(settings, RUN, "a", SystemClock(), group)

    def lose(self, rank: int, *lost: int) -> None:
        dist.barrier()
        if rank in lost:
            shutil.rmtree(self.folder(rank))
        dist.barrier()


@pytest.mark.slow
def test_lost_machine_gets_its_saves_back_and_copies_are_made_again(tmp_path: Path) -> None:
    job = Job(tmp_path, 4, 2)

    def work(rank: int) -> None:
        saved(job.start(rank), 1, 2, rank=rank)
        for lost in (1, 3, 1):  # each time the only other holder of the copies of rank 1 or 3
            job.lose(rank, lost)
            restarted = job.start(rank)
            assert restarted.newest("unfinished") == (2, 2)
            copy = restarted.load("unfinished", 2)
            assert copy is not None
            assert_is(copy.state, rank, 2)

    on_ranks(4, work)


@pytest.mark.slow
def test_damaged_own_copy_is_replaced_by_a_peers(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1)

    def work(rank: int) -> None:
        saved(job.start(rank), 1, rank=rank)
        if rank == 0:
            damage(part_of(job.folder(0), 0, 1))
        dist.barrier()
        copy = job.start(rank).load("unfinished", 1)
        assert copy is not None
        assert_is(copy.state, rank, 1)
        part = part_of(job.folder(rank), rank, 1)
        assert part.name == part_of(job.folder(1 - rank), rank, 1).name

    on_ranks(2, work)


@pytest.mark.slow
def test_state_without_a_whole_copy_keeps_no_other_rank_from_its_own(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1)

    def work(rank: int) -> None:
        saved(job.start(rank), 1, rank=rank)
        damage(part_of(job.folder(rank), 0, 1))
        if rank == 1:
            damage(part_of(job.folder(1), 1, 1))
        dist.barrier()
        copy = job.start(rank).load("unfinished", 1)
        if rank == 0:
            assert copy is None
        else:
            assert copy is not None
            assert_is(copy.state, 1, 1)

    on_ranks(2, work)


@pytest.mark.slow
def test_copy_that_is_damaged_while_it_is_sent_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, move = Job(tmp_path, 2, 1), Phase.move

    def move_badly(phase: Phase, out: Transfers, into: Transfers) -> None:
        move(phase, out, into)
        for _, (buffer,) in into:
            buffer[0] ^= 4

    def work(rank: int) -> None:
        saved(job.start(rank), 1, rank=rank)
        job.lose(rank, 1)
        restarted = job.start(rank)
        with monkeypatch.context() as patch:
            patch.setattr(Phase, "move", move_badly)
            copy = restarted.load("unfinished", 1)
        assert (copy is None) == (rank == 1)
        copy = restarted.load("unfinished", 1)
        assert copy is not None
        assert_is(copy.state, rank, 1)

    on_ranks(2, work)


@pytest.mark.slow
def test_loss_of_a_clique_leaves_no_save_to_load(tmp_path: Path) -> None:
    job = Job(tmp_path, 4, 2)

    def work(rank: int) -> None:
        saved(job.start(rank), 1, rank=rank)
        job.lose(rank, 0, 2)
        restarted = job.start(rank)
        assert restarted.newest("unfinished") == (-1, 1)
        assert (restarted.load("unfinished", 1) is None) == (rank in {0, 2})

    on_ranks(4, work)


@pytest.mark.slow
def test_copies_of_other_cliques_are_left_out_never_mixed_up(tmp_path: Path) -> None:
    """The folders are of cliques with another jump: a lost rank's copy is where no rank of its new clique looks."""

    def work(rank: int) -> None:
        saved(Job(tmp_path, 4, 2).start(rank), 1, rank=rank)
        closer = Job(tmp_path / "closer", 4, 1)
        closer.folder = lambda rank: tmp_path / f"machine{rank}"  # type: ignore[method-assign]
        closer.root.mkdir(exist_ok=True)
        dist.barrier()
        restarted = closer.start(rank)
        assert restarted.newest("unfinished") == (1, 1)  # each rank has its own
        closer.lose(rank, 1)
        restarted = closer.start(rank)
        assert restarted.newest("unfinished") == (-1, 1)
        copy = restarted.load("unfinished", 1)
        assert (copy is None) == (rank == 1)
        if copy is not None:
            assert_is(copy.state, rank, 1)

    on_ranks(4, work)


@pytest.mark.slow
def test_rank_with_nothing_to_save_takes_part_in_the_exchange(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1)

    def work(rank: int) -> None:
        copies = job.start(rank)
        copies.save("unfinished", 1, GENESIS, None if rank == 0 else state_of(rank, 1))
        saved(copies, 2, rank=rank)
        dist.barrier()
        assert job.start(rank).newest("unfinished") == (2, 2)

    on_ranks(2, work)


@pytest.mark.slow
def test_rank_with_a_full_disk_takes_part_in_the_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, 2, 1)

    def work(rank: int) -> None:
        create = DirectoryStore.create

        def create_until_full(store: DirectoryStore, key: str, data: Any) -> bool:
            if rank == 0 and key.startswith(f"{keys.local_prefix('unfinished', 0)}00000002/") and "manifest" in key:
                raise Retryable("No space left on device")
            return create(store, key, data)

        with monkeypatch.context() as patch:
            patch.setattr(DirectoryStore, "create", create_until_full)
            saved(job.start(rank), 1, 2, rank=rank)
        assert complete(job.folder(rank), 0) == ([1] if rank == 0 else [2, 1])
        assert complete(job.folder(rank), 1) == [2, 1]
        assert {path.parent.name for path in files(job.folder(0)) if "rank0" in path.parts} == {"00000001"}
        dist.barrier()
        copy = job.start(rank).load("unfinished", 2)
        assert copy is not None
        assert_is(copy.state, rank, 2)

    on_ranks(2, work, timeout_s=300.0)


@pytest.mark.slow
def test_saves_of_different_numbers_are_not_paired(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1)

    def work(rank: int) -> None:
        saved(job.start(rank), 1 + rank, rank=rank)
        assert complete(job.folder(rank), rank) == [1 + rank]
        assert complete(job.folder(rank), 1 - rank) == []

    on_ranks(2, work)
