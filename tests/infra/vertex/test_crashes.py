"""An apply for Vertex AI that dies after each of its calls in turn, and a destroy: the next one finishes it."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.vertex.deploying import operator

from skerry.infra.clouds.google.session import Google
from skerry.infra.deploy import deployment as deploying
from skerry.infra.targets.vertex.creating import Creator
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.infra.testing.google.sandbox import GoogleSandbox

pytestmark = pytest.mark.slow
# A POST that changes nothing.
READING = (":testIamPermissions", "entries:list", ":getIamPolicy")


class Killed(BaseException):
    """The process is gone."""


class Mortality:
    """Kills after the `after`-th writing call from now; the dead call nobody."""

    def __init__(self, sandbox: GoogleSandbox) -> None:
        self._sandbox = sandbox
        self.after: int | None = None
        self.written = 0
        self._dead = False

    def call(self, call: Callable[[], Any], *, writes: bool) -> Any:
        if self._dead:
            raise Killed
        answer = call()
        if writes:
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
def mortality(sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    mortality = Mortality(sandbox)
    asks: str = "_asked"
    asked, created = getattr(Google, asks), Creator.create

    def ask(self: Google, service: str, method: str, path: str, *said: Any, **more: Any) -> Any:
        writes = method != "GET" and not path.endswith(READING)
        return mortality.call(lambda: asked(self, service, method, path, *said, **more), writes=writes)

    def create(self: Creator, *said: Any) -> str:
        return mortality.call(functools.partial(created, self, *said), writes=True)

    monkeypatch.setattr(Google, asks, ask)
    monkeypatch.setattr(Creator, "create", create)
    # Whoever is dead holds nothing, and its threads are this process's.
    monkeypatch.setattr(deploying, "abandoned", bool)
    return mortality


def test_apply_killed_after_each_of_its_calls(tmp_path: Path, sandbox: GoogleSandbox, mortality: Mortality) -> None:
    one = operator(tmp_path, sandbox, count=1)
    assert one.apply().ok
    calls, whole = mortality.written, sandbox.inventory()
    assert calls >= 5
    for number in range(1, calls + 1):
        sandbox.reset()
        mortality.revive(after=number)
        with pytest.raises((Killed, SkerryError)):
            one.apply()
        mortality.revive()
        outcome = one.apply()
        assert outcome.ok, (number, outcome.failed)
        assert sandbox.inventory() == whole, number
        assert one.plan().plan.empty, number
    # Whatever the last one went through, nothing of it stays.
    assert one.destroy().ok
    assert sandbox.inventory() == {}


def test_destroy_killed_after_each_of_its_calls(tmp_path: Path, sandbox: GoogleSandbox, mortality: Mortality) -> None:
    one = operator(tmp_path, sandbox, count=1)
    assert one.apply().ok
    mortality.revive()
    assert one.destroy().ok
    calls = mortality.written
    assert calls >= 4
    for number in range(1, calls + 1):
        sandbox.reset()
        mortality.revive()
        assert one.apply().ok
        mortality.revive(after=number)
        # Side by side they are not always as many.
        with contextlib.suppress(Killed, SkerryError):
            one.destroy()
        mortality.revive()
        removed = one.destroy()
        assert removed.ok, (number, removed.left, removed.outcome.failed)
        assert sandbox.inventory() == {}, number
