"""Computes the accelerators and disk of a replica, its time limit and its quota. Pure.

Sources: Vertex AI API, Scheduling; "Schedule training jobs based on resource availability" (seven days at most).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.targets.vertex import built_in_accelerators

if TYPE_CHECKING:
    from skerry.infra.spec.model import Limits
    from skerry.infra.targets.vertex.options import VertexTarget

_GIB: Final = 1 << 30
_WEEK_S: Final = 7 * 24 * 3600
# Shorter than the start of any machine; a duration of 0 would be unlimited.
_SHORTEST_S: Final = 60
# The longest limit that a spec can have.
_LONGEST_S: Final = 365 * 24 * 3600
# Names of accelerators in quotas, where they differ.
_IN_QUOTAS: Final = {
    "nvidia-h100-80gb": "h100",
    "nvidia-h100-mega-80gb": "h100_mega",
    "nvidia-h200-141gb": "h200",
}


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """The accelerators and disk of one replica's machine. disk_gb: in GiB, as Google counts."""

    accelerator: str | None
    accelerators: int
    disk_gb: int

    @property
    def ranks(self) -> int:
        """The number of processes of a replica: one for each accelerator."""
        return max(1, self.accelerators)


def fitting(target: VertexTarget) -> Fitting:
    """Return the accelerators and disk of the machines of a group."""
    name, count = built_in_accelerators.of_machine(target.machine, target.accelerator, target.accelerators) or (None, 0)
    return Fitting(accelerator=name, accelerators=count, disk_gb=-(-target.disk // _GIB))


def timeout_s(hours: float | None, target: VertexTarget) -> int | None:
    """Return the time limit of one job in seconds; None is Vertex AI's seven days. hours: the limit of the run.

    A job that replaces a lost one has the same limit again: replicas end by themselves after the run's time, and this
    limit ends one that hangs.
    """
    whole = None if hours is None else hours * 3600
    own = None if target.max_runtime is None else target.max_runtime.total_seconds()
    known = [seconds for seconds in (whole, own) if seconds is not None]
    if not known:
        return None
    most = _WEEK_S if target.scheduling == "flex_start" else _LONGEST_S
    return max(_SHORTEST_S, int(min(*known, most)))


def cap_hours(limits: Limits, target: VertexTarget) -> float:
    """Return the longest time of one replica without a restart."""
    if limits.max_hours is not None:
        return limits.max_hours
    seconds = timeout_s(None, target)
    return (_WEEK_S if seconds is None else seconds) / 3600


def quota_of(accelerator: str | None, scheduling: str) -> str:
    """Return the quota that such machines count against. Source: Vertex AI, "Quotas and limits", training."""
    prefix = "preemptible_" if scheduling == "spot" else ""
    if accelerator is None:
        return f"aiplatform.googleapis.com/custom_model_training_{prefix}cpus"
    name = _IN_QUOTAS.get(accelerator) or accelerator.removeprefix("nvidia-tesla-").removeprefix("nvidia-")
    return f"aiplatform.googleapis.com/custom_model_training_{prefix}nvidia_{name.replace('-', '_')}_gpus"
