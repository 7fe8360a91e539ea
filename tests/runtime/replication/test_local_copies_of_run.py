"""Replicas keep copies on their machines because run.json asks for them."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from tests.kit.managers import Island, begin_run

from skerry.runtime.log import keys
from skerry.runtime.log.run_record import PeerCopies
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_peers_of_run_json_make_replicas_keep_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = MemoryStore()
    run = begin_run(store, "a", peers=PeerCopies(memory=False, every_s=7.0))
    island = Island(store, "a", minimum=1).take(4)
    near = island.manager.lifecycle.log_follower.recorder._near
    assert near is not None
    assert near.every_s == 7.0
    for saving in near._saving.values():  # type: ignore[attr-defined]
        saving.result()
    island.stop()
    assert list(tmp_path.glob(f"skerry-*/{run.nonce}/a/{keys.local_prefix('checkpoints', 0)}*/manifest.json"))
