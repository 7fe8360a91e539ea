"""A machine without a Docker engine."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from skerry.infra.local.docker_engine import Engine
from skerry.runtime.errors import Retryable

if TYPE_CHECKING:
    from pathlib import Path


def test_engine_that_is_not_there_is_named_and_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(Retryable, match=r"none.sock: No such file or directory; start one"):
        Engine()
    gc.collect()
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]
