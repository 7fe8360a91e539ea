"""The folder of a run on this machine, .skerry/{run}/ beside the spec, and the lock that admits only one `up`.

    uri              the run's own prefix in its store
    lock             held by the `up` that supervises the run on this machine; contains its process id
    processes.json   the replicas that were started and have not been recorded as ended
    code/{digest}/   the unpacked training code
    logs/{slot}.{attempt}.log   stdout and stderr of one start of a replica

A process is signalled only if its id, its start time and the machine's boot match, because the kernel reuses ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import select
import shutil
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from skerry.infra.local.leash import stat_fields
from skerry.runtime.errors import Conflict, Corrupt
from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Generator

# A leash whose supervisor has died ends its processes by itself, in milliseconds.
LEASH_TIMEOUT_S: Final = 5.0
# From SIGKILL to the end; it takes longer only if a process is stuck in a dead disk or driver.
_KILL_TIMEOUT_S: Final = 10.0
_LOG = re.compile(r"(.+)\.(\d+)\.log")


class Process(BaseModel):
    """One started replica: the leader of its process group. started: kernel ticks from boot to its start."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    slot: str
    attempt: int
    pid: int
    started: int
    boot: str


class _Processes(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    processes: list[Process]


class Workspace:
    """A run's folder on this machine. Its parts are created on first use. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri_file = folder / "uri"
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Hold the run's lock on this machine. Raises Conflict with the process id of the holder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = self.lock_holder()
                raise Conflict(
                    f"run {self.folder.name!r} is already up on this machine: pid={holder}; "
                    f"stop it with `kill -INT {holder}`"
                ) from error
            if not _same_file(lock.fileno(), self.folder / "lock"):
                raise Conflict(f"run {self.folder.name!r} is being destroyed on this machine; try again")
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield
            lock.truncate(0)

    def lock_holder(self) -> int | None:
        """The id of the process that supervises the run on this machine; None if none does."""
        try:
            with (self.folder / "lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    text = lock.read().strip()
                    return int(text) if text.isdecimal() else 0
        except FileNotFoundError:
            pass
        return None

    def code_folder(self, digest: str) -> Path:
        """The folder for the code of this digest."""
        return self.folder / "code" / digest

    def next_attempt(self, slot: str) -> int:
        """The first number after those of all starts of this slot on this machine."""
        return max((attempt for attempt, _ in self._logs().get(slot, ())), default=-1) + 1

    def log_file(self, slot: str, attempt: int) -> Path:
        """The log file of one start of a replica; its folder exists."""
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{slot}.{attempt}.log"

    def logs(self) -> dict[str, list[Path]]:
        """The log files of each slot, oldest first, slots in slot order."""
        by_slot = self._logs()
        return {slot: [path for _, path in sorted(by_slot[slot])] for slot in sorted(by_slot, key=slot_order)}

    @staticmethod
    def attempt_of(log_file: Path) -> int:
        """The start of its slot that wrote this log file, from 0."""
        return int(log_file.stem.rpartition(".")[2])

    def processes(self) -> list[Process]:
        """The replicas that are not recorded as ended. Raises Corrupt if the file is damaged."""
        path = self.folder / "processes.json"
        try:
            return _Processes.model_validate_json(path.read_bytes()).processes
        except FileNotFoundError:
            return []
        except ValidationError as error:
            raise Corrupt(f"not a list of processes: {path}; if none of them runs any more, delete the file") from error

    def started(self, slot: str, attempt: int, pid: int) -> None:
        """Record the start of a process, before it is waited for."""
        started = process_start(pid)
        if started is None:
            return
        process = Process(slot=slot, attempt=attempt, pid=pid, started=started, boot=boot_id())
        with self._guard:
            self._write([*self.processes(), process])

    def ended(self, pid: int) -> None:
        """Record the end of a process."""
        with self._guard:
            self._write([process for process in self.processes() if process.pid != pid])

    def kill_leftovers(self) -> list[Process]:
        """Kill the process groups that an earlier `up` left; return the processes that were alive.

        Call with the lock held. Raises TimeoutError if one does not die.
        """
        alive = [process for process in self.processes() if _end(process)]
        if (self.folder / "processes.json").exists():
            self._write([])
        return alive

    def remove(self) -> bool:
        """Delete the files of this class only. False if the folder does not exist. Call with the lock held."""
        if not self.folder.exists():
            return False
        for name in ("code", "logs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        named = (self.folder / "processes.json", self.folder / "lock", self.uri_file)
        for path in (*named, *self.folder.glob("processes.*.partial")):
            path.unlink(missing_ok=True)
        # Other files stay, and with them the folder.
        remove_empty(self.folder.parent)
        return True

    def _logs(self) -> dict[str, list[tuple[int, Path]]]:
        by_slot: dict[str, list[tuple[int, Path]]] = {}
        for path in (self.folder / "logs").glob("*.log"):
            if match := _LOG.fullmatch(path.name):
                by_slot.setdefault(match[1], []).append((int(match[2]), path))
        return by_slot

    def _write(self, processes: list[Process]) -> None:
        path = self.folder / "processes.json"
        half = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")  # unique: several may write at once
        half.write_text(_Processes(processes=processes).model_dump_json(indent=1))
        half.replace(path)


def remove_empty(folder: Path) -> None:
    """Remove `folder` and the folders in it that contain no files, even if other processes use it."""
    if not folder.is_dir():
        return
    for inner in folder.iterdir():
        if inner.is_dir() and not inner.is_symlink():
            remove_empty(inner)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _same_file(descriptor: int, path: Path) -> bool:
    """True if the locked file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _end(process: Process) -> bool:
    if process.boot != boot_id():
        return False
    try:
        # Opened before the check, so that the checked process is the one waited for.
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if process_start(process.pid) != process.started:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if poll.poll(LEASH_TIMEOUT_S * 1000):
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not poll.poll(_KILL_TIMEOUT_S * 1000):
            raise TimeoutError(f"process does not die: pid={process.pid} slot={process.slot}")
        return True
    finally:
        os.close(descriptor)


def process_start(pid: int) -> int | None:
    """The start time of a process in kernel ticks since boot; None if no process has this id."""
    return None if (fields := stat_fields(pid)) is None else int(fields[19])


def boot_id() -> str:
    """The unique id of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def operator_name() -> str:
    """The user and host, for people."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"[:256]
