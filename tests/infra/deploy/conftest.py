"""A sandbox with an AWS account, and a spec for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import write_spec

from skerry.testing import plugin

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

empty_sandbox = plugin.skerry_sandbox


@pytest.fixture
def skerry_sandbox(empty_sandbox: Sandbox) -> Sandbox:
    """An empty account, in which every image counts as pushed."""
    empty_sandbox.any_image = True
    return empty_sandbox


@pytest.fixture
def spec(tmp_path: Path, skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a spec with one replica; this process has the sandbox's environment."""
    for name, value in skerry_sandbox.environment.items():
        monkeypatch.setenv(name, value)
    return str(write_spec(tmp_path, count=1))
