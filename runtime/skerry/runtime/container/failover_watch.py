"""Watches a run's store beside the training script, so that the replica votes for a failover once the store is lost.

The script is killed before its replica votes, so a vote is kept whatever the script was doing. The replica then waits
for the verdict, and its script is run again: in the same store if that is back, else where the run goes on.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Final

from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Retryable, SkerryError, Unauthorized
from skerry.runtime.log.log import read_run
from skerry.runtime.log.run_record import Verdict
from skerry.runtime.mirrors.ballots import Ballots, read_verdict
from skerry.runtime.mirrors.checked_cut import CheckedCuts, check_free
from skerry.runtime.mirrors.failover_vote import Failover, go_on, mark_moved
from skerry.runtime.store import open_store
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.clock import Clock
    from skerry.runtime.container.outcome import ExitDecision, OutcomeRecorder
    from skerry.runtime.log.run_record import FailoverSettings, Run
    from skerry.runtime.mirrors.restorable import Cut
    from skerry.runtime.store import Store

# A request or two for each look; a limit of minutes needs no more.
_LONGEST_LOOK_S: Final = 10.0
_LOOKS: Final = 4
_MIRROR_S: Final = 30.0
# How often the store that was left is tried, to say there where the run goes on.
_MARK_S: Final = 60.0


class StoreWatch:
    """One start of a replica."""

    def __init__(self, run: Run, failover: FailoverSettings, uri: str, recorder: OutcomeRecorder, clock: Clock) -> None:
        """uri: of the run. recorder: knows if the replica has claimed its slot."""
        self._run, self._uri, self._recorder, self._clock = run, uri, recorder, clock
        self.mirror_uri = failover.mirror
        self._every_s = min(_LONGEST_LOOK_S, failover.after_s / _LOOKS)
        self._home = open_store(uri, clock=clock, deadline_s=self._every_s)
        self._mirror = open_store(failover.mirror, clock=clock, deadline_s=_MIRROR_S)
        self._cuts, self._goes_on = CheckedCuts(), failover.uri
        ballots = Ballots(self._mirror, run, recorder.slot, clock, self._find_cut)
        self._failover = Failover(ballots, failover.after_s, clock)
        self._has_claimed = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_interrupted = False
        self._logged: str | None = None

    def start(self, interrupt: Callable[[], None]) -> None:
        """Look while the script runs; `interrupt` kills it, when it must not run on."""
        self._stopped.clear()
        self._is_interrupted = False

        def look() -> None:
            while not self._stopped.is_set():
                # Known before the store is away: the mirror may have a newer start of this slot by then.
                self._has_claimed = self._has_claimed or self._look_for_claim(None)
                following = self._failover.step(answers=self._answers(), is_training=True, owns_slot=False)
                if following != "train" and not self._stopped.is_set():
                    self._is_interrupted = True
                    interrupt()
                    return
                self._clock.pause(self._every_s, self._stopped)

        self._thread = threading.Thread(target=look, name="store-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The script has ended."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def is_lost(self, decision: ExitDecision) -> bool:
        """True if the script ended because of its store, or while that is away. The replica must not end then."""
        failed = decision.code in {ExitCode.RETRY, ExitCode.PERMANENT} and not decision.stopped
        return self._is_interrupted or (failed and not self._answers())

    def await_store(self) -> str:
        """Wait until the script may run, and return the URI at which. It does not run. May take for ever."""
        while True:
            # The mirror has the starts of a slot, too: each is there before it trains.
            owns_slot = self._look_for_claim(self._mirror)
            following = self._failover.step(answers=self._answers(), is_training=False, owns_slot=owns_slot)
            if following == "train":
                return self._uri
            if isinstance(following, Verdict) and following.uri is not None:
                self._log(f"{', '.join(following.votes)} have voted: the run goes on from round {following.round}")
                try:
                    target = open_store(following.uri, clock=self._clock)
                    go_on(self._mirror, following, target, self._clock, self._recorder.slot)
                except Retryable as error:
                    self._log(f"the run cannot go on yet: {error}")
                else:
                    threading.Thread(target=self._mark, args=(following,), name="mark-moved", daemon=True).start()
                    return following.uri
            if self._failover.problem is not None:
                self._log(f"waiting for the mirror: {self._failover.problem}")
            self._clock.pause(self._every_s)

    def _find_cut(self, mirror: Store) -> Cut:
        """The cut from which the run can go on; raises, before a verdict, what would make that impossible after it."""
        target = open_store(self._goes_on, clock=self._clock, deadline_s=_MIRROR_S)
        check_free(target)
        probe(target, self._clock)
        return self._cuts.find(mirror)

    def _answers(self) -> bool:
        """True if the store has the run. A bucket that was deleted has not, and a refusal may be for good."""
        try:
            run = read_run(self._home)
        except (SkerryError, OSError):
            return False
        return run is not None and run.nonce == self._run.nonce

    def _look_for_claim(self, copy: Store | None) -> bool:
        try:
            return self._recorder.owns_slot(copy)
        except (SkerryError, OSError):
            return False

    def _mark(self, verdict: Verdict) -> None:
        while True:
            try:
                if self._answers():
                    mark_moved(self._home, verdict)
                    return
            except Unauthorized as error:
                self._log(f"the store that was left could not be marked: {error}")
                return
            except (SkerryError, OSError):
                pass  # away again
            self._clock.pause(_MARK_S)

    def _log(self, line: str) -> None:
        if line != self._logged:
            self._logged = line
            sys.stderr.write(f"skerry-replica: {line}\n")
            sys.stderr.flush()


def follow_verdict(mirror_uri: str, uri: str, clock: Clock) -> str:
    """The URI at which the run of `uri` goes on, by its mirror; `uri` if it has not been left.

    Raises Retryable if the mirror does not answer: without it a replica could start in a store that the run has left.
    """
    mirror = open_store(mirror_uri, clock=clock, deadline_s=_MIRROR_S)
    try:
        verdict = read_verdict(mirror)
    except Unauthorized as error:
        raise Retryable(f"the mirror refuses these credentials: {error}") from error
    if verdict is None or verdict.uri is None:
        return uri
    go_on(mirror, verdict, open_store(verdict.uri, clock=clock), clock)
    return verdict.uri
