"""The mount that holds a folder, from recorded lines of Linux and from this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.events import logged_events

from skerry.runtime.store import filesystem_type, open_store
from skerry.runtime.store.directory import PROFILE, SHARED_PROFILE, DirectoryStore
from skerry.runtime.store.filesystem_type import mount_of

ROOT = "21 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"
NFS = "90 21 0:50 / /mnt/team\\040share rw,noatime - nfs4 files:/export rw,vers=4.2,hard{more},clientaddr=10.0.0.2"
LISTING = f"{ROOT}\n{NFS}\n95 90 0:51 / /mnt/team\\040share/scratch rw - tmpfs tmpfs rw"


@pytest.mark.parametrize(
    ("folder", "point", "kind", "shared"),
    [
        ("/data", "/", "ext4", False),
        ("/mnt/team share/runs/a", "/mnt/team share", "nfs4", True),
        ("/mnt/team share", "/mnt/team share", "nfs4", True),
        ("/mnt/team share/scratch/run", "/mnt/team share/scratch", "tmpfs", False),
        ("/mnt/team", "/", "ext4", False),
    ],
)
def test_innermost_mount_holds_a_folder(folder: str, point: str, kind: str, *, shared: bool) -> None:
    mount = mount_of(Path(folder), LISTING)
    assert mount is not None
    assert (mount.point, mount.kind, mount.is_shared) == (point, kind, shared)


@pytest.mark.parametrize(("more", "remembers"), [("", True), (",lookupcache=pos", False), (",lookupcache=none", False)])
def test_only_nfs_without_the_option_remembers_absence(more: str, *, remembers: bool) -> None:
    mount = mount_of(Path("/mnt/team share/run"), LISTING.replace("{more}", more))
    assert mount is not None
    assert mount.remembers_absence is remembers


def test_opening_a_folder_on_such_a_mount_logs_what_to_mount_it_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(filesystem_type, "_MOUNTS", mounts)
    share = tmp_path / "share"
    line = f"90 21 0:50 / {share} rw - nfs4 files:/export rw,hard"
    for option in ("", ",lookupcache=positive"):
        mounts.write_text(f"{ROOT}\n{line}{option}\n")
        open_store((share / "runs").as_uri())
        open_store((tmp_path / "elsewhere").as_uri())
    (event,) = logged_events(caplog, "mount_remembers_absence")
    assert (event["uri"], event["mount"]) == ((share / "runs").as_uri(), str(share))
    assert "lookupcache=positive" in event["why"]


def test_local_folder_has_no_patience_with_absence(tmp_path: Path) -> None:
    assert DirectoryStore(tmp_path / "not yet").profile == PROFILE
    assert SHARED_PROFILE.absence_s > PROFILE.absence_s == 0.0
