"""A store that is deleted in mid-run takes with it the round in copying, and those that were closed meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import begin_run, islands_of, stop_managers, wait_for
from tests.kit.stores import HookedStore

from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import find_closed
from skerry.runtime.log.run_record import MirrorSettings
from skerry.runtime.mirrors import keeper
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import fork
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COPYING = 3
"""The round that is being copied when the store is deleted."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    stop_managers()


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", [0, 2])
def test_rounds_beyond_the_copy_in_flight_are_all_that_is_lost(
    tmp_path: Path, meanwhile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the mirror. meanwhile: rounds that are closed while round COPYING is in flight.

    Here training waits until the rounds before are copied: a busy machine may close rounds faster than it copies them.
    """
    monkeypatch.setattr(keeper, "_SILENT_S", 0.0)  # heartbeats, which say that a replica is copying, lag behind
    copying, deleted, decided = threading.Event(), threading.Event(), COPYING + 1 + meanwhile

    def delete_in_mid_run(verb: str, key: str) -> None:
        is_mirror = threading.current_thread().name.startswith("mirror")
        if is_mirror and (verb, key.startswith(keys.payloads_prefix(COPYING))) == ("read", True):
            copying.set()
            assert deleted.wait(300)
        if verb == "create" and key.startswith(keys.CONTRIBUTIONS) and not deleted.is_set():
            number = keys.round_of(key)
            if 0 < number <= COPYING:
                wait_for(lambda: mirror.read(keys.commit(number - 1)))
            if number == decided:
                assert copying.wait(300)
                deleted.set()
        if deleted.is_set():
            raise Invalid("no such bucket")

    store, mirror = HookedStore(delete_in_mid_run), DirectoryStore(tmp_path / "mirror")
    begin_run(store, "ab", minimum=2, rounds=None, mirrors=(MirrorSettings(uri=mirror.uri, each_round=True),))
    islands = islands_of(store, "ab", grace_s=60.0, max_retries=0)
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(island.train, decided + 1, close=False) for island in islands]:
            with suppress(SkerryError, RuntimeError):
                ended.result(300)
    for island in islands:
        with suppress(SkerryError, RuntimeError):
            island.stop()
    store.hook = lambda *_: None  # a look at what was deleted
    closed = find_closed(store, 0)
    cut = find_cut(mirror)
    assert (closed, cut.round, closed - cut.round) == (decided, COPYING, 1 + meanwhile)
    assert fork(mirror, cut, MemoryStore("memory://restored/x"), "").nonce
