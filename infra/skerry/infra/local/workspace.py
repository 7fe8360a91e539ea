"""What one machine keeps of a run, beside the spec in .skerry/{run}/, and the lock that makes `up` alone in it.

    lock             held by the one `up` that supervises the run on this machine; its text is that process id
    processes.json   the replicas that were started and not yet seen to end
    code/{digest}/   the unpacked training code
    logs/{slot}.{attempt}.log   stdout and stderr of one start of a replica

A process is ours only if its id, its start time and the machine's boot agree: a recycled id is never signalled.
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

from skerry.runtime.errors import Conflict, Corrupt
from skerry.runtime.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Generator

# A leash whose supervisor is gone ends what it started by itself, and only it can: it needs milliseconds for that.
_LEASH_TIMEOUT_S: Final = 5.0
# From SIGKILL to gone; longer only for a process stuck in a dead disk or driver.
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
    """A run's folder on this machine. Its parts are made when they are first needed. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Hold the run's lock on this machine. Raises Conflict naming the process that has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = self.holder()
                raise Conflict(
                    f"run {self.folder.name!r} is already up on this machine: pid={holder}; "
                    f"stop it with `kill -INT {holder}`"
                ) from error
            if not _same_file(lock.fileno(), self.folder / "lock"):
                raise Conflict(f"run {self.folder.name!r} is just being destroyed on this machine; try again")
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield
            lock.truncate(0)

    def holder(self) -> int | None:
        """The process that is supervising the run on this machine, if there is one."""
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
        """Where the code of this digest is, or belongs."""
        return self.folder / "code" / digest

    def next_attempt(self, slot: str) -> int:
        """A number that no start of this slot on this machine has had."""
        return max((attempt for attempt, _ in self._logs().get(slot, ())), default=-1) + 1

    def log_file(self, slot: str, attempt: int) -> Path:
        """Where one start of a replica writes; its folder exists."""
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{slot}.{attempt}.log"

    def logs(self) -> dict[str, list[Path]]:
        """The log files of each slot, oldest first, slots in slot order."""
        found = self._logs()
        return {slot: [path for _, path in sorted(found[slot])] for slot in sorted(found, key=slot_order)}

    @staticmethod
    def attempt_of(log_file: Path) -> int:
        """Which start of its slot wrote this log file, from 0."""
        return int(log_file.stem.rpartition(".")[2])

    def processes(self) -> list[Process]:
        """What was started here and is not known to have ended. Raises Corrupt if the file is damaged."""
        path = self.folder / "processes.json"
        try:
            return _Processes.model_validate_json(path.read_bytes()).processes
        except FileNotFoundError:
            return []
        except ValidationError as error:
            raise Corrupt(f"not a list of processes: {path}; if none of them runs any more, remove the file") from error

    def started(self, slot: str, attempt: int, pid: int) -> None:
        """Note that this process was started by us. It must not have been waited for yet."""
        started = started_at(pid)
        if started is None:
            return
        mine = Process(slot=slot, attempt=attempt, pid=pid, started=started, boot=boot_id())
        with self._guard:
            self._write([*self.processes(), mine])

    def ended(self, pid: int) -> None:
        """Note that this process is gone."""
        with self._guard:
            self._write([process for process in self.processes() if process.pid != pid])

    def end_leftovers(self) -> list[Process]:
        """Kill, with their groups, the processes that an earlier `up` left; returns those that were alive.

        Call with the lock held. Raises TimeoutError if one does not die.
        """
        alive = [process for process in self.processes() if _end(process)]
        if (self.folder / "processes.json").exists():
            self._write([])
        return alive

    def remove(self) -> bool:
        """Delete what this class made, and nothing else. False if there was nothing. Call with the lock held."""
        if not self.folder.exists():
            return False
        for name in ("code", "logs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for path in [self.folder / "processes.json", self.folder / "lock", *self.folder.glob("processes.*.partial")]:
            path.unlink(missing_ok=True)
        # Anything left is not ours, and keeps its folder.
        remove_empty(self.folder.parent)
        return True

    def _logs(self) -> dict[str, list[tuple[int, Path]]]:
        found: dict[str, list[tuple[int, Path]]] = {}
        for path in (self.folder / "logs").glob("*.log"):
            if match := _LOG.fullmatch(path.name):
                found.setdefault(match[1], []).append((int(match[2]), path))
        return found

    def _write(self, processes: list[Process]) -> None:
        path = self.folder / "processes.json"
        half = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")  # two may write at once
        half.write_text(_Processes(processes=processes).model_dump_json(indent=1))
        half.replace(path)


def remove_empty(folder: Path) -> None:
    """Remove `folder` and the folders in it, as far as they hold no file: somebody may use them meanwhile."""
    if not folder.is_dir():
        return
    for inner in folder.iterdir():
        if inner.is_dir() and not inner.is_symlink():
            remove_empty(inner)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _same_file(descriptor: int, path: Path) -> bool:
    """Whether a lock that was taken is still the one that others will find."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _end(process: Process) -> bool:
    if process.boot != boot_id():
        return False
    try:
        # The descriptor is taken before the check, so that what was checked is what is waited for.
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if started_at(process.pid) != process.started:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if poll.poll(_LEASH_TIMEOUT_S * 1000):
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not poll.poll(_KILL_TIMEOUT_S * 1000):
            raise TimeoutError(f"process does not die: pid={process.pid} slot={process.slot}")
        return True
    finally:
        os.close(descriptor)


def started_at(pid: int) -> int | None:
    """When a process of this machine started, in kernel ticks since boot; None if there is none of this id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name is in parentheses and may itself hold spaces and parentheses; field 22 is the start time.
    return int(stat.rpartition(")")[2].split()[19])


def boot_id() -> str:
    """What tells this boot of this machine from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def operator() -> str:
    """Who sits here, for people."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"[:256]
