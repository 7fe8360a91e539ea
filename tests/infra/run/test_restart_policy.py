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


DONE = NotRestarted(fate=ReplicaFate.DONE, reason="done")
STOPPED = NotRestarted(fate=ReplicaFate.STOPPED, reason="stopped on request")


def failed(reason: str) -> NotRestarted:
    return NotRestarted(fate=ReplicaFate.FAILED, reason=reason)


def killed_while_stopping(ending: str) -> NotRestarted:
    return NotRestarted(fate=ReplicaFate.STOPPED, reason=f"{ending}, while stopping")


@pytest.mark.parametrize(
    ("ending", "restarts", "decision"),
    [
        (Ending(exit_code=0), [950.0, 990.0], DONE),
        (Ending(exit_code=30), [], STOPPED),
        (Ending(exit_code=20), [], failed("exit code 20: a restart cannot help")),
        (Ending(exit_code=10), [], RestartAfter(recent=0)),
        (Ending(exit_code=1), [990.0], RestartAfter(recent=1)),
        (Ending(signal=9), [950.0, 990.0], failed("signal SIGKILL; 2 of 2 restarts used")),
        (Ending(signal=9), [900.0, 990.0], RestartAfter(recent=1)),
        (Ending(signal=9), [100.0, 200.0, 300.0], RestartAfter(recent=0)),
    ],
)
def test_restart_decision_for_each_ending(
    ending: Ending, restarts: list[float], decision: NotRestarted | RestartAfter
) -> None:
    assert decide_restart(ending, restarts, 1000.0, POLICY) == decision


@pytest.mark.parametrize(
    ("ending", "decision"),
    [
        (Ending(exit_code=10), STOPPED),
        (Ending(exit_code=30), STOPPED),
        (Ending(signal=9), killed_while_stopping("signal SIGKILL")),
        (Ending(exit_code=1), killed_while_stopping("exit code 1")),
        (Ending(exit_code=0), DONE),
        (Ending(exit_code=20), failed("exit code 20: a restart cannot help")),
    ],
)
@pytest.mark.parametrize("restarts", [[], [950.0, 990.0]])
def test_stopped_replica_is_not_restarted(ending: Ending, decision: NotRestarted, restarts: list[float]) -> None:
    assert decide_restart(ending, restarts, 1000.0, POLICY, stopping=True) == decision


def test_two_startup_failures_end_the_replica() -> None:
    assert decide_restart(Ending(exit_code=1), [], 1000.0, POLICY, startup_failures=1) == RestartAfter(recent=0)
    second = decide_restart(Ending(exit_code=1), [999.0], 1000.0, POLICY, startup_failures=2)
    assert second == failed("exit code 1 before its first heartbeat, 2 starts in a row")
    assert [code for code in range(50) if not failed_at_startup(Ending(exit_code=code))] == [0, 10, 20, 30]
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
