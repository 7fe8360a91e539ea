"""The watch of a group's heartbeats: when a replica looks at the jobs of others, and when it starts one again."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.kit.protocol import run_record
from tests.kit.records import commit
from tests.kit.stores import HookedStore
from tests.support.clocks import FakeClock

from skerry.runtime.container.choose_jobs_to_restart import (
    JobLoss,
    Leave,
    PeerJob,
    PeerJobState,
    Start,
    decide,
    slots_to_look_at,
)
from skerry.runtime.container.peer_watch import PeerWatch
from skerry.runtime.contract import Revival
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog

if TYPE_CHECKING:
    from collections.abc import Sequence

REVIVAL: Final = Revival(after_s=180.0, limit=2, window_s=3600.0)
NOW_S: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC).timestamp()
FAILED: Final = PeerJob(slot="a-1", key="job-1", generation=0, state=PeerJobState.FAILED, created_s=NOW_S - 9000)
LOSS: Final = JobLoss(again=True, reason="exit code: 137", is_cancelled=False, description={})


def decided(*jobs: PeerJob, loss: JobLoss = LOSS, revival: Revival = REVIVAL) -> str:
    decision = decide(jobs, lambda _: loss, NOW_S, revival)
    return decision.job.key if isinstance(decision, Start) else decision.reason


def test_failed_job_is_followed_by_another() -> None:
    assert decided(FAILED) == "job-1"


def test_newest_job_of_a_slot_decides() -> None:
    live = replace(FAILED, key="job-1-g1", generation=1, state=PeerJobState.LIVE, created_s=NOW_S - 10)
    assert decided(FAILED, live) == "its job job-1-g1 has not ended"
    ended = replace(live, key="job-1-g2", state=PeerJobState.FAILED, generation=2)
    assert decided(live, ended, revival=replace(REVIVAL, limit=5)) == "job-1-g2"


def test_job_of_a_destroyed_run_does_not_decide_and_keeps_its_number() -> None:
    old = replace(FAILED, key="job-1-g3", generation=3, created_s=NOW_S - 90000)
    assert decided(old, replace(FAILED, state=PeerJobState.LIVE)) == "its job job-1 has not ended"
    decision = decide([old, FAILED], lambda _: LOSS, NOW_S, REVIVAL)
    assert isinstance(decision, Start)
    assert (decision.job, decision.generation) == (FAILED, 4)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (PeerJobState.LIVE, "its job job-1 has not ended"),
        (PeerJobState.ENDED, "its job job-1 is done, or was stopped"),
    ],
)
def test_live_finished_or_stopped_job_is_left_alone(state: PeerJobState, reason: str) -> None:
    assert decided(replace(FAILED, state=state)) == reason


def test_slot_without_a_job_is_left_alone() -> None:
    assert decided() == "its service has no record of a job"


def test_cancelled_or_hopeless_job_is_left_alone() -> None:
    assert decided(FAILED, loss=replace(LOSS, is_cancelled=True)) == "its job job-1 was cancelled"
    hopeless = decided(FAILED, loss=replace(LOSS, again=False, reason="exit code: 20"))
    assert hopeless == "its job job-1 failed, and a restart cannot help: exit code: 20"


def test_restarts_within_the_window_are_limited() -> None:
    ages = {0: 9000.0, 1: 4000.0, 2: 100.0}
    jobs = [replace(FAILED, key=f"job-{n}", generation=n, created_s=NOW_S - age) for n, age in ages.items()]
    assert decided(*jobs) == "job-2"
    used = "its job job-2 failed; 2 of 2 restarts used"
    assert decided(*jobs, revival=replace(REVIVAL, window_s=None)) == used
    jobs[1] = replace(jobs[1], created_s=NOW_S - 3000)
    assert decided(*jobs) == used


def test_lowest_live_slot_looks_after_the_silent_ones() -> None:
    slots = ["a-0", "a-1", "a-2", "a-10"]
    assert slots_to_look_at("a-2", {"a-0", "a-1"}, slots) == ["a-0", "a-1"]
    assert slots_to_look_at("a-10", {"a-0", "a-1"}, slots) == []
    assert slots_to_look_at("a-0", {"a-10", "a-2", "b-0"}, slots) == ["a-2", "a-10"]
    # A replica that looks is alive, whatever its own heartbeat says.
    assert slots_to_look_at("a-0", {"a-0", "a-1"}, slots) == ["a-1"]


class Jobs:
    """See PeerJobs. error: raised by every call."""

    def __init__(self, *jobs: PeerJob) -> None:
        self.jobs, self.asked, self.started = list(jobs), 0, list[str]()
        self.error: SkerryError | None = None
        self.loss = LOSS

    def list(self) -> Sequence[PeerJob]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return list(self.jobs)

    def read_loss(self, job: PeerJob) -> JobLoss:
        del job
        return self.loss

    def start_next(self, start: Start) -> str:
        job, name = start.job, f"{start.job.key}-next"
        if name in self.started:
            raise Conflict(name)
        self.started.append(name)
        self.jobs.append(replace(job, key=name, generation=start.generation, state=PeerJobState.LIVE, created_s=NOW_S))
        return name

    def superfluous(self) -> str | None:
        return None


class Group:
    """Three replicas of a group and one of another, of which a-0 watches."""

    def __init__(self, jobs: Jobs, slot: str = "a-0") -> None:
        self.clock, self.jobs, self.slot = FakeClock(), jobs, slot
        self.requests: list[str] = []
        self.store = HookedStore(lambda verb, key: self.requests.append(f"{verb} {key}"), self.clock)
        self.run = run_record(self.clock, slots=("a-0", "a-1", "a-2", "b-0"))
        self.watch = PeerWatch(jobs, REVIVAL, slot, "a", RunLog(self.store, self.run), self.clock)
        self.beats = 0

    def beat(self, *slots: str) -> None:
        self.beats += 1
        for slot in slots:
            self.store.replace(keys.heartbeat(slot), b"x" * self.beats)

    def look(self, *alive: str, times: int = 1) -> None:
        """Look each minute while these slots send heartbeats."""
        for _ in range(times):
            self.beat(*alive)
            self.watch.look()
            self.clock.advance(60.0)


def test_silent_replica_is_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    group = Group(Jobs(FAILED))
    group.look("a-0", "a-1", "a-2", "b-0")
    group.look("a-0", "a-2", times=2)
    assert group.jobs.asked == 0
    group.look("a-0", "a-2", times=2)
    assert group.jobs.started == ["job-1-next"]
    line = "revive: a-1 is silent: its job job-1 failed (exit code: 137); started job-1-next"
    assert line in capfd.readouterr().err
    # The new job has minutes to start, and its heartbeat ends the matter.
    group.look("a-0", "a-2", times=4)
    assert group.jobs.asked == 1
    group.look("a-0", "a-1", "a-2", times=20)
    assert (group.jobs.asked, group.jobs.started) == (1, ["job-1-next"])


def test_replica_that_never_sent_a_heartbeat_is_looked_at() -> None:
    group = Group(Jobs(FAILED))
    group.look("a-0", "a-2", times=5)
    assert group.jobs.started == ["job-1-next"]


def test_other_groups_are_not_looked_at() -> None:
    group = Group(Jobs(replace(FAILED, slot="b-0")))
    group.look("a-0", "a-1", "a-2", times=10)
    assert group.jobs.asked == 0


def test_higher_slot_takes_over_from_a_silent_lower_one() -> None:
    group = Group(Jobs(FAILED, replace(FAILED, slot="a-0", key="job-0")), "a-2")
    group.look("a-0", "a-2", times=6)
    assert group.jobs.started == []
    group.look("a-2", times=5)
    assert group.jobs.started == ["job-0-next", "job-1-next"]


def test_look_without_a_silent_replica_is_one_listing() -> None:
    group = Group(Jobs(FAILED))
    group.look("a-0", "a-1", "a-2")
    group.requests.clear()
    group.watch.look()
    assert group.requests == ["list heartbeats/"]


def test_zombie_is_not_doubled_and_is_asked_about_again() -> None:
    group = Group(Jobs(replace(FAILED, state=PeerJobState.LIVE)))
    group.look("a-0", "a-2", times=16)
    assert (group.jobs.asked, group.jobs.started) == (3, [])


def test_job_that_another_replica_started_is_none_of_ours() -> None:
    group = Group(Jobs(FAILED))
    group.jobs.started.append("job-1-next")
    group.look("a-0", "a-2", times=5)
    assert group.jobs.started == ["job-1-next"]


@pytest.mark.parametrize("error", [Unauthorized("denied"), Retryable("throttled"), Invalid("quota")])
def test_refusal_is_one_warning_and_pauses_grow(capfd: pytest.CaptureFixture[str], error: SkerryError) -> None:
    group = Group(Jobs(FAILED))
    group.jobs.error = error
    pauses = list[float]()

    def beat_and_stop() -> None:
        pauses.append(group.clock.pauses[-1])
        group.beat("a-0", "a-2")
        if len(pauses) == 12:
            group.jobs.error = None
        if group.jobs.started:
            group.watch.stop()

    group.clock.on_pause = beat_and_stop
    group.watch.run()
    warning = f"the other replicas cannot be looked after yet: {type(error).__name__}: {error}; the training goes on"
    assert capfd.readouterr().err.count(warning) == 1
    assert pauses[:3] == [60.0] * 3
    assert 1800.0 >= pauses[11] >= 900.0 > pauses[3]
    assert group.jobs.started == ["job-1-next"]


def test_refused_start_of_one_slot_delays_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    group = Group(Jobs(FAILED, replace(FAILED, slot="a-2", key="job-2")))
    start = group.jobs.start_next

    def refuse(decision: Start) -> str:
        if decision.job.slot == "a-1":
            raise Unauthorized("CreateTrainingJob: AccessDeniedException")
        return start(decision)

    group.jobs.start_next = refuse  # type: ignore[method-assign]
    group.look("a-0", times=6)
    assert group.jobs.started == ["job-2-next"]
    assert capfd.readouterr().err.count("warning: a-1 cannot be started again yet") == 1


def test_watch_that_was_stopped_starts_nothing() -> None:
    group = Group(Jobs(FAILED))
    group.look("a-0", "a-2", times=3)
    group.watch.stop()
    group.look("a-0", "a-2", times=3)
    assert group.jobs.started == []


def test_job_that_cannot_be_read_delays_no_other() -> None:
    group = Group(Jobs(FAILED, replace(FAILED, slot="a-2", key="job-2")))

    def read(job: PeerJob) -> JobLoss:
        if job.slot == "a-1":
            raise KeyError("TrainingJobStatus")
        return LOSS

    group.jobs.read_loss = read  # type: ignore[method-assign]
    group.look("a-0", times=6)
    assert group.jobs.started == ["job-2-next"]


def test_words_of_a_lost_replica_end_no_line_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    group = Group(Jobs(FAILED))
    group.jobs.loss = replace(LOSS, reason="exit code: 10\nskerry-replica: done\x1b[2J")
    group.look("a-0", "a-2", times=5)
    (line,) = capfd.readouterr().err.splitlines()
    assert "(exit code: 10?skerry-replica: done?[2J); started job-1-next" in line


def test_finished_run_needs_no_replica_again() -> None:
    group = Group(Jobs(FAILED))
    run = group.run.model_copy(update={"rounds": 2})
    log = RunLog(group.store, run)
    group.watch = PeerWatch(group.jobs, REVIVAL, "a-0", "a", log, group.clock)
    log.create(keys.commit(0), commit(0, run=run.nonce))
    log.create(keys.commit(1), commit(1, run=run.nonce))
    group.look("a-0", "a-2", times=6)
    assert group.jobs.asked == 0


def test_removed_slot_is_not_started_again() -> None:
    jobs = Jobs(FAILED)
    group = Group(jobs)
    group.watch = PeerWatch(
        jobs, REVIVAL, "a-0", "a", RunLog(group.store, group.run.model_copy(update={"slots": ("a-0",)})), group.clock
    )
    group.beat("a-1")
    group.look("a-0", times=6)
    assert jobs.asked == 0


@pytest.mark.parametrize("text", ["x", "{}", '{"after_s": "a", "max": 1, "window_s": null}'])
def test_wrong_contract_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="SKERRY_REVIVE"):
        Revival.of_text(text)
    assert Revival.of_text(REVIVAL.to_text()) == REVIVAL
    assert isinstance(decide([], lambda _: LOSS, NOW_S, REVIVAL), Leave)
