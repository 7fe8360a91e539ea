"""Puts a replica's lifecycle together from its session, its trainer and its shared state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.runtime.checkpointing.local_state import PrivateState
from skerry.runtime.checkpointing.receipt_and_checkpoint_writer import Recorder
from skerry.runtime.tensors.error_feedback import STATE
from skerry.runtime.training.catch_up_with_log import LogFollower
from skerry.runtime.training.contribute_during_evaluation import Evaluations
from skerry.runtime.training.early_round_end_check import StragglerMonitor
from skerry.runtime.training.lifecycle import Lifecycle
from skerry.runtime.training.resumable_round_store import PartialRoundStore
from skerry.runtime.training.round_runner import RoundRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.checkpointing.local_copies_interface import NearCopies
    from skerry.runtime.checkpointing.shared_state import SharedState
    from skerry.runtime.tensors.tensors_sent_together import TensorBatch
    from skerry.runtime.training.open_session import Session
    from skerry.runtime.training.trainer_interface import Trainer

# How long to wait for a rescue checkpoint, in exchange timeouts: a replica that is ahead writes one only after its own
# round has failed.
_PATIENCE: Final = 2.0


def lifecycle_of(
    session: Session,
    trainer: Trainer,
    state: SharedState,
    *,
    checkpoint_every: int,
    init_sync: bool = True,
    max_retries: int | None = None,
    unfinished_every_s: float | None = None,
    ends_early: bool = True,
    new_batch: Callable[[], TensorBatch] | None = None,
    near: NearCopies | None = None,
) -> Lifecycle:
    """The lifecycle of one replica. For what is not listed here see `LogFollower` and `RoundRunner`.

    unfinished_every_s: seconds between two saves of the current round; None saves nothing within a round.
    ends_early: ends a round when the others wait for it. new_batch: what the tensors of an exchange are put in.
    near: copies of the state on this replica's machines.
    """
    new_batch = new_batch or session.batch
    recorder = Recorder(
        session.log,
        session.presence,
        state,
        session.clock.nonce,
        session.collector,
        session.group,
        session.executor("recorder"),
        near,
    )
    private = PrivateState(session.log, session.presence, session.clock.nonce, session.group, near)
    if session.codec == "sparse":
        feedback = session.averager.feedback
        private.register(STATE, feedback.load_state_dict, feedback.state_dict)
    log_follower = LogFollower(
        session,
        trainer,
        recorder,
        private,
        PartialRoundStore(
            session.log,
            session.presence,
            session.clock,
            session.group,
            unfinished_every_s,
            session.executor("unfinished"),
            near,
        ),
        init_sync=init_sync,
        patience_s=None if max_retries is None else _PATIENCE * session.policy.deadline_s,
    )
    thread = session.executor("exchange")
    rounds = RoundRunner(session, log_follower, thread, new_batch=new_batch, max_retries=max_retries)
    monitor = StragglerMonitor(session) if ends_early else None
    evaluations = Evaluations(session, log_follower, rounds, monitor, thread, new_batch)
    return Lifecycle(session, log_follower, rounds, monitor, evaluations, checkpoint_every=checkpoint_every)
