"""An apply or a destroy for SageMaker is killed after each of its calls in turn; the next one finishes the work."""

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
    """The running job stays, and the lost one is recreated once."""
    calls = 1
    number = 0
    while number < calls:
        sandbox.reset()
        mortality.revive()
        deployer = start()
        assert deployer.apply().ok
        lost, other = names(sandbox)
        sandbox.training.finish(lost, 10)
        mortality.revive(after=number or None)
        with contextlib.suppress(Killed):
            deployer.apply()
        calls = max(calls, mortality.written + 1)
        mortality.revive()
        assert deployer.apply().ok, number
        # An apply that was killed before it recorded the new job leaves the next generation to its successor.
        (again,) = set(names(sandbox)) - {other}
        assert again in {f"{lost}-g1", f"{lost}-g2"}, number
        assert deployer.plan().plan.empty, number
        number += 1


def test_destroy_continues_after_a_kill_at_any_call(crashes: Crashes) -> None:
    crashes.check_destroy(9)
