"""Saves and loads the state that only this replica has: inner optimizer, data position, random states.

Saved in the background when state is stable (the caller decides when), as a checkpoint under the slot's own prefix; the
last two are kept. Loaded when the replica joins. Only the incarnation that owns the slot writes. The run continues
without it: a failure is reported, and a replica without saved state trains with a fresh inner state.
"""
# pyright: reportUnknownMemberType=false
# torch and numpy do not type random states.

from __future__ import annotations

import logging
import random
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
import torch

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.replica_position_in_log import is_due
from skerry.runtime.checkpointing.shared_state import synchronize_device
from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.ranks.interface import SingleRank
from skerry.runtime.structured_logging import emit
from skerry.runtime.tensors.dtensor import collect_meshes, pack_shards, tensors_behind, unpack_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from skerry.runtime.checkpointing.local_copies_interface import NearCopies, NearCopy
    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.log.records import CheckpointManifest
    from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
    from skerry.runtime.ranks.interface import Group

# The formats of inner optimizer state; narrower formats are derived from them.
_FLOATS: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
# The newest, and one more in case the newest is incomplete or damaged.
_KEPT: Final = 2


class Stateful(Protocol):
    """An object with a state to save and load: an optimizer, a scheduler, a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nested dicts, lists and tuples of tensors, int, float, bool, str and None."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Loads a state that `state_dict` returned."""
        ...


class PrivateState:
    """The state of one replica alone. Register it before the first inner step; `record` saves, `load_newest` loads."""

    def __init__(
        self,
        log: RunLog,
        presence: Presence,
        nonce: Callable[[], str],
        group: Group | None = None,
        near: NearCopies | None = None,
    ) -> None:
        """group: the ranks of the replica; each has a state of its own. None for one rank. near: also save here."""
        group = group or SingleRank()
        self._rank = group.rank
        self._train = group.channel("train")
        self._log = log
        self._presence = presence
        self._nonce = nonce
        self._near = near
        self._folder = keys.private_prefix(presence.slot, group.rank)
        self._loads: dict[str, Callable[[Any], object]] = {}
        self._saves: dict[str, Callable[[], object]] = {}
        self._pool = BackgroundThreads(1, "private")
        self._saving: Future[None] | None = None
        self._loaded = False

    def register(self, key: str, load: Callable[[Any], object], save: Callable[[], object]) -> None:
        """Registers a piece of state. Raises Invalid if the key is taken, or if state was loaded already."""
        if key in self._saves:
            raise Invalid(f"private state is registered twice under {key!r}")
        if self._loaded:
            raise Invalid(
                f"private state {key!r} was registered after the join; register it before the first inner step"
            )
        self._loads[key] = load
        self._saves[key] = save

    def record(self, position: LogPosition, checkpoint_every: int | None, *, near: bool = False) -> None:
        """Saves the registered state in the background, at the rounds of checkpoints. Call while state is stable.

        checkpoint_every: in rounds; None means not now. Memory is bounded to one snapshot: while the last save is being
        written, this one is skipped. A state that cannot be stored, or is not finite, is reported and not saved.
        near: also save it on the machine; the same on all ranks.
        """
        if not self._saves or not is_due(position, checkpoint_every, self._log):
            return
        if self.is_saving and not near:
            return
        snapshot: Mapping[str, object] | None = None
        try:
            snapshot = self.capture()
        except Invalid as error:
            self._failed(position.round, error)
        if near and self._near is not None:
            self._near.save("private", position.round, position.previous, snapshot)
        if snapshot is not None and not self.is_saving:
            self._saving = self._pool.submit(self._write, position, snapshot)

    @property
    def is_saving(self) -> bool:
        """True while a save of this replica is being written."""
        return self._saving is not None and not self._saving.done()

    def capture(self) -> Mapping[str, object]:
        """Copies the registered state to CPU memory. Raises Invalid, naming the path, if it cannot be stored."""
        synchronize_device()
        snapshot = checkpoint.snapshot({key: pack_shards(save()) for key, save in self._saves.items()})
        return cast("Mapping[str, object]", snapshot)

    def load_newest(self) -> int | None:
        """Loads the newest state that this slot saved, and returns its round; None if there is none.

        A damaged save is reported and skipped. Raises Diverged if it is of another log, and the store's errors.
        """
        self._loaded = True
        if not self._loads:
            return None
        saved: dict[int, Mapping[str, object]] = {}

        def read(round_number: int, near: NearCopy | None) -> bool:
            manifest = checkpoint.manifest(self._log.store, round_number, self._folder)
            if manifest is None:
                return False
            self._check(manifest)
            if near is not None and (near.commit, near.parts) == (manifest.commit, manifest.parts):
                state = near.state
            else:
                state = checkpoint.load(self._log.store, manifest, self._folder)
            saved[round_number] = cast("Mapping[str, object]", state)
            return True

        for round_number in self._train.reduce_on_rank0("private state", self._saved_rounds, _common):
            near = None if self._near is None else self._near.load("private", round_number)
            try:
                loaded = self._train.reduce_on_rank0("private", partial(read, round_number, near), all)
            except Corrupt as error:
                self._failed(round_number, error)
                continue
            if loaded:
                self.restore(round_number, saved[round_number])
                return round_number
        if self._presence.incarnation > 0:
            emit("local_state_missing", {"slot": self._presence.slot, "incarnation": self._presence.incarnation})
        return None

    def close(self, *, wait: bool) -> None:
        """Stops the background thread. wait: first finish the current save."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _saved_rounds(self) -> tuple[int, ...]:
        return tuple(checkpoint.complete(self._log.store, self._folder))

    def _check(self, manifest: CheckpointManifest) -> None:
        if manifest.run != self._log.run.nonce or manifest.commit != self._log.read_previous_digest(manifest.round):
            raise Diverged(
                f"{keys.checkpoint_manifest(manifest.round, self._folder)} belongs to another log: run={manifest.run} "
                f"commit={manifest.commit[:12]}"
            )

    def restore(self, round_number: int, state: Mapping[str, object]) -> None:
        """Loads a state that `capture` returned. A part that cannot be loaded is reported and stays fresh."""
        fresh: list[str] = []
        for key, load in self._loads.items():
            try:
                load(unpack_shards(state[key], lambda: collect_meshes(*map(tensors_behind, self._loads.values()))))
            except Exception as error:  # noqa: BLE001  a script's object may raise anything, and stays fresh
                fresh.append(key)
                self._failed(round_number, error, key)
        emit(
            "local_state_loaded",
            {"round": round_number, "slot": self._presence.slot, "fresh": ",".join(fresh) or None},
        )

    def _write(self, position: LogPosition, snapshot: Mapping[str, object]) -> None:
        try:
            _check_finite(snapshot)
            saved = checkpoint.save(
                self._log.store,
                run=self._log.run.nonce,
                round_number=position.round,
                commit=position.previous,
                members=position.members,
                batches=position.batches,
                writer=self._presence.slot,
                nonce=self._nonce(),
                state=snapshot,
                folder=self._folder,
                before_manifest=self._presence.raise_if_fenced,
            )
            if saved:  # otherwise an earlier incarnation saved this round
                emit("local_state_saved", {"round": position.round, "slot": self._presence.slot})
                self._clear()
        except Exception as error:  # noqa: BLE001  a thread's entry: training goes on, and the next save may succeed
            self._failed(position.round, error)

    def _clear(self) -> None:
        """Deletes all but the last two saves, manifests first, and parts of incomplete ones."""
        store = self._log.store
        rounds = checkpoint.complete(store, self._folder)
        if len(rounds) < _KEPT:
            return
        end = keys.start_after(self._folder, rounds[_KEPT - 1])
        old = [entry.key for entry in store.list(self._folder) if entry.key < end]
        manifests = {keys.checkpoint_manifest(number, self._folder) for number in rounds}
        for key in sorted(old, key=lambda key: key not in manifests):
            store.delete(key)

    def _failed(self, round_number: int, error: Exception, key: str | None = None) -> None:
        emit(
            "local_state_failed",
            {"round": round_number, "slot": self._presence.slot, "key": key, "error": str(error)},
            level=logging.WARNING,
            error=error,
        )


def _common(all_ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the rounds that every rank has saved, newest first: shards of different rounds do not fit."""
    first, *others = all_ranks
    return tuple(number for number in first if all(number in other for other in others))


def _check_finite(snapshot: Mapping[str, object]) -> None:
    """Raises Invalid for NaN or Inf values: a restart must not load them again."""
    for key, state in snapshot.items():
        if not all(bool(tensor.isfinite().all()) for tensor in checkpoint.flatten(state)[1] if tensor.dtype in _FLOATS):
            raise Invalid(f"private state {key!r} holds values that are not finite; the previous save is kept")


def random_states() -> dict[str, object]:
    """Returns the random states of torch (CPU and GPUs), numpy's global generator and Python."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002  scripts draw from the global one
    inner = {
        key: torch.tensor(value.tolist()) if isinstance(value, np.ndarray) else value
        for key, value in numpy["state"].items()
    }
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {**numpy, "state": inner},
        "python": random.getstate(),
    }


def load_random_states(state: Mapping[str, Any]) -> None:
    """Restores states that `random_states` returned. States of absent GPUs are skipped."""
    inner = {
        key: value.numpy() if isinstance(value, torch.Tensor) else value
        for key, value in state["numpy"]["state"].items()
    }
    torch.set_rng_state(state["torch"])
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
    np.random.set_state({**state["numpy"], "state": inner})  # noqa: NPY002  as above
    random.setstate(state["python"])
