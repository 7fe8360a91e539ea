"""Jobs that were lost while somebody watches are started again, within what the spec allows, and nothing else is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.infra.targets.vertex.deploying import operator
from tests.support.clocks import FakeClock

from skerry.infra.cli.screens import open_screen
from skerry.infra.cli.watch import Watch
from skerry.infra.deploy import running_jobs as working
from skerry.infra.deploy.lock_holder import this_process
from skerry.infra.deploy.planning import apply_plan, make_plan
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
    """Somebody who looks at a run of two jobs, v-0 and v-1."""

    def __init__(self, folder: Path, sandbox: GoogleSandbox, *overrides: str) -> None:
        self.operator = operator(folder, sandbox)
        assert self.operator.apply(*overrides).ok
        self.sandbox = sandbox
        self.deployment = self.operator.deployment(*overrides)
        assert isinstance(self.deployment.clock, FakeClock)
        self.clock = self.deployment.clock
        self.stop = StopRequest()
        self.reviving = LostJobRestarter(self.deployment, self.stop, BACKOFF)
        self.since_apply()

    def job(self, slot: str) -> str:
        """The number of its newest job, which runs from now on if it waited."""
        number = next(view.job for _, view in working.list_jobs(self.deployment) if view.slot == slot)
        if self.sandbox.jobs.state(number) == "JOB_STATE_PENDING":
            self.sandbox.jobs.start(number)
        return number

    def look(self, after_s: float = 0.0, beating: Collection[str] = ("v-0", "v-1")) -> list[str]:
        self.clock.advance(after_s)
        return list(self.reviving.look(working.list_jobs(self.deployment), beating))

    def conditions(self) -> list[Condition]:
        return [view.condition for _, view in working.list_jobs(self.deployment)]

    def since_apply(self) -> int:
        """How many jobs were made since this was asked last."""
        made = sum(call.name.endswith("customJobs.create") for call in self.sandbox.calls)
        self.sandbox.calls.clear()
        return made


def test_job_of_a_reclaimed_machine_restarts_after_a_pause(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    assert shift.look() == []
    assert not shift.reviving.busy
    lost, other = shift.job("v-0"), shift.job("v-1")
    sandbox.jobs.interrupt(lost)
    # Half of the first pause is the least that chance makes of it.
    (said,) = shift.look()
    assert re.fullmatch(r"v-0: will be restarted in (8|9|1[0-6]) s", said)
    assert shift.look(after_s=7.0) == []
    assert shift.reviving.busy
    assert shift.since_apply() == 0
    assert shift.look(after_s=9.1) == ["v-0: restarted (restart 1)"]
    assert shift.reviving.busy
    assert (shift.since_apply(), shift.conditions()) == (1, [Condition.READY, Condition.READY])
    assert (shift.job("v-0") != lost, shift.job("v-1")) == (True, other)
    assert shift.look(after_s=600.0) == []
    assert (shift.reviving.busy, shift.since_apply()) == (False, 0)
    assert shift.operator.plan().plan.empty
    assert shift.operator.destroy().ok
    assert sandbox.inventory() == {}


@pytest.mark.parametrize(("code", "starts"), [(10, 1), (20, 0), (30, 0), (1, 1), (137, 1)])
def test_exit_code_decides_about_a_restart(tmp_path: Path, sandbox: GoogleSandbox, code: int, starts: int) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.finish(shift.job("v-1"), code)
    shift.look()
    assert shift.reviving.busy == (starts > 0)
    shift.look(after_s=16.0)
    assert shift.since_apply() == starts


def test_stopped_or_finished_job_is_not_restarted(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    working.stop_jobs(shift.deployment, working.jobs_to_stop(shift.deployment, ["v-0"]))
    sandbox.jobs.finish(shift.job("v-1"))
    assert shift.look() == []
    assert shift.look(after_s=1000.0) == []
    assert (shift.reviving.busy, shift.since_apply()) == (False, 0)


def test_number_of_restarts_is_limited_by_the_spec(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox, "faults.restarts.max=2", "faults.min_replicas=2")
    pauses = [16.0, 32.0]
    for number, pause in enumerate(pauses, 1):
        sandbox.jobs.interrupt(shift.job("v-0"))
        shift.look()
        assert shift.look(after_s=pause / 2 - 1.0) == []
        assert shift.look(after_s=pause / 2 + 1.0) == [f"v-0: restarted (restart {number})"]
    sandbox.jobs.interrupt(shift.job("v-0"))
    given_up, hopeless = shift.look()
    assert given_up == "v-0: not restarted: signal SIGKILL; 2 of 2 restarts used"
    assert hopeless.startswith("fewer than 2 replicas are left")
    assert shift.look(after_s=1000.0) == []
    assert shift.since_apply() == 2
    # Restarts that are older than the window count no more, but it was given up: an apply starts it again.
    assert shift.operator.apply("faults.restarts.max=2", "faults.min_replicas=2").ok
    assert shift.look(after_s=4000.0) == []
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    assert shift.look(after_s=16.0) == ["v-0: restarted (restart 3)"]


def test_script_without_a_heartbeat_is_restarted_once(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.finish(shift.job("v-0"), 1)
    shift.look(beating=())
    assert shift.look(after_s=16.0, beating=()) == ["v-0: restarted (restart 1)"]
    sandbox.jobs.finish(shift.job("v-0"), 1)
    (said,) = shift.look(beating=())
    assert said == "v-0: not restarted: exit code 1 before its first heartbeat, 2 starts in a row"


def test_restart_changes_nothing_else(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    account = next(made for made in shift.operator.plan().plan.changes if made.kind == "google_service_account")
    entry = next(entry for entry in shift.deployment.open_state().load().entries if entry.id == account.id)  # pyright: ignore[reportOptionalMemberAccess]
    shift.deployment.handlers[account.kind].delete(entry.made)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    said, _ = shift.look(after_s=16.0)
    assert said.startswith("v-0: could not be restarted: ")
    assert account.address in said
    assert (shift.since_apply(), shift.reviving.busy) == (0, True)
    assert shift.operator.apply().ok
    assert shift.look(after_s=100.0) == []
    assert not shift.reviving.busy


def test_failed_start_counts_and_is_retried(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox, "faults.restarts.max=2")
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    sandbox.jobs.refuse(Refusal(429, "Quota exceeded for quota metric 'create requests'"))
    said, again = shift.look(after_s=16.0)
    assert said.startswith("v-0: could not be restarted: ")
    assert again.startswith("v-0: will be restarted in ")
    sandbox.jobs.refuse(None)
    assert shift.look(after_s=32.0) == ["v-0: restarted (restart 2)"]
    assert shift.conditions() == [Condition.READY, Condition.READY]


def test_watch_stays_while_a_restart_is_due(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    for slot in ("v-0", "v-1"):
        sandbox.jobs.interrupt(shift.job(slot))
    shift.since_apply()
    starts: list[int] = []

    def in_a_pause() -> None:
        made = shift.since_apply()
        starts.append(made)
        if sum(starts) == 2 and not made:
            for slot in ("v-0", "v-1"):
                sandbox.jobs.finish(shift.job(slot))

    shift.clock.on_pause = in_a_pause
    console = Console(record=True, width=200, quiet=True)
    with open_screen(console, shift.clock) as screen:
        # They are done, and no round was closed: there is no run in this bucket.
        assert not Watch(shift.deployment).until_over(console, screen, StopRequest())
    assert sum(starts) == 2


def test_job_with_changed_code_or_spec_is_not_restarted(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    """Somebody mends the code and applies it in another terminal: this watch has packed the old one."""
    shift = Shift(tmp_path, sandbox)
    (tmp_path / "train" / "train.py").write_text("print('mended')\n")
    assert shift.operator.apply().ok
    shift.since_apply()
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    (said,) = shift.look(after_s=16.0)
    assert said.startswith("v-0: could not be restarted: environment would change")
    assert "end it (the jobs keep running), and run it again" in said
    assert shift.look(after_s=1000.0) == []
    assert (shift.since_apply(), shift.reviving.busy) == (0, False)


def test_replica_removed_from_the_spec_is_not_restarted(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-1"))
    shift.look()
    assert shift.operator.apply("replicas[0].count=1", "faults.min_replicas=1").ok
    shift.since_apply()
    assert shift.look(after_s=16.0) == []
    assert (shift.since_apply(), shift.reviving.busy) == (0, False)


@pytest.mark.parametrize("slots", [(), ("v-1",)])
def test_cancelled_job_is_not_restarted_before_an_apply(
    tmp_path: Path, sandbox: GoogleSandbox, slots: tuple[str, ...]
) -> None:
    shift = Shift(tmp_path, sandbox)
    shift.job("v-0")
    sandbox.jobs.interrupt(shift.job("v-1"))
    shift.look()
    doomed = working.jobs_to_stop(shift.deployment, slots)
    assert [made.address.partition(".")[2] for made in doomed.jobs] == list(slots or ("v-0", "v-1"))
    working.stop_jobs(shift.deployment, doomed)
    assert shift.look(after_s=16.0) == []
    assert (shift.since_apply(), shift.reviving.busy) == (0, False)
    assert shift.operator.apply().ok
    assert shift.conditions() == [Condition.READY, Condition.READY]
    sandbox.jobs.interrupt(shift.job("v-1"))
    shift.look()
    assert shift.look(after_s=16.0) == ["v-1: restarted (restart 1)"]


def test_cancel_is_rejected_while_an_apply_runs(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    doomed = working.jobs_to_stop(shift.deployment)
    state = read_state(shift.deployment)
    with (
        shift.deployment.open_state().hold(this_process("apply", shift.clock), state, shift.deployment.run),
        pytest.raises(Conflict, match="the state is locked: apply by"),
    ):
        working.stop_jobs(shift.deployment, doomed)
    assert shift.conditions() == [Condition.READY, Condition.READY]


def test_stop_during_the_pause_prevents_the_restart(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    shift.job("v-1")
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.since_apply()

    def in_a_pause() -> None:
        shift.clock.advance(1000.0)
        shift.stop()

    shift.clock.on_pause = in_a_pause
    with open_screen(Console(quiet=True), shift.clock) as screen:
        assert not Watch(shift.deployment).until_over(Console(quiet=True), screen, shift.stop)
    assert shift.since_apply() == 0


def test_restart_after_a_stop_request_does_nothing(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    shift.stop()
    said, *_ = shift.look(after_s=16.0)
    assert said == "v-0: could not be restarted: not begun"
    assert shift.since_apply() == 0


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
        sandbox.jobs.interrupt(shift.job("v-0"))
        given_up, hopeless = shift.look()
        assert given_up.startswith("v-0: not restarted")
        assert hopeless.startswith("fewer than 2 replicas are left")
        assert shift.look() == []
        assert shift.operator.apply("faults.restarts.max=0", "faults.min_replicas=2").ok
        shift.job("v-0")
        assert shift.look() == []


def lose_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are made, and nobody hears of it."""
    create = Jobs.create

    def unheard(jobs: Jobs, desired: Desired) -> Mapping[str, str]:
        create(jobs, desired)
        raise Retryable("no answer")

    monkeypatch.setattr(Jobs, "create", unheard)


def test_restart_with_a_lost_answer_is_found(
    tmp_path: Path, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    with monkeypatch.context() as away:
        lose_the_answer(away)
        said, _ = shift.look(after_s=16.0)
    assert said == "v-0: could not be restarted: no answer"
    assert shift.look(after_s=32.0) == ["v-0: restarted (restart 2)"]
    assert (shift.since_apply(), shift.conditions()) == (1, [Condition.READY, Condition.READY])


def test_unrecorded_job_is_cancelled(tmp_path: Path, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    with monkeypatch.context() as away:
        lose_the_answer(away)
        shift.look(after_s=16.0)
    assert len(sandbox.inventory()["job"]) == 2
    working.stop_jobs(shift.deployment, working.jobs_to_stop(shift.deployment))
    assert "job" not in sandbox.inventory()
    assert shift.look(after_s=1000.0) == []


def test_job_started_during_the_confirmation_is_not_reported_as_stopped(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    doomed = working.jobs_to_stop(shift.deployment)
    assert shift.look(after_s=16.0) == ["v-0: restarted (restart 1)"]
    with pytest.raises(Conflict, match="the state has changed"):
        working.stop_jobs(shift.deployment, doomed)
    assert shift.conditions() == [Condition.READY, Condition.READY]


def test_changed_job_does_not_block_other_restarts(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    """Two are lost at once, and one of them was applied anew with other code."""
    shift = Shift(tmp_path, sandbox)
    (tmp_path / "train" / "train.py").write_text("print('mended')\n")
    newer = shift.operator.deployment()
    assert apply_plan(newer, make_plan(newer, ["vertex_job.v-0"]), lambda _: None, lambda _: None).ok
    for slot in ("v-0", "v-1"):
        sandbox.jobs.interrupt(shift.job(slot))
    shift.look()
    first, second = shift.look(after_s=16.0)
    assert first.startswith("v-0: could not be restarted: environment would change")
    assert second == "v-1: restarted (restart 1)"
