"""Watches a run's store beside the training script, so that the replica votes for a failover once the store is lost.

The script is killed before its replica votes, so a vote is kept whatever the script was doing. The replica then waits
for the verdict, and its script is run again: in the same store if that is back, else where the run goes on.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Final

from skerry.runtime.container.outcome import time_limit
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError, Unauthorized
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
# A job that starts while a store or mirror is gone waits for a verdict so long, or for this many times `after_s`.
_PATIENCE_S: Final = 1800.0
_BALLOTS: Final = 3
# A script that an operator's move may have stopped is kept so long while the mirror does not answer.
_ASKED_S: Final = 300.0


class OutOfTimeError(Exception):
    """The time limit of the run has come while its replica waited for a store."""


class StoreWatch:
    """One start of a replica."""

    def __init__(
        self,
        run: Run,
        failover: FailoverSettings,
        uri: str,
        recorder: OutcomeRecorder,
        clock: Clock,
        until: float | None = None,
    ) -> None:
        """uri: of the run. recorder: knows if the replica has claimed its slot. until: the limit, by clock.now()."""
        self._until = until
        self._run, self._uri, self._recorder, self._clock = run, uri, recorder, clock
        self.mirror_uri = failover.mirror
        self._every_s = min(_LONGEST_LOOK_S, failover.after_s / _LOOKS)
        self._home = open_store(uri, clock=clock, deadline_s=self._every_s)
        self._mirror = open_store(failover.mirror, clock=clock, deadline_s=_MIRROR_S)
        self._cuts, self._goes_on = CheckedCuts(clock), failover.uri
        ballots = Ballots(self._mirror, run, recorder.slot, clock, self._find_cut)
        self._failover = Failover(ballots, failover.after_s, clock)
        self._claim: int | None = None
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
                if self._claim is None:
                    self._claim = self._look_for_claim(None)
                following = self._failover.step(answers=self._answers(), is_training=True, claim=None)
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
        if decision.code == ExitCode.STOPPED and self._has_moved():
            return True  # an operator has moved the run, and its store said so before the next look
        return self._is_interrupted or (failed and not self._answers())

    def await_store(self) -> str:
        """Wait until the script may run, and return the URI at which. It does not run.

        Raises OutOfTimeError at the run's limit; without a limit it may take for ever.
        """
        while True:
            if self._until is not None and self._clock.now() >= self._until:
                raise OutOfTimeError
            # The mirror has the starts of a slot, too: each is there before it trains.
            claim = self._look_for_claim(self._mirror)
            following = self._failover.step(answers=self._answers(), is_training=False, claim=claim)
            if following == "train":
                self._is_interrupted = False
                return self._uri
            if isinstance(following, Verdict) and following.uri is not None:
                why = f"{', '.join(following.votes)} have voted" if following.votes else f"{following.by} has moved it"
                self._log(f"{why}: the run goes on from round {following.round}")
                try:
                    target = open_store(following.uri, clock=self._clock)
                    go_on(self._mirror, following, target, self._clock, self._recorder.slot)
                except Conflict:
                    raise  # another run is in its place
                except SkerryError as error:
                    # An operator's copy may still come from another mirror; the store or the rights may come back.
                    self._log(f"the run cannot go on yet: {error}")
                else:
                    _start_marking(self._home, following, self._clock)
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
        return _has_run(self._home, self._run.nonce)

    def _has_moved(self) -> bool:
        until = self._clock.now() + _ASKED_S
        while True:
            try:
                verdict = read_verdict(self._mirror)
            except (SkerryError, OSError) as error:
                if self._clock.now() >= until:
                    self._log(f"whether the run goes on elsewhere is not known: {error}")
                    return False
                self._clock.pause(self._every_s)
            else:
                return verdict is not None and verdict.uri is not None

    def _look_for_claim(self, copy: Store | None) -> int | None:
        try:
            return self._recorder.claimed if self._recorder.owns_slot(copy) else None
        except (SkerryError, OSError):
            return None

    def _log(self, line: str) -> None:
        if line != self._logged:
            self._logged = line
            _write(line)


def find_run(mirror_uri: str, uri: str, clock: Clock, max_hours: float | None = None) -> str:
    """The URI at which a replica of the run of `uri` starts: `uri`, or where the run goes on by its mirror.

    Waits while `uri` does not have the run and nothing is decided, while the run cannot go on yet, and while the mirror
    does not answer: without it a replica could start in a store that the run has left. max_hours: of the run.
    Raises Retryable after half an hour, or three times `after_s`, OutOfTimeError at the limit, and Conflict if another
    run is where this one goes on.
    """
    mirror = open_store(mirror_uri, clock=clock, deadline_s=_MIRROR_S)
    home = open_store(uri, clock=clock, deadline_s=_LONGEST_LOOK_S)
    patience_s, began, until, logged = _PATIENCE_S, clock.now(), None, ""
    while True:
        verdict = None
        try:
            run, verdict = read_run(mirror), read_verdict(mirror)
            if verdict is not None and verdict.uri is not None:
                go_on(mirror, verdict, open_store(verdict.uri, clock=clock), clock)
                _start_marking(home, verdict, clock)
                return verdict.uri
            if run is None or (problem := _absence(home)) is None:
                return uri
            until = time_limit(run, max_hours, clock) if until is None else until
            if run.failover is not None:
                patience_s = max(_PATIENCE_S, _BALLOTS * run.failover.after_s)
            problem = f"{uri} does not have the run, and its mirror {mirror_uri} no verdict: {problem}"
        except Conflict:
            raise
        except (SkerryError, OSError) as error:
            whose = "the mirror that knows where the run is" if verdict is None else f"the run at {verdict.uri}"
            problem = f"{whose} cannot be used yet: {error}"
        if until is not None and clock.now() >= until:
            raise OutOfTimeError
        if clock.now() - began >= patience_s:
            raise Retryable(f"{problem}; see `skerry doctor {mirror_uri}`")
        if problem != logged:
            logged = problem
            _write(f"waiting: {problem}")
        clock.pause(_LONGEST_LOOK_S)


def _absence(home: Store) -> str | None:
    """The reason that a store counts as lost: no run, no bucket, refused credentials. None if it is busy or has one."""
    try:
        return "no run.json" if read_run(home) is None else None
    except (Invalid, Unauthorized) as error:
        return str(error)
    except (SkerryError, OSError):
        return None


def _has_run(home: Store, nonce: str) -> bool:
    try:
        run = read_run(home)
    except (SkerryError, OSError):
        return False
    return run is not None and run.nonce == nonce


def _start_marking(home: Store, verdict: Verdict, clock: Clock) -> None:
    """Say in the store that was left where the run goes on, as soon as it is back, beside everything else."""

    def mark() -> None:
        while True:
            try:
                if _has_run(home, verdict.run):
                    mark_moved(home, verdict)
                    return
            except Unauthorized as error:
                _write(f"the store that was left could not be marked: {error}")
                return
            except (SkerryError, OSError):
                pass  # away again
            clock.pause(_MARK_S)

    threading.Thread(target=mark, name="mark-moved", daemon=True).start()


def _write(line: str) -> None:
    sys.stderr.write(f"skerry-replica: {line}\n")
    sys.stderr.flush()
