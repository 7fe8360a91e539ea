"""Moves a replica to the head of the log: it joins, heals, loads a newer checkpoint, or follows.

State changes only at a boundary, between a closed round and the next inner step, in the thread that trains; the
lifecycle says when that is. Following is torchft's own outer step, driven by inner steps without gradients: parameters
stay, the wrapper's hooks fire.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
from skerry.runtime.checkpointing.roll_up_writer import RollUpWriter
from skerry.runtime.errors import Corrupt, Diverged, Invalid, Retryable
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.records import GENESIS
from skerry.runtime.mirrors.keeper import MirrorKeeper
from skerry.runtime.structured_logging import emit
from skerry.runtime.training.resumable_round import PartialRound
from skerry.runtime.training.unreadable_rounds import RescueCheckpoints, UnreadableRound

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from skerry.runtime.checkpointing.local_state import PrivateState
    from skerry.runtime.checkpointing.receipt_and_checkpoint_writer import Recorder
    from skerry.runtime.checkpointing.replica_position_in_log import RoundFacts
    from skerry.runtime.log.records import Scope
    from skerry.runtime.training.current_round import CurrentRound
    from skerry.runtime.training.open_session import Session
    from skerry.runtime.training.resumable_round_store import PartialRoundStore
    from skerry.runtime.training.trainer_interface import Trainer

# An empty step takes some 50 us; a hook that has not fired after so many never will.
_EMPTY_STEPS = 100_000
# How long a boundary waits for a store that is away; a retry or two.
_PATIENCE_S = 2.0


class LogFollower:
    """Follows the log for one replica. For the thread that trains.

    position: rounds closed so far, as this replica has applied them. following: it is catching up. idle: inner steps
    are empty, whether it follows or ends a round early. nonfinite: tensors were not finite; fragments that are not
    exchanged yet may hold the same, until the next boundary. rescue: writes extra checkpoints for other replicas.
    """

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        recorder: Recorder,
        private: PrivateState,
        unfinished: PartialRoundStore,
        *,
        init_sync: bool,
        patience_s: float | None = None,
    ) -> None:
        """init_sync: the first replica shares its initial weights (checkpoint 0), and all start from them.

        patience_s: how long to wait for a checkpoint that leads past a round that cannot be followed; None: no limit.
        """
        self.position = LogPosition(round=0, previous=GENESIS, members=(), batches=0, work=0.0)
        self.following = False
        self.idle = False
        self.joined = False
        self.trainer = trainer
        self.private = private
        self.unfinished = unfinished
        self.recorder = recorder
        self._has_resumed = False
        self._local_state_round = -1
        self._session = session
        self._impatient = RunLog(session.store.with_deadline(_PATIENCE_S, session.stop), session.log.run)
        self._train = session.group.channel("train")
        self._init_sync = init_sync
        self._patience_s = patience_s
        self._unreadable: UnreadableRound | None = None
        self.rescue = RescueCheckpoints(session, recorder, trainer)
        self._roll_ups = RollUpWriter(
            session.log, session.presence.slot, session.clock, session.executor("roll-up"), session.roll_ups
        )
        self._mirrors = MirrorKeeper(
            session.log, session.presence, session.watch, session.clock, session.open_mirror, session.executor
        )
        self.nonfinite = False

    @property
    def scope(self) -> Scope:
        """The state that replicas share between rounds, before the next inner step."""
        return "fragments" if self.trainer.fragments else "average"

    @property
    def quarantine(self) -> str | None:
        """The reason for which this replica must not contribute; None if it may."""
        return self.recorder.quarantine

    def move_to(self, position: LogPosition) -> None:
        """Set the position after a round was closed or a checkpoint loaded, and send it in the heartbeat."""
        self.position = position
        self._unreadable = None
        phase = "joining" if self.following or not self.joined else "train"
        self._session.presence.enter(phase, round_number=position.round)

    def is_behind(self) -> bool:
        """The log has rounds that this replica has not applied. One listing."""
        return self._head_and_stop(self.position.round)[0] > self.position.round

    def failed(self, error: Exception | None) -> bool:
        """Handle a failed round. True if the others have closed it and this replica cannot follow it.

        It waits for a checkpoint then, at the next boundary. Rank 0's error decides for all ranks.
        """

        def judge() -> tuple[bool, bool]:
            barred = self.following or (isinstance(error, Corrupt) and self._head() > self.position.round)
            return isinstance(error, TimeoutError), barred

        stuck, barred = self._train.broadcast_from_rank0("judge a failed round", judge)
        self.rescue.stuck |= stuck
        if barred:
            self._unreadable = self._unreadable or UnreadableRound(
                self._session, self.recorder, self.position.round, self._patience_s
            )
            self._unreadable.met(error)
        return barred

    def record(self, facts: RoundFacts | None, scope: Scope, checkpoint_every: int) -> None:
        """Write receipt, checkpoint and private state of the closed round in the background. State must be stable.

        After the last round of the run: stay while others may need this replica to come as far.
        """
        if facts is None:
            return
        every = None if self.following else checkpoint_every
        self.recorder.record(self.position, facts, scope, every)
        self.private.record(self.position, every, near=self.recorder.near_round == self.position.round)
        closed, members = self.position.round, self.position.members
        is_over = self._session.log.run.is_over(closed, self.position.work)
        if every is not None and self._train.rank == 0:
            self._roll_ups.note_closed(self.position)
            self._mirrors.note_closed(closed, members, every, self.recorder.saving, is_over=is_over)
        if is_over:
            self.rescue.wait_for_others(self.position)

    def enter_boundary(self, *, jump: bool) -> None:
        """Once per boundary: join if new, heal if this replica differs, or load a newer checkpoint (`jump`).

        Raises Diverged if the log or its checkpoints are of another model, Corrupt if no checkpoint can be read.
        """
        if not self.joined:
            self._join()
            self.joined = True
        # Not in mid-round: the rest of its inner steps would be empty, and be contributed to the round it jumps to.
        elif not self.following and (healthy := self.recorder.heal(self.position)) is not None:
            self.move_to(healthy)
            self.trainer.take_shared()
        elif jump and not self.following and self._may_jump() and self.is_behind():
            self._pass_by()
        if self.nonfinite:
            self.trainer.take_shared()
            self.nonfinite = False
        self.rescue.help_peers_behind(self.position)

    def _may_jump(self) -> bool:
        """False while rounds are followed for a state that is surely right, unless one cannot be followed."""
        return self._unreadable is not None or self.position.round >= self.recorder.follows_to

    def _jump(self) -> bool:
        """Load a newer checkpoint, if one exists and can be read."""
        checkpoints = self.recorder.checkpoints() if self.recorder.has_state else []
        if not checkpoints or checkpoints[0] <= self.position.round:
            return False
        try:
            self.move_to(self.recorder.load_newest(beyond=self.position.round))
        except Corrupt:  # logged by the recorder; the log may still be followed
            return False
        self.trainer.take_shared()
        return True

    def follow(self, failures: Callable[[], int]) -> bool:
        """Take empty inner steps until the head of the log. failures: returns how many rounds have failed.

        False if a stop ended it before. Raises Invalid for an optimizer whose step needs a closure, or if no wrapper's
        hooks are active, RuntimeError if a round cannot be followed and no checkpoint beyond it appears.
        """
        self.following = True
        try:
            with self._empty_steps() as step:
                return self._follow_to_head(step, failures)
        finally:
            self.following = False

    def end_round(self, failures: Callable[[], int]) -> None:
        """Take empty inner steps until the current round is closed or has failed."""
        with self._empty_steps() as step:
            self._follow_one(step, failures)

    def save_unfinished(self, current: CurrentRound, *, now: bool = False) -> None:
        """Save the progress of the current round, if it is time; now: at once. Between two inner steps."""
        if not self.trainer.fragments or current.exchanges or self.idle:
            return
        if not self.unfinished.is_due(self.position.round, current.inner_steps, now=now):
            return
        try:
            partial = PartialRound(
                round=self.position.round,
                previous=self.position.previous,
                inner_steps=current.inner_steps,
                tokens=current.tokens,
                seconds=self._session.clock.now() - current.since,
                deltas=self.trainer.progress(),
                private=self.private.capture(),
            )
        except Invalid as error:
            fields = {"round": self.position.round, "slot": self._session.presence.slot, "error": str(error)}
            emit("unfinished_round_failed", fields, level=logging.WARNING, error=error)
            partial = None
        self.unfinished.save(self.position, partial, wait=now)

    def resume(self) -> PartialRound | None:
        """Resume, once and at the head, the progress that the slot's last incarnation saved.

        It may be of an earlier round than the current one; then only fragments that are not exchanged yet are resumed.
        """
        if self._has_resumed or not self.trainer.fragments:
            return None
        self._has_resumed = True
        partial = self.unfinished.load()
        if partial is None:
            return None
        fields = {"round": partial.round, "slot": self._session.presence.slot, "steps": partial.inner_steps}
        head = self.position.round
        open_fragments = [fragment for fragment in range(len(partial.deltas)) if partial.is_open(fragment, head)]
        why = self._why_useless(partial, open_fragments)
        # The data and the inner optimizer are as far as this round even if all of its fragments are exchanged.
        is_known = self.trainer.fits(partial.deltas) and partial.round <= head
        if is_known and partial.round >= self._local_state_round:
            self.private.restore(partial.round, partial.private)
        if why is not None:
            emit("unfinished_round_dropped", {**fields, "head": head, "why": why}, level=logging.WARNING)
            return None
        for fragment in open_fragments:
            self.trainer.put_back(fragment, partial.deltas[fragment])
        if partial.round < head:
            emit("unfinished_round_resumed", {**fields, "head": head})
            return partial
        with self._empty_steps() as step:  # torchft counts its inner steps by these
            for _ in range(partial.inner_steps):
                step()
        emit("unfinished_round_resumed", fields)
        return partial

    def _why_useless(self, partial: PartialRound, open_fragments: Sequence[int]) -> str | None:
        """The reason for which the progress cannot be resumed; None if it can."""
        if not self.trainer.fits(partial.deltas):
            return "it is of another model"
        if partial.round > self.position.round:  # following ended before its time
            return "the log was not followed to it"
        return None if open_fragments else "the log is past it"

    @contextmanager
    def _empty_steps(self) -> Generator[Callable[[], object]]:
        self.idle = True
        try:
            with self.trainer.empty_steps() as step:
                yield step
        finally:
            self.idle = False

    def _follow_to_head(self, step: Callable[[], object], failures: Callable[[], int]) -> bool:
        head, stop = self._head_and_stop(self.position.round)
        while self.position.round < head and not stop:
            before = failures()
            self._follow_one(step, failures)
            # What cannot be followed (a damaged payload) may be passed by a checkpoint, now or a little later.
            if failures() > before:
                self._pass_by()
            head, stop = self._head_and_stop(head)
        return not stop

    def _pass_by(self) -> None:
        """Load a checkpoint beyond this round, if one exists. If the round cannot be followed, wait for one."""
        if self._unreadable is None or self._unreadable.wait_for_way(self._impatient.store):
            self._jump()

    def close(self, *, wait: bool) -> None:
        """Stop the background writers. wait: until everything submitted is written."""
        self.recorder.close(wait=wait)
        self.private.close(wait=wait)
        self.unfinished.close(wait=wait)
        self._roll_ups.close(wait=wait)
        is_over = self._session.log.run.is_over(self.position.round, self.position.work)
        self._mirrors.close(wait=wait, is_over=is_over and self._train.rank == 0)

    def _head_and_stop(self, head: int) -> tuple[int, bool]:
        """Return the head of the log (listed again once `head` is reached), and whether to stop. Rank 0 looks."""

        def observe() -> tuple[int, bool]:
            return (head if self.position.round < head else self._head()), self._session.stop.is_set()

        return self._train.broadcast_from_rank0("look at the log", observe)

    def _head(self) -> int:
        """Return the first round that is not closed. One listing."""
        try:
            return self._impatient.find_head(self.position.round)
        except Retryable:  # an outage: training goes on to the sync point, which can wait
            return self.position.round

    def _join(self) -> None:
        """Load the shared initial weights or the newest checkpoint, and the private state."""
        initial = self._session.log.run.init_from
        if initial is not None and not self.recorder.has_state:
            raise Invalid(
                f"the run starts from {initial.uri} (init_from), and the script has registered no state to put that "
                "model into: give the manager state_dict and load_state_dict"
            )
        if self.recorder.has_state:
            if not self.recorder.checkpoints():
                if initial is not None:
                    self.recorder.start_from(initial)
                self.recorder.save_now(self.position)  # checkpoint 0, unless another replica was first
            if self._init_sync or initial is not None or any(self.recorder.checkpoints()):
                self.move_to(self.recorder.load_newest())
                self.trainer.take_shared()
        private_round = self.private.load_newest()
        self._local_state_round = -1 if private_round is None else private_round

    def _follow_one(self, step: Callable[[], object], failures: Callable[[], int]) -> None:
        round_number, before = self.position.round, failures()
        for _ in range(_EMPTY_STEPS):
            step()
            if self.position.round > round_number or failures() > before:
                return
        raise Invalid(
            "empty inner steps do not advance the round: call catch_up inside `with DiLoCo(...)` or "
            "`with LocalSGD(...)`, with the optimizer that was given to it"
        )


def check_loaded(position: LogPosition, step: int) -> None:
    """Raises Diverged if a user's own checkpoint is of another round than the log."""
    if step != position.round:
        raise Diverged(
            f"loaded state is of another round than the log: round={step} log={position.round}; "
            "remove the manager's state from your own checkpoints"
        )
