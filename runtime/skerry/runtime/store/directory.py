"""A store in a folder: one file per object, for one machine or a shared file system with hard links.

No object is visible in part. Bytes are written to a temporary file in a folder that no key can name; then `link`
(create, exclusive) or `rename` (replace) gives the file its key in one step. Opening the key itself with `O_EXCL` would
also be exclusive, but would show an empty file first and leave a partial one after a kill.
Source: link(2), rename(2), POSIX.1-2017.

Durability: once a write has returned, the object survives the end of any process, because it is in the page cache. It
survives a power loss only with `durable=True`, which costs an fsync of the object and of each folder of its key
(milliseconds to tens of them). That is off by default: after a power loss a run continues from what its file system
kept.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.filesystem_type import mount_of
from skerry.runtime.store.interface import Data, Entry, Profile, Span, buffers_of
from skerry.runtime.store.validation import check_key, check_prefix, check_span, is_key, limit_span, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

T = TypeVar("T")

# A 1 MiB piece stays in the CPU cache between read, digest and add; one stream, because a local read is a memory copy.
PROFILE: Final = Profile(piece_bytes=1 << 20, streams=1, poll_first=0.001, poll_cap=0.02, is_local=True)
# Caches of a shared file system; three seconds is the least age at which NFS looks at a folder again by default.
SHARED_PROFILE: Final = replace(PROFILE, absence_s=10.0)
# A key cannot contain "~", so no key is in this folder and no listing shows it.
TEMPORARY: Final = ".tmp~"
# For a file system without locks: a temporary file this much older than a new one belongs to a killed writer.
STALE_S: Final = 86_400.0
# Temporary files of killed writers are looked for at the first write, and then once in so many.
SWEEP_EVERY: Final = 256
# Each needs another process that removes the folder in between.
_FOLDER_ATTEMPTS: Final = 100
# IOV_MAX of Linux and macOS: writev returns EINVAL for more buffers.
MAX_BUFFERS: Final = 1024

_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_UNUSABLE: Final = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENOTSUP}
_DENIED: Final = {errno.EACCES, errno.EPERM, errno.EROFS}


class DirectoryStore:
    """Objects as files below `root`, which the first write creates. Any number of processes may share it.

    A key cannot also be the folder of another (`a` and `a/b`): Invalid. The keys of a run have no such pair.

    durable: fsync the file and the folders above it before a write returns (see the module).
    """

    def __init__(self, root: Path, *, durable: bool = False) -> None:
        self._root = str(root)
        self._durable = durable
        self._root_synced = False
        mount = mount_of(root)
        self._profile = SHARED_PROFILE if mount is not None and mount.is_shared else PROFILE
        self._temporary = f"{self._root}/{TEMPORARY}"
        self._writes = itertools.count()

    @property
    def uri(self) -> str:
        """The folder as a URI."""
        return Path(self._root).as_uri()

    @property
    def profile(self) -> Profile:
        """Small pieces, one stream, polls of a millisecond; patience on a file system of several machines."""
        return self._profile

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """See Store.read. One open, one preadv and one close if the span is no longer than `into`."""
        check_key(key)
        check_span(span)
        try:
            file = os.open(f"{self._root}/{key}", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _translate(error, "read", key) from error
        try:
            if span is None or into is None or into.nbytes < span.stop - span.start:
                span = limit_span(span, os.fstat(file).st_size)
            return _read_exactly(file, span.start, reserve(into, span.stop - span.start))
        except IsADirectoryError:
            return None
        except OSError as error:
            raise _translate(error, "read", key) from error
        finally:
            os.close(file)

    def create(self, key: str, data: Data) -> bool:
        """See Store.create. Never ambiguous, because the result of link is reliable."""
        check_key(key)
        path = f"{self._root}/{key}"
        try:
            if _exists(path):  # only saves the write; link decides
                return False
            with self._temporary_file(buffers_of(data)) as temporary:
                _with_folder(path, lambda: os.link(temporary, path))
            self._sync_folders(path)
        except FileExistsError:
            return False
        except OSError as error:
            raise _translate(error, "create", key) from error
        return True

    def replace(self, key: str, data: Data) -> None:
        """See Store.replace."""
        check_key(key)
        path = f"{self._root}/{key}"
        try:
            with self._temporary_file(buffers_of(data)) as temporary:
                _with_folder(path, lambda: Path(temporary).replace(path))
            self._sync_folders(path)
        except OSError as error:
            raise _translate(error, "replace", key) from error

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """See Store.list. Visits only folders that can contain a match; sorts whole keys, which a walk does not."""
        check_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        try:
            return sorted(_walk(self._root, folder, prefix, after or ""))
        except OSError as error:
            raise _translate(error, "list", prefix) from error

    def folders(self) -> Sequence[str]:
        """See FolderStore.folders. A folder without a file counts too."""
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if is_key(entry.name) and entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _translate(error, "list", "") from error

    def delete(self, key: str) -> None:
        """See Store.delete. Also removes the folders that this leaves empty; a writer that needs one makes it again."""
        check_key(key)
        path = Path(self._root, key)
        try:
            path.unlink(missing_ok=True)
        except (NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            raise _translate(error, "delete", key) from error
        for folder in itertools.islice(path.parents, key.count("/")):
            try:
                folder.rmdir()
            except OSError:  # another object is in it, or another process has removed it
                return

    @contextmanager
    def _temporary_file(self, buffers: list[memoryview]) -> Generator[str]:
        """The path of a new temporary file with these bytes; at the end it is removed, if it was not renamed.

        It is locked until then; the file of a killed writer is not locked.
        """
        path, file = self._open_temporary()
        try:
            _write_all(file, buffers)
            if self._durable:
                os.fsync(file)
            yield path
        finally:
            try:
                Path(path).unlink(missing_ok=True)  # after a rename it is free
            finally:
                os.close(file)

    def _open_temporary(self) -> tuple[str, int]:
        """A new temporary file, open and locked. Now and then it removes those of killed writers."""
        sweeps = next(self._writes) % SWEEP_EVERY == 0
        while True:
            # No name is used twice, also not by another container with the same process number.
            path = f"{self._temporary}/{os.getpid()}-{secrets.token_hex(8)}"
            file = _with_folder(path, lambda path=path: os.open(path, _WRITE, 0o666))
            if _lock(file) is False or not _is_file(path, file):  # another process removed it before it was locked
                os.close(file)
                continue
            if sweeps:
                _remove_abandoned(self._temporary, file)
            return path, file

    def _sync_folders(self, path: str) -> None:
        """Syncs every folder that this write may have created: those of the key, and once the root and all above."""
        if not self._durable:
            return
        for parent in Path(path).parents:
            if self._root_synced and len(str(parent)) < len(self._root):
                return
            with suppress(PermissionError):  # a folder that this process may not read was not created by it
                folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        self._root_synced = True


def _exists(path: str) -> bool:
    """True if the object exists. Raises OSError if the key is the folder of other objects, or is below an object."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return True


def _read_exactly(file: int, start: int, view: memoryview) -> memoryview:
    """Fills `view` from `start`; the result is shorter only at the end of the file."""
    filled = os.preadv(file, [view], start)
    while 0 < filled < view.nbytes:
        count = os.preadv(file, [view[filled:]], start + filled)
        if count == 0:
            break
        filled += count
    return view[:filled]


def _write_all(file: int, buffers: list[memoryview]) -> None:
    """Writes every buffer; the kernel gathers them, so they are not joined."""
    pending = [buffer for buffer in buffers if buffer.nbytes]
    first = 0
    while first < len(pending):
        written = os.writev(file, pending[first : first + MAX_BUFFERS])
        while first < len(pending) and written >= pending[first].nbytes:
            written -= pending[first].nbytes
            first += 1
        if written:  # a full disk or a body above 2 GiB: the kernel stopped inside this buffer
            pending[first] = pending[first][written:]


def _walk(root: str, folder: str, prefix: str, after: str) -> Iterator[Entry]:
    """Matching files below `folder` (empty, or ending in "/"), in no particular order."""
    try:
        items = os.scandir(f"{root}/{folder}")
    except (FileNotFoundError, NotADirectoryError):
        return
    with items:
        for item in items:
            key = folder + item.name
            if item.is_dir(follow_symlinks=False):
                inside = f"{key}/"
                if item.name != TEMPORARY and _may_match(inside, prefix, after):
                    yield from _walk(root, inside, prefix, after)
            elif key.startswith(prefix) and key > after and is_key(key):
                with suppress(FileNotFoundError):  # deleted since the scan
                    status = item.stat()
                    yield Entry(key, status.st_size, status.st_mtime)


def _may_match(inside: str, prefix: str, after: str) -> bool:
    """True if a key that starts with `inside` can start with `prefix` and be greater than `after`."""
    return inside.startswith(prefix) and (inside > after or after.startswith(inside))


def _lock(file: int) -> bool | None:
    """Locks the file: False if another process has locked it, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_file(path: str, file: int) -> bool:
    """True if `path` is still the name of the open file."""
    try:
        return os.path.samestat(Path(path).stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _remove_abandoned(folder: str, mine: int) -> None:
    """Removes temporary files that no process has locked: their writers were killed.

    mine: an open file of this process, to tell the age of others where the file system has no locks. What cannot be
    removed stays: it does not concern the write that comes next.
    """
    with suppress(OSError):
        limit = os.fstat(mine).st_mtime - STALE_S
        for path in Path(folder).iterdir():
            with suppress(OSError), path.open("rb") as file:
                locked = _lock(file.fileno())
                if locked or (locked is None and os.fstat(file.fileno()).st_mtime < limit):
                    path.unlink()


def _with_folder(path: str, act: Callable[[], T]) -> T:
    """Calls `act`; while the folder of `path` is missing, creates it and calls `act` again.

    Another process may remove the folder in between, if it is empty. Raises FileNotFoundError after many times.
    """
    for _ in range(_FOLDER_ATTEMPTS):
        try:
            return act()
        except FileNotFoundError:
            # FileExistsError, too: another process removed the folder just after mkdir met it.
            with suppress(FileNotFoundError, FileExistsError):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
    return act()


def _translate(error: OSError, verb: str, key: str) -> SkerryError:
    facts = f"{verb} key={key}: {error}"
    if error.errno in _DENIED:
        return Unauthorized(f"the file system denies access: {facts}")
    if error.errno in _UNUSABLE:
        return Invalid(f"the file system cannot do this: {facts}; a key cannot be the folder of another")
    return Retryable(f"the file system failed: {facts}")
