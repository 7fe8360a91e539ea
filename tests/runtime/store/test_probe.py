from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock
from tests.support.s3server import S3Server

from skerry.runtime import keys
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.probe import FOLDER, probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Data, Entry


class Overwriting(MemoryStore):
    """Says that the second create lost, and writes it all the same."""

    def create(self, key: str, data: Data) -> bool:
        existed = self.read(key) is not None
        self.replace(key, data)
        return not existed


class Forgetful(MemoryStore):
    """Lists what was there a while ago."""

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:  # noqa: ARG002
        return []


class ReadOnly(MemoryStore):
    def create(self, key: str, data: Data) -> bool:  # noqa: ARG002
        raise Unauthorized("no")


def test_a_server_that_ignores_conditions_is_refused_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(honours_conditions=False) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        store = open_store("s3://bucket/run")
        with pytest.raises(Invalid, match=r"s3://bucket/run: .* ignores If-None-Match; use one that honours"):
            probe(store, FakeClock())
        assert list(store.list("")) == []


def test_a_store_that_overwrites_the_winner_is_refused() -> None:
    with pytest.raises(Invalid, match="changed the object"):
        probe(Overwriting(), FakeClock())


def test_a_store_whose_listings_are_stale_is_refused() -> None:
    with pytest.raises(Invalid, match="not in a listing"):
        probe(Forgetful(), FakeClock())


def test_missing_rights_are_told_as_such() -> None:
    with pytest.raises(Unauthorized):
        probe(ReadOnly(), FakeClock())


def test_the_folder_is_the_one_that_keys_name() -> None:
    assert FOLDER == keys.PROBE
