"""An apply for SageMaker that dies after each of its calls in turn, and a destroy: the next one finishes it."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import Operator
from tests.infra.sagemaker.test_deploying import names, write_spec

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.deploy import deployment as deploying

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.infra.testing.sandbox import Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
# Not counted: they change nothing.
READING = ("describe_", "list_", "get_", "head_", "batch_get_")


class Killed(BaseException):
    """The process is gone."""


class Mortality:
    """Kills after the `after`-th writing call from now; the dead call nobody."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.after: int | None = None
        self.written = 0
        self._dead = False

    def call(
        self, real: Callable[..., object], aws: Aws, service: str, region: str, operation: str, /, **parameters: object
    ) -> object:
        if self._dead:
            raise Killed
        answer = real(aws, service, region, operation, **parameters)
        if not operation.startswith(READING):
            self.written += 1
            if self.written == self.after:
                self._dead = True
                # What other threads of the process still wanted to write, the state too, never arrives.
                self._sandbox.fail(how="timeout", times=None)
                raise Killed
        return answer

    def revive(self, after: int | None = None) -> None:
        self._dead, self.written, self.after = False, 0, after
        self._sandbox.heal()


@pytest.fixture
def mortality(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    mortality = Mortality(sandbox)
    for name in ("call", "call_once"):
        monkeypatch.setattr(Aws, name, functools.partialmethod(_call, mortality, getattr(Aws, name)))
    # Whoever is dead holds nothing, and its threads are this process's.
    monkeypatch.setattr(deploying, "abandoned", lambda _: True)
    return mortality


def _call(aws: Aws, mortality: Mortality, real: Callable[..., object], /, *said: str, **parameters: object) -> object:
    return mortality.call(real, aws, *said, **parameters)


def operator(folder: Path, sandbox: Sandbox) -> Operator:
    path = write_spec(folder, count=2, options="role: replica")
    return Operator(path, {**sandbox.environment, "AWS_MAX_ATTEMPTS": "1"})


def test_apply_killed_after_each_of_its_calls(tmp_path: Path, sandbox: Sandbox, mortality: Mortality) -> None:
    one = operator(tmp_path, sandbox)
    assert one.apply().ok
    calls, whole = mortality.written, sandbox.inventory()
    assert calls > 10
    for number in range(1, calls + 1):
        sandbox.reset()
        one = operator(tmp_path, sandbox)
        mortality.revive(after=number)
        with pytest.raises(Killed):
            one.apply()
        mortality.revive()
        outcome = one.apply()
        assert outcome.ok, (number, outcome.failed)
        assert sandbox.inventory() == whole, number
        assert one.plan().plan.empty, number
    # Whatever the last one went through, nothing of it stays.
    assert one.destroy().ok
    assert sandbox.inventory() == {}


def test_a_replacement_killed_after_each_of_its_calls(tmp_path: Path, sandbox: Sandbox, mortality: Mortality) -> None:
    """The one that goes on is left, the one that was lost is made once."""
    calls = 1
    number = 0
    while number < calls:
        sandbox.reset()
        mortality.revive()
        one = operator(tmp_path, sandbox)
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


def test_destroy_killed_after_each_of_its_calls(tmp_path: Path, sandbox: Sandbox, mortality: Mortality) -> None:
    one = operator(tmp_path, sandbox)
    assert one.apply().ok
    mortality.revive()
    assert one.destroy().ok
    calls = mortality.written
    assert calls > 8
    for number in range(1, calls + 1):
        sandbox.reset()
        one = operator(tmp_path, sandbox)
        mortality.revive()
        assert one.apply().ok
        mortality.revive(after=number)
        # Side by side they are not always as many.
        with contextlib.suppress(Killed):
            one.destroy()
        mortality.revive()
        removed = one.destroy()
        assert removed.ok, (number, removed.left, removed.outcome.failed)
        assert sandbox.inventory() == {}, number
