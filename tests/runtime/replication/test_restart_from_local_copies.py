"""Replicas that keep copies of their state on their machines: saves and restarts that need the bucket less."""

from __future__ import annotations

import shutil
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
import torch.distributed as dist
from tests.kit.managers import Island, together, wait_for_copies
from tests.kit.ranks import on_ranks
from tests.kit.stores import ReadRecorder

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.log import keys
from skerry.runtime.replication.local_and_peer_checkpoints import LocalCopies
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.store import Store

H = 6
"""Inner steps of a round."""
AT_ONCE = timedelta(microseconds=1)


class Kept(Island):
    """A replica with private state, that keeps copies of every inner step in a folder."""

    def __init__(self, store: Store, folder: Path, slot: str = "a", **more: object) -> None:
        copies = LocalCopies(folder=folder, apart=1, every=AT_ONCE)
        self.view = ReadRecorder(store)
        super().__init__(self.view, slot, **({"sync_every": H, "minimum": 1, "local_copies": copies} | more))  # type: ignore[arg-type]
        self.inner.param_groups[0]["momentum"] = 0.9
        self.manager.register_private_state("inner", self.inner.load_state_dict, self.inner.state_dict)

    @property
    def state(self) -> list[torch.Tensor]:
        momenta = [self.inner.state[parameter]["momentum_buffer"] for parameter in self.model.parameters()]
        return [tensor.detach().clone() for tensor in [*self.model.parameters(), *momenta]]

    @property
    def progress(self) -> tuple[int, int]:
        return self.manager.current_step(), self.manager.inner_steps

    @property
    def parts_read(self) -> list[str]:
        """Parts of checkpoints and of private state that were read from the bucket."""
        folders = (keys.CHECKPOINTS, keys.PRIVATE, keys.UNFINISHED)
        return [key for key in self.view.reads if key.startswith(folders) and not key.endswith(keys.MANIFEST)]

    def take(self, steps: int) -> Self:
        """Every copy of every step is complete."""
        for _ in range(steps):
            super().take(1)
            wait_for_copies(self.manager)
        return super().take(0) if steps == 0 else self


def trained(store: Store, folder: Path, slot: str = "a", **more: object) -> Kept:
    """A replica at the end of two rounds, which has copies of them and of no step between."""
    copies = LocalCopies(folder=folder, every=timedelta(hours=1))
    return Kept(store, folder, slot, local_copies=copies, **more).take(2 * H)


def copy_of(folder: Path, kind: str, rank: int = 0) -> tuple[DirectoryStore, str]:
    """The folder of a rank's saves."""
    (place,) = folder.glob("*/*")
    return DirectoryStore(place), keys.local_prefix(kind, rank)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_saves_within_a_round_cost_no_request_and_are_resumed(store: MemoryStore, tmp_path: Path) -> None:
    died = Kept(store, tmp_path).take(4)
    wait_for_copies(died.manager)
    assert store.list(keys.UNFINISHED) == []
    back = Kept(store, tmp_path, seed=5).take(0)
    assert back.progress == (0, 4)
    torch.testing.assert_close(back.state, died.state)
    assert back.take(2).progress == (1, 0)


def test_restart_reads_no_state_from_the_bucket(store: MemoryStore, tmp_path: Path) -> None:
    died = Kept(store, tmp_path).take(2 * H + 3)
    wait_for_copies(died.manager)
    died.stop()
    back = Kept(store, tmp_path, seed=5).take(0)
    assert back.progress == (2, 3)
    torch.testing.assert_close(back.state, died.state)
    assert back.parts_read == []
    shutil.rmtree(tmp_path)
    new_machine = Kept(store, tmp_path, seed=6).take(0)
    assert new_machine.progress == (2, 0)
    assert {key.partition("/")[0] for key in new_machine.parts_read} == {"checkpoints", "private"}


@pytest.mark.parametrize("kind", ["checkpoints", "private"])
def test_damaged_copy_is_read_from_the_bucket(store: MemoryStore, tmp_path: Path, kind: str) -> None:
    trained(store, tmp_path).stop()
    expected = Kept(store, tmp_path / "none", seed=4).take(0).state
    place, folder = copy_of(tmp_path, kind)
    for entry in place.list(folder):
        if not entry.key.endswith(keys.MANIFEST):
            data = bytearray(place.read(entry.key) or b"")
            data[-2] ^= 1
            place.replace(entry.key, data)
    back = Kept(store, tmp_path, seed=5).take(0)
    torch.testing.assert_close(back.state, expected)
    assert {key.partition("/")[0] for key in back.parts_read} == {kind}


def test_copy_that_receipts_contradict_is_not_used(store: MemoryStore, tmp_path: Path) -> None:
    trained(store, tmp_path).stop()
    expected = Kept(store, tmp_path / "none", seed=4).take(0).state
    place, folder = copy_of(tmp_path, "checkpoints")
    newest = checkpoint.complete(place, folder)[0]
    manifest = checkpoint.manifest(place, newest, folder)
    assert manifest is not None
    state: Any = checkpoint.load(place, manifest, folder)
    for tensor in checkpoint.flatten(state)[1]:
        tensor.add_(1)
    for entry in place.list(folder):
        place.delete(entry.key)
    fields = {name: getattr(manifest, name) for name in ("run", "commit", "members", "batches", "writer", "nonce")}
    checkpoint.save(place, round_number=newest, state=state, folder=folder, **fields)
    back = Kept(store, tmp_path, seed=5).take(0)
    torch.testing.assert_close(back.state, expected)
    assert {key.partition("/")[0] for key in back.parts_read} == {"checkpoints"}


def test_save_in_the_bucket_at_a_stop_is_newer_than_the_copies(store: MemoryStore, tmp_path: Path) -> None:
    hourly = {"local_copies": LocalCopies(folder=tmp_path, every=timedelta(hours=1)), "keep_unfinished": AT_ONCE * 4e9}
    wait_for_copies(Kept(store, tmp_path, keep_unfinished=timedelta(hours=1)).take(2).manager)
    Kept(store, tmp_path, seed=5, **hourly).take(2).stop()
    assert Kept(store, tmp_path, seed=6, **hourly).take(0).progress == (0, 4)


def test_replica_that_was_away_follows_the_log_from_its_own_copy(store: MemoryStore, tmp_path: Path) -> None:
    both = together([lambda slot=slot: trained(store, tmp_path / slot, slot, minimum=2) for slot in "ab"])
    for replica in both:
        replica.stop()
    back = [Kept(store, tmp_path / slot, slot, minimum=2, seed=seed) for seed, slot in enumerate("ab", 5)]
    together([lambda replica=replica: replica.train(3, close=False) for replica in back])
    assert [replica.parts_read for replica in back] == [[], []]
    for tensor, other in zip(back[0].originals.values(), back[1].originals.values(), strict=True):
        assert tensor.equal(other)


@pytest.mark.slow
def test_ranks_on_a_new_machine_get_their_state_from_peers(tmp_path: Path) -> None:
    """A replica of four ranks, each on a machine of its own; two machines are lost."""

    def work(rank: int) -> None:
        if rank == 0:
            server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            (tmp_path / "new").write_text(str(server.port))
            (tmp_path / "new").rename(tmp_path / "port")
        dist.barrier()
        address = {"rank": rank, "world_size": 4, "store_addr": "localhost"}
        address["store_port"] = int((tmp_path / "port").read_text())
        store, machine = DirectoryStore(tmp_path / "bucket"), tmp_path / f"machine{rank}"
        died = Kept(store, machine, seed=rank, **address).take(2 * H + 3)
        wait_for_copies(died.manager)
        expected = died.state
        died.stop()
        dist.barrier()
        if rank in {1, 2}:
            shutil.rmtree(machine)
        dist.barrier()
        back = Kept(store, machine, seed=rank + 4, **address).take(0)
        assert back.progress == (2, 3)
        torch.testing.assert_close(back.state, expected)
        assert back.parts_read == []
        back.stop()
        dist.barrier()  # the server of the TCPStore ends with rank 0

    on_ranks(4, work)
