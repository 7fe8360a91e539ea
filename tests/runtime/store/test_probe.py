"""The start-up probe: stores that break a guarantee are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock
from tests.support.s3server import S3Server

from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.probe import PREFIX, probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Data, Entry


class OverwritingStore(MemoryStore):
    """Reports that the second create lost, but writes its bytes."""

    def create(self, key: str, data: Data) -> bool:
        existed = self.read(key) is not None
        self.replace(key, data)
        return not existed


class StaleStore(MemoryStore):
    """Returns outdated listings."""

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:  # noqa: ARG002
        return []


class ReadOnlyStore(MemoryStore):
    def create(self, key: str, data: Data) -> bool:  # noqa: ARG002
        raise Unauthorized("no right to write")


@pytest.mark.usefixtures("aws_keys")
def test_server_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(honours_conditions=False) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        store = open_store("s3://bucket/run")
        with pytest.raises(Invalid, match=r"s3://bucket/run: .* ignores If-None-Match; use a store that honours"):
            probe(store, FakeClock())
        assert list(store.list("")) == []


@pytest.mark.parametrize(
    ("store", "kind", "words"),
    [
        (OverwritingStore(), Invalid, "changed the object"),
        (StaleStore(), Invalid, "a listing after the write does not contain"),
        (ReadOnlyStore(), Unauthorized, "no right to write"),
    ],
)
def test_broken_guarantee_is_named(store: MemoryStore, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        probe(store, FakeClock())


def test_probe_prefix_is_the_one_in_keys() -> None:
    assert PREFIX == keys.PROBE
