"""Determines how a container ends: the exit code for its launcher, and the outcome record for later inspection.

The outcome record is the truth about an incarnation. The replica writes it itself where it can; for a start that failed
before that (damaged code, a script that cannot start, an out-of-memory kill) it is written here.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from skerry.runtime.contract import STOP_BUDGET_S, ExitCode
from skerry.runtime.errors import Corrupt, Diverged, Fenced, Invalid, Moved, SkerryError, Unauthorized
from skerry.runtime.failure_text import OUT_OF_MEMORY, shortened
from skerry.runtime.log import keys
from skerry.runtime.log.records import Heartbeat, Member, Outcome
from skerry.runtime.protocol.slot_claim_and_heartbeats import claim_slot

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.clock import Clock
    from skerry.runtime.container.process_tree import ProcessResult
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.log.records import Place, Software
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

# SageMaker shows this much of the file as FailureReason.
_FAILURE_FILE_CHARACTERS: Final = 1024
_PERMANENT: Final = (Corrupt, Diverged, Fenced, Invalid, Unauthorized)
_Status: TypeAlias = Literal["done", "retry", "failed", "stopped"]
_STATUS: Final[dict[ExitCode, _Status]] = {
    ExitCode.DONE: "done",
    ExitCode.RETRY: "retry",
    ExitCode.PERMANENT: "failed",
    ExitCode.STOPPED: "stopped",
}


@dataclass(frozen=True, kw_only=True)
class ExitDecision:
    """The exit code and its reason. stopped: a signal ended it, and nothing failed."""

    code: ExitCode
    reason: str
    stopped: bool = False

    @property
    def status(self) -> _Status:
        """The status for the outcome record."""
        return "stopped" if self.stopped else _STATUS[self.code]


OUT_OF_TIME: Final = ExitDecision(
    code=ExitCode.STOPPED, reason="the run has used its max_hours; raise max_hours to continue it"
)
"""Not to be restarted, because a restart costs money."""


def stopped_by_signal(detail: str = "") -> ExitDecision:
    """The decision for a stop of which only the signal is known: its sender decides whether to restart."""
    return ExitDecision(code=ExitCode.RETRY, reason=f"stopped by a signal{detail}", stopped=True)


def time_limit(run: Run, max_hours: float | None, clock: Clock) -> float | None:
    """The end of the run's time, by clock.now(); None for no limit.

    It counts from the time in run.json: two wall clocks that agree to the minute are enough for a limit in hours.
    """
    if max_hours is None:
        return None
    age = datetime.fromisoformat(clock.utc_text()) - datetime.fromisoformat(run.created)
    return clock.now() + max_hours * 3600 - age.total_seconds()


def decide_exit(result: ProcessResult, recorded: Outcome | None) -> ExitDecision:
    """The decision for a command that ended. recorded: the outcome its replica wrote itself, if it did. Pure.

    The replica's outcome counts where the command's code is not one of the contract: torchrun ends with 1 whichever
    codes its ranks ended with.
    """
    if result.expired:
        return OUT_OF_TIME
    if result.leash_closed or result.killed:
        late = f"not done {STOP_BUDGET_S:g} s after a stop was requested; killed"
        reason = "the process that started this container has ended" if result.leash_closed else late
        reason = (
            "it was killed, because the run's store is away or the run has left it" if result.interrupted else reason
        )
        return ExitDecision(code=ExitCode.RETRY, reason=reason)
    stopped = recorded is not None and recorded.status == "stopped"
    if result.exit_code in set(ExitCode):
        code = ExitCode(result.exit_code)
        reason = recorded.reason if recorded else f"the command ended with {result}"
        return ExitDecision(code=code, reason=reason, stopped=stopped)
    if recorded is not None and recorded.exit_code in set(ExitCode):
        return ExitDecision(code=ExitCode(recorded.exit_code), reason=recorded.reason, stopped=stopped)
    if result.stopped:
        return stopped_by_signal(f"; the command ended with {result}")
    # Without a stop request only the kernel, or a person, sends SIGKILL; a shell reports it as 137.
    hint = f"; probably {OUT_OF_MEMORY}" if result.signal == 9 or result.exit_code == 137 else ""
    return ExitDecision(code=ExitCode.RETRY, reason=f"the command ended with {result}{hint}")


def decide_exit_for_error(error: BaseException) -> ExitDecision:
    """The decision for an error before the command was started."""
    if isinstance(error, Moved):
        return ExitDecision(code=ExitCode.STOPPED, reason=str(error), stopped=True)
    code = ExitCode.PERMANENT if isinstance(error, _PERMANENT) else ExitCode.RETRY
    return ExitDecision(code=code, reason=f"{type(error).__name__}: {shortened(str(error), 2000)}")


class OutcomeRecorder:
    """Reads and writes the outcome of the incarnation that this start of the container became.

    That is the newest incarnation claimed from this host since the recorder was made.
    """

    def __init__(
        self,
        log: RunLog,
        slot: str,
        clock: Clock,
        place: Place | None = None,
        software: Software | None = None,
        earlier: OutcomeRecorder | None = None,
    ) -> None:
        """Note the slot's newest incarnation before this start. place, software: of it. Raises what the store raises.

        earlier: of a command that this process has run in the same store before; its claim holds until a newer one.
        """
        self._log = log
        self.slot = slot
        self._clock = clock
        self._place = place
        self._software = software
        self._before = self._newest()
        self._claimed: int | None = None
        self._claimed_before = None if earlier is None else earlier.claimed

    def read(self) -> Outcome | None:
        """The outcome that this start's replica wrote, if any."""
        incarnation = self._incarnation()
        if incarnation is None:
            return None
        key = keys.outcome(self.slot, incarnation)
        data = self._log.store.read(key)
        return None if data is None else Outcome.parse(data, key)

    def record(self, exit_decision: ExitDecision) -> bool:
        """Write this start's outcome unless one exists; returns whether it was written now.

        A start that failed before its replica claimed an incarnation claims one here, so that the failure is recorded.
        """
        incarnation = self._incarnation()
        if incarnation is None:
            if exit_decision.status in {"done", "stopped"}:
                return False
            incarnation = claim_slot(self._log, self.slot, self._clock, self._place, self._software)
        key = keys.outcome(self.slot, incarnation)
        if self._log.store.read(key) is not None:
            return False
        heartbeat = self._last_heartbeat(incarnation)
        outcome = Outcome(
            run=self._log.run.nonce,
            slot=self.slot,
            incarnation=incarnation,
            status=exit_decision.status,
            exit_code=int(exit_decision.code),
            reason=shortened(exit_decision.reason + _last_words(heartbeat), 2000),
            round=0 if heartbeat is None else heartbeat.round,
            inner_step=0 if heartbeat is None else heartbeat.inner_step,
            tokens=0 if heartbeat is None else heartbeat.tokens,
            loss_first=None,
            loss_last=None if heartbeat is None else heartbeat.loss,
            ended=self._clock.utc_text(),
        )
        self._log.create(key, outcome)
        return True

    @property
    def claimed(self) -> int | None:
        """The newest incarnation of this process that `owns_slot` has seen."""
        return self._claimed_before if self._claimed is None else self._claimed

    def owns_slot(self, copy: Store | None = None) -> bool:
        """True if this start's replica has claimed its slot, and no newer start has. copy: a mirror, read instead.

        Raises what the store raises.
        """
        if self._claimed is None:
            self._claimed = self._incarnation(copy)
        # A newer start may have the same host name: that of a pod that was replaced.
        return self.claimed is not None and self._newest(copy) <= self.claimed

    def _newest(self, copy: Store | None = None) -> int:
        listed = (copy or self._log.store).list(keys.members_prefix(self.slot))
        return keys.newest_incarnation([entry.key for entry in listed])

    def _incarnation(self, copy: Store | None = None) -> int | None:
        for number in range(self._newest(copy), self._before, -1):
            key = keys.member(self.slot, number)
            data = (copy or self._log.store).read(key)
            if data is not None and Member.parse(data, key).host == socket.gethostname():
                return number
        return None

    def _last_heartbeat(self, incarnation: int) -> Heartbeat | None:
        with contextlib.suppress(SkerryError):
            key = keys.heartbeat(self.slot)
            data = self._log.store.read(key)
            if data is not None and (heartbeat := Heartbeat.parse(data, key)).incarnation == incarnation:
                return heartbeat
        return None


def _last_words(heartbeat: Heartbeat | None) -> str:
    """The reason in the last heartbeat of a script without `connect`, whose process has no outcome."""
    if heartbeat is None or heartbeat.phase not in {"failed", "left"} or heartbeat.notice is None:
        return ""
    return f": {heartbeat.notice}"


def write_failure_file(exit_decision: ExitDecision, ml: Path) -> None:
    """Write the file that SageMaker shows as the reason of a failure; other platforms have no such folder."""
    folder = ml / "output"
    if exit_decision.status in {"done", "stopped"} or not folder.is_dir():
        return
    text = f"skerry: exit code {int(exit_decision.code)}: {exit_decision.reason}"
    with contextlib.suppress(OSError):  # not writable: already logged at the start
        (folder / "failure").write_text(text[:_FAILURE_FILE_CHARACTERS])
