"""Detects the hardware of this machine or container: GPUs, cores, shared memory, disk, and the torch installation."""

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
# A container's default. With less than a batch or two of images, a data loader's worker dies of a bus error.
SMALL_SHM_BYTES: Final = 64 << 20
# nvidia-smi takes 0.1 s, and several seconds with many idle GPUs; importing torch reads from disk.
_COMMAND_TIMEOUT_S: Final = 60.0
_TORCH_SCRIPT: Final = """
import json, torch
usable = torch.cuda.is_available()
devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if usable else []
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "usable": usable, "devices": devices}))
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as the driver reports it."""

    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The torch installation. cuda: the version it was built for. error: why it cannot be imported."""

    version: str | None = None
    cuda: str | None = None
    usable: bool = False
    devices: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The resources a replica can use. cores: those the container may use, not the host's."""

    cores: float
    memory_bytes: int
    shm_bytes: int
    disk_free_bytes: int
    gpus: tuple[Gpu, ...]
    n_gpus: int
    uid: int


def detect_hardware(environment: Mapping[str, str], work: Path) -> Hardware:
    """Measure this machine. work: the folder where code is unpacked and scripts write."""
    return Hardware(
        cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shm_bytes=shm_bytes(),
        disk_free_bytes=shutil.disk_usage(work).free,
        gpus=_gpus(),
        n_gpus=count_gpus(environment),
        uid=os.geteuid(),
    )


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Count the GPUs a process may use: the device files, or fewer if CUDA_VISIBLE_DEVICES limits them."""
    present = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(part.strip() not in {"", "-1", "none", "NoDevFiles"} for part in visible.split(",")))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Count the cores this container may use: its CPU affinity, or fewer if its cgroup (v1 or v2) has a quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    try:
        if (cgroup / "cpu.max").is_file():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        return allowed if quota in {"max", "-1"} else min(allowed, int(quota) / int(period))
    except (OSError, ValueError):
        return allowed


def shm_bytes(folder: Path = SHARED_MEMORY) -> int:
    """The size of shared memory; 0 if there is none."""
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return 0


def detect_torch(environment: Mapping[str, str]) -> Torch:
    """Inspect torch in a separate process, because it must not be imported in this one."""
    command = [sys.executable, "-c", _TORCH_SCRIPT]
    try:
        result = subprocess.run(  # noqa: S603  our own interpreter and script
            command, env=environment, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Torch(error=str(error))
    if result.returncode:
        return Torch(error=(result.stderr.strip().splitlines() or ["no output"])[-1])
    document = cast("dict[str, object]", json.loads(result.stdout.splitlines()[-1]))
    return Torch(
        version=str(document["version"]),
        cuda=None if document["cuda"] is None else str(document["cuda"]),
        usable=bool(document["usable"]),
        devices=tuple(cast("list[str]", document["devices"])),
    )


def _gpus() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(  # noqa: S603  the driver's own program
            query, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [[part.strip() for part in line.split(",")] for line in result.stdout.splitlines()]
    return tuple(
        Gpu(name=row[0], memory_mib=int(row[1]), driver=row[2]) for row in rows if len(row) == 3 and row[1].isdecimal()
    )
