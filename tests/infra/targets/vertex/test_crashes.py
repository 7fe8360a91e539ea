"""An apply or a destroy for Vertex AI is killed after each of its calls in turn; the next one finishes the work."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.crashes import Crashes, Mortality
from tests.infra.kit import Killed
from tests.infra.targets.vertex.deploying import operator

from skerry.infra.clouds.google.session import Google
from skerry.infra.targets.vertex.sdk_create import Creator
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.testing.google.sandbox import GoogleSandbox

pytestmark = pytest.mark.slow
# A POST that changes nothing.
READING = (":testIamPermissions", "entries:list", ":getIamPolicy")


@pytest.fixture
def crashes(tmp_path: Path, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> Crashes:
    mortality = Mortality(sandbox, monkeypatch)
    created = Creator.create

    def mortal(send: Callable[..., Any]) -> Callable[..., Any]:
        def ask(self: Google, service: str, method: str, path: str, **more: Any) -> Any:
            writes = method != "GET" and not path.endswith(READING)
            return mortality.call(lambda: send(self, service, method, path, **more), writes=writes)

        return ask

    def create(self: Creator, *positional: Any) -> str:
        return mortality.call(functools.partial(created, self, *positional), writes=True)

    monkeypatch.setattr(Google, "call", mortal(Google.call))
    monkeypatch.setattr(Google, "call_once", mortal(Google.call_once))
    monkeypatch.setattr(Creator, "create", create)
    start = functools.partial(operator, tmp_path, sandbox, count=1)
    return Crashes(start, sandbox, mortality, ends=(Killed, SkerryError))


def test_apply_continues_after_a_kill_at_any_call(crashes: Crashes) -> None:
    crashes.check_apply(5)


def test_destroy_continues_after_a_kill_at_any_call(crashes: Crashes) -> None:
    crashes.check_destroy(4)
