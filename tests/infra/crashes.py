"""Kills a command after each of its writing calls in turn, and checks that the next command finishes the work."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from tests.infra.kit import Killed

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.deploy import deployment as deploying

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tests.infra.deploy.account import Operator

    from skerry.testing.google import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

T = TypeVar("T")
# Calls that change nothing are not counted.
READING = ("describe_", "list_", "get_", "head_", "batch_get_", "simulate_")


class Mortality:
    """Raises Killed after the `after`-th writing call from now, and on every later call."""

    def __init__(self, sandbox: Sandbox | GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sandbox = sandbox
        self.after: int | None = None
        self.written = 0
        self._dead = False
        # The killed command ran in this process, so its lock would look held.
        monkeypatch.setattr(deploying, "abandoned", _is_gone)

    def call(self, real: Callable[[], T], *, writes: bool) -> T:
        if self._dead:
            raise Killed
        result = real()
        if writes:
            self.written += 1
            if self.written == self.after:
                self._dead = True
                # Writes of the command's other threads, also of the state, must not arrive.
                self._sandbox.fail(how="timeout", times=None)
                raise Killed
        return result

    def revive(self, after: int | None = None) -> None:
        self._dead, self.written, self.after = False, 0, after
        self._sandbox.heal()


def _is_gone(_: object) -> bool:
    return True


def mortality_on_aws(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, uncounted: Collection[str] = ()) -> Mortality:
    """A Mortality that counts and kills calls to AWS. uncounted: services whose calls are not counted."""
    mortality = Mortality(sandbox, monkeypatch)

    def ask(aws: Aws, real: Callable[..., Any], /, *names: str, **parameters: object) -> Any:
        service, _, operation = names
        writes = service not in uncounted and not operation.startswith(READING)
        return mortality.call(functools.partial(real, aws, *names, **parameters), writes=writes)

    for name in ("call", "call_once"):
        monkeypatch.setattr(Aws, name, functools.partialmethod(ask, getattr(Aws, name)))
    return mortality


class Crashes:
    """Runs the commands of a run in a sandbox and kills them. ends: the exceptions of a killed command."""

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

    def check(self, least: tuple[int, int], comparable: Callable[[dict[str, tuple[str, ...]]], object]) -> None:
        """Kill an apply and a destroy after each of their calls in turn.

        least: the fewest calls of each. comparable: the part of an inventory that is equal in every new account.
        """
        operator = self._start()
        assert operator.apply().ok
        created, whole = self._mortality.written, comparable(self._sandbox.inventory())
        self._mortality.revive()
        assert operator.destroy().ok
        deleted = self._mortality.written
        assert (created >= least[0], deleted >= least[1]) == (True, True), (created, deleted)
        for number in range(1, max(created, deleted) + 1):
            self._sandbox.reset()
            operator = self._start()
            if number <= created:
                self._mortality.revive(after=number)
                with pytest.raises(self._ends):
                    operator.apply()
            self._mortality.revive()
            outcome = operator.apply()
            assert outcome.ok, (number, outcome.failed)
            assert comparable(self._sandbox.inventory()) == whole, number
            assert operator.plan().plan.empty, number
            if number <= deleted:
                self._mortality.revive(after=number)
                # Parallel deletions do not always make the same number of calls.
                with contextlib.suppress(*self._ends):
                    operator.destroy()
                self._mortality.revive()
                removed = operator.destroy()
                assert removed.ok, (number, removed.left, removed.outcome.failed)
                assert self._sandbox.inventory() == {}, number
