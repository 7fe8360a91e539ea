"""A group whose replicas start each other's lost jobs, and the tests of it that hold on every target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

import pytest

from skerry.infra.deploy import list_and_stop_jobs as working
from skerry.infra.provision.handler import Condition
from skerry.runtime.container.choose_jobs_to_restart import Start, decide
from skerry.runtime.contract import Revival

if TYPE_CHECKING:
    from tests.infra.targets.runs import TargetRun

    from skerry.runtime.container.choose_jobs_to_restart import Decision, PeerJob

REVIVAL: Final = Revival(after_s=1.0, limit=9, window_s=None)


class Group(ABC):
    """A run of two jobs, a-0 and a-1, and the view that a-0 has of them."""

    def __init__(self, run: TargetRun, options: str) -> None:
        self.run, self.operator = run, run.operator(options=options)
        assert self.operator.apply().ok
        self.first = run.jobs(self.operator)

    @abstractmethod
    def peers(self, job: str | None = None) -> Any:
        """The jobs of the group, as a-0 sees them, or this job."""

    def newest(self) -> PeerJob:
        return max((job for job in self.peers().list() if job.slot == "a-1"), key=lambda job: job.generation)

    def decide(self) -> Decision:
        peers = self.peers()
        return decide([job for job in peers.list() if job.slot == "a-1"], peers.read_loss, 0.0, REVIVAL)

    def lose(self) -> Start:
        """End the newest job of a-1, and decide about it as a-0 does."""
        self.run.driver.finish(self.newest().key, 10)
        decision = self.decide()
        assert isinstance(decision, Start)
        return decision

    def revive(self) -> str:
        return self.peers().start_next(self.lose())


class RevivalSuite:
    """Subclass it where the fixture `group` is."""

    def test_operator_sees_a_revived_job_as_the_job_of_its_slot(self, group: Group) -> None:
        group.revive()
        name = group.revive()
        assert group.run.jobs(group.operator) == {**group.first, "a-1": name}
        assert group.operator.plan().plan.empty
        group.run.creations()
        assert group.operator.apply().ok
        assert group.run.creations() == 0
        assert [view.condition for _, view in working.list_jobs(group.operator.deployment())] == [Condition.READY] * 2
        assert group.operator.apply("limits.max_hours=12").ok
        assert group.run.live() == 2

    @pytest.mark.parametrize("revived", [False, True])
    def test_job_beside_a_live_one_takes_no_place_and_is_destroyed(self, group: Group, *, revived: bool) -> None:
        current = group.revive() if revived else group.first["a-1"]
        peers, live = group.peers(), group.newest()
        peers.start_next(Start(job=live, loss=peers.read_loss(live), generation=live.generation + 1))
        assert group.run.jobs(group.operator) == {**group.first, "a-1": current}
        assert group.operator.plan().plan.empty
        assert group.run.live() == 3
        assert group.operator.destroy().ok
        assert group.run.live() == 0

    def test_job_revived_during_its_cancel_does_not_run(self, group: Group) -> None:
        lost = group.lose()
        deployment = group.operator.deployment()
        to_stop = working.jobs_to_stop(deployment, ["a-1"])
        name = group.peers().start_next(lost)
        assert group.peers(name).superfluous() is None
        assert working.stop_jobs(deployment, to_stop) == {}
        assert group.peers(name).superfluous() == f"{lost.job.key}, which this job follows, was cancelled"
        # What the operator starts has no such origin.
        group.run.driver.finish(name, 30)
        assert group.operator.apply().ok
        assert group.peers(group.run.jobs(group.operator)["a-1"]).superfluous() is None
        assert group.run.live() == 2
