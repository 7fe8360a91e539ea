"""The file system behind a folder, as Linux lists it: a shared one may remember for seconds that a file was absent.

Source: proc(5) on mountinfo, nfs(5) on `lookupcache` and `actimeo`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

_MOUNTS: Final = Path("/proc/self/mountinfo")
_SHARED: Final = re.compile(r"(nfs4?|cifs|smb3?|fuse\..+|lustre|ceph|9p|virtiofs|beegfs|gpfs|afs|glusterfs)")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mounted file system. kind: as in mount(8). options: of the mount and of its file system."""

    point: str
    kind: str
    options: frozenset[str]

    @property
    def is_shared(self) -> bool:
        """True if other machines may write to it."""
        return _SHARED.fullmatch(self.kind) is not None

    @property
    def remembers_absence(self) -> bool:
        """True for an NFS mount that answers from its cache that a file does not exist."""
        return self.kind in {"nfs", "nfs4"} and self.options.isdisjoint(
            {"lookupcache=none", "lookupcache=pos", "lookupcache=positive"}
        )


def mount_of(folder: Path, listing: str | None = None) -> Mount | None:
    """The mount that holds `folder`, which need not exist; None where mounts are not listed. listing: of Linux."""
    if listing is None:
        try:
            listing = _MOUNTS.read_text()
        except OSError:  # no Linux
            return None
    path = folder.resolve()
    mounts = [_parse(line) for line in listing.splitlines()]
    holding = [mount for mount in mounts if path == Path(mount.point) or Path(mount.point) in path.parents]
    # Of several at one point the last hides the others.
    return max(enumerate(holding), key=lambda each: (len(each[1].point), each[0]))[1] if holding else None


def _parse(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields, (kind, _, options) = before.split(" "), after.split(" ", 2)
    point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
    return Mount(point, kind, frozenset([*fields[5].split(","), *options.split(",")]))
