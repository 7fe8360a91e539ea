"""Kills commands after each of their writing calls in turn; each continues where the previous one was killed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from tests.infra.kit import Killed

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.deploy import prepared_deployment as deploying

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import pytest

    from skerry.testing.google import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

T = TypeVar("T")
# Calls that change nothing are not counted.
READING = ("describe_", "list_", "get_", "head_", "batch_get_", "simulate_")


class Mortality:
    """Raises Killed after the first writing call that no command was killed after, and on every later call."""

    def __init__(self, sandbox: Sandbox | GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sandbox = sandbox
        self.after: set[str] = set()
        self.dead = False
        # The killed command ran in this process, so its lock would look held.
        monkeypatch.setattr(deploying, "abandoned", _is_gone)

    def call(self, real: Callable[[], T], writes: str | None) -> T:
        """Make a call. writes: its name, see call_name; None if it changes nothing."""
        if self.dead:
            raise Killed
        result = real()
        if writes is not None and (self.dead or writes not in self.after):
            self.after.add(writes)
            self.dead = True
            # Writes of the command's other threads, also of the state, must not arrive.
            self._sandbox.fail(how="timeout", times=None)
            raise Killed
        return result

    def revive(self) -> None:
        self.dead = False
        self._sandbox.heal()


def call_name(*words: object) -> str:
    """The same for the same call of a later command: of those of its words and parameters that are texts."""
    return " ".join(word for word in words if isinstance(word, str))


def _is_gone(_: object) -> bool:
    return True


def mortality_on_aws(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, uncounted: Collection[str] = ()) -> Mortality:
    """A Mortality that counts and kills calls to AWS. uncounted: services whose calls are not counted."""
    mortality = Mortality(sandbox, monkeypatch)

    def ask(aws: Aws, real: Callable[..., Any], /, *names: str, **parameters: object) -> Any:
        service, _, operation = names
        reads = service in uncounted or operation.startswith(READING)
        call = None if reads else call_name(service, operation, *parameters.values())
        return mortality.call(functools.partial(real, aws, *names, **parameters), call)

    for name in ("call", "call_once"):
        monkeypatch.setattr(Aws, name, functools.partialmethod(ask, getattr(Aws, name)))
    return mortality


def kill_in_turn(
    mortality: Mortality, command: Callable[[], T], ends: tuple[type[BaseException], ...] = (Killed,)
) -> tuple[T, int]:
    """Repeat a command that is killed after each of its writing calls until it completes.

    ends: the exceptions of a killed command. Returns its result, and the number of calls that it was killed after.
    """
    mortality.after.clear()
    while True:
        try:
            result = command()
        except ends:
            assert mortality.dead
        else:
            assert not mortality.dead
            return result, len(mortality.after)
        mortality.revive()
