"""The result of `up`, for each way in which replicas end; the processes themselves are tested elsewhere."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.infra.observe.rolled_up_run import RolledUpRun
from tests.kit.protocol import run_record
from tests.support.clocks import FakeClock

from skerry.infra.local.up import LocalRun
from skerry.infra.local.up_destroy_events import ReplicaResult
from skerry.infra.observe.run_view import RunView
from skerry.infra.run.restart_policy import ReplicaFate
from skerry.runtime.errors import Retryable
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.local.supervisor import Supervisor

VIEW = RunView(
    run="r", uri="memory://", rounds=3, closed=0, work=0.0, due=None, participants=None, replicas=(), agreement=None
)
ENDLESS = replace(VIEW, rounds=None)


@dataclass
class EndedReplicas:
    """A supervisor whose replicas have ended already."""

    fates: Sequence[ReplicaFate]
    last_view: RunView | None = None

    def run(self, _: RunView) -> tuple[ReplicaResult, ...]:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        return tuple(ReplicaResult(slot="a-0", fate=fate, reason="", restarts=0) for fate in self.fates)


def local_run(supervisor: EndedReplicas, *views: RunView | BaseException) -> LocalRun:
    remaining = iter(views)

    def read_view() -> RunView:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        view = next(remaining)
        if isinstance(view, BaseException):
            raise view
        return view

    assert isinstance(views[0], RunView)
    return LocalRun(
        run=run_record(FakeClock(), rounds=views[0].rounds),
        store=MemoryStore(),
        continued=False,
        code="c",
        supervisor=cast("Supervisor", supervisor),
        read_view=read_view,
        clock=FakeClock(),
    )


@pytest.mark.parametrize(
    ("before", "after", "fates", "ok"),
    [
        (VIEW, VIEW, [ReplicaFate.DONE, ReplicaFate.DONE], False),
        (VIEW, replace(VIEW, closed=3), [ReplicaFate.DONE, ReplicaFate.DONE], True),
        (VIEW, replace(VIEW, closed=3), [ReplicaFate.DONE, ReplicaFate.FAILED], True),
        (VIEW, replace(VIEW, closed=2), [ReplicaFate.STOPPED], False),
        (ENDLESS, ENDLESS, [ReplicaFate.DONE, ReplicaFate.DONE], True),
        (ENDLESS, ENDLESS, [ReplicaFate.DONE, ReplicaFate.STOPPED], False),
    ],
)
def test_up_succeeds_if_all_rounds_are_closed(
    before: RunView, after: RunView, fates: list[ReplicaFate], *, ok: bool
) -> None:
    assert local_run(EndedReplicas(fates), before, after).supervise().ok is ok


@pytest.mark.parametrize("error", [Retryable("away"), KeyboardInterrupt()])
def test_summary_has_the_last_view_if_the_store_cannot_be_read(error: BaseException) -> None:
    last = replace(VIEW, closed=2)
    summary = local_run(EndedReplicas([ReplicaFate.STOPPED], last_view=last), VIEW, error).supervise()
    assert (summary.view, summary.ok, summary.unseen) == (last, False, str(error) or "KeyboardInterrupt")


def test_end_of_a_long_run_compares_its_digests_for_few_requests() -> None:
    rolled_up = RolledUpRun(300, 2)
    finished = replace(VIEW, closed=300, rounds=300)
    run = replace(local_run(EndedReplicas([]), finished), store=rolled_up.store)
    summary = run.supervise()
    assert (summary.ok, summary.digests_equal) == (True, True)
    assert summary.participation is not None
    assert summary.participation.replicas[0].missing == (96, 196, 296)
    assert rolled_up.store.requests == 3 + 2 * 2 + 7, "those of the history alone"
