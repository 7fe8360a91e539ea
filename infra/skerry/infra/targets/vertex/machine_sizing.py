"""What one replica has of its machine, and how long it may run. Pure.

Sources: Vertex AI API, Scheduling; "Schedule training jobs based on resource availability" (seven days at most).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra import accelerators

if TYPE_CHECKING:
    from skerry.infra.placement import VertexTarget
    from skerry.infra.spec import Limits

_GIB: Final = 1 << 30
_WEEK_S: Final = 7 * 24 * 3600
# Shorter than any machine takes to start; and no duration may be 0, which is without end.
_SHORTEST_S: Final = 60
# Durations are 64 bits of seconds, of which a calendar has less; nobody writes a longer limit than a year.
_LONGEST_S: Final = 365 * 24 * 3600
# What quotas call some of them.
_IN_QUOTAS: Final = {
    "nvidia-h100-80gb": "h100",
    "nvidia-h100-mega-80gb": "h100_mega",
    "nvidia-h200-141gb": "h200",
}


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """What is in one replica's machine. accelerator: None for none. disk_gb: as Google counts, in GiB."""

    accelerator: str | None
    accelerators: int
    disk_gb: int

    @property
    def ranks(self) -> int:
        """How many processes a replica has: one for each accelerator."""
        return max(1, self.accelerators)


def fitting(target: VertexTarget) -> Fitting:
    """What the machines of a group have."""
    found = accelerators.fitted(target.machine, target.accelerator, target.accelerators)
    name, count = (None, 0) if found is None else found
    return Fitting(accelerator=name, accelerators=count, disk_gb=-(-target.disk // _GIB))


def timeout_s(hours: float | None, target: VertexTarget) -> int | None:
    """How long one job may run, in seconds; None is Vertex AI's own seven days. hours: how long the run may take.

    A job that is made again after one was lost has the same time once more: replicas end by the run's time themselves,
    and this ends one that does not.
    """
    whole = None if hours is None else hours * 3600
    own = None if target.max_runtime is None else target.max_runtime.total_seconds()
    known = [seconds for seconds in (whole, own) if seconds is not None]
    if not known:
        return None
    most = _WEEK_S if target.scheduling == "flex_start" else _LONGEST_S
    return max(_SHORTEST_S, int(min(*known, most)))


def cap_hours(limits: Limits, target: VertexTarget) -> float:
    """The longest that one replica runs without anybody starting it again."""
    if limits.max_hours is not None:
        return limits.max_hours
    seconds = timeout_s(None, target)
    return (_WEEK_S if seconds is None else seconds) / 3600


def quota_of(accelerator: str | None, scheduling: str) -> str:
    """The quota that such machines count against in their region. Source: Vertex AI, "Quotas and limits", training."""
    spare = "preemptible_" if scheduling == "spot" else ""
    if accelerator is None:
        return f"aiplatform.googleapis.com/custom_model_training_{spare}cpus"
    name = _IN_QUOTAS.get(accelerator) or accelerator.removeprefix("nvidia-tesla-").removeprefix("nvidia-")
    return f"aiplatform.googleapis.com/custom_model_training_{spare}nvidia_{name.replace('-', '_')}_gpus"
