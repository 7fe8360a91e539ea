"""An apply for SageMaker that dies after each of its calls in turn, and a destroy: the next one finishes it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from tests.infra.crashes import Crashes, Mortality, mortality_on_aws
from tests.infra.deploy.account import Operator
from tests.infra.kit import Killed
from tests.infra.targets.sagemaker.test_deploying import names, write_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


@pytest.fixture
def mortality(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    return mortality_on_aws(sandbox, monkeypatch)


@pytest.fixture
def start(tmp_path: Path, sandbox: Sandbox) -> Callable[[], Operator]:
    def start() -> Operator:
        path = write_spec(tmp_path, count=2, options="role: replica")
        return Operator(path, {**sandbox.environment, "AWS_MAX_ATTEMPTS": "1"})

    return start


@pytest.fixture
def crashes(start: Callable[[], Operator], sandbox: Sandbox, mortality: Mortality) -> Crashes:
    return Crashes(start, sandbox, mortality)


def test_apply_continues_after_a_kill_at_any_call(crashes: Crashes) -> None:
    crashes.check_apply(11)


def test_replacement_continues_after_a_kill_at_any_call(
    start: Callable[[], Operator], sandbox: Sandbox, mortality: Mortality
) -> None:
    """The one that goes on is left, the one that was lost is made once."""
    calls = 1
    number = 0
    while number < calls:
        sandbox.reset()
        mortality.revive()
        one = start()
        assert one.apply().ok
        lost, other = names(sandbox)
        sandbox.training.finish(lost, 10)
        mortality.revive(after=number or None)
        with contextlib.suppress(Killed):
            one.apply()
        calls = max(calls, mortality.written + 1)
        mortality.revive()
        assert one.apply().ok, number
        # Whoever died before it wrote down what it had begun makes the next number.
        (again,) = set(names(sandbox)) - {other}
        assert again in {f"{lost}-g1", f"{lost}-g2"}, number
        assert one.plan().plan.empty, number
        number += 1


def test_destroy_continues_after_a_kill_at_any_call(crashes: Crashes) -> None:
    crashes.check_destroy(9)
