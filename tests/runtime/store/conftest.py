"""Fixtures for tests of stores."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from tests.support.s3server import S3Server

from skerry.runtime.store.fsspec_store import FsspecStore, open_fsspec_store

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERS = itertools.count()
KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}


@pytest.fixture
def prefix() -> str:
    """A prefix of the bucket that no other test uses."""
    return f"runs/{next(_NUMBERS)}/"


@pytest.fixture
def aws_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed AWS keys in the environment."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A server with one bucket and short pages, so that most listings need several."""
    with S3Server(page_keys=3, buckets=frozenset({"bucket"}), seed=20) as running:
        yield running


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    """The same server; its faults end with the test."""
    yield server
    server.faults.set()


@pytest.fixture(scope="module")
def session(server: S3Server) -> Iterator[FsspecStore]:
    """One session of s3fs for the module, because each one stays open until the process ends."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": server.endpoint}).items():
            patch.setenv(name, value)
        yield open_fsspec_store("s3", "bucket", "")
