"""Writes this replica's checkpoints of the shared state, and replaces one of a state that turned out to be wrong."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.log import keys
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.checkpointing.shared_state import SharedState
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.ranks.interface import Channel


class CheckpointWriter:
    """Writes checkpoints in the thread that calls it. With several ranks each writes its shard, and rank 0 the rest."""

    def __init__(self, log: RunLog, slot: str, nonce: Callable[[], str]) -> None:
        """nonce: a new text for each manifest, so that no two are equal."""
        self._log = log
        self._slot = slot
        self._nonce = nonce
        self.healed = -1
        """Closed rounds after which this slot's receipt is of another state than this replica has. On rank 0."""

    @staticmethod
    def copy(state: SharedState, ranks: Channel) -> object:
        """Copy this rank's state, to be written later. Raises Invalid on all ranks if one has what cannot be stored."""
        copied: object = None

        def capture() -> None:
            nonlocal copied
            copied = checkpoint.snapshot(state.for_checkpoint())

        ranks.reduce_on_rank0("copy the last state", capture, lambda _: None)
        return copied

    def write(self, position: LogPosition, state: object, ranks: Channel) -> bool:
        """Write the checkpoint of this position. False if there is one already.

        One that this slot wrote of another state is replaced. Raises the errors of `checkpoint.save`.
        """
        healed = self.healed == position.round
        saved = checkpoint.save(
            self._log.store,
            run=self._log.run.nonce,
            round_number=position.round,
            commit=position.previous,
            members=position.members,
            batches=position.batches,
            writer=self._slot,
            nonce=self._nonce(),
            state=state,
            healed=healed,
            before_manifest=partial(self._delete_wrong, position.round) if healed else None,
            ranks=ranks,
        )
        if saved and ranks.rank == 0:  # otherwise another replica wrote the same state first
            emit("checkpoint_saved", {"round": position.round, "slot": self._slot})
        return saved

    def _delete_wrong(self, round_number: int) -> None:
        manifest = checkpoint.manifest(self._log.store, round_number)
        if manifest is not None and manifest.writer == self._slot and not manifest.healed:
            self._log.store.delete(keys.checkpoint_manifest(round_number))
