"""A Slurm cluster of one node on this machine: the real munged, slurmctld and slurmd, in a folder of their own.

Needs root, and the packages slurmctld, slurmd, slurm-client and munge of Debian. Without them its tests are skipped;
SKERRY_TEST_SLURM=required, which scripts/test sets, makes that a failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from skerry.runtime.clock import Backoff, SystemClock, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch")
DEADLINE_S: Final = 600.0
# cred_expire: a requeued job waits so long before it starts again; 5 s are the least, 120 s the default.
CONFIGURATION: Final = """\
ClusterName=skerry
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=30
NodeName=node NodeHostname={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=64000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 State=UP
PartitionName=short Nodes=ALL MaxTime=10 State=UP
"""


@dataclass(frozen=True, kw_only=True)
class SlurmSite:
    """folder: of everything; its `home` is the home folder of the jobs."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "home"),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }

    def call(self, *words: str) -> str:
        environment = {**os.environ, **self.environment}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout

    def restarts(self, job: str) -> int:
        """The number of times that a job was requeued."""
        match = re.search(r" Restarts=(\d+) ", self.call("scontrol", "--oneliner", "show", "job", job))
        return int(match[1]) if match else 0

    def start(self, job: str, when: str) -> None:
        """Let a job that waits start at this time, as `now+1hour`."""
        self.call("scontrol", "update", f"JobId={job}", f"StartTime={when}")

    @contextlib.contextmanager
    def drained(self) -> Iterator[None]:
        """No job starts meanwhile; those that run go on."""
        self.call("scontrol", "update", "NodeName=node", "State=DRAIN", "Reason=test")
        try:
            yield
        finally:
            self.call("scontrol", "update", "NodeName=node", "State=RESUME")

    def kill(self, job: str) -> None:
        """Kill every process of a job by SIGKILL, its script first, as an operating system without memory may do."""
        processes = self._processes(job)
        self._kill(sorted(processes, key=lambda pid: b"slurm_script" not in _command(pid)))

    def kill_replica(self, job: str) -> None:
        """Kill the processes of a job by SIGKILL, except its script, which then decides about another start."""
        self._kill([pid for pid in self._processes(job) if b"slurm_script" not in _command(pid)])

    def _kill(self, processes: Iterable[int]) -> None:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self, job: str) -> list[int]:
        # Tests that run at the same time have clusters of their own, whose jobs have the same numbers.
        marks = (f"\0SLURM_JOB_ID={job}\0".encode(), f"\0SLURM_CONF={self.folder}/".encode())
        processes: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                environment = b"\0" + (entry / "environ").read_bytes()
                if all(mark in environment for mark in marks):
                    processes.append(int(entry.name))
        return processes


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextlib.contextmanager
def slurm_site() -> Iterator[SlurmSite]:
    """Start the daemons, and end them and their jobs."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        _lacking(f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    if os.getuid() != 0:
        _lacking("only root can start a Slurm cluster")
    # A socket's path is short.
    folder = Path(tempfile.mkdtemp(prefix="skerry-slurm-"))
    folder.chmod(0o755)
    for name in ("state", "spool", "home"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    configuration = CONFIGURATION.format(folder=folder, host=socket.gethostname(), ports=_free_ports())
    (folder / "slurm.conf").write_text(configuration)
    site = SlurmSite(folder=folder)
    try:
        site.call("munged", "--force", *(f"--{name}={folder}/{file}" for name, file in _MUNGE.items()))
        site.call("slurmctld")
        site.call("slurmd", "-N", "node")
        until(lambda: "idle" in site.call("sinfo", "--noheader", "--format=%T"))
        yield site
        site.call("scancel", "--user=root")
        until(lambda: not site.call("squeue", "--noheader"))
    finally:
        for name in ("slurmd", "slurmctld", "munge"):
            _end(folder / f"{name}.pid")
        shutil.rmtree(folder, ignore_errors=True)


_MUNGE: Final = {
    "key-file": "munge.key",
    "socket": "munge.sock",
    "pid-file": "munge.pid",
    "log-file": "munge.log",
    "seed-file": "munge.seed",
}


def until(condition: Callable[[], object]) -> None:
    clock = SystemClock()
    wait_until(clock, lambda: condition() or None, clock.now() + DEADLINE_S, Backoff(first=0.1, cap=0.5))


def _free_ports() -> list[int]:
    """Two ports that no connection of another test takes before the daemons listen there: below the kernel's own."""
    with contextlib.ExitStack() as held:
        free: list[int] = []
        while len(free) < 2:
            port = 20000 + secrets.randbelow(10000)
            with contextlib.suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                free.append(port)
        return free


def _end(pid_file: Path) -> None:
    """End a daemon that this site has started."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return
    until(lambda: not Path(f"/proc/{pid}/exe").exists())


def _lacking(what: str) -> None:
    if os.environ.get("SKERRY_TEST_SLURM") == "required":
        pytest.fail(what)
    pytest.skip(what)
