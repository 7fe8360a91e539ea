"""A process that dies after each of its writing calls in turn: whatever it left, the next one finishes it."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from tests.infra.ground import Killed

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.deploy import deployment as deploying

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.infra.deploy.account import Operator

    from skerry.infra.testing.google import GoogleSandbox
    from skerry.infra.testing.sandbox import Sandbox

T = TypeVar("T")
# Not counted: they change nothing.
READING = ("describe_", "list_", "get_", "head_", "batch_get_")


class Mortality:
    """Kills after the `after`-th writing call from now; the dead call nobody."""

    def __init__(self, sandbox: Sandbox | GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sandbox = sandbox
        self.after: int | None = None
        self.written = 0
        self._dead = False
        # Whoever is dead holds nothing, and its threads are this process's.
        monkeypatch.setattr(deploying, "abandoned", _is_gone)

    def call(self, real: Callable[[], T], *, writes: bool) -> T:
        if self._dead:
            raise Killed
        answer = real()
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


def _is_gone(_: object) -> bool:
    return True


def mortality_on_aws(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    """Every call to AWS may be the last."""
    mortality = Mortality(sandbox, monkeypatch)

    def ask(aws: Aws, real: Callable[..., Any], /, *said: str, **parameters: object) -> Any:
        _, _, operation = said
        writes = not operation.startswith(READING)
        return mortality.call(functools.partial(real, aws, *said, **parameters), writes=writes)

    for name in ("call", "call_once"):
        monkeypatch.setattr(Aws, name, functools.partialmethod(ask, getattr(Aws, name)))
    return mortality


class Crashes:
    """Commands of a run in a sandbox that die. ends: what a dead one raises."""

    def __init__(
        self,
        start: Callable[[], Operator],
        sandbox: Sandbox | GoogleSandbox,
        mortality: Mortality,
        ends: tuple[type[BaseException], ...] = (Killed,),
    ) -> None:
        self._start = start
        self._sandbox = sandbox
        self._mortality = mortality
        self._ends = ends

    def check_apply(self, least: int, found: Callable[[dict[str, tuple[str, ...]]], object] = dict) -> None:
        """least: so many calls it has at least. found: what of an inventory is the same in each new account."""
        assert self._start().apply().ok
        calls, whole = self._mortality.written, found(self._sandbox.inventory())
        assert calls >= least
        for number in range(1, calls + 1):
            self._sandbox.reset()
            one = self._start()
            self._mortality.revive(after=number)
            with pytest.raises(self._ends):
                one.apply()
            self._mortality.revive()
            outcome = one.apply()
            assert outcome.ok, (number, outcome.failed)
            assert found(self._sandbox.inventory()) == whole, number
            assert one.plan().plan.empty, number
        # Whatever the last one went through, nothing of it stays.
        assert self._start().destroy().ok
        assert self._sandbox.inventory() == {}

    def check_destroy(self, least: int) -> None:
        one = self._start()
        assert one.apply().ok
        self._mortality.revive()
        assert one.destroy().ok
        calls = self._mortality.written
        assert calls >= least
        for number in range(1, calls + 1):
            self._sandbox.reset()
            one = self._start()
            self._mortality.revive()
            assert one.apply().ok
            self._mortality.revive(after=number)
            # Side by side they are not always as many.
            with contextlib.suppress(*self._ends):
                one.destroy()
            self._mortality.revive()
            removed = one.destroy()
            assert removed.ok, (number, removed.left, removed.outcome.failed)
            assert self._sandbox.inventory() == {}, number
