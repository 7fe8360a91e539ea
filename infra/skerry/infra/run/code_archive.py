"""Packs the training code into an archive that has the same bytes on every machine, named by its sha256.

Times, owners and directory order are ignored, so equal code has an equal digest. `unpack` verifies the archive; it is
also used by replicas in their containers.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import os
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.container.code_archive import MAX_BYTES, MAX_FILES, unpack
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["ALWAYS_IGNORED", "IGNORE_FILE", "Bundle", "files_of", "pack", "takes", "unpack"]

IGNORE_FILE: Final = ".skerryignore"
ALWAYS_IGNORED: Final = (".git", ".hg", ".venv", "venv", "__pycache__", "*.pyc", ".skerry", ".DS_Store")
# Number of the largest files in the error message.
_NAMED = 5
_LEAVE_OUT = f"change its rights, or list it in {IGNORE_FILE}"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A packed code folder. digest: sha256 of `data`, in hex."""

    data: bytes
    digest: str


def files_of(folder: Path) -> list[str]:
    """The files of `folder` that `pack` includes, as sorted paths with `/`.

    Links to files inside the folder are followed. Raises Invalid if a link leaves the folder, if the folder is missing
    or unreadable, or if it exceeds the limits, with its largest files.
    """
    if not folder.is_dir():
        raise Invalid(f"no such folder: {folder}")
    ignored = (*ALWAYS_IGNORED, *_ignore_file(folder))
    try:
        names = sorted(_walk(folder, folder, ignored))
    except PermissionError as error:
        raise Invalid(f"unreadable: {error.filename}; {_LEAVE_OUT}") from error
    for name in names:
        if not os.access(folder / name, os.R_OK):
            raise Invalid(f"unreadable: {name}; {_LEAVE_OUT}")
    sizes = {name: (folder / name).stat().st_size for name in names}
    if len(names) > MAX_FILES or sum(sizes.values()) > MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
        raise Invalid(
            f"too much to pack: {len(names)} files, {_mib(sum(sizes.values()))}; the limits are {MAX_FILES} files, "
            f"{_mib(MAX_BYTES)}; largest: {', '.join(f'{name} ({_mib(sizes[name])})' for name in largest)}; "
            f"list what replicas do not need in {IGNORE_FILE}"
        )
    return names


def takes(folder: Path, path: Path) -> bool:
    """True if `pack` would include a file at `path`; both paths resolved. Reads the ignore file only."""
    if not path.is_relative_to(folder):
        return False
    ignored = (*ALWAYS_IGNORED, *_ignore_file(folder))
    inner = path.relative_to(folder)
    return not any(_is_ignored(step, ignored) for step in (inner, *inner.parents[:-1]))


def pack(folder: Path) -> Bundle:
    """`folder` as a tar.gz. Raises Invalid as `files_of` does."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in files_of(folder):
            path = folder / name
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            # Only the executable bit is part of the code; other mode bits depend on the checkout.
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(content))
    data = gzip.compress(plain.getvalue(), compresslevel=6, mtime=0)
    return Bundle(data=data, digest=hashlib.sha256(data).hexdigest())


def _ignore_file(folder: Path) -> Sequence[str]:
    path = folder / IGNORE_FILE
    if not path.is_file():
        return ()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (UnicodeDecodeError, OSError) as error:
        raise Invalid(f"{IGNORE_FILE} is unreadable: {error}; write it as UTF-8 text") from error
    return tuple(line.rstrip("/") for line in lines if line and not line.startswith("#"))


def _walk(root: Path, folder: Path, ignored: Sequence[str]) -> Iterator[str]:
    for entry in sorted(folder.iterdir()):
        inner = entry.relative_to(root)
        name = inner.as_posix()
        if _is_ignored(inner, ignored):
            continue
        if entry.is_symlink() and not _resolved(entry, name).is_relative_to(root.resolve()):
            raise Invalid(f"link leaves the code folder: {name}; copy its target, or list it in {IGNORE_FILE}")
        if entry.is_symlink() and entry.is_dir():
            raise Invalid(f"link to a folder: {name}; copy the folder, or list it in {IGNORE_FILE}")
        if entry.is_dir():
            yield from _walk(root, entry, ignored)
        elif entry.is_file():
            yield name
        else:
            raise Invalid(f"not a file: {name}; remove it, or list it in {IGNORE_FILE}")


def _is_ignored(inner: Path, ignored: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(part, glob) for part in (inner.name, inner.as_posix()) for glob in ignored)


def _resolved(link: Path, name: str) -> Path:
    try:
        return link.resolve()
    except (RuntimeError, OSError) as error:  # Python 3.11 and 3.12 raise RuntimeError for a loop
        raise Invalid(f"broken link: {name}; remove it, or list it in {IGNORE_FILE}") from error


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"
