"""Jobs that were lost while somebody watches are started again, within what the spec allows, and nothing else is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.infra.vertex.deploying import operator
from tests.support.clocks import FakeClock

from skerry.infra import render
from skerry.infra.deploy import jobs as working
from skerry.infra.deploy.holding import holder
from skerry.infra.deploy.planning import carry_out, make_plan
from skerry.infra.deploy.reviving import Reviving, Stop
from skerry.infra.deploy.watching import Watch
from skerry.infra.handler import Condition
from skerry.infra.targets.vertex import watching
from skerry.infra.targets.vertex.working import Jobs
from skerry.infra.testing.google.refusals import Refusal
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Retryable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from skerry.infra.handler import Wanted
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
        self.stop = Stop()
        self.reviving = Reviving(self.deployment, self.stop, BACKOFF)
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
    (said,) = shift.look()
    assert re.fullmatch(r"v-0: to be started again in (8|9|1[0-6]) s", said)
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
    working.end(shift.deployment, working.doomed(shift.deployment, ["v-0"]))
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
    said, _ = shift.look(after_s=16.0)
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
    said, again = shift.look(after_s=16.0)
    assert said.startswith("v-0: could not be started again: ")
    assert again.startswith("v-0: to be started again in ")
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
        assert not Watch(shift.deployment).until_over(console, screen, Stop())
    assert sum(starts) == 2


def test_a_job_whose_code_or_spec_has_changed_since_is_left_to_who_changed_it(
    tmp_path: Path, sandbox: GoogleSandbox
) -> None:
    """Somebody mends the code and applies it in another terminal: this watch has packed the old one."""
    shift = Shift(tmp_path, sandbox)
    (tmp_path / "train" / "train.py").write_text("print('mended')\n")
    assert shift.operator.apply().ok
    shift.since_apply()
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    (said,) = shift.look(after_s=16.0)
    assert said.startswith("v-0: could not be started again: its environment would not be what it was made with")
    assert "end it (the jobs go on), and start it again" in said
    assert shift.look(after_s=1000.0) == []
    assert (shift.since_apply(), shift.reviving.busy) == (0, False)


def test_a_replica_that_was_taken_out_of_the_spec_is_not_started_again(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-1"))
    shift.look()
    assert shift.operator.apply("replicas[0].count=1", "faults.min_replicas=1").ok
    shift.since_apply()
    assert shift.look(after_s=16.0) == []
    assert (shift.since_apply(), shift.reviving.busy) == (0, False)


@pytest.mark.parametrize("slots", [(), ("v-1",)])
def test_what_is_cancelled_while_it_waits_to_be_started_stays_away_until_an_apply(
    tmp_path: Path, sandbox: GoogleSandbox, slots: tuple[str, ...]
) -> None:
    shift = Shift(tmp_path, sandbox)
    shift.job("v-0")
    sandbox.jobs.interrupt(shift.job("v-1"))
    shift.look()
    doomed = working.doomed(shift.deployment, slots)
    assert [made.address.partition(".")[2] for made in doomed.made] == list(slots or ("v-0", "v-1"))
    working.end(shift.deployment, doomed)
    assert shift.look(after_s=16.0) == []
    assert (shift.since_apply(), shift.reviving.busy) == (0, False)
    assert shift.operator.apply().ok
    assert shift.conditions() == [Condition.READY, Condition.READY]
    sandbox.jobs.interrupt(shift.job("v-1"))
    shift.look()
    assert shift.look(after_s=16.0) == ["v-1: started again, 1 so far"]


def test_nothing_is_cancelled_while_somebody_changes_the_run(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    doomed = working.doomed(shift.deployment)
    state = shift.deployment.state()
    with (
        shift.deployment.state_file.hold(holder("apply", shift.clock), state, shift.deployment.run),
        pytest.raises(Conflict, match="the state is held: apply by"),
    ):
        working.end(shift.deployment, doomed)
    assert shift.conditions() == [Condition.READY, Condition.READY]


def test_who_is_asked_to_stop_in_a_pause_starts_nothing_more(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    shift.job("v-1")
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.since_apply()

    def in_a_pause() -> None:
        shift.clock.advance(1000.0)
        shift.stop()

    shift.clock.on_pause = in_a_pause
    with render.screen(Console(quiet=True), shift.clock) as screen:
        assert not Watch(shift.deployment).until_over(Console(quiet=True), screen, shift.stop)
    assert shift.since_apply() == 0


def test_a_start_that_is_begun_after_a_request_to_stop_begins_nothing(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    shift.stop()
    said, *_ = shift.look(after_s=16.0)
    assert said == "v-0: could not be started again: it was not begun"
    assert shift.since_apply() == 0


def test_a_job_that_a_listing_does_not_show_yet_is_asked_for_by_name(
    tmp_path: Path, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = Shift(tmp_path, sandbox, "faults.min_replicas=2")
    monkeypatch.setattr(watching, "listed", lambda *_: iter(()))
    assert shift.conditions() == [Condition.READY, Condition.READY]
    assert shift.look() == []


def test_that_too_few_are_left_is_told_again_when_it_comes_to_that_again(
    tmp_path: Path, sandbox: GoogleSandbox
) -> None:
    shift = Shift(tmp_path, sandbox, "faults.restarts.max=0", "faults.min_replicas=2")
    for _ in range(2):
        sandbox.jobs.interrupt(shift.job("v-0"))
        given_up, hopeless = shift.look()
        assert given_up.startswith("v-0: not started again")
        assert hopeless.startswith("fewer than 2 replicas are left")
        assert shift.look() == []
        assert shift.operator.apply("faults.restarts.max=0", "faults.min_replicas=2").ok
        shift.job("v-0")
        assert shift.look() == []


def lose_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are made, and nobody hears of it."""
    create = Jobs.create

    def unheard(jobs: Jobs, wanted: Wanted) -> Mapping[str, str]:
        create(jobs, wanted)
        raise Retryable("no answer")

    monkeypatch.setattr(Jobs, "create", unheard)


def test_a_start_whose_answer_was_lost_is_found_to_have_been_one(
    tmp_path: Path, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    with monkeypatch.context() as away:
        lose_the_answer(away)
        said, _ = shift.look(after_s=16.0)
    assert said == "v-0: could not be started again: no answer"
    assert shift.look(after_s=32.0) == ["v-0: started again, 2 so far"]
    assert (shift.since_apply(), shift.conditions()) == (1, [Condition.READY, Condition.READY])


def test_a_job_of_which_nobody_has_heard_is_cancelled_too(
    tmp_path: Path, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    with monkeypatch.context() as away:
        lose_the_answer(away)
        shift.look(after_s=16.0)
    assert len(sandbox.inventory()["job"]) == 2
    working.end(shift.deployment, working.doomed(shift.deployment))
    assert "job" not in sandbox.inventory()
    assert shift.look(after_s=1000.0) == []


def test_what_is_started_while_somebody_is_asked_is_not_told_to_be_stopped(
    tmp_path: Path, sandbox: GoogleSandbox
) -> None:
    shift = Shift(tmp_path, sandbox)
    sandbox.jobs.interrupt(shift.job("v-0"))
    shift.look()
    doomed = working.doomed(shift.deployment)
    assert shift.look(after_s=16.0) == ["v-0: started again, 1 so far"]
    with pytest.raises(Conflict, match="moved on meanwhile"):
        working.end(shift.deployment, doomed)
    assert shift.conditions() == [Condition.READY, Condition.READY]


def test_one_that_has_changed_does_not_keep_the_others_away(tmp_path: Path, sandbox: GoogleSandbox) -> None:
    """Two are lost at once, and one of them was applied anew with other code."""
    shift = Shift(tmp_path, sandbox)
    (tmp_path / "train" / "train.py").write_text("print('mended')\n")
    newer = shift.operator.deployment()
    assert carry_out(newer, make_plan(newer, ["vertex_job.v-0"]), lambda _: None, lambda _: None).ok
    for slot in ("v-0", "v-1"):
        sandbox.jobs.interrupt(shift.job(slot))
    shift.look()
    first, second = shift.look(after_s=16.0)
    assert first.startswith("v-0: could not be started again: its environment would not be what it was made with")
    assert second == "v-1: started again, 1 so far"
