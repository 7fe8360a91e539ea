"""`ObjectStoreManager`: torchft's Manager surface over the log in the bucket.

Translates the calls of torchft's wrappers into the replica's `training.lifecycle`. Composes, never subclasses.
Errors inside a round do not raise into the training loop: they are logged, `should_commit()` returns False, and
`max_retries` counts them. Errors that must stop a replica (Fenced, Diverged, Invalid, RunFinished, Unauthorized) are
raised by `should_commit`.
The deliberate differences to torchft are listed in runtime/README.md.
"""

from __future__ import annotations

import os
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.distributed.distributed_c10d import ProcessGroup, ReduceOp
from torchft.futures import future_timeout
from torchft.manager import ExceptionWithTraceback, WorldSizeMode

from skerry.runtime import contract
from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.checkpointing.shared_state import SharedState
from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.log.installed_versions import read_software
from skerry.runtime.log.log import read_run
from skerry.runtime.log.records import Telemetry
from skerry.runtime.ranks.interface import read_address
from skerry.runtime.ranks.tcpstore import join_group
from skerry.runtime.replication.local_and_peer_checkpoints import LocalCheckpoints, LocalCopies
from skerry.runtime.store import open_store
from skerry.runtime.structured_logging import log_to_stderr
from skerry.runtime.training.allreduce_future import ExchangeWork, op_of
from skerry.runtime.training.assemble_lifecycle import lifecycle_of
from skerry.runtime.training.catch_up_with_log import check_loaded
from skerry.runtime.training.exit_hook import forget, leave_at_process_end
from skerry.runtime.training.open_session import SessionOptions, join_run, successor_lives
from skerry.runtime.training.round_runner import seconds_of
from skerry.runtime.training.torchft_fragments import parameters_behind, save_without_copies
from skerry.runtime.training.torchft_trainer import TorchTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch
    from torch.distributed.distributed_c10d import Work

    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.log.records import Place, Reduction
    from skerry.runtime.log.run_record import CodecSetting, Run
    from skerry.runtime.protocol.quorum import Grace
    from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
    from skerry.runtime.ranks.interface import Address
    from skerry.runtime.store import Store

T = TypeVar("T")


class ObjectStoreManager:
    """A drop-in for `torchft.manager.Manager` whose replicas share only a bucket.

    Takes torchft's arguments in torchft's order, so its positional call works: a process group in place of the store is
    no store. store: the run's own prefix, as a URI or an open Store. replica_id: the slot, the same after a restart;
    None takes SKERRY_SLOT, and without it makes a new one: after a restart the replica is then another one.
    Without a store, both are those of the contract (SKERRY_RUN, SKERRY_SLOT), which `skerry up` sets. Then replica_id
    is ignored, because torchft's is the same for all replicas or a new one at each start; and the settings of the run
    replace min_replica_size, codec, reduction, checkpoint_every, retention, max_norm and keep_unfinished.
    min_replica_size: contributions without which no round is decided. timeout: how long one exchange may wait.
    codec: how tensors travel (see `log.records.Codec`), or "auto". checkpoint_every: rounds between checkpoints.
    retention: which checkpoints stay. max_norm: a contribution of a larger L2 norm is not made; None has no limit.
    keep_unfinished: how often to save the current round, for the next incarnation to resume; also saved at a stop.
    None saves nothing within a round. heartbeat_interval: None chooses by the store.
    local_copies: where this replica keeps copies of its state on its machines, so that a restart needs the bucket less;
    None for what run.json says (`peers`).
    reduction: see `log.records.Reduction`; "auto" chooses by bytes and links. place: the machine, for people.
    rank, world_size, store_addr, store_port: this process among the ranks of the replica, and their TCPStore; None
    takes torchrun's variables, and one rank where there are none. connect_timeout: to that store.
    Ignored, so that a torchft script needs one changed line: pg, lighthouse_addr, port, hostname, checkpoint_transport,
    quorum_timeout, quorum_retries (nothing here blocks on a quorum).
    Writes the events of the runtime to stderr, unless the script has configured logging itself.
    Raises Invalid for what cannot work, and if the store ignores conditions.
    """

    def __init__(
        self,
        store: str | Store | ProcessGroup | None = None,
        load_state_dict: Callable[[T], None] | None = None,
        state_dict: Callable[[], T] | None = None,
        min_replica_size: int | None = None,
        use_async_quorum: bool = False,  # noqa: FBT001, FBT002  torchft's signature
        timeout: timedelta = timedelta(minutes=30),
        quorum_timeout: timedelta = timedelta(minutes=30),
        connect_timeout: timedelta = timedelta(seconds=60),
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta | None = None,
        checkpoint_transport: object = None,
        init_sync: bool = True,  # noqa: FBT001, FBT002  torchft's signature
        max_retries: int | None = None,
        quorum_retries: int = 0,
        *,
        pg: object = None,
        codec: CodecSetting = "none",
        reduction: Literal["auto"] | Reduction = "auto",
        grace: Grace | None = None,
        checkpoint_every: int = 1,
        retention: Retention | None = None,
        max_norm: float | None = None,
        keep_unfinished: timedelta | None = None,
        place: Place | None = None,
        local_copies: LocalCopies | None = None,
        clock: Clock | None = None,
    ) -> None:
        del quorum_timeout, lighthouse_addr, port, hostname, checkpoint_transport, pg, quorum_retries
        if store is None or isinstance(store, ProcessGroup):
            store, replica_id, run = _from_contract()
            min_replica_size, codec, max_norm = run.min_replicas, run.codec, run.max_norm
            reduction = run.reduction or "auto"
            checkpoint_every, retention, keep_unfinished = (
                run.checkpoint_every,
                retention_of(run),
                keep_unfinished_of(run),
            )
        if min_replica_size is None:
            raise Invalid("min_replica_size is needed: the contributions without which no round is decided")
        self._clock = clock or SystemClock()
        address = read_address(os.environ, rank, world_size, store_addr, store_port)
        replica_id = replica_id or _new_slot(address, self._clock)
        terms = SessionOptions(
            min_replicas=min_replica_size,
            deadline_s=timeout.total_seconds(),
            heartbeat_s=None if heartbeat_interval is None else heartbeat_interval.total_seconds(),
            grace=grace,
            spares=world_size_mode == WorldSizeMode.FIXED_WITH_SPARES,
            codec=codec,
            reduction=None if reduction == "auto" else reduction,
            checkpoint_every=checkpoint_every,
            retention=retention or Retention(),
            max_norm=max_norm,
            place=place,
            software=read_software(os.environ),
            is_watched=contract.FAILOVER in os.environ,
        )
        log_to_stderr(replica_id if address is None else f"{replica_id}/{address.rank}")
        group = join_group(address, self._clock, timeout.total_seconds(), connect_timeout.total_seconds())
        self.session = join_run(store, replica_id, terms, self._clock, group)
        run = self.session.log.run
        local_copies = local_copies or LocalCopies.of_run(run)
        self._train = group.channel("train")
        self._state = SharedState(parameters_behind)
        self._trainer = TorchTrainer(self._state)
        self.lifecycle = lifecycle_of(
            self.session,
            self._trainer,
            self._state,
            checkpoint_every=checkpoint_every,
            init_sync=init_sync,
            max_retries=max_retries,
            unfinished_every_s=seconds_of(keep_unfinished),
            ends_early=not terms.spares,
            near=None
            if local_copies is None
            else LocalCheckpoints.open(local_copies, run.nonce, replica_id, self._clock, group),
        )
        self._use_async_quorum = use_async_quorum
        self._timeout = timeout
        self._started = False
        self._errored: ExceptionWithTraceback | None = None
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self.session.presence.start()
        leave_at_process_end(self.lifecycle)

    # State that consumers share.

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Share a piece of state under `key`: it is in checkpoints, and loaded when joining."""
        save = save_without_copies(load_state_dict, state_dict)
        self._state.register(key, load_state_dict, save)  # pyright: ignore[reportArgumentType]  T is the caller's own

    def set_state_dict_fns(self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]) -> None:
        """Deprecated in torchft: the name for registering under one fixed key."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def register_private_state(self, key: str, load: Callable[[Any], object], save: Callable[[], object]) -> None:
        """Keep what only this replica has (inner optimizer, data position, random states) for its next incarnation.

        Saved with the round's checkpoint under this slot, loaded at the join. Raises Invalid if the key is taken, or
        after the join.
        """
        self.lifecycle.log_follower.private.register(key, load, save)

    def state_dict(self) -> dict[str, int]:
        """This replica's position in the log, for a user's own checkpoint."""
        return {"step": self._position.round, "batches_committed": self._position.batches}

    def _manager_state_dict(self) -> dict[str, object]:
        """The registered state and this replica's position. torchft's own trainers and test helpers read it."""
        return {"user": self._state.values(), "torchft": self.state_dict()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Accepted for torchft's signature. Raises Diverged if it is of another round than the log gave us."""
        if self.lifecycle.log_follower.joined:
            check_loaded(self._position, state_dict["step"])

    def disallow_state_dict_read(self) -> None:
        """Called before an inner step: state of the last round is stable now, and a batch of allreduces is over."""
        self.lifecycle.before_step()

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
        self._train.reduce_on_rank0("start_quorum", lambda: None, lambda _: None, timeout_s=seconds_of(timeout))
        self.lifecycle.begin_round()
        self._started = True

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

        tensor: any shape; must not change until the work is waited for. should_quantize: send int8, if all tensors of
        the exchange ask for it and the manager's codec does not quantize itself. Raises Invalid for an average of
        integers, an expanded tensor, one that shares memory with another of the exchange, an operation that is not AVG,
        SUM, MAX or MIN, and a call between should_commit and the next start_quorum: a restarted replica could never
        follow such a round.
        """
        op = op_of(tensor, reduce_op)
        self.wait_quorum()
        if not self.lifecycle.in_exchange:
            raise Invalid(
                "allreduce between should_commit and start_quorum belongs to no round; "
                "average metrics with skerry.runtime.allreduce.ObjectStoreAllReduce"
            )
        rounds = self.lifecycle.rounds
        exchange = self.lifecycle.add(tensor, op, quantize=should_quantize)
        return ExchangeWork(
            tensor, lambda: rounds.finish(exchange) is not None, lambda error: rounds.fail(exchange, error)
        )

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Close the round: True if this replica holds every average of it, and then `current_step` has grown.

        False is no veto: the round may be closed with this slot's contribution by others, and is then followed. After
        an error in a round of several exchanges only the others can know that it is complete (decision 0002).
        Raises RuntimeError after max_retries failures in a row, and what must stop a replica. timeout: for the other
        ranks of this replica to come. All ranks return the same.
        """
        return self.lifecycle.close_round(timeout)

    def catch_up(self, inner_optimizer: torch.optim.Optimizer) -> int:
        """Join the run, and follow the log to its head with empty inner steps. Returns how many rounds were followed.

        Call it inside the DiLoCo or LocalSGD context, before the forward pass: once at the start, or at the top of
        every inner step (inside a round it costs one look per heartbeat, at a boundary one request). A round that the
        others wait for is contributed here with what there is of it, and closed. Raises Invalid for an optimizer whose
        step needs a closure, or if no wrapper's hooks are active.
        """
        self._trainer.use(inner_optimizer)
        return self.lifecycle.catch_up()

    # Errors.

    def report_error(self, e: Exception) -> None:
        """Remember an error of this round. Before the upload it makes this replica abstain; later it changes little."""
        self.lifecycle.rounds.report_error(e)

    def errored(self) -> ExceptionWithTraceback | None:
        """The error of this round, if there is one."""
        error = self.lifecycle.rounds.errored
        if error is None:
            return None
        if self._errored is None or self._errored.original_exception is not error:
            self._errored = ExceptionWithTraceback(error)
            self._errored.stack_trace = "".join(traceback.format_exception(error))
        return self._errored

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
    def _position(self) -> LogPosition:
        return self.lifecycle.position

    @property
    def finished(self) -> bool:
        """All rounds of the run are closed."""
        return self.lifecycle.finished

    @property
    def run(self) -> Run:
        """The run's own record."""
        return self.session.log.run

    @property
    def presence(self) -> Presence:
        """This incarnation; callers may report through its heartbeat."""
        return self.session.presence

    @property
    def _pg(self) -> object:
        raise Invalid(
            "torchft's ManagedProcessGroup divides by size() before the members are known, which would be wrong here; "
            "use manager.allreduce"
        )

    def current_step(self) -> int:
        """Closed rounds: the number of the round being trained."""
        return self._position.round

    @property
    def inner_steps(self) -> int:
        """Inner steps of the current round, including those resumed from an earlier incarnation."""
        return self.lifecycle.rounds.round.inner_steps

    def batches_committed(self) -> int:
        """Sum of the member counts of all closed rounds; the same on every replica."""
        return self._position.batches

    def num_participants(self) -> int:
        """Members of the last closed round; before the first, the replicas that are seen alive (never 0)."""
        return len(self.lifecycle.members) if self._started else 0

    def participating_rank(self) -> int | None:
        """This slot's place among them in slot order; None if it is not one of them."""
        members = self.lifecycle.members if self._started else ()
        return members.index(self.session.presence.slot) if self.session.presence.slot in members else None

    def is_participating(self) -> bool:
        """This slot is one of the last round's members."""
        return self.participating_rank() is not None

    # The end.

    def request_stop(self) -> None:
        """From any thread or signal handler: end all waiting. The contribution in flight stays valid."""
        self.session.stop.set()
        self.session.group.request_stop()

    def is_succeeded(self) -> bool:
        """After Fenced: whether the incarnation that replaced this one lives; else the slot is empty.

        Watches its heartbeat, as long as a dead one is waited for. Every rank must ask. Raises Interrupted on a stop.
        """
        return successor_lives(self.session)

    def any_rank(self, value: bool) -> bool:  # noqa: FBT001  the value is the whole message
        """True if any rank of this replica passes True; every rank must call. Free for a replica of one rank."""
        return self._train.reduce_on_rank0("any rank", lambda: value, any)

    @property
    def rank(self) -> int:
        """This process among the ranks of its replica; rank 0 represents it in the log."""
        return self._train.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of this replica."""
        return self._train.size

    def count_tokens(self, tokens: int) -> None:
        """Add to what this replica trains on with its next inner step: its weight, if the run weighs by tokens.

        Raises Invalid for a negative number.
        """
        if tokens < 0:
            raise Invalid(f"cannot count a negative number of tokens: tokens={tokens}")
        self.lifecycle.rounds.round.count_tokens(tokens)

    def report_metrics(self, values: Mapping[str, float]) -> None:
        """Take in values of one inner step; the round's record keeps their means. Raises Invalid for too many names."""
        self.lifecycle.rounds.round.telemetry.report(values)

    def unrecorded_metrics(self) -> dict[str, float]:
        """The means over all ranks of what was reported in the current round; after the last no contribution has them.

        Every rank must call. Free for a replica of one rank.
        """
        own = Telemetry(metrics=self.lifecycle.rounds.round.telemetry.metrics)
        whole = self._train.reduce_on_rank0("metrics", lambda: own, Telemetry.of_ranks, Telemetry)
        return {} if whole is None else whole.metrics

    def evaluating(self) -> AbstractContextManager[None]:
        """Within it nothing is trained: its time counts neither for this replica's pace nor for its round."""
        return self.lifecycle.evaluating()

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Within it DiLoCo's parameters are the shared ones; after it they are this replica's own again."""
        return self._trainer.shared_parameters()

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002  torchft's signature
        """Write what is due, send the last heartbeat and stop the threads. Idempotent.

        After an exception no state is written. A replica that ends without an error has finished, and the others do not
        wait for it. One that was stopped or failed may come back.
        """
        try:
            self.lifecycle.finish(wait=wait)
        finally:
            forget(self.lifecycle)


def retention_of(run: Run) -> Retention:
    """The retention of checkpoints that the run asks for."""
    return Retention(last=run.keep_checkpoints, every=run.keep_every)


def keep_unfinished_of(run: Run) -> timedelta | None:
    """The time between two saves of a current round in this run; None: nothing is saved within a round."""
    return None if run.keep_unfinished_s is None else timedelta(seconds=run.keep_unfinished_s)


def _new_slot(address: Address | None, clock: Clock) -> str:
    """The slot of a replica without replica_id. Raises Invalid for several ranks, which would not agree on it."""
    if slot := os.environ.get(contract.SLOT):
        return slot
    if address is not None:
        raise Invalid("replica_id is needed for several ranks, the same on all of them and after a restart")
    return f"replica-{clock.nonce()[:12]}"


def _from_contract() -> tuple[Store, str, Run]:
    """The store, slot and run of the replica that this process is. Raises Invalid if it is none."""
    settings = contract.read(os.environ)
    store = open_store(settings.run_uri)
    run = read_run(store)
    if run is None:
        raise Invalid(f"no run under {settings.run_uri}: start it with `skerry up`")
    return store, settings.slot, run
