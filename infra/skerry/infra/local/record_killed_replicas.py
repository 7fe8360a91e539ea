"""Writes the outcome of a replica of this machine that could not write it itself: killed, or ended without `connect()`.

Only the launcher knows the signal. Without this record, `status` and `doctor` see a start without an end.
"""

from __future__ import annotations

import queue
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from skerry.runtime.contract import ExitCode
from skerry.runtime.failure_text import OUT_OF_MEMORY
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import Heartbeat, Member, Outcome

if TYPE_CHECKING:
    from skerry.infra.run.executor import Ending
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.records import Memory
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

R = TypeVar("R", bound=Record)
# An exit code names a signal as shells do.
_SIGNALLED: Final = 128
_LONGEST: Final = 2000
_STATUS: Final[dict[int, Literal["done", "failed", "stopped"]]] = {
    ExitCode.DONE: "done",
    ExitCode.PERMANENT: "failed",
    ExitCode.STOPPED: "stopped",
}


class EndingRecorder:
    """Records endings of one run's replicas. `note` may be called from any thread, `write` from one."""

    def __init__(self, store: Store, run: Run, clock: Clock) -> None:
        """Note the newest start of each slot, whose ends are not known here. Raises what the store raises."""
        self._store = store
        self._run = run
        self._clock = clock
        self._written = {entry.key for entry in store.list(keys.MEMBERS)}
        self._noted: queue.SimpleQueue[tuple[str, Ending, str | None]] = queue.SimpleQueue()

    def note(self, slot: str, ending: Ending, last_line: str | None) -> None:
        """Take in the end of a start. Does no I/O. last_line: of its log."""
        self._noted.put((slot, ending, last_line))

    def write(self) -> None:
        """Write the outcome of each noted start that claimed its slot and has none. Raises what the store raises."""
        while not self._noted.empty():
            slot, ending, last_line = self._noted.get()
            try:
                self._write(slot, ending, last_line)
            except BaseException:
                self._noted.put((slot, ending, last_line))
                raise

    def _write(self, slot: str, ending: Ending, last_line: str | None) -> None:
        for entry in self._store.list(keys.members_prefix(slot)):
            if entry.key in self._written or (member := self._read(Member, entry.key)) is None:
                continue
            # A newer start that runs already is not the one that ended.
            if member.host != socket.gethostname() or Path(f"/proc/{member.process}").exists():
                continue
            self._written.add(entry.key)
            if self._store.read(keys.outcome(slot, member.incarnation)) is None:
                outcome = self._outcome(member, ending, last_line)
                self._store.create(keys.outcome(slot, member.incarnation), outcome.to_bytes())
            return

    def _outcome(self, member: Member, ending: Ending, last_line: str | None) -> Outcome:
        beat = self._read(Heartbeat, keys.heartbeat(member.slot))
        beat = beat if beat is not None and beat.incarnation == member.incarnation else None
        code = ending.exit_code if ending.signal is None else _SIGNALLED + ending.signal
        return Outcome(
            run=self._run.nonce,
            slot=member.slot,
            incarnation=member.incarnation,
            status="stopped" if ending.why else _STATUS.get(code or 0, "retry"),
            exit_code=min(255, code or 0),
            reason=ending_text(ending, last_line, None if beat is None else beat.memory)[:_LONGEST],
            round=0 if beat is None else beat.round,
            inner_step=0 if beat is None else beat.inner_step,
            tokens=0 if beat is None else beat.tokens,
            loss_first=None,
            loss_last=None if beat is None else beat.loss,
            ended=self._clock.utc_text(),
        )

    def _read(self, kind: type[R], key: str) -> R | None:
        data = self._store.read(key)
        return None if data is None else kind.parse(data, key)


def ending_text(ending: Ending, last_line: str | None = None, memory: Memory | None = None) -> str:
    """The end of a start for people. last_line: of its log, which says why a script ended with an exit code.

    memory: of its last heartbeat, from which a lack of memory is guessed.
    """
    if ending.signal is None:
        return f"{ending}: {last_line}" if last_line else str(ending)
    if ending.why:
        return f"killed ({ending}): {ending.why}"
    if ending.signal == signal.SIGKILL:
        guess = ", probably" if memory is not None and memory.is_nearly_full else "; if not by a person, then"
        return f"killed ({ending}){guess} {OUT_OF_MEMORY}" + ("" if memory is None else f"; it had used {memory}")
    return f"killed ({ending})"
