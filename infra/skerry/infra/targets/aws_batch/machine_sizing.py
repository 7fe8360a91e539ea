"""Computes the vCPUs and memory of a replica on a machine, the vCPUs of all machines, and time limits. Pure.

Sources: Batch user guide, "Compute resource memory management", "Job timeouts".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.targets.aws_batch.options import AwsBatchTarget

# The share of a machine's memory that jobs can use, without kernel, Docker and agent.
_USABLE: Final = 0.94
# The default memory of a replica: this share of that of its machine; the rest is for the page cache.
_DEFAULT_SHARE: Final = 0.9
# The default shared memory, unless it is more than half of the memory.
_SHARED_MIB: Final = 2048
_MIB: Final = 1 << 20
# Batch accepts whole seconds from a minute on; a year is the longest limit that a spec can have.
_SHORTEST_S: Final = 60
_LONGEST_S: Final = 365 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A type of machine, as EC2 describes it."""

    type: str
    vcpus: int
    memory_mib: int
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The resources of one replica, and the most vCPUs of the machines of all replicas."""

    vcpus: int
    memory_mib: int
    shared_memory_mib: int
    max_vcpus: int


def shape(target: AwsBatchTarget, count: int, machines: Sequence[Machine]) -> Shape:
    """Return the resources of each of `count` replicas. Raises Invalid if one of the types is too small."""
    for machine in machines:
        if machine.gpus < target.gpus:
            raise Invalid(f"a replica needs {target.gpus} GPUs, and {machine.type} has {machine.gpus}")
    shares = [(machine, target.gpus / machine.gpus if target.gpus else 1.0) for machine in machines]
    vcpus = target.vcpus or max(1, min(int(machine.vcpus * share) for machine, share in shares))
    least = min(machine.memory_mib * share * _DEFAULT_SHARE for machine, share in shares)
    memory_mib = int(least) // 256 * 256 if target.memory is None else target.memory // _MIB
    requested = target.shared_memory
    shared_mib = min(_SHARED_MIB, memory_mib // 2) if requested is None else requested // _MIB
    if requested is not None and requested > memory_mib * _MIB:
        raise Invalid(f"shared_memory is more than the {memory_mib} MiB that a replica has; write less")
    for machine in machines:
        if machine.vcpus < vcpus:
            raise Invalid(f"a replica needs {vcpus} vCPUs, and {machine.type} has {machine.vcpus}")
        if usable_mib(machine) < memory_mib:
            raise Invalid(
                f"a replica needs {memory_mib} MiB, and {machine.type} has {machine.memory_mib}, of which jobs can "
                f"use {usable_mib(machine)}; write memory: {usable_mib(machine)}MiB or less"
            )
    needed = [math.ceil(count / _fit(machine, target.gpus, vcpus, memory_mib)) * machine.vcpus for machine in machines]
    return Shape(vcpus=vcpus, memory_mib=memory_mib, shared_memory_mib=shared_mib, max_vcpus=max(needed))


def usable_mib(machine: Machine) -> int:
    """Return the memory that jobs can use on a machine."""
    return int(machine.memory_mib * _USABLE)


def attempt_s(hours: float | None, target: AwsBatchTarget) -> int | None:
    """Return the time limit of one attempt in seconds; None is unlimited. hours: the limit of the run.

    Batch counts the time of each attempt from zero, and never retries one that reached its limit. So the run's time is
    not divided among attempts: replicas end by themselves after it, and this limit ends one that hangs.
    """
    whole = None if hours is None else hours * 3600
    own = None if target.max_runtime is None else target.max_runtime.total_seconds()
    known = [seconds for seconds in (whole, own) if seconds is not None]
    return max(_SHORTEST_S, int(min(*known, _LONGEST_S))) if known else None


def own_hours(target: AwsBatchTarget) -> float | None:
    """Return the longest time of a job by its own options, all attempts together; None is unlimited."""
    return None if target.max_runtime is None else target.attempts * target.max_runtime.total_seconds() / 3600


def _fit(machine: Machine, gpus: int, vcpus: int, memory_mib: int) -> int:
    """Return the number of replicas that a machine holds at once."""
    by_gpus = machine.gpus // gpus if gpus else machine.vcpus
    return max(1, min(machine.vcpus // vcpus, usable_mib(machine) // memory_mib, by_gpus))
