"""Tests against real accounts, which cost: each is skipped unless a variable says that it may use one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cloud.place import placed
from tests.cloud.settings import AWS_REGION, PATIENCE, Settings
from tests.e2e import deployed

from skerry.infra.cost import prices as prices_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cloud.place import Place

    from skerry.runtime.clock import Clock

_LOCAL = frozenset({"test_ladder.py", "test_rehearsal.py", "test_remove_ids.py"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name not in _LOCAL:
            item.add_marker(pytest.mark.cloud)


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings.read(os.environ)


@pytest.fixture(scope="session")
def clock(settings: Settings) -> Clock:
    return settings.clock()


@pytest.fixture(scope="session")
def prices(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with what the table lacks."""
    path = tmp_path_factory.mktemp("prices") / "prices.json"
    settings.write_prices(path)
    return str(path)


@pytest.fixture(scope="session", autouse=True)
def _patient(prices: str, settings: Settings) -> Iterator[None]:
    """A command may have to wait for machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployed, "DEADLINE_S", 3 * PATIENCE.total_seconds())
        patch.setenv(prices_of.VARIABLE, prices)
        if AWS_REGION in settings.given:
            # A bucket in S3 of a run without jobs on AWS is created there.
            patch.setenv("AWS_REGION", settings.given[AWS_REGION])
        yield


@pytest.fixture(autouse=True)
def _priced(prices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a developer's settings before each test."""
    monkeypatch.setenv(prices_of.VARIABLE, prices)


@pytest.fixture(scope="session")
def in_aws(settings: Settings) -> Iterator[Place]:
    """A place with a bucket in S3."""
    with placed(settings, ["aws_batch"], 1, jobs=False) as place:
        place.make_bucket()
        yield place


@pytest.fixture(scope="session")
def in_google(settings: Settings) -> Iterator[Place]:
    """A place with a bucket in Cloud Storage."""
    with placed(settings, ["vertex"], 1, jobs=False) as place:
        place.make_bucket()
        yield place
