"""Packs the training code into an archive that has the same bytes on every machine, named by its sha256.

In a git repository the files are those that git tracks, with their present content. Elsewhere they are all files that
no `.gitignore` names. `.skerryignore` leaves out more. A file that looks like a secret is refused, because the archive
goes to the bucket and to every replica. Times, owners and directory order are ignored, so equal code has an equal
digest. `unpack` verifies the archive; it is also used by replicas in their containers.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import os
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.runtime.container.code_archive import MAX_BYTES, MAX_FILES, unpack
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ALWAYS_IGNORED", "IGNORE_FILE", "Bundle", "files_of", "pack", "takes", "unpack"]

IGNORE_FILE: Final = ".skerryignore"
ALWAYS_IGNORED: Final = (".git", ".hg", ".venv", "venv", "__pycache__", "*.pyc", ".skerry", ".DS_Store")
# Names under which tools keep credentials; compared without case, with the name and with the path.
SECRETS: Final = (
    *(".env", ".env.*", ".envrc", ".netrc", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.p12", "*.pfx", "*.keystore", "*.tfstate", "*.tfstate.*"),
    *("*.ssh/*", "*.aws/*", "*.azure/*", "*.kube/*", "*.docker/config.json", "*.config/gcloud/*"),
    *("application_default_credentials.json", "service-account*.json", "service_account*.json"),
)
_SAMPLES: Final = (".example", ".sample", ".template", ".dist")
# The beginning of a file is enough to find a private key in PEM, also inside a service account's JSON.
_HEAD_BYTES: Final = 4096
_PRIVATE_KEY: Final = b"PRIVATE KEY-----"
# Number of the largest files in the error message.
_NAMED = 5
_LEAVE_OUT = f"change its rights, or list it in {IGNORE_FILE}"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A packed code folder. digest: sha256 of `data`, in hex. files: the size of each in bytes, by path.

    untracked: files that are left out only because git does not track them.
    """

    data: bytes
    digest: str
    files: Mapping[str, int]
    untracked: Sequence[str] = ()


def files_of(folder: Path) -> list[str]:
    """The files of `folder` that `pack` includes, as sorted paths with `/`.

    Links to files inside the folder are followed. Raises Invalid if a link leaves the folder, if the folder is missing
    or unreadable, if a file looks like a secret, or if the folder exceeds the limits, with its largest files.
    """
    if not folder.is_dir():
        raise Invalid(f"no such folder: {folder}")
    ignored = (*ALWAYS_IGNORED, *_ignore_file(folder))
    listed = _tracked(folder)
    try:
        names = sorted(name for name in _walk(folder, folder, ignored) if listed is None or name in listed)
    except PermissionError as error:
        raise Invalid(f"unreadable: {error.filename}; {_LEAVE_OUT}") from error
    for name in names:
        if not os.access(folder / name, os.R_OK):
            raise Invalid(f"unreadable: {name}; {_LEAVE_OUT}")
    if secrets := [name for name in names if _is_secret(folder, name)]:
        raise Invalid(
            f"looks like a secret: {', '.join(secrets[:_NAMED])}; every replica and every reader of the bucket would "
            f"get it: move it out of the folder, or list it in {IGNORE_FILE}"
        )
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
    return _is_taken(path.relative_to(folder), ignored)


def _is_taken(inner: Path, ignored: Sequence[str]) -> bool:
    return not any(_is_ignored(step, ignored) for step in (inner, *inner.parents[:-1]))


def pack(folder: Path) -> Bundle:
    """`folder` as a tar.gz. Raises Invalid as `files_of` does."""
    plain = io.BytesIO()
    sizes: dict[str, int] = {}
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in files_of(folder):
            path = folder / name
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = sizes[name] = len(content)
            # Only the executable bit is part of the code; other mode bits depend on the checkout.
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(content))
    data = gzip.compress(plain.getvalue(), compresslevel=6, mtime=0)
    digest = hashlib.sha256(data).hexdigest()
    return Bundle(data=data, digest=digest, files=sizes, untracked=untracked_files(folder))


def untracked_files(folder: Path) -> list[str]:
    """The files that `pack` leaves out only because git does not track them, although nothing ignores them."""
    listed = _tracked(folder)
    if listed is None:
        return []
    wanted = _git(folder, "ls-files", "-z", "--others", "--exclude-standard")
    ignored = (*ALWAYS_IGNORED, *_ignore_file(folder))
    return sorted(name for name in wanted if _is_taken(Path(name), ignored))


def _tracked(folder: Path) -> frozenset[str] | None:
    """The files that git tracks, or those that no `.gitignore` names; None if there is neither repository nor file."""
    try:
        return frozenset(_git(folder, "ls-files", "-z", "--cached", "--recurse-submodules"))
    except _NoRepository:
        pass
    if not any(folder.rglob(".gitignore")):
        return None
    with tempfile.TemporaryDirectory() as empty:
        try:
            _git(Path(empty), "init", "--quiet")
            own = (f"--git-dir={empty}/.git", f"--work-tree={folder}")
            return frozenset(_git(folder, *own, "ls-files", "-z", "--others", "--exclude-per-directory=.gitignore"))
        except _NoRepository as error:
            raise Invalid(f"cannot read .gitignore: {error}; install git, or remove the file") from error


class _NoRepository(Exception):  # noqa: N818  not an error by itself
    """There is no git, or the folder is in no repository."""


def _git(folder: Path, *command: str) -> list[str]:
    """The names that a git command prints, separated by zeros. Runs no program that the repository names."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    safe = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false")
    try:
        done = subprocess.run(  # noqa: S603  a constant command
            ["git", *safe, *command],  # noqa: S607  the git of the user's PATH
            cwd=folder,
            env={**variables, "LC_ALL": "C"},
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise _NoRepository("git is not installed") from error
    if done.returncode != 0:
        raise _NoRepository(done.stderr.decode(errors="replace").strip())
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _is_secret(folder: Path, name: str) -> bool:
    lowered = name.lower()
    if lowered.endswith(_SAMPLES):
        return False
    parts = (lowered, lowered.rpartition("/")[2])
    if any(fnmatch.fnmatchcase(part, glob) for part in parts for glob in SECRETS):
        return True
    with (folder / name).open("rb") as file:
        return _PRIVATE_KEY in file.read(_HEAD_BYTES)


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
