"""What only this replica has: inner optimizer, data position, random states, by key; saved for its next incarnation.

Saved in the background when state is stable (the caller says when), in the format of a checkpoint, under the slot's
own folder; the last two stay. Loaded at the join. Only the incarnation that owns the slot writes. Never needed for the
run to go on: whatever fails is told, and a replica that finds nothing of its own trains on with fresh inner state.
"""
# pyright: reportUnknownMemberType=false
# torch and numpy leave the types of random states open.

from __future__ import annotations

import logging
import random
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
import torch

from skerry.runtime import checkpoint, keys
from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.events import emit
from skerry.runtime.ranks import Alone
from skerry.runtime.recording import is_due, settle
from skerry.runtime.records import Count, Record
from skerry.runtime.sharded import apart, meshes_of, tensors_behind, together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.runtime.journal import Journal
    from skerry.runtime.membership import Presence
    from skerry.runtime.ranks import Group
    from skerry.runtime.recording import Standing
    from skerry.runtime.records import CheckpointManifest

# What inner steps compute in; narrower formats are what is derived from it.
_FLOATS: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
# The newest, and one more while it is being written or should it be damaged.
_KEPT: Final = 2


class Stateful(Protocol):
    """An optimizer, a scheduler, a sampler: what gives its state away and takes it back."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dict, list and tuple of tensors, int, float, bool, str and None."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from a state that `state_dict` gave."""
        ...


class _Saves(Record):
    """The rounds that have a save, newest first."""

    rounds: tuple[Count, ...]


class PrivateState:
    """One replica's own state. Register it before the first inner step; `record` and `load_newest` do the rest."""

    def __init__(
        self, journal: Journal, presence: Presence, nonce: Callable[[], str], group: Group | None = None
    ) -> None:
        """group: the ranks of the replica; each has a state of its own. None for one rank."""
        group = group or Alone()
        self._rank = group.rank
        self._train = group.line("train")
        self._journal = journal
        self._presence = presence
        self._nonce = nonce
        self._folder = keys.private_of(presence.slot, group.rank)
        self._loads: dict[str, Callable[[Any], object]] = {}
        self._saves: dict[str, Callable[[], object]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="private")
        self._saving: Future[None] | None = None
        self._loaded = False

    def register(self, key: str, load: Callable[[Any], object], save: Callable[[], object]) -> None:
        """Keep a piece of state under `key`. Raises Invalid if the key is taken, or if it is too late to load it."""
        if key in self._saves:
            raise Invalid(f"private state is registered twice under {key!r}")
        if self._loaded:
            raise Invalid(f"private state {key!r} comes after the join; register it before the first inner step")
        self._loads[key] = load
        self._saves[key] = save

    def record(self, standing: Standing, checkpoint_every: int | None) -> None:
        """Save in the background what is registered, at the rounds of checkpoints. Call while state is stable.

        checkpoint_every: in rounds; None means not now. Memory is bounded to one snapshot: while the last save is on
        its way, this one is left out. A state that cannot be stored, or is not finite, is told and not saved.
        """
        if not self._saves or not is_due(standing, checkpoint_every, self._journal.run):
            return
        if self._saving is not None and not self._saving.done():
            return
        try:
            snapshot = self.capture()
        except Invalid as error:
            self._failed(standing.round, error)
            return
        self._saving = self._pool.submit(self._write, standing, snapshot)

    def capture(self) -> Mapping[str, object]:
        """A copy of what is registered, in CPU memory. Raises Invalid, naming the path, for what cannot be stored."""
        settle()
        snapshot = checkpoint.snapshot({key: apart(save()) for key, save in self._saves.items()})
        return cast("Mapping[str, object]", snapshot)

    def load_newest(self) -> int | None:
        """Give back what this slot saved last; returns its round. None: there is nothing, which is told if odd.

        A damaged save is told, and passed over. Raises Diverged if it is of another log, and what the store raises.
        """
        self._loaded = True
        if not self._loads:
            return None
        saved: dict[int, Mapping[str, object]] = {}

        def read(round_number: int) -> _Saves:
            manifest = checkpoint.manifest(self._journal.store, round_number, self._folder)
            if manifest is None:
                return _Saves(rounds=())
            self._check(manifest)
            state = checkpoint.load(self._journal.store, manifest, self._folder)
            saved[round_number] = cast("Mapping[str, object]", state)
            return _Saves(rounds=(round_number,))

        for round_number in self._train.consult("private state", self._there, _common, _Saves).rounds:
            try:
                found = self._train.consult("private", partial(read, round_number), _common, _Saves)
            except Corrupt as error:
                self._failed(round_number, error)
                continue
            if found.rounds:
                self.restore(round_number, saved[round_number])
                return round_number
        if self._presence.incarnation > 0:
            emit("private_fresh", {"slot": self._presence.slot, "incarnation": self._presence.incarnation})
        return None

    def close(self, *, wait: bool) -> None:
        """Stop; wait: until what is on its way is written."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _there(self) -> _Saves:
        return _Saves(rounds=tuple(checkpoint.complete(self._journal.store, self._folder)))

    def _check(self, manifest: CheckpointManifest) -> None:
        if manifest.run != self._journal.run.nonce or manifest.commit != self._journal.previous(manifest.round):
            raise Diverged(
                f"{keys.checkpoint_manifest(manifest.round, self._folder)} is not of this log: run={manifest.run} "
                f"commit={manifest.commit[:12]}"
            )

    def restore(self, round_number: int, state: Mapping[str, object]) -> None:
        """Give back what `capture` gave in this round. What cannot be taken back is told, and begins anew."""
        fresh: list[str] = []
        for key, load in self._loads.items():
            try:
                load(together(state[key], lambda: meshes_of(*map(tensors_behind, self._loads.values()))))
            except Exception as error:  # noqa: BLE001  whatever a script's object raises: it can begin anew
                fresh.append(key)
                self._failed(round_number, error, key)
        emit(
            "private_loaded",
            {"round": round_number, "slot": self._presence.slot, "fresh": ",".join(fresh) or None},
        )

    def _write(self, standing: Standing, snapshot: Mapping[str, object]) -> None:
        try:
            _check_finite(snapshot)
            saved = checkpoint.save(
                self._journal.store,
                run=self._journal.run.nonce,
                round_number=standing.round,
                commit=standing.previous,
                members=standing.members,
                batches=standing.batches,
                writer=self._presence.slot,
                nonce=self._nonce(),
                state=snapshot,
                folder=self._folder,
                before_manifest=self._presence.fence,
            )
            if saved:  # else an earlier incarnation came as far, and this one continues it
                emit("private_saved", {"round": standing.round, "slot": self._presence.slot})
                self._clear()
        except Exception as error:  # noqa: BLE001  a thread's entry: training goes on, and the next save may succeed
            self._failed(standing.round, error)

    def _clear(self) -> None:
        """Delete all before the last two saves, manifests first, and what was never finished."""
        store = self._journal.store
        there = checkpoint.complete(store, self._folder)
        if len(there) < _KEPT:
            return
        end = keys.since(self._folder, there[_KEPT - 1])
        old = [entry.key for entry in store.list(self._folder) if entry.key < end]
        manifests = {keys.checkpoint_manifest(number, self._folder) for number in there}
        for key in sorted(old, key=lambda key: key not in manifests):
            store.delete(key)

    def _failed(self, round_number: int, error: Exception, key: str | None = None) -> None:
        emit(
            "private_failed",
            {"round": round_number, "slot": self._presence.slot, "key": key, "error": str(error)},
            level=logging.WARNING,
            error=error,
        )


def _common(all_ranks: Sequence[_Saves]) -> _Saves:
    """What every rank has: shards of different rounds are no state."""
    first, *others = (one.rounds for one in all_ranks)
    return _Saves(rounds=tuple(one for one in first if all(one in other for other in others)))


def _check_finite(snapshot: Mapping[str, object]) -> None:
    """Raises Invalid for moments gone NaN or Inf: a restart is the way out of those, and must not bring them back."""
    for key, state in snapshot.items():
        if not all(bool(one.isfinite().all()) for one in checkpoint.flatten(state)[1] if one.dtype in _FLOATS):
            raise Invalid(f"private state {key!r} holds values that are not finite; the save before it stays")


def random_states() -> dict[str, object]:
    """The random states of torch (CPU and GPUs), numpy's global generator and Python, as a state to keep."""
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
    """Draw on from where `random_states` was taken. GPUs that are not here are passed over."""
    inner = {
        key: value.numpy() if isinstance(value, torch.Tensor) else value
        for key, value in state["numpy"]["state"].items()
    }
    torch.set_rng_state(state["torch"])
    for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(one, device)
    np.random.set_state({**state["numpy"], "state": inner})  # noqa: NPY002  as above
    random.setstate(state["python"])
