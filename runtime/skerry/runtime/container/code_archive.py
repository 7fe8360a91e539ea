"""The packed training code, taken from the run's store: checked against its digest, and unpacked safely.

Trusts nothing: no path or link leaves the folder, nothing but files and folders is made, and sizes are bounded.
`skerry.infra.bundle` packs within the same bounds.
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

from skerry.runtime import keys
from skerry.runtime.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.runtime.store import Store

# Code, configuration and a small sample of data. Data sets and weights belong in a bucket: every start fetches this.
MAX_BYTES: Final = 64 << 20
MAX_FILES: Final = 20_000


def fetch(store: Store, digest: str, into: Path) -> None:
    """The code of this digest, under `into`. Raises Invalid if the run has none, Corrupt as `unpack` does."""
    data = store.read(keys.code(digest))
    if data is None:
        raise Invalid(f"the run has no code {digest[:12]}: no {store.uri}/{keys.code(digest)}; `skerry up` uploads it")
    unpack(data, digest, into)


def unpack(data: bytes | memoryview, digest: str, into: Path) -> None:
    """The files of a packed code folder, under `into`, which must not exist; it appears complete or not at all.

    Raises Corrupt if the bytes are not those that `digest` names, or hold anything but plain files inside `into`.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise Corrupt(f"packed code is damaged: sha256 is not {digest}; upload it again with `skerry up`")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=into.parent) as folder:
        half = Path(folder, "code")
        half.mkdir()
        try:
            with tarfile.open(fileobj=io.BytesIO(_inflate(data)), mode="r:") as archive:
                for member in _plain_files(archive):
                    _write(archive, member, half)
        except (tarfile.TarError, zlib.error, OSError, EOFError) as error:
            raise Corrupt(f"packed code cannot be unpacked: {error}") from error
        half.rename(into)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """One file, in a folder that holds only what this has written: no link can lead out of it.

    By hand, not with `extractall`: its filters came with Python 3.11.4, and Debian's is 3.11.2.
    """
    inner = PurePosixPath(member.name)
    if inner.is_absolute() or not inner.parts or ".." in inner.parts or "\0" in member.name:
        raise Corrupt(f"packed code holds a path that leaves its folder: {member.name!r}")
    content = archive.extractfile(member)
    path = folder / inner
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(b"" if content is None else content.read())
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _inflate(data: bytes | memoryview) -> bytes:
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
        # `pack` writes nothing else, so a folder, link or device in an archive means that it is not ours.
        if not member.isreg():
            raise Corrupt(f"packed code holds something else than a file: {member.name!r}")
        yield member
