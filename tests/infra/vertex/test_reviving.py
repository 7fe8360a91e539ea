"""Jobs that were lost while somebody watches are started again, within what the spec allows, and nothing else is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.infra.vertex.deploying import operator
from tests.support.clocks import FakeClock

from skerry.infra import render
from skerry.infra.deploy import jobs as working
from skerry.infra.deploy.reviving import Reviving
from skerry.infra.deploy.watching import Watch
from skerry.infra.handler import Condition
from skerry.infra.testing.google.refusals import Refusal
from skerry.runtime.clock import Backoff

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from skerry.infra.testing.google.sandbox import GoogleSandbox

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
        self.reviving = Reviving(self.deployment, BACKOFF)
        self.since_apply()

    def job(self, slot: str) -> str:
        """The number of its newest job, which runs from now on if it waited."""
        number = next(view.job for _, view in working.jobs(self.deployment) if view.slot == slot)
        if self.sandbox.jobs.state(number) == "JOB_STATE_PENDING":
            self.sandbox.jobs.start(number)
        return number

    def look(self, after_s: float = 0.0, beating: Collection[str] = ("v-0", "v-1")) -> list[str]:
        self.clock.advance(after_s)
        return list(self.reviving.look(working.jobs(self.deployment), beating))

    def conditions(self) -> list[Condition]:
        return [view.condition for _, view in working.jobs(self.deployment)]

    def since_apply(self) -> int:
        """How many jobs were made since this was asked last."""
        made = sum(call.name.endswith("customJobs.create") for call in self.sandbox.calls)
        self.sandbox.calls.clear()
        return made


def test_a_job_whose_machine_was_taken_back_is_started_again_after_a_pause(
    tmp_path: Path, sandbox: GoogleSandbox
) -> None:
    shift = Shift(tmp_path, sandbox)
    assert shift.look() == []
    assert not shift.reviving.busy
    lost, other = shift.job("v-0"), shift.job("v-1")
    sandbox.jobs.interrupt(lost)
    # Half of the first pause is the least that chance makes of it.
    assert shift.look() == []
    assert shift.look(after_s=7.0) == []
    assert shift.reviving.busy
    assert shift.since_apply() == 0
    assert shift.look(after_s=9.1) == ["v-0: started again, 1 so far"]
    assert shift.reviving.busy
    assert (shift.since_apply(), shift.conditions()) == (1, [Condition.READY, Condition.READY])
    assert (shift.job("v-0") != lost, shift.job("v-1")) == (True, other)
    assert shift.look(after_s=600.0) == []
    assert (shift.reviving.busy, shift.since_apply()) == (False, 0)
    assert shift.operator.plan().plan.empty
    assert shift.operator.destroy().ok
    assert sandbox.inventory() == {}


@pytest.mark.parametrize(("code", "starts"), [(10, 1), (20, 0), (30, 0), (1, 1), (137, 1)])
def test_the_exit_code_says_whether_another_start_helps(
    tmp_path: Path, sandbox: GoogleSandbox, code: int, starts: int
) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.finish(shift.job("v-1"), code)
    shift.look()
    assert shift.reviving.busy == (starts > 0)
    shift.look(after_s=16.0)
    assert shift.since_apply() == starts


def test_what_was_stopped_by_somebody_or_is_done_stays_so(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    working.end(shift.deployment, working.live(shift.deployment, ["v-0"]))
    sandbox.jobs.finish(shift.job("v-1"))
    assert shift.look() == []
    assert shift.look(after_s=1000.0) == []
    assert (shift.reviving.busy, shift.since_apply()) == (False, 0)


def test_the_spec_bounds_how_often(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox, "faults.restarts.max=2", "faults.min_replicas=2")
    pauses = [16.0, 32.0]
    for number, pause in enumerate(pauses, 1):
        sandbox.jobs.interrupt(shift.job("v-0"))
        shift.look()
        assert shift.look(after_s=pause / 2 - 1.0) == []
        assert shift.look(after_s=pause / 2 + 1.0) == [f"v-0: started again, {number} so far"]
    sandbox.jobs.interrupt(shift.job("v-0"))
    given_up, hopeless = shift.look()
    assert given_up == "v-0: not started again: signal SIGKILL; 2 of 2 restarts used"
    assert hopeless.startswith("fewer than 2 replicas are left")
    assert shift.look(after_s=1000.0) == []
    assert shift.since_apply() == 2
    # Restarts that are older than the window count no more, but it was given up: an apply starts it again.
    assert shift.operator.apply("faults.restarts.max=2", "faults.min_replicas=2").ok
    assert shift.look(after_s=4000.0) == []
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    assert shift.look(after_s=16.0) == ["v-0: started again, 3 so far"]


def test_a_script_that_ends_before_its_first_heartbeat_is_started_once_more_only(
    tmp_path: Path, sandbox: GoogleSandbox
) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.finish(shift.job("v-0"), 1)
    shift.look(beating=())
    assert shift.look(after_s=16.0, beating=()) == ["v-0: started again, 1 so far"]
    sandbox.jobs.finish(shift.job("v-0"), 1)
    (said,) = shift.look(beating=())
    assert said == "v-0: not started again: exit code 1 before its first heartbeat, 2 starts in a row"


def test_nothing_else_is_changed_with_it(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    account = next(made for made in shift.operator.plan().plan.changes if made.kind == "google_service_account")
    entry = next(one for one in shift.deployment.state_file.load().entries if one.id == account.id)  # pyright: ignore[reportOptionalMemberAccess]
    shift.deployment.handlers[account.kind].delete(entry.made)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    (said,) = shift.look(after_s=16.0)
    assert said.startswith("v-0: could not be started again: ")
    assert account.address in said
    assert (shift.since_apply(), shift.reviving.busy) == (0, True)
    assert shift.operator.apply().ok
    assert shift.look(after_s=100.0) == []
    assert not shift.reviving.busy


def test_a_start_that_fails_counts_and_is_tried_again(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox, "faults.restarts.max=2")
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    sandbox.jobs.refuse(Refusal(429, "Quota exceeded for quota metric 'create requests'"))
    (said,) = shift.look(after_s=16.0)
    assert said.startswith("v-0: could not be started again: ")
    sandbox.jobs.refuse(None)
    assert shift.look(after_s=32.0) == ["v-0: started again, 2 so far"]
    assert shift.conditions() == [Condition.READY, Condition.READY]


def test_who_watches_stays_while_something_will_be_started_again(tmp_path: Path, sandbox: GoogleSandbox) -> None:
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
    with render.screen(console, shift.clock) as screen:
        # They are done, and no round was closed: there is no run in this bucket.
        assert not Watch(shift.deployment).until_over(console, screen, threading.Event())
    assert sum(starts) == 2
