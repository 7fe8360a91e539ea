"""What `up` makes of how the replicas ended and of what it last saw; the processes are elsewhere."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.infra.test_observe import RUN
from tests.support.clocks import FakeClock

from skerry.infra.policy import Fate
from skerry.infra.reports import ReplicaResult
from skerry.infra.up import Launch
from skerry.infra.view import RunView
from skerry.runtime.errors import Retryable
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.supervise import Supervisor

VIEW = RunView(
    run="r", uri="memory://", rounds=3, closed=0, work=0.0, due=None, participants=None, replicas=(), agreement=None
)
ENDLESS = replace(VIEW, rounds=None)


@dataclass
class Ended:
    """A supervisor whose replicas have ended already."""

    fates: Sequence[Fate]
    last_view: RunView | None = None

    def run(self, _: RunView) -> tuple[ReplicaResult, ...]:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        return tuple(ReplicaResult(slot="a-0", fate=fate, reason="", restarts=0) for fate in self.fates)


def launch(supervisor: Ended, *looks: RunView | BaseException) -> Launch:
    left = iter(looks)

    def look() -> RunView:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        found = next(left)
        if isinstance(found, BaseException):
            raise found
        return found

    assert isinstance(looks[0], RunView)
    return Launch(
        run=RUN.model_copy(update={"rounds": looks[0].rounds}),
        store=MemoryStore(),
        continued=False,
        code="c",
        supervisor=cast("Supervisor", supervisor),
        look=look,
        clock=FakeClock(),
    )


@pytest.mark.parametrize(
    ("before", "after", "fates", "ok"),
    [
        (VIEW, VIEW, [Fate.DONE, Fate.DONE], False),
        (VIEW, replace(VIEW, closed=3), [Fate.DONE, Fate.DONE], True),
        (VIEW, replace(VIEW, closed=3), [Fate.DONE, Fate.FAILED], True),
        (VIEW, replace(VIEW, closed=2), [Fate.STOPPED], False),
        (ENDLESS, ENDLESS, [Fate.DONE, Fate.DONE], True),
        (ENDLESS, ENDLESS, [Fate.DONE, Fate.STOPPED], False),
    ],
)
def test_success_is_that_all_rounds_are_closed(before: RunView, after: RunView, fates: list[Fate], *, ok: bool) -> None:
    assert launch(Ended(fates), before, after).supervise().ok is ok


@pytest.mark.parametrize("error", [Retryable("away"), KeyboardInterrupt()])
def test_without_a_last_look_the_summary_is_what_was_seen_before(error: BaseException) -> None:
    seen = replace(VIEW, closed=2)
    summary = launch(Ended([Fate.STOPPED], last_view=seen), VIEW, error).supervise()
    assert (summary.view, summary.ok, summary.unseen) == (seen, False, str(error) or "KeyboardInterrupt")
