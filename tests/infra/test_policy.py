from __future__ import annotations

import pytest

from skerry.infra.executor import Ending
from skerry.infra.policy import Again, Fate, Over, RestartPolicy, hopeless, is_stillborn, judge

POLICY = RestartPolicy(limit=2, window_s=100.0)


@pytest.mark.parametrize(
    ("ending", "restarts", "verdict"),
    [
        (Ending(exit_code=0), [], Over(fate=Fate.DONE, reason="done")),
        (Ending(exit_code=30), [], Over(fate=Fate.STOPPED, reason="stopped on request")),
        (Ending(exit_code=20), [], Over(fate=Fate.FAILED, reason="exit code 20: another start cannot help")),
        (Ending(exit_code=10), [], Again(recent=0)),
        (Ending(exit_code=1), [990.0], Again(recent=1)),
        (Ending(signal=9), [], Again(recent=0)),
        (Ending(signal=9), [950.0, 990.0], Over(fate=Fate.FAILED, reason="signal SIGKILL; 2 of 2 restarts used")),
        (Ending(signal=9), [900.0, 990.0], Again(recent=1)),
        (Ending(signal=9), [100.0, 200.0, 300.0], Again(recent=0)),
        (Ending(exit_code=0), [950.0, 990.0], Over(fate=Fate.DONE, reason="done")),
    ],
)
def test_what_follows_from_an_ending(ending: Ending, restarts: list[float], verdict: Over | Again) -> None:
    assert judge(ending, restarts, 1000.0, POLICY) == verdict


@pytest.mark.parametrize(
    ("ending", "over"),
    [
        (Ending(exit_code=10), Over(fate=Fate.STOPPED, reason="stopped on request")),
        (Ending(exit_code=30), Over(fate=Fate.STOPPED, reason="stopped on request")),
        (Ending(signal=9), Over(fate=Fate.STOPPED, reason="signal SIGKILL, while stopping")),
        (Ending(exit_code=1), Over(fate=Fate.STOPPED, reason="exit code 1, while stopping")),
        (Ending(exit_code=0), Over(fate=Fate.DONE, reason="done")),
        (Ending(exit_code=20), Over(fate=Fate.FAILED, reason="exit code 20: another start cannot help")),
    ],
)
@pytest.mark.parametrize("restarts", [[], [950.0, 990.0]])
def test_who_was_asked_to_stop_is_not_started_again_nor_has_it_failed(
    ending: Ending, over: Over, restarts: list[float]
) -> None:
    assert judge(ending, restarts, 1000.0, POLICY, stopping=True) == over


def test_a_script_that_never_gets_to_its_first_heartbeat_is_given_up_after_two_starts() -> None:
    assert judge(Ending(exit_code=1), [], 1000.0, POLICY, stillborn=1) == Again(recent=0)
    assert judge(Ending(exit_code=1), [999.0], 1000.0, POLICY, stillborn=2) == Over(
        fate=Fate.FAILED, reason="exit code 1 before its first heartbeat, 2 starts in a row"
    )
    found = [ending for code in range(50) if not is_stillborn(ending := Ending(exit_code=code))]
    assert [ending.exit_code for ending in found] == [0, 10, 20, 30]
    assert not is_stillborn(Ending(signal=9))


def test_without_a_window_no_restart_is_forgotten() -> None:
    policy = RestartPolicy(limit=1, window_s=None)
    assert isinstance(judge(Ending(signal=9), [0.0], 1e9, policy), Over)


@pytest.mark.parametrize(
    ("fates", "needed", "lost"),
    [
        ([None, None], 2, False),
        ([Fate.FAILED, None], 2, True),
        ([Fate.FAILED, None], 1, False),
        ([Fate.FAILED, None, None], 2, False),
        ([Fate.DONE, None], 2, False),
        ([Fate.DONE, Fate.FAILED, None], 2, False),
        ([Fate.STOPPED, None], 2, False),
        ([Fate.FAILED, Fate.FAILED], 2, False),
    ],
)
def test_the_rest_is_stopped_only_when_no_round_can_close(fates: list[Fate | None], needed: int, *, lost: bool) -> None:
    assert hopeless(fates, needed) is lost
