"""How a container ends: the exit code its launcher must understand, and what is left for who asks why.

The truth about an incarnation is its outcome record. The replica writes it itself where it can; what never came so far
(code that is damaged, a script that cannot start, a kill for want of memory) is written here.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from skerry.runtime import keys
from skerry.runtime.contract import STOP_BUDGET_S, ExitCode
from skerry.runtime.errors import Corrupt, Diverged, Fenced, Invalid, SkerryError, Unauthorized
from skerry.runtime.records import Heartbeat, Member, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.clock import Clock
    from skerry.runtime.entry.processes import Ended
    from skerry.runtime.journal import Journal

# SageMaker shows so much of the file as FailureReason.
_SHOWN: Final = 1024
_PERMANENT: Final = (Corrupt, Diverged, Fenced, Invalid, Unauthorized)
_Status: TypeAlias = Literal["done", "retry", "failed", "stopped"]
_STATUS: Final[dict[ExitCode, _Status]] = {
    ExitCode.DONE: "done",
    ExitCode.RETRY: "retry",
    ExitCode.PERMANENT: "failed",
    ExitCode.STOPPED: "stopped",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the launcher is told, and why. stopped: by a signal, and nothing has failed."""

    code: ExitCode
    reason: str
    stopped: bool = False

    @property
    def status(self) -> _Status:
        """What the outcome record says of it."""
        return "stopped" if self.stopped else _STATUS[self.code]


OUT_OF_TIME: Final = Verdict(code=ExitCode.STOPPED, reason="the run has had its max_hours; a larger limit continues it")
"""Nobody is to start it again: it costs."""


def stopped_by_signal(more: str = "") -> Verdict:
    """What a stop means of which nothing is known but the signal: whoever sent it knows whether it is wanted again."""
    return Verdict(code=ExitCode.RETRY, reason=f"stopped by a signal{more}", stopped=True)


def verdict(ended: Ended, recorded: Outcome | None) -> Verdict:
    """What the way a command ended means. recorded: what this start's replica wrote of its own end, if it did. Pure.

    The replica's own word counts where the command's code is not the contract's: torchrun ends with 1 whatever
    its ranks ended with.
    """
    if ended.expired:
        return OUT_OF_TIME
    if ended.cut or ended.killed:
        late = f"not done {STOP_BUDGET_S:g} s after a stop was asked for; killed"
        return Verdict(code=ExitCode.RETRY, reason="whoever started this container is gone" if ended.cut else late)
    stopped = recorded is not None and recorded.status == "stopped"
    if ended.exit_code in set(ExitCode):
        code = ExitCode(ended.exit_code)
        reason = recorded.reason if recorded else f"the command ended with {ended}"
        return Verdict(code=code, reason=reason, stopped=stopped)
    if recorded is not None and recorded.exit_code in set(ExitCode):
        return Verdict(code=ExitCode(recorded.exit_code), reason=recorded.reason, stopped=stopped)
    if ended.stopped:
        return stopped_by_signal(f"; the command ended with {ended}")
    hint = "; out of memory?" if ended.signal == 9 else ""
    return Verdict(code=ExitCode.RETRY, reason=f"the command ended with {ended}{hint}")


def verdict_of_error(error: BaseException) -> Verdict:
    """What an error before the command was started means."""
    code = ExitCode.PERMANENT if isinstance(error, _PERMANENT) else ExitCode.RETRY
    return Verdict(code=code, reason=f"{type(error).__name__}: {error}")


class Incarnation:
    """Which incarnation of its slot this start of the container became, found by who has claimed one since."""

    def __init__(self, journal: Journal, slot: str, clock: Clock) -> None:
        """Look at who has had the slot before. Raises what the store raises."""
        self._journal = journal
        self._slot = slot
        self._clock = clock
        self._before = self._newest()

    def outcome(self) -> Outcome | None:
        """What this start's replica wrote of its end."""
        mine = self._mine()
        if mine is None:
            return None
        key = keys.outcome(self._slot, mine)
        data = self._journal.store.read(key)
        return None if data is None else Outcome.parse(data, key)

    def record(self, found: Verdict) -> bool:
        """Write how this start ended, if nobody has; whether it was written now.

        A start that failed before its replica claimed an incarnation claims one here, so that the failure has a place.
        """
        mine = self._mine()
        if mine is None:
            if found.status in {"done", "stopped"}:
                return False
            mine = self._claim()
        key = keys.outcome(self._slot, mine)
        if self._journal.store.read(key) is not None:
            return False
        last = self._last_word(mine)
        outcome = Outcome(
            run=self._journal.run.nonce,
            slot=self._slot,
            incarnation=mine,
            status=found.status,
            exit_code=int(found.code),
            reason=found.reason[:2000],
            round=0 if last is None else last.round,
            inner_step=0 if last is None else last.inner_step,
            tokens=0 if last is None else last.tokens,
            loss_first=None,
            loss_last=None if last is None else last.loss,
            ended=self._clock.utc_text(),
        )
        self._journal.create(key, outcome)
        return True

    def _newest(self) -> int:
        listed = self._journal.store.list(keys.members_of(self._slot))
        return keys.incarnation_of(listed[-1].key) if listed else -1

    def _mine(self) -> int | None:
        """The newest that was claimed from here since this started."""
        for number in range(self._newest(), self._before, -1):
            key = keys.member(self._slot, number)
            data = self._journal.store.read(key)
            if data is not None and Member.parse(data, key).host == socket.gethostname():
                return number
        return None

    def _claim(self) -> int:
        number = self._newest() + 1
        while True:
            mine = Member(
                run=self._journal.run.nonce,
                slot=self._slot,
                incarnation=number,
                nonce=self._clock.nonce(),
                host=socket.gethostname(),
                process=os.getpid(),
                created=self._clock.utc_text(),
            )
            if self._journal.create(keys.member(self._slot, number), mine).record.nonce == mine.nonce:
                return number
            number += 1

    def _last_word(self, incarnation: int) -> Heartbeat | None:
        with contextlib.suppress(SkerryError):
            key = keys.heartbeat(self._slot)
            data = self._journal.store.read(key)
            if data is not None and (last := Heartbeat.parse(data, key)).incarnation == incarnation:
                return last
        return None


def tell_platform(found: Verdict, ml: Path) -> None:
    """SageMaker shows a file's beginning as the reason of a failure; elsewhere there is no such folder."""
    folder = ml / "output"
    if found.status in {"done", "stopped"} or not folder.is_dir():
        return
    text = f"skerry: exit code {int(found.code)}: {found.reason}"
    with contextlib.suppress(OSError):  # not writable: said at the start already
        (folder / "failure").write_text(text[:_SHOWN])
