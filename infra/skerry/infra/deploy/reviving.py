"""Starts jobs again that were lost while `up` watches: those whose cloud does not, as often as the spec allows.

What has ended is judged as replicas on this machine are (`policy`); what is started again is a plan of these jobs
alone, so a cloud that differs otherwise is left for somebody to look at.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.infra.deploy.planning import carry_out, make_plan
from skerry.infra.errors import in_short
from skerry.infra.executor import Ending, ending_of_code
from skerry.infra.handler import Condition
from skerry.infra.plan import Action
from skerry.infra.policy import Again, Fate, Over, hopeless, is_stillborn, judge, policy_of
from skerry.infra.state import Id, Phase
from skerry.infra.supervise import BACKOFF
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from skerry.infra.apply import Applying
    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.deploy.planning import Planned
    from skerry.infra.handler import Made
    from skerry.infra.target import JobView
    from skerry.runtime.clock import Backoff


class Stop:
    """A request to end the watching: nothing more is begun, and a start that is on its way is the last."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._works: list[Applying] = []

    def __call__(self) -> None:
        """From any thread, and from a signal's handler."""
        self.asked.set()
        for work in self._works:
            work.stop()

    def applying(self, work: Applying) -> None:
        """This is on its way now."""
        self._works.append(work)
        if self.asked.is_set():
            work.stop()

    @property
    def at_work(self) -> bool:
        """Whether a job is being started."""
        return any(work.running for work in self._works)


class _Outdated(Invalid):
    """This watch was begun with a spec, or code, that is not what its jobs are made from any more."""


@dataclass(kw_only=True)
class _Slot:
    """One replica. made: its newest job. judged: the one whose end was looked at last. due: when to start it again, on
    the clock's scale.
    """

    made: Made
    judged: str | None = None
    due: float | None = None
    over: Fate | None = None
    restarts: list[float] = field(default_factory=list[float])
    stillborn: int = 0


class Reviving:
    """The restarts of one watch."""

    def __init__(self, deployment: Deployment, stop: Stop | None = None, backoff: Backoff = BACKOFF) -> None:
        self._deployment = deployment
        self._stop = stop or Stop()
        self._clock = deployment.clock
        self._policy = policy_of(deployment.spec.spec.faults.restarts)
        self._backoff = backoff
        self._slots: dict[str, _Slot] = {}
        self._told_hopeless = False
        self._began = False

    @property
    def busy(self) -> bool:
        """Whether something was started again in the last look, or will be, though nothing ran in it."""
        return self._began or any(slot.due is not None for slot in self._slots.values())

    def look(self, jobs: Sequence[tuple[Made, JobView]], beating: Collection[str]) -> Iterator[str]:
        """Judge what has ended since the last look, and start what is due. What happened, in words.

        beating: slots that the run has heard of.
        """
        for gone in self._slots.keys() - {view.slot for _, view in jobs}:
            del self._slots[gone]  # taken out of the spec, and away, by somebody else's apply
        for made, view in jobs:
            yield from self._judge(made, view, beating)
        now = self._clock.now()
        self._began = False
        if due := {name: slot for name, slot in self._slots.items() if slot.due is not None and slot.due <= now}:
            yield from self._start(due)
        least = self._deployment.spec.spec.faults.min_replicas
        before, self._told_hopeless = self._told_hopeless, hopeless([one.over for one in self._slots.values()], least)
        if self._told_hopeless and not before:
            yield f"fewer than {least} replicas are left, and no round can close: `skerry cancel` ends what they cost"

    def _judge(self, made: Made, view: JobView, beating: Collection[str]) -> Iterator[str]:
        slot = self._slots.setdefault(view.slot, _Slot(made=made))
        slot.made = made
        match view.condition:
            case Condition.READY | Condition.BROKEN:
                slot.due = slot.over = None
            case Condition.DONE:
                slot.due, slot.over = None, Fate.DONE
            case Condition.LOST if view.job != slot.judged and slot.due is None:
                slot.judged = view.job
                yield from self._ended(slot, view, beating)
            case Condition.LOST if slot.due is not None and view.stopped:  # while it waited to be started
                slot.due, slot.over = None, Fate.FAILED
            case Condition.LOST:
                pass

    def _ended(self, slot: _Slot, view: JobView, beating: Collection[str]) -> Iterator[str]:
        if not view.again:
            slot.over = Fate.FAILED
            return
        # A machine that was taken away says as little of the replica as a kill does.
        ending = Ending(signal=9) if view.exit_code is None else ending_of_code(view.exit_code)
        slot.stillborn = slot.stillborn + 1 if is_stillborn(ending) and view.slot not in beating else 0
        yield from self._again(slot, view.slot, ending)

    def _again(self, slot: _Slot, name: str, ending: Ending) -> Iterator[str]:
        now = self._clock.now()
        match judge(ending, slot.restarts, now, self._policy, stillborn=slot.stillborn):
            case Over(fate=fate, reason=reason):
                slot.over, slot.due = fate, None
                yield f"{name}: not started again: {reason}"
            case Again(recent=recent):
                wait_s = self._backoff.delay(recent, self._clock)
                slot.due = now + wait_s
                yield f"{name}: to be started again in {wait_s:.0f} s"

    def _start(self, due: Mapping[str, _Slot]) -> Iterator[str]:
        for slot in due.values():
            slot.restarts.append(self._clock.now())
            slot.due = None
        failed: dict[str, SkerryError | TimeoutError] = {}
        try:
            failed = self._carry_out([slot.made for slot in due.values()])
        except SkerryError as error:
            failed = {slot.made.address: error for slot in due.values()}
        for name, slot in due.items():
            error = failed.get(slot.made.address)
            if error is None:
                self._began = True
                yield f"{name}: started again, {len(slot.restarts)} so far"
                continue
            yield f"{name}: could not be started again: {in_short(error)}"
            if isinstance(error, _Outdated):
                slot.over = Fate.FAILED
            else:
                yield from self._again(slot, name, Ending(signal=9))

    def _carry_out(self, lost: Sequence[Made]) -> dict[str, SkerryError | TimeoutError]:
        """Make these jobs anew; what failed, by address. Raises Invalid if anything else would change with them."""
        planned = make_plan(self._deployment, [made.address for made in lost])
        unlike = {made.address: error for made in lost if (error := _unlike(planned, made)) is not None}
        addresses = [made.address for made in lost if made.address not in unlike]
        if unlike and addresses:
            planned = make_plan(self._deployment, addresses)
        besides = {change.address for change in planned.plan.changes if change.acts} - {made.address for made in lost}
        if besides:
            text = f"{', '.join(sorted(besides))} changed as well; `skerry plan` shows how, `skerry apply` mends it"
            raise Invalid(text)
        if not addresses:
            return dict(unlike)
        outcome = carry_out(self._deployment, planned, lambda _: None, self._stop.applying)
        skipped = {change.address: Invalid("it was not begun") for change in outcome.skipped}
        return {**unlike, **skipped, **{key.address: error for key, error in outcome.failed.items()}}


def _unlike(planned: Planned, lost: Made) -> Invalid | None:
    """Why the next job would not be what the lost one was, or it is not lost any more; None if it is well."""
    change = next((one for one in planned.plan.changes if one.acts and one.address == lost.address), None)
    entry = None if planned.state is None else planned.state.by_id().get(Id(lost.address, lost.generation))
    # Of one whose creation was begun and whose end is not known, the same generation is made, or found to be there.
    begun = entry is not None and entry.phase is Phase.CREATING
    generation = lost.generation if begun else lost.generation + 1
    actions = (Action.CREATE, Action.ADOPT) if begun else (Action.REPLACE,)
    if change is None or change.generation != generation or change.action not in actions:
        return Invalid("it was stopped, or started by somebody else")
    if entry is None or entry.stopped:
        return Invalid("it was stopped")
    if changed := sorted(name for name in change.settings if change.settings[name] != lost.settings.get(name)):
        return _Outdated(
            f"its {', '.join(changed)} would not be what it was made with: the spec or the code has changed since this "
            "`skerry up` began; end it (the jobs go on), and start it again"
        )
    return None
