from __future__ import annotations

import pytest

from skerry.infra.run.executor import Ending
from skerry.infra.run.restart_policy import (
    NotRestarted,
    ReplicaFate,
    RestartAfter,
    RestartPolicy,
    decide_restart,
    failed_at_startup,
    too_few_left,
)

POLICY = RestartPolicy(limit=2, window_s=100.0)


@pytest.mark.parametrize(
    ("ending", "restarts", "verdict"),
    [
        (Ending(exit_code=0), [], NotRestarted(fate=ReplicaFate.DONE, reason="done")),
        (Ending(exit_code=30), [], NotRestarted(fate=ReplicaFate.STOPPED, reason="stopped on request")),
        (
            Ending(exit_code=20),
            [],
            NotRestarted(fate=ReplicaFate.FAILED, reason="exit code 20: a restart cannot help"),
        ),
        (Ending(exit_code=10), [], RestartAfter(recent=0)),
        (Ending(exit_code=1), [990.0], RestartAfter(recent=1)),
        (Ending(signal=9), [], RestartAfter(recent=0)),
        (
            Ending(signal=9),
            [950.0, 990.0],
            NotRestarted(fate=ReplicaFate.FAILED, reason="signal SIGKILL; 2 of 2 restarts used"),
        ),
        (Ending(signal=9), [900.0, 990.0], RestartAfter(recent=1)),
        (Ending(signal=9), [100.0, 200.0, 300.0], RestartAfter(recent=0)),
        (Ending(exit_code=0), [950.0, 990.0], NotRestarted(fate=ReplicaFate.DONE, reason="done")),
    ],
)
def test_restart_decision_for_each_ending(
    ending: Ending, restarts: list[float], verdict: NotRestarted | RestartAfter
) -> None:
    assert decide_restart(ending, restarts, 1000.0, POLICY) == verdict


@pytest.mark.parametrize(
    ("ending", "over"),
    [
        (Ending(exit_code=10), NotRestarted(fate=ReplicaFate.STOPPED, reason="stopped on request")),
        (Ending(exit_code=30), NotRestarted(fate=ReplicaFate.STOPPED, reason="stopped on request")),
        (Ending(signal=9), NotRestarted(fate=ReplicaFate.STOPPED, reason="signal SIGKILL, while stopping")),
        (Ending(exit_code=1), NotRestarted(fate=ReplicaFate.STOPPED, reason="exit code 1, while stopping")),
        (Ending(exit_code=0), NotRestarted(fate=ReplicaFate.DONE, reason="done")),
        (Ending(exit_code=20), NotRestarted(fate=ReplicaFate.FAILED, reason="exit code 20: a restart cannot help")),
    ],
)
@pytest.mark.parametrize("restarts", [[], [950.0, 990.0]])
def test_stopped_replica_is_not_restarted(ending: Ending, over: NotRestarted, restarts: list[float]) -> None:
    assert decide_restart(ending, restarts, 1000.0, POLICY, stopping=True) == over


def test_two_startup_failures_end_the_replica() -> None:
    assert decide_restart(Ending(exit_code=1), [], 1000.0, POLICY, startup_failures=1) == RestartAfter(recent=0)
    assert decide_restart(Ending(exit_code=1), [999.0], 1000.0, POLICY, startup_failures=2) == NotRestarted(
        fate=ReplicaFate.FAILED, reason="exit code 1 before its first heartbeat, 2 starts in a row"
    )
    decision = [ending for code in range(50) if not failed_at_startup(ending := Ending(exit_code=code))]
    assert [ending.exit_code for ending in decision] == [0, 10, 20, 30]
    assert not failed_at_startup(Ending(signal=9))


def test_all_restarts_count_without_a_window() -> None:
    policy = RestartPolicy(limit=1, window_s=None)
    assert isinstance(decide_restart(Ending(signal=9), [0.0], 1e9, policy), NotRestarted)


@pytest.mark.parametrize(
    ("fates", "needed", "lost"),
    [
        ([None, None], 2, False),
        ([ReplicaFate.FAILED, None], 2, True),
        ([ReplicaFate.FAILED, None], 1, False),
        ([ReplicaFate.FAILED, None, None], 2, False),
        ([ReplicaFate.DONE, None], 2, False),
        ([ReplicaFate.DONE, ReplicaFate.FAILED, None], 2, False),
        ([ReplicaFate.STOPPED, None], 2, False),
        ([ReplicaFate.FAILED, ReplicaFate.FAILED], 2, False),
    ],
)
def test_run_ends_when_too_few_replicas_are_left(fates: list[ReplicaFate | None], needed: int, *, lost: bool) -> None:
    assert too_few_left(fates, needed) is lost
