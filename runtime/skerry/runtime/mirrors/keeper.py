"""Keeps the mirrors of a run from within its replicas: after each round one of them copies what is new.

The members of a round take turns, so a killed one is replaced by the next. Objects are created once, so two that copy
at the same time do no harm; a replica that sees another one copying, by its heartbeat, leaves it alone. Each mirror has
a thread and at most one copy at a time: no round waits, and what was missed is copied the next time. Needs no torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from skerry.runtime.log.records import MirrorState
from skerry.runtime.mirrors.budget import Budget, SpentError
from skerry.runtime.mirrors.mirror import Mirror, MirrorOptions
from skerry.runtime.store.retrying import apart
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor, Future

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.log.run_record import MirrorSettings
    from skerry.runtime.protocol.slot_claim_and_heartbeats import HeartbeatMonitor, Presence
    from skerry.runtime.store import Store

# One call. A store that is away longer is tried again after the next round.
_CALL_S: Final = 30.0
# A checkpoint that its author could not copy is copied by others after the next rounds.
_LOOKS: Final = 3
# A replica that copies says so in each heartbeat. One that was not seen to beat for so long may be dead.
_SILENT_S: Final = 30.0


def is_due(settings: MirrorSettings, closed: int, checkpoint_every: int) -> bool:
    """True if after so many closed rounds the mirror may lack something that it should have. Pure."""
    if settings.each_round:
        return True
    start = (closed - closed % checkpoint_every) // settings.every * settings.every
    first = -(-start // checkpoint_every) * checkpoint_every
    return closed - first < _LOOKS


def turn_of(closed: int, members: Sequence[str], checkpoint_every: int, *, is_over: bool) -> str | None:
    """The slot that copies after so many rounds: a checkpoint's author, then the members after it. Pure.

    members: of the last round.
    """
    number, later = divmod(closed, checkpoint_every)
    return members[(number + (0 if is_over else later)) % len(members)] if members else None


class MirrorKeeper:
    """The mirrors of one replica. Call it from the thread that trains, on rank 0."""

    def __init__(
        self,
        log: RunLog,
        presence: Presence,
        watch: HeartbeatMonitor,
        clock: Clock,
        open_mirror: Callable[[str], Store],
        executor: Callable[[str], Executor],
    ) -> None:
        """open_mirror: opens the store of a URI, without a request. executor: makes a thread of a name."""
        self._log, self._presence, self._watch, self._clock = log, presence, watch, clock
        self._kept = [
            _KeptMirror(log, presence.slot, clock, open_mirror, settings) for settings in log.run.mirrors or ()
        ]
        if self._kept:
            presence.mirrors = lambda: tuple(kept.state for kept in self._kept)
        self._threads = [executor(f"mirror-{number}") for number in range(len(self._kept))]
        self._jobs: list[Future[None] | None] = [None] * len(self._kept)
        self._is_over = False

    def note_closed(
        self, closed: int, members: Sequence[str], checkpoint_every: int, saving: Future[None] | None, *, is_over: bool
    ) -> None:
        """A round was closed, and this replica is at the head of the log. Sends no request itself.

        members: of the round. saving: the checkpoint that this replica writes or has written;
        the thread of the mirror waits for it. is_over: it was the last round of the run.
        """
        self._is_over = is_over
        is_mine = turn_of(closed, members, checkpoint_every, is_over=is_over) == self._presence.slot
        for number, kept in enumerate(self._kept):
            job = self._jobs[number]
            if (job is not None and not job.done() and not is_over) or kept.is_spent:
                continue
            due = is_mine and (is_over or is_due(kept.settings, closed, checkpoint_every))
            if not due and kept.state.problem is None:
                continue
            if is_over or not self._is_copied_by_another(kept.settings.uri):
                self._jobs[number] = self._threads[number].submit(kept.catch_up, saving)

    def close(self, *, wait: bool, is_over: bool) -> None:
        """Stop the threads. wait: first for a last copy, if the run is over. is_over: for this replica, on rank 0.

        A replica that has come after the end copies, too: the one whose turn it was may have been killed.
        """
        for number, (kept, thread) in enumerate(zip(self._kept, self._threads, strict=True)):
            if wait and is_over:
                if not self._is_over and not kept.is_spent:
                    self._jobs[number] = thread.submit(kept.catch_up, None)
                if (job := self._jobs[number]) is not None:
                    job.exception()
            thread.shutdown(wait=False, cancel_futures=True)

    def _is_copied_by_another(self, uri: str) -> bool:
        return any(
            state.uri == uri and state.is_copying and self._clock.now() - seen.changed_at < _SILENT_S
            for seen in self._watch.heartbeats.values()
            if seen.fresh and seen.heartbeat.phase not in {"finished", "left", "failed"}
            for state in seen.heartbeat.mirrors or ()
        )


class _KeptMirror:
    """One mirror. state: for the heartbeat. is_spent: its limit is reached."""

    def __init__(
        self,
        log: RunLog,
        slot: str,
        clock: Clock,
        open_mirror: Callable[[str], Store],
        settings: MirrorSettings,
    ) -> None:
        self.settings = settings
        self.state = MirrorState(uri=settings.uri)
        self.is_spent = False
        self._log, self._slot, self._clock = log, slot, clock
        self._open_mirror = open_mirror
        self._mirror: Mirror | None = None
        self._bytes = 0

    def catch_up(self, saving: Future[None] | None) -> None:
        """Copy what is new, in the mirror's thread."""
        self._set(is_copying=True)
        try:
            if saving is not None:
                saving.exception()
            self._opened().catch_up()
        except Exception as error:  # noqa: BLE001  a thread's entry: the mirror is behind, and training goes on
            self.is_spent = isinstance(error, SpentError)
            self._tell_progress()  # beside damage all else is copied
            self._failed(error)
        else:
            self._tell_progress()
            self._set(is_copying=False, problem=None)

    def _opened(self) -> Mirror:
        if self._mirror is None:
            # Apart: what fails here must not look like an outage of the run's store.
            source, target = apart(self._log.store, _CALL_S), apart(self._open_mirror(self.settings.uri), _CALL_S)
            self._mirror = Mirror(
                source,
                target,
                self._clock,
                MirrorOptions(
                    every=self.settings.every, payloads=self.settings.each_round, private=self.settings.private
                ),
                by=self._slot,
                recent=self._log.recent,
                charge=Budget(target, self.settings, self._log.run.nonce, self._slot).charge,
            )
        return self._mirror

    def _tell_progress(self) -> None:
        if self._mirror is None:
            return
        before, progress = self.state, self._mirror.progress
        self._set(copied=progress.copied, checkpoint=progress.checkpoint)
        if (before.copied, before.checkpoint) != (progress.copied, progress.checkpoint):
            fields = {"uri": self.settings.uri, "slot": self._slot, "rounds": progress.copied}
            emit("mirrored", {**fields, "checkpoint": progress.checkpoint, "bytes": progress.bytes - self._bytes})
        self._bytes = progress.bytes

    def _failed(self, error: Exception) -> None:
        known = self.state.problem
        problem = (str(error) or repr(error))[:500]
        self._set(is_copying=False, problem=problem)
        if problem != known:
            fields = {"uri": self.settings.uri, "slot": self._slot, "error": str(error)}
            emit("mirror_behind", fields, level=logging.WARNING, error=error)

    def _set(self, **changes: object) -> None:
        self.state = self.state.model_copy(update=changes)
