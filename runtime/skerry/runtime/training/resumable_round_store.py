"""Saves the progress of a round that is not closed, so that the next incarnation resumes it.

Off unless asked for: a save is as large as the model and the private state together. In the format of a checkpoint,
under the slot's own folder, the newest only; with several ranks also the one before it, because a rank may die in a
save that another rank completes. A pseudo-gradient is saved, not parameters: it can be put on the shared parameters
again, also in a later round. Never needed for the run to go on: failures are logged.

With copies on the replica's machines, saves go there too, more often and without a request to the bucket; both are
numbered together, so the higher number is the newer one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, cast

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.daemon_executors import BackgroundThreads
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS
from skerry.runtime.structured_logging import emit
from skerry.runtime.training.resumable_round import PartialRound
from skerry.runtime.training.work_counter import WorkAmount, WorkCounter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor, Future

    from skerry.runtime.checkpointing.local_copies_interface import NearCopies
    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
    from skerry.runtime.ranks.interface import Group


_NONE: Final = -1
"""The number of a save that does not exist."""


class PartialRoundStore:
    """Saves and loads the progress of one replica's current round. For the thread that trains; has a writing thread.

    every_s: seconds between saves; None saves nothing, and resumes nothing. counter: the work to save; the round
    runner counts it.
    """

    def __init__(
        self,
        log: RunLog,
        presence: Presence,
        clock: Clock,
        group: Group,
        every_s: float | None,
        pool: Executor | None = None,
        near: NearCopies | None = None,
    ) -> None:
        """pool: the writing thread; None makes one. near: also save here, as often as it asks for."""
        self._log = log
        self._presence = presence
        self._clock = clock
        self._train = group.channel("train")
        self._every_s = every_s
        self.counter = WorkCounter()
        self._folder = keys.unfinished_prefix(presence.slot, group.rank)
        self._pool = pool or BackgroundThreads(1, "unfinished")
        self._saving: Future[None] | None = None
        self._number = 0
        self._before = 0  # the last save that is complete on this rank
        self._last = (-1, 0)
        self._saved_at = self._saved_near_at = clock.now()
        self._near = near
        self._to_store, self._to_near = every_s is not None, False
        self._token = ""  # of this incarnation: saves of two do not fit, even under one number

    @property
    def is_on(self) -> bool:
        """This replica saves unfinished rounds."""
        return self._every_s is not None or self._near is not None

    @property
    def is_saving(self) -> bool:
        """True while a save is being written."""
        return self._saving is not None and not self._saving.done()

    def is_due(self, round_number: int, inner_steps: int, *, now: bool) -> bool:
        """True if there is progress to save and it is time, or it must be `now`. The same on all ranks."""
        if not self.is_on or inner_steps == 0 or (round_number, inner_steps) == self._last:
            return False
        if now:  # the ranks may be at different steps, and the machine may go: only the bucket
            self._to_store, self._to_near = self._every_s is not None, False
        else:
            self._to_store, self._to_near = self._train.broadcast_from_rank0("save the unfinished", self._due_places)
        return self._to_store or self._to_near

    def _due_places(self) -> tuple[bool, bool]:
        """True for the bucket, and for the machine, if the last save there is old enough and written."""
        now, every_s, near = self._clock.now(), self._every_s, self._near
        return (
            every_s is not None and now - self._saved_at >= every_s and not self.is_saving,
            near is not None and now - self._saved_near_at >= near.every_s and not near.is_saving("unfinished"),
        )

    def save(self, position: LogPosition, partial: PartialRound | None, *, wait: bool = False) -> None:
        """Save in the background where it is due. Memory is bounded to one save of each place.

        partial: None on a rank that has nothing to save. wait: until it is written. What cannot be stored, or is not
        finite, is logged and not saved.
        """
        self._number += 1  # on all ranks, also on one that has nothing to save
        state = None if partial is None else self._state_of(partial)
        if self._to_near and self._near is not None:
            self._saved_near_at = self._clock.now()
            self._near.save("unfinished", self._number, position.previous, state)
        if self._to_store:
            self._saved_at = self._clock.now()
            if state is not None:
                self._saving = self._pool.submit(self._write, self._number, position, state)
        if wait and self._saving is not None:
            self._saving.result()

    def _state_of(self, partial: PartialRound) -> dict[str, object] | None:
        """The state to save; None if it is not finite."""
        self._last = (partial.round, partial.inner_steps)
        if not all(bool(tensor.isfinite().all()) for delta in partial.deltas for tensor in delta):
            self._failed(partial.round, Invalid("what was trained is not finite"))
            return None
        return {
            "token": self._token,
            "round": partial.round,
            "inner steps": partial.inner_steps,
            "tokens": partial.tokens,
            "seconds": partial.seconds,
            "deltas": list(partial.deltas),
            "trained": [list(self.counter.since(fragment)) for fragment in range(len(partial.deltas))],
            "private": dict(partial.private),
        }

    def load(self) -> PartialRound | None:
        """Load the slot's last save, if it is of this log; else None. Damage is logged."""
        if not self.is_on:
            return None
        partial: PartialRound | None = None
        newest, highest, near_newest = _NONE, 0, _NONE
        if self._every_s is not None:
            newest, highest = self._train.reduce_on_rank0("the unfinished", self._complete, _common)
        if self._near is not None:
            near_newest, near_highest = self._near.newest("unfinished")
            self._token = self._train.broadcast_from_rank0("name the saves", self._clock.nonce)
            highest = max(highest, near_highest)
        self._number = highest
        if self._near is not None and near_newest > newest:
            partial = self._load_near(self._near, near_newest)
            if partial is not None:
                self._last = (partial.round, partial.inner_steps)
                return partial
        if newest == _NONE:
            return None
        self._before = newest

        def read() -> bool:
            nonlocal partial
            partial = self._read(newest)
            return partial is not None

        if not self._train.reduce_on_rank0("load the unfinished", read, all) or partial is None:
            return None
        self._last = (partial.round, partial.inner_steps)
        return partial

    def close(self, *, wait: bool) -> None:
        """Stop. wait: until the save in progress is written."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _complete(self) -> tuple[int, ...]:
        return tuple(checkpoint.complete(self._log.store, self._folder))

    def _load_near(self, near: NearCopies, number: int) -> PartialRound | None:
        """The save of this number on the replica's machines, if all ranks have it, and of one incarnation."""
        copy = near.load("unfinished", number)
        partial: PartialRound | None = None

        def parse() -> tuple[str, int, int]:
            nonlocal partial
            if copy is None:
                return "", 0, 0
            try:
                partial = self._of_this_log(_parse(copy.state, copy.commit))
                token = str(cast("dict[str, Any]", copy.state).get("token"))
            except Corrupt as error:
                self._failed(number, error)
                return "", 0, 0
            return ("", 0, 0) if partial is None else (token, partial.round, partial.inner_steps)

        def agree(all_ranks: Sequence[tuple[str, int, int]]) -> bool:
            return len(set(all_ranks)) == 1 and all_ranks[0][0] != ""

        return partial if self._train.reduce_on_rank0("load the near unfinished", parse, agree) else None

    def _of_this_log(self, partial: PartialRound) -> PartialRound | None:
        # A log that was begun anew has other commits under the same numbers.
        known = self._log.read_commit(partial.round - 1) if partial.round > 0 else None
        return partial if partial.previous == (GENESIS if known is None else known.digest) else None

    def _read(self, number: int) -> PartialRound | None:
        try:
            manifest = checkpoint.manifest(self._log.store, number, self._folder)
            if manifest is None or manifest.run != self._log.run.nonce:
                return None
            partial = _parse(checkpoint.load(self._log.store, manifest, self._folder), manifest.commit)
        except Corrupt as error:
            self._failed(number, error)
            return None
        return self._of_this_log(partial)

    def _write(self, number: int, position: LogPosition, state: Mapping[str, object]) -> None:
        """Uses a number of its own, because a replica may save more than once in a round."""
        store = self._log.store
        try:
            checkpoint.save(
                store,
                run=self._log.run.nonce,
                round_number=number,
                commit=position.previous,
                members=position.members,
                batches=position.batches,
                writer=self._presence.slot,
                nonce=self._clock.nonce(),
                state=state,
                folder=self._folder,
                before_manifest=self._presence.raise_if_fenced,
            )
            emit(
                "unfinished_round_saved",
                {"round": position.round, "slot": self._presence.slot, "steps": cast("int", state["inner steps"])},
            )
            end = keys.start_after(self._folder, self._before if self._train.size > 1 else number)
            self._before = number
            old = [entry.key for entry in store.list(self._folder) if entry.key < end]
            # Manifests first: a save is complete or invisible.
            for key in sorted(old, key=lambda key: not key.endswith(keys.MANIFEST)):
                store.delete(key)
        except Exception as error:  # noqa: BLE001  a thread's entry: training goes on, and the next save may succeed
            self._failed(position.round, error)

    def _failed(self, round_number: int, error: Exception) -> None:
        fields = {"round": round_number, "slot": self._presence.slot, "error": str(error)}
        emit("unfinished_round_failed", fields, level=logging.WARNING, error=error)


def _parse(state: object, previous: str) -> PartialRound:
    """Parse a saved state. Raises Corrupt if it is none."""
    saved = cast("dict[str, Any]", state)
    try:
        deltas = tuple(tuple(delta) for delta in saved["deltas"])
        alone = (saved["inner steps"], saved["tokens"])
        return PartialRound(
            round=int(saved["round"]),
            previous=previous,
            inner_steps=int(saved["inner steps"]),
            tokens=int(saved["tokens"]),
            seconds=float(saved["seconds"]),
            deltas=deltas,
            private=saved["private"],
            # An older skerry may have counted the round alone.
            trained=tuple(WorkAmount(*map(int, amount)) for amount in saved.get("trained", [alone] * len(deltas))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"not what a replica has begun: {error!r}") from error


def _common(all_ranks: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """The newest save that every rank has, and the highest number that is taken."""
    common = set(all_ranks[0]).intersection(*all_ranks[1:])
    return max(common, default=_NONE), max((0, *(number for numbers in all_ranks for number in numbers)))
