"""Replicas keep copies on their machines because run.json asks for them."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import Island, begin_run, wait_for_copies

from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import PeerCopies
from skerry.runtime.replication.local_and_peer_checkpoints import LocalCopies
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path


def test_peers_of_run_json_make_replicas_keep_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = MemoryStore()
    run = begin_run(store, "a", peers=PeerCopies(memory=False, every_s=7.0))
    island = Island(store, "a", minimum=1).take(4)
    near = island.manager.lifecycle.log_follower.recorder.near
    assert near is not None
    assert near.every_s == 7.0
    wait_for_copies(island.manager)
    island.stop()
    assert list(tmp_path.glob(f"skerry-*/{run.nonce}/a/{keys.local_prefix('checkpoints', 0)}*/manifest.json"))
    (folder,) = tmp_path.glob("skerry-*")
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("occupied", ["readable", "link", "dangling_link", "another_user"])
def test_folder_that_others_can_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, occupied: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, user = tmp_path / f"skerry-{os.getuid()}", os.getuid()
    if "link" in occupied:
        if occupied == "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o755 if occupied == "readable" else 0o700)
    if occupied == "another_user":
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        folder.rename(tmp_path / f"skerry-{user + 1}")
    run = begin_run(MemoryStore(), "a", peers=PeerCopies(memory=False))
    with pytest.raises(Invalid, match="remove it, or chmod 700 it"):
        LocalCopies.of_run(run)
