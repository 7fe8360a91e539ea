"""Fixtures for tests of the entry point of a container."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.container import ContainerStarts, Signpost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def container(tmp_path: Path) -> Iterator[ContainerStarts]:
    with ContainerStarts(tmp_path) as starts:
        yield starts


@pytest.fixture
def signpost(tmp_path: Path) -> Iterator[Signpost]:
    signpost = Signpost(tmp_path)
    yield signpost
    signpost.close()
