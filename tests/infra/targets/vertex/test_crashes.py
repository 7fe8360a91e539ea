"""An apply for Vertex AI that dies after each of its calls in turn, and a destroy: the next one finishes it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.crashes import Crashes, Mortality
from tests.infra.ground import Killed
from tests.infra.vertex.deploying import operator

from skerry.infra.clouds.google.session import Google
from skerry.infra.targets.vertex.creating import Creator
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.testing.google.sandbox import GoogleSandbox

pytestmark = pytest.mark.slow
# A POST that changes nothing.
READING = (":testIamPermissions", "entries:list", ":getIamPolicy")


@pytest.fixture
def crashes(tmp_path: Path, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> Crashes:
    mortality = Mortality(sandbox, monkeypatch)
    asks: str = "_asked"
    asked, created = getattr(Google, asks), Creator.create

    def ask(self: Google, service: str, method: str, path: str, *said: Any, **more: Any) -> Any:
        writes = method != "GET" and not path.endswith(READING)
        return mortality.call(lambda: asked(self, service, method, path, *said, **more), writes=writes)

    def create(self: Creator, *said: Any) -> str:
        return mortality.call(functools.partial(created, self, *said), writes=True)

    monkeypatch.setattr(Google, asks, ask)
    monkeypatch.setattr(Creator, "create", create)
    start = functools.partial(operator, tmp_path, sandbox, count=1)
    return Crashes(start, sandbox, mortality, ends=(Killed, SkerryError))


def test_apply_killed_after_each_of_its_calls(crashes: Crashes) -> None:
    crashes.check_apply(5)


def test_destroy_killed_after_each_of_its_calls(crashes: Crashes) -> None:
    crashes.check_destroy(4)
