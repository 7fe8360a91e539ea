"""Fetches the packed training code from the run's store, checks its digest, and unpacks it safely.

Trusts no content: no path or link leaves the folder, only files and folders are created, and sizes are bounded.
`skerry.infra.run.code_archive` packs within the same bounds.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.store.retrying import read_existing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.runtime.store import Store

# Code, configuration and a small sample of data. Data sets and weights belong in a bucket: every start fetches this.
MAX_BYTES: Final = 64 << 20
MAX_FILES: Final = 20_000


def fetch(store: Store, digest: str, into: Path) -> None:
    """Unpack the code with this digest at `into`. Raises Invalid if the run has none, Corrupt as `unpack` does."""
    data = read_existing(store, keys.code(digest))  # it was uploaded before the job that names it
    if data is None:
        raise Invalid(
            f"the run has no code {digest[:12]}: no {store.uri}/{keys.code(digest)}; upload it with `skerry up`"
        )
    unpack(data, digest, into)


def unpack(data: bytes | memoryview, digest: str, into: Path) -> None:
    """Unpack a code archive at `into`, which must not exist; it appears complete or not at all.

    Raises Corrupt if the bytes do not match `digest`, or contain anything but plain files inside `into`.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise Corrupt(f"packed code is damaged: sha256 is not {digest}; upload it again with `skerry up`")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=into.parent) as folder:
        partial = Path(folder, "code")
        partial.mkdir()
        try:
            with tarfile.open(fileobj=io.BytesIO(_decompress(data)), mode="r:") as archive:
                for member in _plain_files(archive):
                    _write(archive, member, partial)
        except (tarfile.TarError, zlib.error, OSError, EOFError) as error:
            raise Corrupt(f"packed code cannot be unpacked: {error}") from error
        partial.rename(into)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write one file into a folder that contains only files written here, so that no link can lead out of it.

    Not with `extractall`: its filters came with Python 3.11.4, and Debian has 3.11.2.
    """
    inner = PurePosixPath(member.name)
    if inner.is_absolute() or not inner.parts or ".." in inner.parts or "\0" in member.name:
        raise Corrupt(f"packed code contains a path that leaves its folder: {member.name!r}")
    content = archive.extractfile(member)
    path = folder / inner
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(b"" if content is None else content.read())
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _decompress(data: bytes | memoryview) -> bytes:
    # tar pads each file to 512 bytes and adds a header of the same size (more for long names).
    limit = MAX_BYTES + MAX_FILES * 2048
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        plain = stream.read(limit + 1)
    if len(plain) > limit:
        raise Corrupt(f"packed code is more than {MAX_BYTES >> 20} MiB when unpacked")
    return plain


def _plain_files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for count, member in enumerate(archive):
        if count >= MAX_FILES:
            raise Corrupt(f"packed code has more than {MAX_FILES} files")
        # `pack` writes only files, so a folder, link or device means that skerry did not pack this archive.
        if not member.isreg():
            raise Corrupt(f"packed code contains something other than a file: {member.name!r}")
        yield member
