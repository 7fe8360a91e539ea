"""`ObjectStoreManager`: torchft's Manager surface over the log in the bucket.

Thin: what it owns is when a burst ends and when state is stable; rounds are `conduct`, exchanges `averaging`, joining
and following `course`, the protocol `exchange`. Composes, never subclasses.
Errors inside a round do not raise into the training loop: they are kept, logged, and surface in `should_commit()`
being False and in `max_retries`. What must stop a replica (Fenced, Diverged, Invalid, RunFinished, Unauthorized) does
raise, from `should_commit`.
The deliberate differences to torchft are listed in runtime/README.md.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.distributed.distributed_c10d import ReduceOp
from torchft.futures import future_timeout
from torchft.manager import ExceptionWithTraceback, WorldSizeMode

from skerry.runtime.carry import Carry
from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.conduct import Conduct, seconds_of
from skerry.runtime.course import Course, check_loaded, check_optimizer
from skerry.runtime.early import Lookout
from skerry.runtime.errors import Invalid, RunFinished
from skerry.runtime.events import emit
from skerry.runtime.garbage import Retention
from skerry.runtime.keys import slot_order
from skerry.runtime.ranks import Nothing, RankLost, address_of
from skerry.runtime.records import Record
from skerry.runtime.seat import Terms, successor_lives, take_seat
from skerry.runtime.several import join_group

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed.distributed_c10d import Work

    from skerry.runtime.codec.layout import Codec, Op
    from skerry.runtime.membership import Presence
    from skerry.runtime.recording import Standing
    from skerry.runtime.records import Run, Scope
    from skerry.runtime.rounds import Grace
    from skerry.runtime.store import Store

T = TypeVar("T")

# In exchange timeouts: who stands beyond a round that cannot be followed leads past it once its own round has failed.
_PATIENCE = 2.0

_OPS: dict[Any, Op] = {
    ReduceOp.AVG: "avg",
    ReduceOp.SUM: "sum",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
}


class _Slots(Record):
    """Some replicas."""

    slots: tuple[str, ...]


class _Flag(Record):
    """Yes or no."""

    value: bool


class ObjectStoreManager:
    """A drop-in for `torchft.manager.Manager` whose replicas share nothing but a bucket.

    store: the run's own prefix, as a URI or an open Store. replica_id: the slot; it must be the same after a restart.
    min_replica_size: contributions without which no round is decided. timeout: how long one exchange may wait.
    codec: "none" (tensors travel as they are) or "bf16". checkpoint_every: rounds between checkpoints.
    retention: which checkpoints stay. max_norm: a contribution of a larger L2 norm is not offered; None offers all.
    keep_unfinished: how often to save the round at hand, for the next incarnation to go on with; also saved at a stop.
    None saves nothing within a round. heartbeat_interval: None chooses by the store.
    reduction: "auto" is all-gather in this version.
    rank, world_size, store_addr, store_port: this process among the ranks of the replica, and their TCPStore; None
    takes torchrun's variables, and one rank where there are none. connect_timeout: to that store.
    Ignored, so that a torchft script needs one changed line: pg, lighthouse_addr, port, hostname, checkpoint_transport,
    quorum_timeout, quorum_retries (nothing here blocks on a quorum).
    Raises Invalid for what cannot work, and if the store ignores conditions.
    """

    def __init__(
        self,
        store: str | Store,
        *,
        replica_id: str | None,
        min_replica_size: int,
        load_state_dict: Callable[[T], None] | None = None,
        state_dict: Callable[[], T] | None = None,
        use_async_quorum: bool = False,
        timeout: timedelta = timedelta(minutes=30),
        quorum_timeout: timedelta = timedelta(minutes=30),
        connect_timeout: timedelta = timedelta(seconds=60),
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta | None = None,
        checkpoint_transport: object = None,
        pg: object = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
        codec: Codec = "none",
        reduction: Literal["auto", "all_gather"] = "auto",
        grace: Grace | None = None,
        checkpoint_every: int = 1,
        retention: Retention | None = None,
        max_norm: float | None = None,
        keep_unfinished: timedelta | None = None,
        clock: Clock | None = None,
    ) -> None:
        del quorum_timeout, lighthouse_addr, port, hostname, checkpoint_transport, pg, quorum_retries, reduction
        if not replica_id:
            raise Invalid("replica_id is needed, the same after a restart: it names the slot of this replica")
        terms = Terms(
            min_replicas=min_replica_size,
            deadline_s=timeout.total_seconds(),
            heartbeat_s=None if heartbeat_interval is None else heartbeat_interval.total_seconds(),
            grace=grace,
            spares=world_size_mode == WorldSizeMode.FIXED_WITH_SPARES,
            codec=codec,
            checkpoint_every=checkpoint_every,
            retention=retention or Retention(),
            max_norm=max_norm,
        )
        self._clock = clock or SystemClock()
        address = address_of(os.environ, rank, world_size, store_addr, store_port)
        group = join_group(address, self._clock, timeout.total_seconds(), connect_timeout.total_seconds())
        self._seat = take_seat(store, replica_id, terms, self._clock, group)
        self._train = group.line("train")
        self._journal = self._seat.journal
        self._presence = self._seat.presence
        patience_s = None if max_retries is None else _PATIENCE * timeout.total_seconds()
        self._course = Course(
            self._seat,
            init_sync=init_sync,
            patience_s=patience_s,
            unfinished_every_s=seconds_of(keep_unfinished),
        )
        self._codec: Codec = codec
        self._state = self._course.state
        self._carry = None if terms.spares else Carry()
        self._conduct = Conduct(self._seat, self._course, self._carry, max_retries)
        self._use_async_quorum = use_async_quorum
        self._timeout = timeout
        self._checkpoint_every = checkpoint_every
        self._started = False
        self._in_quorum = False
        self._at_boundary = True
        self._lookout = None if terms.spares else Lookout(self._seat)
        self._live: tuple[str, ...] = ()
        self._closed = False
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._presence.start()

    # State that consumers share.

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Share a piece of state under `key`: it is in checkpoints, and loaded when joining."""
        self._state.register(key, load_state_dict, state_dict)  # pyright: ignore[reportArgumentType]  T is the caller's own

    def set_state_dict_fns(self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]) -> None:
        """Deprecated in torchft: the name for registering under one fixed key."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def register_private_state(self, key: str, load: Callable[[Any], object], save: Callable[[], object]) -> None:
        """Keep what only this replica has (inner optimizer, data position, random states) for its next incarnation.

        Saved with the round's checkpoint under this slot, loaded at the join. Raises Invalid if the key is taken, or
        after the join.
        """
        self._course.private.register(key, load, save)

    def state_dict(self) -> dict[str, int]:
        """Where this replica stands, for a user's own checkpoint."""
        return {"step": self._standing.round, "batches_committed": self._standing.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Accepted for torchft's signature. Raises Diverged if it is of another round than the log gave us."""
        if self._course.joined:
            check_loaded(self._standing, state_dict["step"])

    def disallow_state_dict_read(self) -> None:
        """Called before an inner step: state of the last round is stable now, and a burst of allreduces is over."""
        self._boundary(self._course.scope)
        self._conduct.round.count_step(idle=self._course.idle)
        self._conduct.flush()

    def allow_state_dict_read(self) -> None:
        """Called after an inner step. Nothing to do: snapshots are taken at boundaries only."""

    # The round.

    def start_quorum(
        self,
        allow_heal: bool = True,  # noqa: FBT001, FBT002  torchft's signature
        shrink_only: bool = False,  # noqa: FBT001, FBT002
        timeout: timedelta | None = None,
    ) -> None:
        """Begin a round's exchange. Never blocks on other replicas. Raises RunFinished once all rounds are closed.

        timeout: for the other ranks of this replica to come; then it raises RankLost, which is a TimeoutError.
        """
        del allow_heal, shrink_only
        self._train.consult("start_quorum", Nothing, lambda _: Nothing(), Nothing, timeout_s=seconds_of(timeout))
        self._conduct.wait()
        self._boundary("fragments" if self._state.has_fragments else "registered")
        if self.finished:
            raise RunFinished(f"all {self._standing.round} rounds of run {self._journal.run.name} are closed")
        self._conduct.restart()
        self._started = self._in_quorum = True
        if not self._standing.members:
            self._live = self._train.first("who is here", self._look_around, _Slots).slots

    def wait_quorum(self) -> None:
        """Nothing to wait for; start_quorum must have been called."""
        if not self._started:
            raise RuntimeError("must call start_quorum before wait_quorum")

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,  # noqa: FBT001, FBT002  torchft's signature
        reduce_op: Any = ReduceOp.AVG,  # torch gives ReduceOp members no usable type
    ) -> Work:
        """Average `tensor` in place over the round's members. All calls until the first wait travel together.

        tensor: any shape; must not change until the work is waited for. Raises Invalid for an average of integers, an
        operation that is not AVG, SUM, MAX or MIN, should_quantize (choose codec= instead), and a call between
        should_commit and the next start_quorum: a restarted replica could never follow such a round.
        """
        if should_quantize:
            raise Invalid('should_quantize is torchft\'s GPU path; give the manager codec="bf16" instead')
        op = _OPS.get(reduce_op)
        if op is None:
            raise Invalid(f"cannot reduce with {reduce_op}; use AVG, SUM, MAX or MIN")
        if op == "avg" and not tensor.is_floating_point():
            raise Invalid(f"average of {tensor.dtype}: only floating point tensors have one; use SUM")
        self.wait_quorum()
        if not self._in_quorum:
            raise Invalid(
                "allreduce between should_commit and start_quorum belongs to no round; "
                "average metrics with skerry.runtime.allreduce.ObjectStoreAllReduce"
            )
        self._at_boundary = False
        return self._conduct.allreduce(tensor, op)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Close the round: True if this replica holds every average of it, and then `current_step` has grown.

        False is no veto: the round may be closed with this slot's contribution by others, and is then followed. After
        an error in a round of several exchanges only the others can know that it is complete (decision 0002).
        Raises RuntimeError after max_retries failures in a row, and what must stop a replica. timeout: for the other
        ranks of this replica to come. All ranks return the same.
        """
        try:
            return self._conduct.close(timeout)
        finally:
            self._in_quorum, self._at_boundary = False, True

    def catch_up(self, inner_optimizer: torch.optim.Optimizer) -> int:
        """Join the run, and follow the log to its head with empty inner steps. Returns how many rounds were followed.

        Call it inside the DiLoCo or LocalSGD context, before the forward pass: once at the start, or at the top of
        every inner step (inside a round it costs nothing, at a boundary one request). A round that the others wait for
        is contributed here with what there is of it, and closed. Raises Invalid for an optimizer whose step needs a
        closure, or if no wrapper's hooks are active.
        """
        check_optimizer(inner_optimizer)
        if not self._at_boundary and not self._ends_early(inner_optimizer):
            self._course.save_unfinished(self._conduct.round)
            return 0
        followed = self._go_to_head(inner_optimizer)
        # Whoever comes back may be waited for, and need not train another step before it sees that.
        if self._take_up(inner_optimizer) and self._ends_early(inner_optimizer):
            followed += self._go_to_head(inner_optimizer)
        self._presence.enter("train", round_number=self._standing.round)
        return followed

    # Errors.

    def report_error(self, e: Exception) -> None:
        """Remember an error of this round. Before the upload it makes this replica abstain; later it changes little."""
        self._conduct.report_error(e)

    def errored(self) -> ExceptionWithTraceback | None:
        """The error of this round, if there is one."""
        return self._conduct.errored

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """`fut`, or `default` after an error or the timeout, which is then reported."""

        def value(done: torch.futures.Future[T]) -> T:
            try:
                return done.value()
            except Exception as error:  # noqa: BLE001  whatever a user's future raised surfaces in should_commit
                self.report_error(error)
                return default

        return future_timeout(fut, timeout or self._timeout).then(value)

    # Where we are.

    @property
    def _standing(self) -> Standing:
        return self._course.standing

    @property
    def finished(self) -> bool:
        """All rounds of the run are closed."""
        return self._journal.run.is_over(self._standing.round, self._standing.work)

    @property
    def run(self) -> Run:
        """The run's own record."""
        return self._journal.run

    @property
    def presence(self) -> Presence:
        """This incarnation, for those who report through its heartbeat."""
        return self._presence

    @property
    def _pg(self) -> object:
        raise Invalid(
            "torchft's ManagedProcessGroup divides by size() before the members are known, which would be wrong here; "
            "use manager.allreduce"
        )

    def current_step(self) -> int:
        """Closed rounds: the number of the round being trained."""
        return self._standing.round

    @property
    def inner_steps(self) -> int:
        """Inner steps of the round at hand, an earlier incarnation's that this one goes on with included."""
        return self._conduct.round.inner_steps

    def batches_committed(self) -> int:
        """Sum of the member counts of all closed rounds; the same on every replica."""
        return self._standing.batches

    def num_participants(self) -> int:
        """Members of the last closed round; before the first, the replicas that are seen alive (never 0)."""
        return len(self._members()) if self._started else 0

    def participating_rank(self) -> int | None:
        """This slot's place among them in slot order; None if it is not one of them."""
        members = self._members() if self._started else ()
        return members.index(self._presence.slot) if self._presence.slot in members else None

    def is_participating(self) -> bool:
        """This slot is one of the last round's members."""
        return self.participating_rank() is not None

    # The end.

    def request_stop(self) -> None:
        """From any thread or signal handler: end all waiting. The contribution in flight stays valid."""
        self._seat.stop.set()
        self._seat.group.ask_to_stop()

    def is_succeeded(self) -> bool:
        """After Fenced: whether the incarnation that replaced this one lives; else the slot is empty.

        Watches its heartbeat, as long as a dead one is waited for. Every rank must ask. Raises Interrupted on a stop.
        """
        return successor_lives(self._seat)

    def any_rank(self, value: bool) -> bool:  # noqa: FBT001  what is asked is whether one says True
        """Whether any rank of this replica says True; every rank must ask. Free for a replica of one rank."""
        return self._train.consult(
            "any rank",
            lambda: _Flag(value=value),
            lambda all_ranks: _Flag(value=any(one.value for one in all_ranks)),
            _Flag,
        ).value

    @property
    def rank(self) -> int:
        """This process among the ranks of its replica; rank 0 speaks for it."""
        return self._train.rank

    @property
    def world_size(self) -> int:
        """How many ranks this replica has."""
        return self._train.size

    def count_tokens(self, tokens: int) -> None:
        """Add to what this replica trains on with its next inner step: its weight, if the run weighs by tokens."""
        self._conduct.round.count_tokens(tokens)

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002  torchft's signature
        """Write what is due, say good-bye and stop the threads. Idempotent. After an exception nothing is published.

        A replica that ends in peace has finished, and nobody waits for it; one that was stopped or failed may be back.
        """
        if self._closed:
            return
        self._closed = True
        in_peace = sys.exc_info()[0] is None
        try:
            if in_peace and self._at_boundary:
                self._record(self._course.scope)
            elif in_peace and self._seat.stop.is_set():
                self._course.save_unfinished(self._conduct.round, now=True)
        except RankLost:
            in_peace = False
            raise
        finally:  # a rank that is lost must not keep this one's threads
            self._end(in_peace=in_peace, wait=wait)

    def _end(self, *, in_peace: bool, wait: bool) -> None:
        finished = self.finished or (in_peace and not self._seat.stop.is_set())
        self._seat.stop.set()
        self._conduct.shutdown(wait=wait)
        self._course.close(wait=wait)
        self._seat.group.close()
        self._presence.stop("finished" if finished else "left")

    # Boundaries: between a closed round and the next inner step.

    def _boundary(self, scope: Scope, *, jump: bool = True) -> None:
        """Once per round, when state is stable: record it, then settle where this replica stands."""
        if not self._at_boundary:
            return
        self._record(scope)
        sick = self._course.sick
        self._conduct.settled(healed=self._course.settle(jump=jump), sick=sick)
        self._at_boundary = False
        if not self._course.following:
            self._presence.enter("train", round_number=self._standing.round)
            self._conduct.bring_kept()

    def _ends_early(self, inner_optimizer: torch.optim.Optimizer) -> bool:
        """Whether the round at hand is over for this replica before it has taken all inner steps.

        The others have closed it: what was trained is kept. Or they wait, and would not wait long enough: what was
        trained is contributed now. DiLoCo only.
        """
        at_hand, fragments = self._conduct.round, self._state.fragments
        if self._lookout is None or not self._state.has_fragments or at_hand.bursts:
            return False
        early = self._lookout.look(self._standing, at_hand, self._conduct.round_seconds, fragments)
        if early.closed or early.share is None:
            return early.closed
        self._conduct.round.share = early.share
        self._course.end_round(inner_optimizer, lambda: self._conduct.failed)
        return self._at_boundary

    def _go_to_head(self, inner_optimizer: torch.optim.Optimizer) -> int:
        """To the boundary after the last closed round, and through it. Returns how many rounds were followed."""
        self._boundary(self._course.scope, jump=False)
        before = self._standing.round
        behind = self._course.is_behind()
        while behind:
            began = self._standing.round
            self._presence.enter("joining", round_number=began)
            there = self._course.follow(inner_optimizer, lambda: self._conduct.failed)
            if self._train.rank == 0:
                emit("caught_up", {"slot": self._presence.slot, "from_round": began, "round": self._standing.round})
            self._boundary(self._course.scope, jump=False)  # may heal, by a checkpoint that is older than the head
            behind = there and self._course.is_behind()
        return self._standing.round - before

    def _take_up(self, inner_optimizer: torch.optim.Optimizer) -> bool:
        """Once: go on with what the slot's last incarnation had begun. True if that is of the round at hand."""
        taken = self._course.take_up(inner_optimizer)
        if taken is None:
            return False
        begun, late = taken
        at_hand = begun.round == self._standing.round
        self._conduct.take_up(begun, late, self._codec, at_hand=at_hand)
        return at_hand

    def _record(self, scope: Scope) -> None:
        self._course.record(self._conduct.take_facts(), scope, self._checkpoint_every)

    def _members(self) -> tuple[str, ...]:
        return self._standing.members or self._live

    def _look_around(self) -> _Slots:
        """Before the first commit: who is seen alive."""
        self._seat.watch.look()
        live = {
            slot
            for slot, peer in self._seat.watch.peers.items()
            if peer.heartbeat.phase in {"joining", "train", "sync"}
        }
        return _Slots(slots=tuple(sorted(live | {self._presence.slot}, key=slot_order)))
