"""What this machine or container has: GPUs, cores, shared memory, disk. Reads files, asks two programs, no more."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the name of the file system, not a temporary file
# A container's default. Less than a batch or two of images, and a data loader's worker dies of a bus error.
SMALL_SHM_BYTES: Final = 64 << 20
# nvidia-smi answers in a tenth of a second, and in several with many GPUs in a deep sleep; torch is imported from disk.
_ASK_S: Final = 60.0
_TORCH: Final = """
import json, torch
usable = torch.cuda.is_available()
devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if usable else []
told = {"version": torch.__version__, "cuda": torch.version.cuda, "usable": usable, "devices": devices}
print(json.dumps(told))
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as the driver tells it."""

    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What torch says of itself. cuda: the version it was built for. error: why it cannot be imported."""

    version: str | None = None
    cuda: str | None = None
    usable: bool = False
    devices: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a replica finds. cores: what the container may use, not what the host has."""

    cores: float
    memory_bytes: int
    shm_bytes: int
    disk_free_bytes: int
    gpus: tuple[Gpu, ...]
    n_gpus: int
    uid: int


def machine(environment: Mapping[str, str], work: Path) -> Machine:
    """This machine. work: where code is unpacked and scripts write."""
    return Machine(
        cores=cores(),
        memory_bytes=_memory_bytes(),
        shm_bytes=shm_bytes(),
        disk_free_bytes=shutil.disk_usage(work).free,
        gpus=_gpus(),
        n_gpus=n_gpus(environment),
        uid=os.geteuid(),
    )


def n_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many GPUs a process here may use: device files, or fewer where CUDA_VISIBLE_DEVICES says so."""
    there = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    named = [part for part in visible.split(",") if part.strip() not in {"", "-1", "none", "NoDevFiles"}]
    return min(there, len(named))


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """How many cores this container may use: those it may run on, or fewer by its quota."""
    may = float(len(os.sched_getaffinity(0)))
    quota = _quota(cgroup)
    return may if quota is None else min(may, quota)


def shm_bytes(folder: Path = SHARED_MEMORY) -> int:
    """The size of shared memory; 0 if there is none."""
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return 0


def torch_here(environment: Mapping[str, str]) -> Torch:
    """What torch says, asked in a process of its own: here it must not be imported."""
    ask = [sys.executable, "-c", _TORCH]
    try:
        asked = subprocess.run(  # noqa: S603  our own interpreter and words
            ask, env=environment, capture_output=True, text=True, check=False, timeout=_ASK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Torch(error=str(error))
    if asked.returncode:
        return Torch(error=(asked.stderr.strip().splitlines() or ["no word"])[-1])
    told = cast("dict[str, object]", json.loads(asked.stdout.splitlines()[-1]))
    return Torch(
        version=str(told["version"]),
        cuda=None if told["cuda"] is None else str(told["cuda"]),
        usable=bool(told["usable"]),
        devices=tuple(cast("list[str]", told["devices"])),
    )


def _gpus() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_ASK_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [[part.strip() for part in line.split(",")] for line in asked.stdout.splitlines()]
    return tuple(
        Gpu(name=row[0], memory_mib=int(row[1]), driver=row[2]) for row in rows if len(row) == 3 and row[1].isdecimal()
    )


def _quota(cgroup: Path) -> float | None:
    """Cores by the quota of either version of cgroups; None without one."""
    try:
        if (cgroup / "cpu.max").is_file():
            most, period = (cgroup / "cpu.max").read_text().split()
        else:
            most = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        return int(most) / int(period) if most not in {"max", "-1"} else None
    except (OSError, ValueError):
        return None


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
