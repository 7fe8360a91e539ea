"""Restarts jobs that were lost while `skerry up` watches, where the cloud does not, as often as the spec allows.

An ended job is judged by the same policy as a replica on this machine (`restart_policy`). A restart is a plan of the
lost jobs alone: if any other resource has changed, nothing is restarted and the difference is reported.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan
from skerry.infra.local.supervisor import BACKOFF
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.planned_changes import Action
from skerry.infra.provision.state import Id, StatePhase
from skerry.infra.run.executor import Ending, ending_from_exit_code
from skerry.infra.run.restart_policy import (
    NotRestarted,
    ReplicaFate,
    RestartAfter,
    decide_restart,
    failed_at_startup,
    policy_from_spec,
    too_few_left,
)
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from skerry.infra.deploy.plan_and_apply import Planned
    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.deploy.read_clouds import Resolved
    from skerry.infra.provision.apply import ApplyRun
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import JobView
    from skerry.runtime.clock import Backoff


class StopRequest:
    """A request to end the watch: a restart in progress is finished, and no other begins."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._works: list[ApplyRun] = []

    def __call__(self) -> None:
        """Request the end. Callable from any thread and from a signal handler."""
        self.requested.set()
        for work in self._works:
            work.stop()

    def on_begin(self, work: ApplyRun) -> None:
        """Register an apply that begins, so that the request stops it."""
        self._works.append(work)
        if self.requested.is_set():
            work.stop()

    @property
    def restarting(self) -> bool:
        """True while a job is being restarted."""
        return any(work.running for work in self._works)


class _Outdated(Invalid):
    """The spec or the code of the deployment has changed since this watch began."""


@dataclass(kw_only=True)
class _Slot:
    """One replica. job: its newest. judged: the job whose end was judged last. due: clock time of its restart.

    startup_failures: how many jobs in a row ended before any heartbeat.
    """

    job: StateRecord
    judged: str | None = None
    due: float | None = None
    over: ReplicaFate | None = None
    restarts: list[float] = field(default_factory=list[float])
    startup_failures: int = 0


class LostJobRestarter:
    """Restarts the lost jobs of one watch. resolved: of the plan that `up` applied; None reads the clouds again."""

    def __init__(
        self,
        deployment: Deployment,
        stop: StopRequest | None = None,
        backoff: Backoff = BACKOFF,
        resolved: Resolved | None = None,
    ) -> None:
        self._deployment = deployment
        self._resolved = resolved
        self._stop = stop or StopRequest()
        self._clock = deployment.clock
        self._policy = policy_from_spec(deployment.spec.spec.faults.restarts)
        self._backoff = backoff
        self._slots: dict[str, _Slot] = {}
        self._reported_hopeless = False
        self._restarted = False

    @property
    def busy(self) -> bool:
        """True if a job was restarted in the last look, or will be; it may not have been running in that look."""
        return self._restarted or any(slot.due is not None for slot in self._slots.values())

    def look(self, jobs: Sequence[tuple[StateRecord, JobView]], beating: Collection[str]) -> Iterator[str]:
        """Judge the jobs that ended since the last look, and restart those that are due. A line for each event.

        beating: slots whose replica has sent a heartbeat.
        """
        for gone in self._slots.keys() - {view.slot for _, view in jobs}:
            del self._slots[gone]  # another apply removed it from the spec
        for job, view in jobs:
            yield from self._judge(job, view, beating)
        now = self._clock.now()
        self._restarted = False
        if due := {name: slot for name, slot in self._slots.items() if slot.due is not None and slot.due <= now}:
            yield from self._restart(due)
        least = self._deployment.spec.spec.faults.min_replicas
        before, self._reported_hopeless = (
            self._reported_hopeless,
            too_few_left([slot.over for slot in self._slots.values()], least),
        )
        if self._reported_hopeless and not before:
            yield f"fewer than {least} replicas are left, so no round can close; stop the others with `skerry cancel`"

    def _judge(self, job: StateRecord, view: JobView, beating: Collection[str]) -> Iterator[str]:
        slot = self._slots.setdefault(view.slot, _Slot(job=job))
        slot.job = job
        match view.condition:
            case Condition.READY | Condition.BROKEN:
                slot.due = slot.over = None
            case Condition.DONE:
                slot.due, slot.over = None, ReplicaFate.DONE
            case Condition.LOST if view.job != slot.judged and slot.due is None:
                slot.judged = view.job
                yield from self._ended(slot, view, beating)
            case Condition.LOST if slot.due is not None and view.stopped:  # stopped while its restart was due
                slot.due, slot.over = None, ReplicaFate.FAILED
            case Condition.LOST:
                pass

    def _ended(self, slot: _Slot, view: JobView, beating: Collection[str]) -> Iterator[str]:
        if not view.again:
            slot.over = ReplicaFate.FAILED
            return
        # A lost machine gives no exit code; it is judged like a killed process.
        ending = Ending(signal=9) if view.exit_code is None else ending_from_exit_code(view.exit_code)
        slot.startup_failures = (
            slot.startup_failures + 1 if failed_at_startup(ending) and view.slot not in beating else 0
        )
        yield from self._schedule(slot, view.slot, ending)

    def _schedule(self, slot: _Slot, name: str, ending: Ending) -> Iterator[str]:
        now = self._clock.now()
        match decide_restart(ending, slot.restarts, now, self._policy, startup_failures=slot.startup_failures):
            case NotRestarted(fate=fate, reason=reason):
                slot.over, slot.due = fate, None
                yield f"{name}: not restarted: {reason}"
            case RestartAfter(recent=recent):
                wait_s = self._backoff.delay(recent, self._clock)
                slot.due = now + wait_s
                yield f"{name}: will be restarted in {wait_s:.0f} s"

    def _restart(self, due: Mapping[str, _Slot]) -> Iterator[str]:
        for slot in due.values():
            slot.restarts.append(self._clock.now())
            slot.due = None
        failed: dict[str, SkerryError | TimeoutError] = {}
        try:
            failed = self._apply([slot.job for slot in due.values()])
        except SkerryError as error:
            failed = {slot.job.address: error for slot in due.values()}
        for name, slot in due.items():
            error = failed.get(slot.job.address)
            if error is None:
                self._restarted = True
                yield f"{name}: restarted (restart {len(slot.restarts)})"
                continue
            yield f"{name}: could not be restarted: {in_short(error)}"
            if isinstance(error, _Outdated):
                slot.over = ReplicaFate.FAILED
            else:
                yield from self._schedule(slot, name, Ending(signal=9))

    def _apply(self, lost: Sequence[StateRecord]) -> dict[str, SkerryError | TimeoutError]:
        """Create these jobs again; the errors, by address. Raises Invalid if any other resource would change."""
        planned = make_plan(self._deployment, [job.address for job in lost], self._resolved)
        self._resolved = planned.resolved
        refused = {job.address: error for job in lost if (error := _refusal(planned, job)) is not None}
        addresses = [job.address for job in lost if job.address not in refused]
        if refused and addresses:
            planned = make_plan(self._deployment, addresses, self._resolved)
        others = {change.address for change in planned.plan.changes if change.acts} - {job.address for job in lost}
        if others:
            raise Invalid(
                f"{', '.join(sorted(others))} changed as well; `skerry plan` shows how, `skerry apply` repairs it"
            )
        if not addresses:
            return dict(refused)
        outcome = apply_plan(self._deployment, planned, lambda _: None, self._stop.on_begin)
        skipped = {change.address: Invalid("not begun") for change in outcome.skipped}
        return {**refused, **skipped, **{key.address: error for key, error in outcome.failed.items()}}


def _refusal(planned: Planned, lost: StateRecord) -> Invalid | None:
    """The reason why this job may not be restarted: no longer lost, or its settings would change. None if it may."""
    change = next((change for change in planned.plan.changes if change.acts and change.address == lost.address), None)
    entry = None if planned.state is None else planned.state.by_id().get(Id(lost.address, lost.generation))
    # A job whose creation began and did not finish keeps its generation: it is created, or adopted if it exists.
    creating = entry is not None and entry.phase is StatePhase.CREATING
    generation = lost.generation if creating else lost.generation + 1
    actions = (Action.CREATE, Action.ADOPT) if creating else (Action.REPLACE,)
    if change is None or change.generation != generation or change.action not in actions:
        return Invalid("it was stopped, or another process started it")
    if entry is None or entry.stopped:
        return Invalid("it was stopped")
    if changed := sorted(name for name in change.settings if change.settings[name] != lost.settings.get(name)):
        return _Outdated(
            f"{', '.join(changed)} would change: the spec or the code has changed since this `skerry up` began; "
            "end it (the jobs keep running), and run it again"
        )
    return None
