"""The interface for training scripts: `connect()` returns a Replica with its run, slot, manager and a clean end.

Reads the contract from the environment, once. A SIGTERM ends the script after the current inner step. Every way to end
gives the documented exit code and an outcome record in the bucket, which is the truth about this incarnation. Under
torchrun each rank has a Replica; all end with the same code, and rank 0 writes the record.
"""

from __future__ import annotations

import logging
import operator
import os
import signal
import sys
import threading
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, TypeVar

from skerry.runtime import contract
from skerry.runtime.checkpointing.local_state import load_random_states, random_states
from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import (
    Corrupt,
    Diverged,
    Fenced,
    Invalid,
    Moved,
    Retryable,
    RunFinished,
    SkerryError,
    Unauthorized,
)
from skerry.runtime.failure_text import shortened, text_of_failure
from skerry.runtime.log import files_saved_by_script, keys
from skerry.runtime.log.log import RunLog, read_run
from skerry.runtime.log.records import Outcome, Place
from skerry.runtime.log.setting_changes import RunSettings
from skerry.runtime.manager import ObjectStoreManager, keep_unfinished_of, retention_of
from skerry.runtime.protocol.exchange import Interrupted
from skerry.runtime.ranks.interface import read_address
from skerry.runtime.replica_number_and_share import SlotNumbers
from skerry.runtime.store import open_store
from skerry.runtime.structured_logging import emit, log_to_stderr
from skerry.runtime.training.advance_lr_schedule import advance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import FrameType, TracebackType

    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from skerry.runtime.checkpointing.local_state import Stateful
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.ranks.interface import Address
    from skerry.runtime.replication.local_and_peer_checkpoints import LocalCopies

T = TypeVar("T")
SignalHandler: TypeAlias = "signal.Handlers | Callable[[int, FrameType | None], object] | int | None"
Status: TypeAlias = Literal["done", "retry", "failed", "stopped"]
# Two seconds of the budget are left for the operating system and the container to end.
_STOP_LIMIT_S = contract.STOP_BUDGET_S - 2.0
_STATUS: dict[int, Status] = {ExitCode.RETRY: "retry", ExitCode.PERMANENT: "failed", ExitCode.STOPPED: "stopped"}
_PERMANENT = (Corrupt, Diverged, Fenced, Invalid, Unauthorized)


def connect(environment: Mapping[str, str] | None = None, *, clock: Clock | None = None) -> Replica:
    """Connect this process to its run. Use the replica as a context manager around the training loop.

    environment: the contract's variables. None means the process's own; an error then ends the process with a line on
    stderr and the exit code for its launcher. With an environment given, raises Invalid if it is wrong or if there is
    no run under the prefix, and what the store raises.
    """
    try:
        variables = os.environ if environment is None else environment
        data, place = contract.read_data(variables), Place.of_text(variables.get(contract.PLACE))
        settings, address = contract.read(variables), read_address(variables)
        return Replica(settings, clock or SystemClock(), address, data, place)
    except SkerryError as error:
        if environment is not None:
            raise
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(int(exit_code_of(error))) from error


def exit_code_of(error: Exception) -> ExitCode:
    """The exit code of a process that this error ends: whether its launcher starts it again."""
    return ExitCode.PERMANENT if isinstance(error, _PERMANENT) else ExitCode.RETRY


class _Evaluations:
    """The functions that a script registers to be called after rounds, each with its number of rounds."""

    def __init__(self) -> None:
        self._functions: list[tuple[Callable[[], Mapping[str, float] | None], int]] = []
        self._evaluated = 0

    def add(self, function: Callable[[], Mapping[str, float] | None], every: int) -> None:
        """Raises Invalid unless `every` is at least 1."""
        if every < 1:
            raise Invalid(f"evaluate needs a number of rounds of at least 1: every={every}")
        self._functions.append((function, every))

    def run(self, manager: ObjectStoreManager) -> None:
        """Call those that are due at the begin of this round, once; after the last round of the run all."""
        closed, is_last = manager.current_step(), manager.finished
        if manager.inner_steps or closed in {0, self._evaluated}:
            return
        self._evaluated = closed
        for function in (function for function, every in self._functions if is_last or closed % every == 0):
            with manager.evaluating(), manager.shared_parameters():
                metrics = function()
            manager.report_metrics({name: float(value) for name, value in (metrics or {}).items()})


class Replica(SlotNumbers):
    """One replica of a run, from its start to its outcome."""

    def __init__(
        self,
        settings: contract.Contract,
        clock: Clock,
        address: Address | None = None,
        data: Mapping[str, str] | None = None,
        place: Place | None = None,
    ) -> None:
        """address: of this rank; None for a replica of one rank. data: the spec's, by name. place: of its machine."""
        super().__init__(settings, 0 if address is None else address.rank, 1 if address is None else address.size)
        self._address = address
        log_to_stderr(settings.slot if address is None else f"{settings.slot}/{self.rank}")
        self.data: Mapping[str, str] = dict(data or {})
        self._place = place
        self._clock = clock
        self._store = open_store(settings.run_uri, clock=clock)
        run = read_run(self._store)
        if run is None:
            raise Invalid(f"no run under {settings.run_uri}: start it with `skerry up`, which writes {keys.RUN}")
        self.run: Run = run
        self._rounds = _rounds_of(RunLog(self._store, run))
        self._steps_per_round = max(1, run.sync_every // run.fragments)
        self._stopping = threading.Event()
        self._stop_requested = False
        self._ended = threading.Event()
        self._handlers: dict[signal.Signals, SignalHandler] = {}
        self._step = -1
        self._keeps = False
        self._tokens = 0
        self._started = clock.now()
        self._losses: list[float] = []
        self._evaluations = _Evaluations()
        self._last_metrics: dict[str, float] = {}

    def manager(
        self,
        *,
        state_dict: Callable[[], T] | None = None,
        load_state_dict: Callable[[T], None] | None = None,
        timeout: timedelta = timedelta(minutes=30),
        max_retries: int | None = 3,
        local_copies: LocalCopies | None = None,
    ) -> ObjectStoreManager:
        """Create the manager of this replica with the settings of the run. Call it once.

        timeout: how long an exchange may wait for the other replicas. max_retries: failed rounds in a row after which
        the script ends with exit code 10. local_copies: where to keep copies of the state on this replica's machines.
        """
        if self._manager is not None:
            raise Invalid("a replica has one manager: use the existing one")
        self._manager = ObjectStoreManager(
            self._store,
            replica_id=self.slot,
            min_replica_size=self.run.min_replicas,
            state_dict=state_dict,
            load_state_dict=load_state_dict,
            max_retries=max_retries,
            codec=self.run.codec,
            reduction=self.run.reduction or "auto",
            checkpoint_every=self.run.checkpoint_every,
            max_norm=self.run.max_norm,
            retention=retention_of(self.run),
            keep_unfinished=keep_unfinished_of(self.run),
            timeout=timeout,
            local_copies=local_copies,
            place=self._place,
            clock=self._clock,
            rank=self.rank,
            world_size=self.world_size,
            store_addr=None if self._address is None else self._address.host,
            store_port=None if self._address is None else self._address.port,
        )
        return self._manager

    def keep(self, *, random: bool = False, **own: Stateful) -> None:
        """Retain this replica's own state over a restart: `keep(inner=optimizer, sampler=sampler, random=True)`.

        Saves each object under its name, with the number of the inner step, in the background at rounds with a
        checkpoint; a new incarnation restores them. random: also the random states of torch, numpy and Python. Call it
        after `manager` and before the first step. Raises Invalid for a name in use, or after the first step.
        """
        manager = self._the_manager()
        for name, state in own.items():
            manager.register_private_state(name, state.load_state_dict, state.state_dict)
        if random:
            manager.register_private_state("random states", load_random_states, random_states)
        if not self._keeps:
            manager.register_private_state("inner step", self._resume_after, lambda: self._step)
        self._keeps = True

    @property
    def total_steps(self) -> int | None:
        """Inner steps that the rounds of the run take, for a learning rate schedule; None for a run without end.

        The same for every replica, without the rounds that `faults.make_up` adds. `skerry extend` raises it.
        """
        known = self._rounds if self._manager is None else self._manager.run.rounds
        return None if known is None or self._rounds is None else max(known, self._rounds) * self._steps_per_round

    def steps(self, inner_optimizer: torch.optim.Optimizer, schedule: LRScheduler | None = None) -> Iterator[int]:
        """Iterate over inner step numbers until the run is finished or a stop is requested.

        Before each step the replica follows the log to its head (`catch_up`). Numbers increase; after a restart they
        continue at the run's position, so a script may derive its data position from them. With `keep` they also
        continue after the saved step, if failed rounds took more steps than the run counts.
        schedule: advanced to each step's number, up to `total_steps`, and only here. Keep it with the optimizer.
        """
        manager = self._the_manager()
        while not manager.any_rank(self._stopping.is_set()):
            manager.catch_up(inner_optimizer)
            self._evaluations.run(manager)
            if manager.finished:
                self._last_metrics = manager.unrecorded_metrics()
                return
            self._step = max(self._step + 1, manager.current_step() * self._steps_per_round + manager.inner_steps)
            if schedule is not None:
                advance(schedule, self._step if self.total_steps is None else min(self._step, self.total_steps))
            yield self._step
        self._stopping.set()  # all ranks stop if one was asked to
        self._stop_requested = manager.any_rank(self._stop_requested)

    def evaluating(self) -> AbstractContextManager[None]:
        """Put evaluation, saving, sampling and profiling within it: `with replica.evaluating():`.

        Its time does not make this replica look slow, and the steps that it has taken are contributed in time. The
        others wait no longer than their grace window. Take no inner step within it; enter it on all ranks.
        """
        return self._the_manager().evaluating()

    def evaluate(self, function: Callable[[], Mapping[str, float] | None], *, every: int = 1) -> None:
        """Call `function` on the shared parameters after every so many rounds and after the last, after the commit.

        `steps` calls it before the next inner step; this replica's own parameters are restored after it. What it
        returns, such as {"val_loss": 1.7}, is recorded in the round that begins, or else with this replica's end.
        Call this before the first step, on the replicas that evaluate. Raises Invalid unless `every` is at least 1.
        """
        self._evaluations.add(function, every)

    def log(self, *, loss: float | None = None, tokens: int = 0, **metrics: float) -> None:
        """Report an inner step. The record of the round keeps the means of the loss and of each metric by its name.

        Tokens are weights of the average if the run is configured so. Call it before the optimizer's step (with DDP
        before `backward`), because the last step of a round ends in the exchange that its tokens belong to. Accepts
        numbers of numpy and torch; raises Invalid for other values, and for more than 32 metrics.
        """
        try:
            tokens, loss = operator.index(tokens), None if loss is None else float(loss)
            values = {name: float(value) for name, value in metrics.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise Invalid(
                "log needs a whole number of tokens, a numeric loss and numeric metrics: "
                f"tokens={tokens!r} loss={loss!r} {' '.join(f'{name}={value!r}' for name, value in metrics.items())}"
            ) from error
        manager = self._the_manager()
        manager.count_tokens(tokens)
        self._tokens += tokens
        if loss is not None:
            self._losses = [self._losses[0] if self._losses else loss, loss]
        manager.report_metrics(values if loss is None else values | {"loss": loss})
        seconds = self._clock.now() - self._started
        manager.presence.report(
            inner_step=max(0, self._step),
            loss=loss,
            tokens=self._tokens,
            tokens_per_s=self._tokens / seconds if seconds > 0 else None,
        )

    def save(self, name: str, content: bytes | str | os.PathLike[str]) -> None:
        """Store bytes, or the file at a path, with the run. `skerry artifacts` fetches it, also when the job has ended.

        Call it on one rank, as often as needed: every save is kept, with the number of closed rounds, and the newest is
        fetched by default. Returns when it is stored, so training waits. Raises Invalid for a name that is no plain
        file name, and for a file that cannot be read.
        """
        saved = files_saved_by_script.save(self._store, self.slot, self._the_manager().current_step(), name, content)
        emit("artifact_saved", {"slot": self.slot, "round": saved.round, "name": name, "bytes": saved.size_bytes})

    @property
    def stopping(self) -> bool:
        """A stop was requested; `steps` ends after this inner step."""
        return self._stopping.is_set()

    def request_stop(self, reason: str) -> None:
        """End after this inner step, and waits at once; no launcher restarts it. With torchrun call it on all ranks."""
        if not self._stopping.is_set():
            self._stop_requested = True
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        emit("stop_requested", {"slot": self.slot, "reason": reason})
        # After `_stopping` is set the script may end at any moment, so the manager comes first.
        if self._manager is not None:
            self._manager.request_stop()
        self._stopping.set()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Write the outcome and end by the contract: return if done, otherwise raise SystemExit with the exit code."""
        if isinstance(error, Fenced):
            error = _judge_successor(self._manager, error)
        status, code, reason = _verdict(
            error, self._manager, stopping=self._stopping.is_set(), requested=self._stop_requested
        )
        if isinstance(error, Exception) and not isinstance(error, (Interrupted, RunFinished)):
            traceback.print_exception(error)
        try:
            self._end(status, code, reason, failed=status in {"retry", "failed"})
        except Exception as late:  # noqa: BLE001  the exit code must report how the script ended in any case
            fields = {"slot": self.slot, "status": status, "exit_code": int(code), "reason": reason[:200]}
            emit("ended", {**fields, "outcome": f"not written: {late}"}, level=logging.ERROR)
        finally:
            self._ended.set()
            for number, handler in self._handlers.items():
                # None means that the handler was not set from Python, and cannot be restored.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if code is not ExitCode.DONE:
            raise SystemExit(int(code)) from error
        return True

    def _end(self, status: Status, code: ExitCode, reason: str, *, failed: bool) -> None:
        if self._manager is None:
            return
        try:
            self._manager.shutdown(wait=not failed)
        except Exception as error:  # noqa: BLE001  this rank has ended all the same, and the record says how
            reason = f"{reason}; {error if isinstance(error, SkerryError) else text_of_failure(error)}"
        if self.rank > 0:
            return
        presence, metrics = self._manager.presence, self._last_metrics
        if self._manager.world_size == 1 and self._manager.finished:  # also what was logged after the loop
            metrics = self._manager.unrecorded_metrics()
        outcome = Outcome(
            run=self.run.nonce,
            slot=self.slot,
            incarnation=presence.incarnation,
            status=status,
            exit_code=int(code),
            reason=shortened(reason, 2000),
            round=self._manager.current_step(),
            inner_step=max(0, self._step),
            tokens=self._tokens,
            loss_first=self._losses[0] if self._losses else None,
            loss_last=self._losses[-1] if self._losses else None,
            ended=self._clock.utc_text(),
            metrics=metrics or None,
        )
        RunLog(self._store, self.run).create(keys.outcome(self.slot, presence.incarnation), outcome)
        emit("ended", {"slot": self.slot, "status": status, "exit_code": int(code), "reason": reason[:200]})

    def _resume_after(self, step: int) -> None:
        self._step = max(self._step, step)

    def _the_manager(self) -> ObjectStoreManager:
        if self._manager is None:
            raise Invalid("call replica.manager(...) first")
        return self._manager

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """First signal: end cleanly within the budget. Second signal: end at once."""
        del frame
        for handler in self._handlers:
            signal.signal(handler, signal.SIG_DFL)
        # In a thread: a signal handler must not take a lock that the interrupted code may hold.
        name = signal.Signals(number).name
        threading.Thread(target=self._stop_within_budget, args=(name,), name="stop", daemon=True).start()

    def _stop_within_budget(self, name: str) -> None:
        if self._manager is not None:
            self._manager.presence.notice(f"stopping on {name}")
        if not self._stopping.is_set():
            self._stop(name)
        self._clock.pause(_STOP_LIMIT_S, self._ended)
        if self._ended.is_set():
            return
        emit("ended", {"slot": self.slot, "reason": f"not done {_STOP_LIMIT_S:g} s after {name}"}, level=logging.ERROR)
        os._exit(ExitCode.RETRY)


def _rounds_of(log: RunLog) -> int | None:
    """The rounds of the run, with those that were added until now."""
    settings = RunSettings(log)
    settings.read()
    return settings.end[0]


def _verdict(
    error: BaseException | None, manager: ObjectStoreManager | None, *, stopping: bool, requested: bool
) -> tuple[Status, ExitCode, str]:
    """The outcome's status, exit code and reason. An error counts even after the last round.

    A signal may come from a person or from a reclaimed machine, and cannot tell which: see decision 0013.
    """
    finished = manager is not None and manager.finished
    if isinstance(error, SystemExit) and error.code in (None, 0):
        error = None
    if error is None and stopping and not finished:
        error = Interrupted("stopped")
    position = "" if manager is None else f"round {manager.current_step()}"
    reason = "" if error is None else text_of_failure(error, position)
    requested = requested or isinstance(error, KeyboardInterrupt)
    code, cause = (ExitCode.STOPPED, "stopped on request") if requested else (ExitCode.RETRY, "stopped by a signal")
    verdict: tuple[Status, ExitCode, str]
    match error:
        case None | RunFinished():
            verdict = (
                "done",
                ExitCode.DONE,
                "all rounds are closed" if finished else str(error or "the script ended"),
            )
        case SystemExit(code=int(own)) if own in _STATUS:
            verdict = _STATUS[own], ExitCode(own), f"the script called exit({own})"
        case SystemExit(code=own):
            verdict = "failed", ExitCode.PERMANENT, f"the script called exit({own})"
        case KeyboardInterrupt() | Interrupted():
            verdict = "stopped", code, cause
        case Moved():
            verdict = "stopped", ExitCode.STOPPED, reason
        case _ if isinstance(error, _PERMANENT):
            verdict = "failed", ExitCode.PERMANENT, reason
        case _ if stopping:
            verdict = "stopped", code, f"{cause}, and then {reason}"
        case _:
            verdict = "retry", ExitCode.RETRY, reason
    return verdict


def _judge_successor(manager: ObjectStoreManager | None, fenced: Fenced) -> SkerryError:
    """Fenced if the newer incarnation lives; Retryable if it died right after its claim: the slot is empty."""
    if manager is None:
        return fenced
    try:
        lives = manager.is_succeeded()
    except SkerryError as error:
        return error
    if lives:
        return Fenced(f"{fenced}; the newer one is live; do not restart this one")
    return Retryable(f"{fenced}; the newer one has no heartbeat, so the slot is empty; restart this replica")
