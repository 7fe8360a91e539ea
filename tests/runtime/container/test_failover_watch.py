"""The watch of a run's store, over memory stores: when it ends the script, votes, waits and goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.kit.stores import HookedStore
from tests.runtime.mirrors.test_failover_vote import AFTER_S, FORK, MIRROR, failover_run
from tests.support.clocks import FakeClock

from skerry.runtime.container import failover_watch, outcome
from skerry.runtime.container.failover_watch import OutOfTimeError, StoreWatch, find_run
from skerry.runtime.container.outcome import ExitDecision, OutcomeRecorder
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Conflict, Corrupt, Invalid, Moved, Retryable, SkerryError, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import read_elsewhere
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.records import Member
from skerry.runtime.log.run_record import Parent, Run, Verdict
from skerry.runtime.mirrors import failover_vote as failover_module
from skerry.runtime.mirrors.ballots import Ballots, read_verdict
from skerry.runtime.mirrors.checked_cut import CheckedCuts
from skerry.runtime.mirrors.failover_vote import go_on
from skerry.runtime.mirrors.restorable import Cut, find_cut
from skerry.runtime.store import open_store
from skerry.runtime.training import open_session
from skerry.runtime.training.open_session import SessionOptions, join_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.runtime.store import Store

HOME = "memory://home"
ROUND, COMMIT = 7, "1" * 64
FAILED = ExitDecision(code=ExitCode.RETRY, reason="it failed")


class Places:
    """A run's store, its mirror, and the run that goes on; each may be away, with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.clock, self.run = monkeypatch, FakeClock(), failover_run(3, 2)
        self.errors: dict[str, Exception] = {}
        self.stores = {uri: HookedStore(self.hook(uri), self.clock) for uri in (HOME, MIRROR, FORK)}
        self.home, self.mirror, self.fork = self.stores.values()
        for store in (self.home, self.mirror):
            store.create(keys.RUN, self.run.to_bytes())
        monkeypatch.setattr(failover_watch, "open_store", lambda uri, **_: self.stores[uri])
        monkeypatch.setattr(failover_module, "find_cut", lambda *_: self.cut(COMMIT))

    def hook(self, uri: str):  # noqa: ANN201  a function of two strings
        def raise_if_away(_verb: str, _key: str) -> None:
            if (error := self.errors.get(uri)) is not None:
                raise error

        return raise_if_away

    def cut(self, commit: str) -> Cut:
        return Cut(run=self.run, round=ROUND, checkpoint=ROUND, commit=commit, logged=ROUND)

    def claim(self, incarnation: int, host: str, *stores: Store, slot: str = "r-0") -> None:
        member = Member(
            run=self.run.nonce,
            slot=slot,
            incarnation=incarnation,
            nonce=self.clock.nonce(),
            host=host,
            process=1,
            created="2026-01-01",
            place=None,
            software=None,
        )
        for store in stores:
            store.create(keys.member(slot, incarnation), member.to_bytes())

    def recorder(self, earlier: OutcomeRecorder | None = None) -> OutcomeRecorder:
        self.patch.setattr(outcome.socket, "gethostname", lambda: "node")
        return OutcomeRecorder(RunLog(self.home, self.run), "r-0", self.clock, earlier=earlier)

    def watch(self, recorder: OutcomeRecorder | None = None) -> StoreWatch:
        assert self.run.failover is not None
        return StoreWatch(self.run, self.run.failover, HOME, recorder or self.recorder(), self.clock)

    def verdict(self) -> Verdict:
        verdict = Verdict(
            run=self.run.nonce,
            ballot=0,
            uri=FORK,
            round=ROUND,
            commit=COMMIT,
            votes=("r-1", "r-2"),
            by="r-1",
            created="2026-01-01",
        )
        self.mirror.create(keys.verdict(0), verdict.to_bytes())
        return verdict

    def forked(self, **changes: object) -> Run:
        """The run that goes on by the verdict; changes: of its parent."""
        parent = Parent(uri=HOME, run=self.run.nonce, round=ROUND, commit=COMMIT).model_copy(update=changes)
        run = self.run.model_copy(update={"nonce": "f" * 32, "parent": parent, "failover": None, "mirrors": None})
        self.fork.create(keys.RUN, run.to_bytes())
        return run

    def forks_by_itself(self) -> None:
        """Let the fork be made without the objects of a mirror."""

        def make(*_: object, **__: object) -> Run:
            return self.forked()

        self.patch.setattr(failover_module, "fork", make)

    @property
    def votes(self) -> list[str]:
        return [entry.key for entry in self.mirror.list(keys.votes_prefix(0))]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    places = Places(monkeypatch)
    yield places
    places.errors.clear()  # the threads that mark a store that was left wait for it, by a clock that does not
    for thread in threading.enumerate():
        if thread.name == "mark-moved":
            thread.join()


def wait_long(places: Places, watch: StoreWatch, looks: int) -> None:
    """Let a watch wait for a store that stays away; its pause then ends the wait."""
    left = [looks]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise InterruptedError

    places.clock.on_pause = count
    with pytest.raises(InterruptedError):
        watch.await_store()


def refuse_writes(verb: str, key: str) -> None:
    if verb == "create":
        raise Unauthorized(key)


def test_start_that_owns_its_slot_votes_when_its_store_is_away(places: Places) -> None:
    watch = places.watch()
    places.claim(0, "node", places.home, places.mirror)
    places.errors[HOME] = Retryable("away")
    wait_long(places, watch, 10)
    assert places.votes == [keys.vote(0, "r-0")]


@pytest.mark.parametrize("host", ["other-node", "node"])  # a pod that was replaced may have the name of the old one
def test_older_process_does_not_vote_beside_a_newer_start(places: Places, host: str) -> None:
    watch = places.watch()
    places.claim(0, "node", places.home, places.mirror)
    interrupted, looked = threading.Event(), threading.Event()
    places.clock.on_pause = looked.set
    watch.start(interrupted.set)
    assert looked.wait(300)
    watch.stop()
    assert not interrupted.is_set()
    places.claim(1, host, places.home, places.mirror)
    places.errors[HOME] = Retryable("away")
    wait_long(places, watch, 10)
    assert places.votes == []


def test_claim_of_an_earlier_command_of_this_process_still_votes(places: Places) -> None:
    first = places.recorder()
    places.claim(0, "node", places.home, places.mirror)
    assert first.owns_slot()
    second = places.recorder(first)
    assert second.owns_slot(places.mirror)
    assert not places.recorder().owns_slot(places.mirror)
    places.claim(1, "node", places.home, places.mirror)  # by the second command
    assert second.owns_slot(places.mirror)
    places.claim(2, "other-node", places.mirror)
    assert not second.owns_slot(places.mirror)


def test_script_is_interrupted_at_the_first_look_after_a_verdict(places: Places) -> None:
    """The store answers, and the run has left it."""
    places.verdict()
    watch, interrupted = places.watch(), threading.Event()
    watch.start(interrupted.set)
    assert interrupted.wait(300)
    watch.stop()
    assert watch.is_lost(ExitDecision(code=ExitCode.DONE, reason="done"))


def test_failed_script_is_kept_only_while_its_store_is_away(places: Places) -> None:
    watch = places.watch()
    assert not watch.is_lost(FAILED)
    places.errors[HOME] = Retryable("away")
    assert watch.is_lost(FAILED)
    assert not watch.is_lost(ExitDecision(code=ExitCode.DONE, reason="done"))
    assert not watch.is_lost(ExitDecision(code=ExitCode.RETRY, reason="stopped", stopped=True))
    places.errors.clear()
    places.home.replace(keys.RUN, places.run.model_copy(update={"nonce": "e" * 32}).to_bytes())
    assert watch.is_lost(FAILED)  # another run in its place


def test_script_is_not_started_while_the_mirror_is_away(places: Places) -> None:
    """The run may have left the store, which answers."""
    watch = places.watch()
    places.errors[MIRROR] = Retryable("away")
    wait_long(places, watch, 5)
    places.errors.clear()
    assert watch.await_store() == HOME


def test_store_that_is_back_is_used_after_seconds(places: Places) -> None:
    watch, before = places.watch(), places.clock.now()
    places.errors[HOME] = Retryable("away")
    places.clock.on_pause = places.errors.clear
    assert watch.await_store() == HOME
    assert places.clock.now() - before <= AFTER_S / 4


def test_run_goes_on_once_its_new_store_answers_and_the_old_is_marked(places: Places) -> None:
    verdict = places.verdict()
    places.forked()
    watch, marked = places.watch(), threading.Event()
    real = failover_watch.mark_moved

    def mark(home: Store, seen: Verdict) -> None:
        real(home, seen)
        marked.set()

    places.patch.setattr(failover_watch, "mark_moved", mark)
    places.errors[FORK] = Retryable("away")
    places.clock.on_pause = places.errors.clear
    assert watch.await_store() == FORK
    assert marked.wait(300)
    mark_of_home = read_elsewhere(places.home)
    assert mark_of_home is not None
    assert (mark_of_home.why, mark_of_home.uri, mark_of_home.round) == ("moved", FORK, verdict.round)


def test_no_verdict_is_created_from_damage_or_onto_another_run(places: Places) -> None:
    """It is final: a run that cannot be made after it is stuck, while a store that comes back ends a ballot."""
    for slot in ("r-1", "r-2"):
        Ballots(places.mirror, places.run, slot, places.clock, find_cut).vote(0)
    watch = places.watch()
    places.errors[HOME] = Retryable("away")
    wait_long(places, watch, 10)  # nothing in the mirror
    places.patch.setattr(CheckedCuts, "find", lambda *_: places.cut(COMMIT))
    places.claim(0, "node", places.fork)
    wait_long(places, watch, 10)
    places.fork.delete(keys.member("r-0", 0))
    places.fork.hook = refuse_writes
    wait_long(places, watch, 10)
    assert read_verdict(places.mirror) is None
    places.fork.hook = places.hook(FORK)
    places.forks_by_itself()
    assert watch.await_store() == FORK
    verdict = read_verdict(places.mirror)
    assert verdict is not None
    assert (verdict.by, verdict.votes) == ("r-0", ("r-1", "r-2"))


@pytest.mark.parametrize("slot", ["r-1", "r-2", None])  # r-1 has created the verdict
@pytest.mark.parametrize("changes", [{"run": "a" * 32}, {"round": 3}, {"commit": "2" * 64}])
def test_another_run_at_the_new_place_is_refused(places: Places, slot: str | None, changes: dict[str, object]) -> None:
    verdict = places.verdict()
    places.forked(**changes)
    with pytest.raises(Conflict, match="does not go on from round 7 of this run"):
        go_on(places.mirror, verdict, places.fork, places.clock, slot)


def test_run_without_a_parent_at_the_new_place_is_refused(places: Places) -> None:
    places.fork.create(keys.RUN, places.run.to_bytes())
    with pytest.raises(Conflict, match="has run"):
        go_on(places.mirror, places.verdict(), places.fork, places.clock, "r-1")


def test_round_with_another_commit_than_the_verdict_is_not_restored(places: Places) -> None:
    places.patch.setattr(failover_module, "find_cut", lambda *_: places.cut("2" * 64))
    with pytest.raises(Corrupt, match="is not that of the verdict"):
        go_on(places.mirror, places.verdict(), places.fork, places.clock, "r-1")
    assert places.fork.list("") == []


def marked_at(places: Places) -> str | None:
    for thread in threading.enumerate():
        if thread.name == "mark-moved":
            thread.join()
    mark = read_elsewhere(places.home)
    return None if mark is None else mark.uri


def test_job_starts_where_the_run_goes_on_and_marks_the_old_store(places: Places) -> None:
    assert find_run(MIRROR, HOME, places.clock) == HOME
    places.verdict()
    places.forked()
    assert find_run(MIRROR, HOME, places.clock) == FORK
    assert marked_at(places) == FORK


@pytest.mark.parametrize("error", [Unauthorized("refused"), Invalid("no such bucket"), Retryable("away")])
def test_job_does_not_start_while_the_mirror_cannot_be_asked(places: Places, error: Exception) -> None:
    places.errors[MIRROR] = error
    with pytest.raises(Retryable, match=f"the mirror that knows where the run is cannot be used yet: {error}"):
        find_run(MIRROR, HOME, places.clock)
    places.clock.on_pause = places.errors.clear
    assert find_run(MIRROR, HOME, places.clock) == HOME


@pytest.mark.parametrize("gone", [None, Invalid("no such bucket"), Unauthorized("its account is closed")])
def test_job_waits_for_the_verdict_on_a_store_that_was_deleted(places: Places, gone: Exception | None) -> None:
    """It has no vote, because it has not claimed its slot; the others have."""
    if gone is None:
        places.home.delete(keys.RUN)
    else:
        places.errors[HOME] = gone
    began = places.clock.now()
    with pytest.raises(Retryable, match="does not have the run, and its mirror memory://mirror/run no verdict"):
        find_run(MIRROR, HOME, places.clock)
    assert places.clock.now() - began >= 1800
    with pytest.raises(OutOfTimeError):
        find_run(MIRROR, HOME, places.clock, max_hours=0.01)

    def decide() -> None:
        places.clock.on_pause = lambda: None
        places.verdict()
        places.forked()

    places.clock.on_pause = decide
    assert find_run(MIRROR, HOME, places.clock) == FORK
    places.errors.clear()
    places.home.replace(keys.RUN, places.run.to_bytes())


def test_job_of_a_run_that_never_was_is_refused_by_its_start(places: Places) -> None:
    places.home.delete(keys.RUN)
    places.mirror.delete(keys.RUN)
    assert find_run(MIRROR, HOME, places.clock) == HOME


def test_script_that_was_stopped_by_the_move_of_its_run_goes_on(places: Places) -> None:
    """`skerry restore` takes its slot, and it ends with 30 before the next look."""
    watch, stopped = places.watch(), ExitDecision(code=ExitCode.STOPPED, reason="moved", stopped=True)
    assert not watch.is_lost(stopped)
    places.verdict()
    assert watch.is_lost(stopped)
    places.errors[MIRROR] = Retryable("busy")
    places.clock.on_pause = places.errors.clear
    assert watch.is_lost(stopped)
    places.errors[MIRROR] = Retryable("away")
    places.clock.on_pause = lambda: None
    assert not watch.is_lost(stopped)


@pytest.mark.parametrize("error", [Invalid("no such round"), Corrupt("damaged"), Unauthorized("refused")])
@pytest.mark.parametrize("is_started", [True, False])
def test_run_that_cannot_be_made_yet_is_waited_for(places: Places, error: Exception, *, is_started: bool) -> None:
    """An operator's copy from another mirror takes longer than replicas wait for it."""
    places.verdict()

    def fail(*_: object) -> Cut:
        raise error

    places.patch.setattr(failover_module, "find_cut", fail)
    began = places.clock.now()

    def copy() -> None:
        if places.clock.now() - began > 600:
            places.clock.on_pause = lambda: None
            places.forked()

    places.clock.on_pause = copy
    assert (places.watch().await_store() if is_started else find_run(MIRROR, HOME, places.clock)) == FORK


def test_patience_of_a_start_is_three_times_that_of_a_vote(places: Places) -> None:
    settings = places.run.failover
    assert settings is not None
    slow = places.run.model_copy(update={"failover": settings.model_copy(update={"after_s": 3600.0})})
    places.mirror.replace(keys.RUN, slow.to_bytes())
    places.home.delete(keys.RUN)
    began = places.clock.now()
    with pytest.raises(Retryable):
        find_run(MIRROR, HOME, places.clock)
    assert places.clock.now() - began >= 3 * 3600


def test_interrupt_is_forgotten_once_its_store_answers(places: Places) -> None:
    watch, interrupted = places.watch(), threading.Event()
    places.errors[HOME] = Retryable("away")
    places.clock.pause(AFTER_S + 1)
    watch.start(interrupted.set)
    assert interrupted.wait(300)
    watch.stop()
    places.clock.on_pause = places.errors.clear
    places.errors.clear()
    assert watch.await_store() == HOME
    assert not watch.is_lost(FAILED)


def test_wait_for_a_store_ends_at_the_limit_of_the_run(places: Places) -> None:
    assert places.run.failover is not None
    until = places.clock.now() + 3600
    watch = StoreWatch(places.run, places.run.failover, HOME, places.recorder(), places.clock, until)
    places.errors[HOME] = Retryable("away")
    with pytest.raises(OutOfTimeError):
        watch.await_store()
    assert until <= places.clock.now() < until + AFTER_S


def run_with_mirror(places: Places, mirror: str) -> Run:
    settings = places.run.failover
    assert settings is not None
    changed = places.run.model_copy(
        update={
            "mirrors": tuple(each.model_copy(update={"uri": mirror}) for each in places.run.mirrors or ()),
            "failover": settings.model_copy(update={"mirror": mirror, "uri": f"{mirror}-failover"}),
        }
    )
    run = Run.parse(changed.to_bytes(), keys.RUN)
    places.home.replace(keys.RUN, run.to_bytes())
    return run


WATCHED = SessionOptions(min_replicas=2, deadline_s=10.0, is_watched=True)


def test_start_is_in_the_mirror_before_it_trains(tmp_path: Path, places: Places) -> None:
    run_with_mirror(places, (tmp_path / "mirror/test").as_uri())
    join_run(places.home, "r-0", WATCHED, places.clock)
    key = keys.member("r-0", 0)
    assert (tmp_path / "mirror/test" / key).read_bytes() == bytes(places.home.read(key) or b"")


def test_start_makes_an_older_vote_of_its_slot_void_before_it_trains(tmp_path: Path, places: Places) -> None:
    """An older process of the slot may have voted between the look of this one's watch and its claim."""
    run = run_with_mirror(places, (tmp_path / "mirror/test").as_uri())
    mirror = open_store((tmp_path / "mirror/test").as_uri())
    ballots = Ballots(mirror, run, "r-0", places.clock, find_cut)
    ballots.vote(0)
    join_run(places.home, "r-0", WATCHED, places.clock)
    assert Verdict.parse(mirror.read(keys.verdict(0)) or b"", "verdict").uri is None
    ballots.read()
    assert ballots.order(FORK, places.cut(COMMIT)) is not None
    with pytest.raises(Moved, match=f"goes on at {FORK}, from round {ROUND}"):
        join_run(places.home, "r-0", WATCHED, places.clock)


@pytest.mark.parametrize("error", [Invalid("no such bucket"), Unauthorized("refused")])
def test_start_without_its_mirror_is_repeated(places: Places, tmp_path: Path, error: Exception) -> None:
    run_with_mirror(places, (tmp_path / "mirror/test").as_uri())
    places.patch.setattr(open_session, "open_store", lambda *_, **__: places.mirror)
    places.errors[MIRROR] = error
    with pytest.raises(Retryable, match=f"by which the run may leave its store: {error}"):
        join_run(places.home, "r-0", WATCHED, places.clock)


def test_mirror_of_another_run_ends_the_start(places: Places, tmp_path: Path) -> None:
    mirror = (tmp_path / "mirror/test").as_uri()
    run = run_with_mirror(places, mirror)
    open_store(mirror).create(keys.RUN, run.model_copy(update={"nonce": "d" * 32}).to_bytes())
    with pytest.raises(SkerryError) as raised:
        join_run(places.home, "r-0", WATCHED, places.clock)
    assert not isinstance(raised.value, Retryable)
