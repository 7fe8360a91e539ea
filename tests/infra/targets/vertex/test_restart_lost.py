"""`skerry watch` restarts lost jobs, as often as the spec allows, and changes no other resource."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.infra.targets.runs import VertexRun
from tests.support.clocks import FakeClock

from skerry.infra.cli.deployed_watch import Watch
from skerry.infra.cli.live_run_table import open_screen
from skerry.infra.deploy import list_and_stop_jobs as working
from skerry.infra.deploy.lock_owner_identity import this_process
from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan
from skerry.infra.deploy.read_clouds import read_state
from skerry.infra.deploy.restart_lost import LostJobRestarter, StopRequest
from skerry.infra.provision.handler import Condition
from skerry.infra.targets.vertex import job_views
from skerry.infra.targets.vertex.jobs import Jobs
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Retryable
from skerry.testing.google.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from skerry.infra.provision.handler import Desired
    from skerry.testing.google.sandbox import GoogleSandbox

BACKOFF = Backoff(first=16.0, cap=600.0)


class Shift:
    """A watch of a run with two jobs, a-0 and a-1."""

    def __init__(self, folder: Path, sandbox: GoogleSandbox, *overrides: str) -> None:
        self.operator = VertexRun(folder, sandbox).operator(options="role: group")
        assert self.operator.apply(*overrides).ok
        self.sandbox = sandbox
        self.deployment = self.operator.deployment(*overrides)
        assert isinstance(self.deployment.clock, FakeClock)
        self.clock = self.deployment.clock
        self.stop = StopRequest()
        self.reviving = LostJobRestarter(self.deployment, self.stop, BACKOFF)
        self.take_creations()

    def job(self, slot: str) -> str:
        """Return the number of the newest job of the slot, and start it if it is pending."""
        number = next(view.job for _, view in working.list_jobs(self.deployment) if view.slot == slot)
        if self.sandbox.jobs.state(number) == "JOB_STATE_PENDING":
            self.sandbox.jobs.start(number)
        return number

    def look(self, after_s: float = 0.0, beating: Collection[str] = ("a-0", "a-1")) -> list[str]:
        self.clock.advance(after_s)
        return list(self.reviving.look(working.list_jobs(self.deployment), beating))

    def lose(self, slot: str) -> list[str]:
        """Reclaim the machine of a job, and look."""
        self.sandbox.jobs.interrupt(self.job(slot))
        return self.look()

    def conditions(self) -> list[Condition]:
        return [view.condition for _, view in working.list_jobs(self.deployment)]

    def take_creations(self) -> int:
        """Return the number of jobs created since the previous call."""
        created = sum(call.name.endswith("customJobs.create") for call in self.sandbox.calls)
        self.sandbox.calls.clear()
        return created


@pytest.fixture
def shift(tmp_path: Path, sandbox: GoogleSandbox) -> Shift:
    return Shift(tmp_path, sandbox)


def test_job_of_a_reclaimed_machine_restarts_after_a_pause(shift: Shift, sandbox: GoogleSandbox) -> None:
    assert shift.look() == []
    assert not shift.reviving.busy
    lost, other = shift.job("a-0"), shift.job("a-1")
    sandbox.jobs.interrupt(lost)
    # The random pause is at least half of the first one.
    (line,) = shift.look()
    assert re.fullmatch(r"a-0: will be restarted in (8|9|1[0-6]) s", line)
    assert shift.look(after_s=7.0) == []
    assert shift.reviving.busy
    assert shift.take_creations() == 0
    assert shift.look(after_s=9.1) == ["a-0: restarted (restart 1)"]
    assert shift.reviving.busy
    assert (shift.take_creations(), shift.conditions()) == (1, [Condition.READY, Condition.READY])
    assert (shift.job("a-0") != lost, shift.job("a-1")) == (True, other)
    assert shift.look(after_s=600.0) == []
    assert (shift.reviving.busy, shift.take_creations()) == (False, 0)
    assert shift.operator.plan().plan.empty
    assert shift.operator.destroy().ok
    assert sandbox.inventory() == {}


@pytest.mark.parametrize(("code", "starts"), [(10, 1), (20, 0), (30, 0), (1, 1), (137, 1)])
def test_exit_code_decides_about_a_restart(shift: Shift, sandbox: GoogleSandbox, code: int, starts: int) -> None:
    sandbox.jobs.finish(shift.job("a-1"), code)
    shift.look()
    assert shift.reviving.busy == (starts > 0)
    shift.look(after_s=16.0)
    assert shift.take_creations() == starts


def test_stopped_or_finished_job_is_not_restarted(shift: Shift, sandbox: GoogleSandbox) -> None:
    working.stop_jobs(shift.deployment, working.jobs_to_stop(shift.deployment, ["a-0"]))
    sandbox.jobs.finish(shift.job("a-1"))
    assert shift.look() == []
    assert shift.look(after_s=1000.0) == []
    assert (shift.reviving.busy, shift.take_creations()) == (False, 0)


def test_number_of_restarts_is_limited_by_the_spec(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox, "faults.restarts.max=2", "faults.min_replicas=2")
    pauses = [16.0, 32.0]
    for number, pause in enumerate(pauses, 1):
        shift.lose("a-0")
        assert shift.look(after_s=pause / 2 - 1.0) == []
        assert shift.look(after_s=pause / 2 + 1.0) == [f"a-0: restarted (restart {number})"]
    refusal, too_few = shift.lose("a-0")
    assert refusal == "a-0: not restarted: signal SIGKILL; 2 of 2 restarts used"
    assert too_few.startswith("fewer than 2 replicas are left")
    assert shift.look(after_s=1000.0) == []
    assert shift.take_creations() == 2
    # Restarts older than the window do not count, but restarts of this job ended: an apply starts it again.
    assert shift.operator.apply("faults.restarts.max=2", "faults.min_replicas=2").ok
    assert shift.look(after_s=4000.0) == []
    shift.lose("a-0")
    assert shift.look(after_s=16.0) == ["a-0: restarted (restart 3)"]


def test_script_without_a_heartbeat_is_restarted_once(shift: Shift, sandbox: GoogleSandbox) -> None:
    sandbox.jobs.finish(shift.job("a-0"), 1)
    shift.look(beating=())
    assert shift.look(after_s=16.0, beating=()) == ["a-0: restarted (restart 1)"]
    sandbox.jobs.finish(shift.job("a-0"), 1)
    (line,) = shift.look(beating=())
    assert line == "a-0: not restarted: exit code 1 before its first heartbeat, 2 starts in a row"


def test_restart_changes_nothing_else(shift: Shift) -> None:
    account = next(change for change in shift.operator.plan().plan.changes if change.kind == "google_service_account")
    entry = next(entry for entry in shift.deployment.open_state().load().entries if entry.id == account.id)  # pyright: ignore[reportOptionalMemberAccess]
    shift.deployment.handlers[account.kind].delete(entry.record)
    shift.lose("a-0")
    line, _ = shift.look(after_s=16.0)
    assert line.startswith("a-0: could not be restarted: ")
    assert account.address in line
    assert (shift.take_creations(), shift.reviving.busy) == (0, True)
    assert shift.operator.apply().ok
    assert shift.look(after_s=100.0) == []
    assert not shift.reviving.busy


def test_failed_start_counts_and_is_retried(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox, "faults.restarts.max=2")
    shift.lose("a-0")
    sandbox.jobs.refuse(Refusal(429, "Quota exceeded for quota metric 'create requests'"))
    line, again = shift.look(after_s=16.0)
    assert line.startswith("a-0: could not be restarted: ")
    assert again.startswith("a-0: will be restarted in ")
    sandbox.jobs.refuse(None)
    assert shift.look(after_s=32.0) == ["a-0: restarted (restart 2)"]
    assert shift.conditions() == [Condition.READY, Condition.READY]


def test_watch_stays_while_a_restart_is_due(shift: Shift, sandbox: GoogleSandbox) -> None:
    for slot in ("a-0", "a-1"):
        sandbox.jobs.interrupt(shift.job(slot))
    shift.take_creations()
    starts: list[int] = []

    def in_a_pause() -> None:
        created = shift.take_creations()
        starts.append(created)
        if sum(starts) == 2 and not created:
            for slot in ("a-0", "a-1"):
                sandbox.jobs.finish(shift.job(slot))

    shift.clock.on_pause = in_a_pause
    console = Console(record=True, width=200, quiet=True)
    with open_screen(console, shift.clock) as screen:
        # The jobs are done without a closed round: the bucket holds no run.
        assert not Watch(shift.deployment).until_over(console, screen, StopRequest())
    assert sum(starts) == 2


def test_job_with_changed_code_or_spec_is_not_restarted(shift: Shift, tmp_path: Path) -> None:
    """An apply from another terminal has changed the code; this watch has the old archive."""
    (tmp_path / "train" / "train.py").write_text("print('fixed')\n")
    assert shift.operator.apply().ok
    shift.take_creations()
    shift.lose("a-0")
    (line,) = shift.look(after_s=16.0)
    assert line.startswith("a-0: could not be restarted: environment would change")
    assert "end it (the jobs keep running), and run it again" in line
    assert shift.look(after_s=1000.0) == []
    assert (shift.take_creations(), shift.reviving.busy) == (0, False)


def test_replica_removed_from_the_spec_is_not_restarted(shift: Shift) -> None:
    shift.lose("a-1")
    assert shift.operator.apply("replicas[0].count=1", "faults.min_replicas=1").ok
    shift.take_creations()
    assert shift.look(after_s=16.0) == []
    assert (shift.take_creations(), shift.reviving.busy) == (0, False)


@pytest.mark.parametrize("slots", [(), ("a-1",)])
def test_cancelled_job_is_not_restarted_before_an_apply(shift: Shift, slots: tuple[str, ...]) -> None:
    shift.job("a-0")
    shift.lose("a-1")
    to_stop = working.jobs_to_stop(shift.deployment, slots)
    assert [record.address.partition(".")[2] for record in to_stop.jobs] == list(slots or ("a-0", "a-1"))
    working.stop_jobs(shift.deployment, to_stop)
    assert shift.look(after_s=16.0) == []
    assert (shift.take_creations(), shift.reviving.busy) == (0, False)
    assert shift.operator.apply().ok
    assert shift.conditions() == [Condition.READY, Condition.READY]
    shift.lose("a-1")
    assert shift.look(after_s=16.0) == ["a-1: restarted (restart 1)"]


def test_cancel_is_rejected_while_an_apply_runs(shift: Shift) -> None:
    to_stop = working.jobs_to_stop(shift.deployment)
    state = read_state(shift.deployment)
    with (
        shift.deployment.open_state().hold(this_process("apply", shift.clock), state, shift.deployment.run),
        pytest.raises(Conflict, match="the state is locked: apply by"),
    ):
        working.stop_jobs(shift.deployment, to_stop)
    assert shift.conditions() == [Condition.READY, Condition.READY]


def test_stop_during_the_pause_prevents_the_restart(shift: Shift, sandbox: GoogleSandbox) -> None:
    shift.job("a-1")
    sandbox.jobs.interrupt(shift.job("a-0"))
    shift.take_creations()

    def in_a_pause() -> None:
        shift.clock.advance(1000.0)
        shift.stop()

    shift.clock.on_pause = in_a_pause
    with open_screen(Console(quiet=True), shift.clock) as screen:
        assert not Watch(shift.deployment).until_over(Console(quiet=True), screen, shift.stop)
    assert shift.take_creations() == 0


def test_restart_after_a_stop_request_does_nothing(shift: Shift) -> None:
    shift.lose("a-0")
    shift.stop()
    line, *_ = shift.look(after_s=16.0)
    assert line == "a-0: could not be restarted: not begun"
    assert shift.take_creations() == 0


def test_job_missing_from_the_listing_is_read_by_name(
    tmp_path: Path, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = Shift(tmp_path, sandbox, "faults.min_replicas=2")
    monkeypatch.setattr(job_views, "listed", lambda *_: iter(()))
    assert shift.conditions() == [Condition.READY, Condition.READY]
    assert shift.look() == []


def test_too_few_replicas_are_reported_each_time(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox, "faults.restarts.max=0", "faults.min_replicas=2")
    for _ in range(2):
        refusal, too_few = shift.lose("a-0")
        assert refusal.startswith("a-0: not restarted")
        assert too_few.startswith("fewer than 2 replicas are left")
        assert shift.look() == []
        assert shift.operator.apply("faults.restarts.max=0", "faults.min_replicas=2").ok
        shift.job("a-0")
        assert shift.look() == []


def lose_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create jobs and lose the responses."""
    create = Jobs.create

    def create_unanswered(jobs: Jobs, desired: Desired) -> Mapping[str, str]:
        create(jobs, desired)
        raise Retryable("no answer")

    monkeypatch.setattr(Jobs, "create", create_unanswered)


def test_restart_with_a_lost_answer_is_found(shift: Shift, monkeypatch: pytest.MonkeyPatch) -> None:
    shift.lose("a-0")
    with monkeypatch.context() as patch:
        lose_the_answer(patch)
        line, _ = shift.look(after_s=16.0)
    assert line == "a-0: could not be restarted: no answer"
    assert shift.look(after_s=32.0) == ["a-0: restarted (restart 2)"]
    assert (shift.take_creations(), shift.conditions()) == (1, [Condition.READY, Condition.READY])


def test_unrecorded_job_is_cancelled(shift: Shift, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    shift.lose("a-0")
    with monkeypatch.context() as patch:
        lose_the_answer(patch)
        shift.look(after_s=16.0)
    assert len(sandbox.inventory()["job"]) == 2
    working.stop_jobs(shift.deployment, working.jobs_to_stop(shift.deployment))
    assert "job" not in sandbox.inventory()
    assert shift.look(after_s=1000.0) == []


def test_job_started_during_the_confirmation_is_not_reported_as_stopped(shift: Shift) -> None:
    shift.lose("a-0")
    to_stop = working.jobs_to_stop(shift.deployment)
    assert shift.look(after_s=16.0) == ["a-0: restarted (restart 1)"]
    with pytest.raises(Conflict, match="the state has changed"):
        working.stop_jobs(shift.deployment, to_stop)
    assert shift.conditions() == [Condition.READY, Condition.READY]


def test_changed_job_does_not_block_other_restarts(shift: Shift, tmp_path: Path, sandbox: GoogleSandbox) -> None:
    """Two jobs are lost, and one of them was applied again with other code."""
    (tmp_path / "train" / "train.py").write_text("print('fixed')\n")
    newer = shift.operator.deployment()
    assert apply_plan(newer, make_plan(newer, ["vertex_job.a-0"]), lambda _: None, lambda _: None).ok
    for slot in ("a-0", "a-1"):
        sandbox.jobs.interrupt(shift.job(slot))
    shift.look()
    first, second = shift.look(after_s=16.0)
    assert first.startswith("a-0: could not be restarted: environment would change")
    assert second == "a-1: restarted (restart 1)"
