"""Saves of a rank on its own machine, with copies at the peers of its clique; they cost no request to the bucket.

    local/{kind}/rank{owner}/{number}/...   in a folder of the machine, memory (/dev/shm) or disk; as a checkpoint

A save is written whole, synced and renamed, and verified block by block when it is read. Each rank saves its own state
and then exchanges it with its clique. A restarted rank takes its own copy, else a peer's; then it also writes the
copies that its folder lacks, so the next loss costs nothing either. Where neither exists, the caller reads the bucket.

Every rank makes the same calls in the same order; saves run on one background thread, on process groups of their own.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.local_copies_interface import Kind, NearCopy
from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.errors import Corrupt, Invalid, Retryable, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.replication.copy_placement import NoReplicasAvailableError
from skerry.runtime.replication.copy_strategies import CliqueReplicationStrategy
from skerry.runtime.replication.tensors_of_state_dict import BasicTensorAwareStateDict
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.ranks.interface import Channel, Group
    from skerry.runtime.store import Store

_KEPT: Final = 2
"""A rank may die in a save that another rank completes."""


@dataclass(frozen=True, kw_only=True)
class LocalCopies:
    """The place of a replica's copies of its state, and how often it saves the current round there.

    folder: on the machine, shared by its ranks. copies: ranks that hold a state, its own included; 1 makes none at
    peers. apart: ranks that are lost together (a machine's); None takes LOCAL_WORLD_SIZE. every: between two saves.
    """

    folder: Path
    copies: int = 2
    apart: int | None = None
    every: timedelta = timedelta(seconds=30)

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        """The copies that run.json asks for; None if it has no `peers`. Raises Invalid for a folder of another user."""
        if (peers := run.peers) is None:
            return None
        memory = Path("/dev/shm")  # noqa: S108  what is loaded from it is compared with the digests in the bucket
        folder = memory if peers.memory and memory.is_dir() else Path(tempfile.gettempdir())
        return cls(
            folder=_own_folder(folder / f"skerry-{os.getuid()}"),
            copies=peers.copies,
            apart=peers.apart,
            every=timedelta(seconds=peers.every_s),
        )


def _own_folder(folder: Path) -> Path:
    """The folder, made if it is missing. Its parent is shared, so another user may have made one of its name."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise Invalid(f"local copies need a folder that only this user can enter: {folder}; remove it, or chmod 700 it")
    return folder


class LocalCheckpoints:
    """The copies of one replica, as one of its ranks sees them. See `local_copies_interface.NearCopies`."""

    def __init__(self, place: Store, run: str, slot: str, clock: Clock, group: Group) -> None:
        """place: the folder of this run on this machine."""
        self._place = place
        self._run = run
        self._slot = slot
        self._clock = clock
        self._rank = group.rank
        self._train: Channel = group.channel("train")
        self._clique: CliqueReplicationStrategy | None = None
        self._ranks = [self._rank]
        self.every_s = LocalCopies.every.total_seconds()
        self._pool = BackgroundThreads(1, "local-copies")
        self._saving: dict[Kind, Future[None]] = {}

    @staticmethod
    def open(settings: LocalCopies, run: str, slot: str, clock: Clock, group: Group) -> LocalCheckpoints:
        """Opens the folder, and makes the process groups of the cliques, which is collective.

        Raises Invalid if copies at peers are wanted and torch.distributed is not initialized.
        """
        place = DirectoryStore(settings.folder / run / slot, durable=True)
        opened = LocalCheckpoints(place, run, slot, clock, group)
        opened.every_s = settings.every.total_seconds()
        if settings.copies > 1 and group.size > 1:
            opened._make_cliques(settings)
        return opened

    def _make_cliques(self, settings: LocalCopies) -> None:
        try:
            # Saves run beside training, and move memory of the host.
            self._clique = CliqueReplicationStrategy.from_replication_params(
                settings.apart, settings.copies, backend="gloo"
            )
        except ValueError as error:
            if isinstance(error, Invalid):
                raise
            raise Invalid(f"copies at peers need torch.distributed: call init_process_group first: {error}") from error
        self._ranks = self._clique.local_group.ranks

    def is_saving(self, kind: Kind) -> bool:
        """See NearCopies."""
        return kind in self._saving and not self._saving[kind].done()

    def save(self, kind: Kind, number: int, commit: str, state: object) -> None:
        """See NearCopies."""
        self._saving[kind] = self._pool.submit(self._write, kind, number, commit, state)

    def newest(self, kind: Kind) -> tuple[int, int]:
        """See NearCopies."""

        def held() -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
            pairs = [(owner, number) for owner in self._ranks for number in self._complete(kind, owner)]
            return tuple(self._ranks), tuple(pairs)

        def covered(all_ranks: Sequence[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]) -> tuple[int, int]:
            """A number counts if every rank's save is at a rank of its clique."""
            at_cliques = [{pair for peer in clique for pair in all_ranks[peer][1]} for clique, _ in all_ranks]
            numbers = {number for _, pairs in all_ranks for _, number in pairs}
            whole = [n for n in numbers if all((rank, n) in pairs for rank, pairs in enumerate(at_cliques))]
            return max(whole, default=-1), max(numbers, default=0)

        return self._train.reduce_on_rank0("look for local copies", held, covered)

    def load(self, kind: Kind, number: int) -> NearCopy | None:
        """See NearCopies."""
        own = self._read(kind, number, self._rank)
        if self._clique is None:
            return own
        for _ in self._ranks:
            held = {owner for owner in self._ranks if owner != self._rank and number in self._complete(kind, owner)}
            held |= set[int]() if own is None else {self._rank}
            try:
                self._fetch_missing(self._clique, kind, number, held)
            except NoReplicasAvailableError as error:  # all ranks raise the same, and have removed what is damaged
                self._failed(kind, number, error)
            except (Corrupt, Invalid, Retryable) as error:
                self._failed(kind, number, error)
                break
            else:
                break
        return self._read(kind, number, self._rank) if own is None else own

    def close(self, *, wait: bool) -> None:
        """See NearCopies."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _fetch_missing(self, clique: CliqueReplicationStrategy, kind: Kind, number: int, held: set[int]) -> None:
        """Get the saves of the clique that this rank does not hold, and write them. On all ranks of the replica."""
        group = clique.local_group
        holders = dict(zip(group.ranks, group.all_gather_object(held), strict=True))
        missing = [
            owner for owner in group.ranks if owner not in held and any(owner in ids for ids in holders.values())
        ]
        plan = clique.retrieve_plan(holders, missing)
        copies = {owner: self._read(kind, number, owner) for owner in plan.required_ids(alternates=True)}
        provided = {
            owner: BasicTensorAwareStateDict({"commit": copy.commit, "state": copy.state})
            for owner, copy in copies.items()
            if copy is not None
        }
        for owner, received in clique.retrieve_execute(plan, provided).items():
            state = received.state_dict
            try:
                self._put(kind, owner, number, state["commit"], state["state"])
            except SkerryError as error:  # a full disk: the others go on, and so does this rank
                self._failed(kind, number, error)

    def _write(self, kind: Kind, number: int, commit: str, state: object) -> None:
        """state: None on a rank that has nothing to save; it takes part in the exchange, as one that cannot write."""
        failed: list[Exception] = []

        def put(owner: int, commit: str, state: object) -> None:
            try:
                self._put(kind, owner, number, commit, state)
            except Exception as error:  # noqa: BLE001  the peers wait for this rank
                failed.append(error)

        try:
            if state is not None:
                put(self._rank, commit, state)
            for owner, received in self._exchange(kind, number, commit, state).items():
                if received["state"] is not None:
                    put(owner, received["commit"], received["state"])
            for owner in self._ranks:
                self._remove_old(kind, owner)
            if failed:
                self._failed(kind, number, failed[0])
            else:
                emit("local_copy_saved", {"kind": kind, "number": number, "slot": self._slot, "rank": self._rank})
        except Exception as error:  # noqa: BLE001  a thread's entry: training goes on, the bucket has what it needs
            self._failed(kind, number, error)

    def _exchange(self, kind: Kind, number: int, commit: str, state: object) -> dict[int, dict[str, Any]]:
        """The states of the peers. Raises Invalid if a peer exchanges another save."""
        if self._clique is None:
            return {}
        sealed = BasicTensorAwareStateDict({"commit": commit, "state": state})
        copies, ids = self._clique.replicate(sealed, (self._rank, kind, number))
        if others := [id_ for id_ in ids if id_[1:] != (kind, number)]:
            raise Invalid(f"ranks exchange different saves: rank {self._rank}: {kind} {number}, others: {others}")
        pairs = zip(ids, cast("list[BasicTensorAwareStateDict]", copies), strict=True)
        return {owner: copy.state_dict for (owner, *_), copy in pairs if owner != self._rank}

    def _put(self, kind: Kind, owner: int, number: int, commit: str, state: object) -> None:
        """Write a save. If that fails, its parts are removed: a full disk would stay full."""
        folder = keys.local_prefix(kind, owner)
        try:
            checkpoint.save(
                self._place,
                run=self._run,
                round_number=number,
                commit=commit,
                members=(),
                batches=0,
                writer=self._slot,
                nonce=self._clock.nonce(),
                state=state,
                folder=folder,
            )
        except Exception:
            if number not in self._complete(kind, owner):
                self._delete_save(folder, number)
            raise

    def _complete(self, kind: Kind, owner: int) -> list[int]:
        return checkpoint.complete(self._place, keys.local_prefix(kind, owner))

    def _read(self, kind: Kind, number: int, owner: int) -> NearCopy | None:
        """A copy in the folder, verified; None if there is none. A damaged one is removed, so that it is replaced."""
        folder = keys.local_prefix(kind, owner)
        try:
            manifest = checkpoint.manifest(self._place, number, folder)
            if manifest is None or manifest.run != self._run:
                return None
            return NearCopy(manifest.commit, manifest.parts, checkpoint.load(self._place, manifest, folder))
        except (Corrupt, Retryable) as error:
            self._failed(kind, number, error)
        self._place.delete(keys.checkpoint_manifest(number, folder))
        self._delete_save(folder, number)
        return None

    def _remove_old(self, kind: Kind, owner: int) -> None:
        numbers, folder = self._complete(kind, owner), keys.local_prefix(kind, owner)
        if len(numbers) > _KEPT:
            self._delete("", keys.start_after(folder, numbers[_KEPT - 1]), folder)

    def _delete_save(self, folder: str, number: int) -> None:
        self._delete(keys.start_after(folder, number), keys.start_after(folder, number + 1), folder)

    def _delete(self, start: str, end: str, folder: str) -> None:
        """Manifests first: a save is complete or invisible."""
        old = [entry.key for entry in self._place.list(folder) if start <= entry.key < end]
        for key in sorted(old, key=lambda key: not key.endswith(keys.MANIFEST)):
            self._place.delete(key)

    def _failed(self, kind: Kind, number: int, error: Exception) -> None:
        fields = {"kind": kind, "number": number, "slot": self._slot, "rank": self._rank, "error": str(error)}
        emit("local_copy_failed", fields, level=logging.WARNING, error=error)
