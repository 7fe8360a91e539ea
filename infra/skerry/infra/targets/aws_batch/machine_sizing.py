"""How replicas fit on machines: what one takes, how many vCPUs all need, how long it may run. Pure.

Sources: Batch user guide, "Compute resource memory management", "Job timeouts".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.placement import AwsBatchTarget

# What is left of a machine's memory for jobs after kernel, daemon and agent; Batch places nothing that needs more.
_USABLE: Final = 0.94
# Of that, what a replica gets that did not ask for a size: some room for the page cache.
_DEFAULT_SHARE: Final = 0.9
# What data loaders get that did not ask for a size, as long as it is at most half of the memory.
_SHARED_MIB: Final = 2048
_MIB: Final = 1 << 20
# Batch takes whole seconds from here on, in 32 bits; nobody writes a longer limit than a year.
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
    """What one replica takes, and how many vCPUs the machines of all may have."""

    vcpus: int
    memory_mib: int
    shared_memory_mib: int
    max_vcpus: int


def shape(target: AwsBatchTarget, count: int, machines: Sequence[Machine]) -> Shape:
    """What each of `count` replicas takes on any of these machines. Raises Invalid if it fits on one of them not."""
    for machine in machines:
        if machine.gpus < target.gpus:
            raise Invalid(f"a replica needs {target.gpus} GPUs, and {machine.type} has {machine.gpus}")
    shares = [(machine, target.gpus / machine.gpus if target.gpus else 1.0) for machine in machines]
    vcpus = target.vcpus or max(1, min(int(machine.vcpus * share) for machine, share in shares))
    least = min(machine.memory_mib * share * _DEFAULT_SHARE for machine, share in shares)
    memory_mib = int(least) // 256 * 256 if target.memory is None else target.memory // _MIB
    asked = target.shared_memory
    shared_mib = min(_SHARED_MIB, memory_mib // 2) if asked is None else asked // _MIB
    if asked is not None and asked > memory_mib * _MIB:
        raise Invalid(f"shared_memory is more than the {memory_mib} MiB that a replica has; write less")
    for machine in machines:
        if machine.vcpus < vcpus:
            raise Invalid(f"a replica needs {vcpus} vCPUs, and {machine.type} has {machine.vcpus}")
        if usable_mib(machine) < memory_mib:
            raise Invalid(
                f"a replica needs {memory_mib} MiB, and {machine.type} has {machine.memory_mib}, of which jobs get "
                f"some {usable_mib(machine)}; write memory: {usable_mib(machine)}MiB or less"
            )
    needed = [math.ceil(count / _fit(machine, target.gpus, vcpus, memory_mib)) * machine.vcpus for machine in machines]
    return Shape(vcpus=vcpus, memory_mib=memory_mib, shared_memory_mib=shared_mib, max_vcpus=max(needed))


def usable_mib(machine: Machine) -> int:
    """The memory that jobs get on such a machine, at the least."""
    return int(machine.memory_mib * _USABLE)


def attempt_s(hours: float | None, target: AwsBatchTarget) -> int | None:
    """How long one attempt may run, in seconds; None is without end. hours: how long the run may take.

    Batch counts the time of each attempt anew, and never retries one that ran into its limit. So the run's time is not
    shared out among attempts: replicas end by it themselves, and this ends one that does not.
    """
    whole = None if hours is None else hours * 3600
    own = None if target.max_runtime is None else target.max_runtime.total_seconds()
    known = [seconds for seconds in (whole, own) if seconds is not None]
    return max(_SHORTEST_S, int(min(*known, _LONGEST_S))) if known else None


def own_hours(target: AwsBatchTarget) -> float | None:
    """The longest that a job runs by its own options, all attempts together; None is without end."""
    return None if target.max_runtime is None else target.attempts * target.max_runtime.total_seconds() / 3600


def _fit(machine: Machine, gpus: int, vcpus: int, memory_mib: int) -> int:
    """How many replicas such a machine holds at once."""
    by_gpus = machine.gpus // gpus if gpus else machine.vcpus
    return max(1, min(machine.vcpus // vcpus, usable_mib(machine) // memory_mib, by_gpus))
