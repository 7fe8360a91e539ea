"""What a training script sees of skerry: `connect()` gives it its run, its slot, its manager and a clean end.

Reads the contract from the environment, once. Turns SIGTERM into the end of the current inner step, and every way a
script can end into the documented exit code and an outcome record in the bucket, the truth about this incarnation.
Under torchrun each rank has a Replica; all end alike, and rank 0 writes what is written.
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

from skerry.runtime import contract, keys
from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import (
    Corrupt,
    Diverged,
    Fenced,
    Invalid,
    Retryable,
    RunFinished,
    SkerryError,
    Unauthorized,
)
from skerry.runtime.events import emit
from skerry.runtime.exchange import Interrupted
from skerry.runtime.garbage import Retention
from skerry.runtime.journal import Journal, read_run
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.private import load_random_states, random_states
from skerry.runtime.ranks import address_of
from skerry.runtime.records import Outcome
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType, TracebackType

    import torch

    from skerry.runtime.clock import Clock
    from skerry.runtime.private import Stateful
    from skerry.runtime.ranks import Address
    from skerry.runtime.records import Run

T = TypeVar("T")
Status: TypeAlias = Literal["done", "retry", "failed", "stopped"]
# Two seconds of the budget are left for the operating system and the container to end.
_LAST_CALL_S = contract.STOP_BUDGET_S - 2.0
_STATUS: dict[int, Status] = {ExitCode.RETRY: "retry", ExitCode.PERMANENT: "failed", ExitCode.STOPPED: "stopped"}
_PERMANENT = (Corrupt, Diverged, Fenced, Invalid, Unauthorized)


def connect(environment: Mapping[str, str] | None = None, *, clock: Clock | None = None) -> Replica:
    """This process's place in its run: use it as a context manager around the training loop.

    environment: the contract's variables. None means the process's own; what is wrong with them or with the run then
    ends the process with a line on stderr and the exit code that tells its launcher whether to try again. With an
    environment given, raises Invalid if it is wrong or if there is no run under the prefix, and what the store raises.
    """
    try:
        found = os.environ if environment is None else environment
        return Replica(contract.read(found), clock or SystemClock(), address_of(found))
    except SkerryError as error:
        if environment is not None:
            raise
        code = ExitCode.PERMANENT if isinstance(error, _PERMANENT) else ExitCode.RETRY
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(int(code)) from error


class Replica:
    """One replica of a run, from its start to its outcome."""

    def __init__(self, place: contract.Contract, clock: Clock, address: Address | None = None) -> None:
        """address: this process among the ranks of the replica; None for a replica of one rank."""
        self.rank = 0 if address is None else address.rank
        self.world_size = 1 if address is None else address.size
        self._address = address
        _log_to_stderr(place.slot if address is None else f"{place.slot}/{self.rank}")
        self.slot = place.slot
        self.index = place.index
        self.replicas = place.replicas
        self._clock = clock
        self._store = open_store(place.run_uri, clock=clock)
        run = read_run(self._store)
        if run is None:
            raise Invalid(f"no run under {place.run_uri}: start it with `skerry up`, which writes {keys.RUN}")
        self.run: Run = run
        self._manager: ObjectStoreManager | None = None
        self._stopping = threading.Event()
        self._asked = False
        self._ended = threading.Event()
        self._handlers: dict[
            signal.Signals, signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        ] = {}
        self._step = -1
        self._keeps = False
        self._tokens = 0
        self._started = clock.now()
        self._losses: list[float] = []

    def manager(
        self,
        *,
        state_dict: Callable[[], T] | None = None,
        load_state_dict: Callable[[T], None] | None = None,
        timeout: timedelta = timedelta(minutes=30),
        max_retries: int | None = 3,
    ) -> ObjectStoreManager:
        """The manager of this replica, set up as the run says. Call it once.

        timeout: how long one exchange may wait for the others. max_retries: failed rounds in a row after
        which the script ends with exit code 10.
        """
        if self._manager is not None:
            raise Invalid("a replica has one manager: keep the first one")
        self._manager = ObjectStoreManager(
            self._store,
            replica_id=self.slot,
            min_replica_size=self.run.min_replicas,
            state_dict=state_dict,
            load_state_dict=load_state_dict,
            max_retries=max_retries,
            codec=self.run.codec,
            checkpoint_every=self.run.checkpoint_every,
            max_norm=self.run.max_norm,
            retention=Retention(last=self.run.keep_checkpoints, every=self.run.keep_every),
            keep_unfinished=timedelta(seconds=seconds) if (seconds := self.run.keep_unfinished_s) else None,
            timeout=timeout,
            clock=self._clock,
            rank=self.rank,
            world_size=self.world_size,
            store_addr=None if self._address is None else self._address.host,
            store_port=None if self._address is None else self._address.port,
        )
        return self._manager

    def keep(self, *, random: bool = False, **own: Stateful) -> None:
        """Keep over a restart what only this replica has: `keep(inner=optimizer, sampler=sampler, random=True)`.

        Saved in the background at the rounds of checkpoints, each under its name, with the number of the inner step;
        given back when a new incarnation joins. random: also what torch, numpy and Python draw from. Call it after
        `manager` and before the first step. Raises Invalid for a name that is taken, or too late.
        """
        manager = self._the_manager()
        for name, one in own.items():
            manager.register_private_state(name, one.load_state_dict, one.state_dict)
        if random:
            manager.register_private_state("random states", load_random_states, random_states)
        if not self._keeps:
            manager.register_private_state("inner step", self._go_on_after, lambda: self._step)
        self._keeps = True

    def shard(self, items: Sequence[T]) -> list[T]:
        """Every replicas-th item, starting at this replica's index: disjoint shards that cover everything.

        Of several ranks each has a shard of its replica's.
        """
        return list(items[self.index + self.rank * self.replicas :: self.replicas * self.world_size])

    def steps(self, inner_optimizer: torch.optim.Optimizer) -> Iterator[int]:
        """Inner step numbers until the run is finished or a stop is requested.

        Before each step the replica is at the head of the log (`catch_up`). Numbers grow; after a restart they go on
        where the run is, so a script may derive its data position from them. With `keep` they also go on after what
        was saved, where failed rounds have taken more steps than the run counts.
        """
        manager = self._the_manager()
        per_round = max(1, self.run.sync_every // self.run.fragments)
        while not manager.any_rank(self._stopping.is_set()):
            manager.catch_up(inner_optimizer)
            if manager.finished:
                return
            self._step = max(self._step + 1, manager.current_step() * per_round + manager.inner_steps)
            yield self._step
        self._stopping.set()  # a rank that was not asked itself ends like the one that was
        self._asked = manager.any_rank(self._asked)

    def log(self, *, loss: float | None = None, tokens: int = 0) -> None:
        """Report one inner step: shown by `skerry status`, and tokens weigh in the average if the run asks for it.

        Call it before the optimizer's step: the last step of a round ends in the exchange that its tokens belong to.
        Numbers of numpy and torch are taken as well; raises Invalid for what is none.
        """
        try:
            tokens, loss = operator.index(tokens), None if loss is None else float(loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise Invalid(f"log takes a whole number of tokens and a loss: tokens={tokens!r} loss={loss!r}") from error
        self._tokens += tokens
        if loss is not None:
            self._losses = [self._losses[0] if self._losses else loss, loss]
        manager = self._the_manager()
        manager.count_tokens(tokens)
        seconds = self._clock.now() - self._started
        manager.presence.report(
            inner_step=max(0, self._step),
            loss=loss,
            tokens=self._tokens,
            tokens_per_s=self._tokens / seconds if seconds > 0 else None,
        )

    @property
    def stopping(self) -> bool:
        """A stop was requested; `steps` ends after this inner step."""
        return self._stopping.is_set()

    def request_stop(self, reason: str) -> None:
        """End after the current inner step, and stop waiting for others at once; nobody is to start it again.

        Under torchrun call it on every rank.
        """
        if not self._stopping.is_set():
            self._asked = True
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        emit("stop_requested", {"slot": self.slot, "reason": reason})
        # The loop may end, and the replica say its last word, the moment that it is asked to stop.
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
        """Write the outcome and end as the contract says: returns for done, else SystemExit with the exit code."""
        if isinstance(error, Fenced):
            error = self._succeeded(error)
        status, code, reason = self._verdict(error)
        if isinstance(error, Exception) and not isinstance(error, (Interrupted, RunFinished)):
            traceback.print_exception(error)
        try:
            self._end(status, code, reason, failed=status in {"retry", "failed"})
        except Exception as late:  # noqa: BLE001  whatever it is, the exit code must say how the script ended
            fields = {"slot": self.slot, "status": status, "exit_code": int(code), "reason": reason[:200]}
            emit("ended", {**fields, "outcome": f"not written: {late}"}, level=logging.ERROR)
        finally:
            self._ended.set()
            for number, handler in self._handlers.items():
                # None means that the handler was not set from Python, and cannot be put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if code is not ExitCode.DONE:
            raise SystemExit(int(code)) from error
        return True

    def _succeeded(self, fenced: Fenced) -> SkerryError:
        """What being replaced means: who replaced me has the slot, or died right after its claim, and nobody has it."""
        if self._manager is None:
            return fenced
        try:
            lives = self._manager.is_succeeded()
        except SkerryError as error:
            return error
        if lives:
            return Fenced(f"{fenced}; the newer one lives, so this one is not to be started again")
        return Retryable(f"{fenced}; the newer one does not beat, so the slot is empty: start another")

    def _verdict(self, error: BaseException | None) -> tuple[Status, ExitCode, str]:
        """What the way a script ended means for its launcher. What went wrong counts more than how far it came.

        A signal alone does not tell a person's wish from a machine that is taken back: decision 0013.
        """
        finished = self._manager is not None and self._manager.finished
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        if error is None and self._stopping.is_set() and not finished:
            error = Interrupted("stopped")
        reason = f"{type(error).__name__}: {error}"
        asked = self._asked or isinstance(error, KeyboardInterrupt)
        code, how = (ExitCode.STOPPED, "stopped on request") if asked else (ExitCode.RETRY, "stopped by a signal")
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
                verdict = "stopped", code, how
            case _ if isinstance(error, _PERMANENT):
                verdict = "failed", ExitCode.PERMANENT, reason
            case _ if self._stopping.is_set():
                verdict = "stopped", code, f"{how}, and then {reason}"
            case _:
                verdict = "retry", ExitCode.RETRY, reason
        return verdict

    def _end(self, status: Status, code: ExitCode, reason: str, *, failed: bool) -> None:
        if self._manager is None:
            return
        self._manager.shutdown(wait=not failed)
        if self.rank > 0:
            return
        presence = self._manager.presence
        outcome = Outcome(
            run=self.run.nonce,
            slot=self.slot,
            incarnation=presence.incarnation,
            status=status,
            exit_code=int(code),
            reason=reason[:2000],
            round=self._manager.current_step(),
            inner_step=max(0, self._step),
            tokens=self._tokens,
            loss_first=self._losses[0] if self._losses else None,
            loss_last=self._losses[-1] if self._losses else None,
            ended=self._clock.utc_text(),
        )
        Journal(self._store, self.run).create(keys.outcome(self.slot, presence.incarnation), outcome)
        emit("ended", {"slot": self.slot, "status": status, "exit_code": int(code), "reason": reason[:200]})

    def _go_on_after(self, step: int) -> None:
        self._step = max(self._step, step)

    def _the_manager(self) -> ObjectStoreManager:
        if self._manager is None:
            raise Invalid("call replica.manager(...) first")
        return self._manager

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """First signal: end cleanly within the budget. Second: at once."""
        del frame
        for each in self._handlers:
            signal.signal(each, signal.SIG_DFL)
        # A thread does the rest: a handler that interrupts a lock's owner must not take that lock.
        name = signal.Signals(number).name
        threading.Thread(target=self._stop_within_budget, args=(name,), name="stop", daemon=True).start()

    def _stop_within_budget(self, name: str) -> None:
        if self._manager is not None:
            self._manager.presence.notice(f"stopping on {name}")
        if not self._stopping.is_set():
            self._stop(name)
        self._clock.pause(_LAST_CALL_S, self._ended)
        if self._ended.is_set():
            return
        emit("ended", {"slot": self.slot, "reason": f"not done {_LAST_CALL_S:g} s after {name}"}, level=logging.ERROR)
        os._exit(ExitCode.RETRY)


def _log_to_stderr(slot: str) -> None:
    """The runtime's events as lines on stderr, unless the script has set logging up itself."""
    logger = logging.getLogger("skerry")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {slot} %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
