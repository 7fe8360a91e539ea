"""Computes the hourly price of a group's replicas from the prices that Hugging Face's own API lists. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.provision.target_and_store_interfaces import Rate
from skerry.infra.targets.hf_jobs.options import HfJobsTarget
from skerry.infra.targets.hf_jobs.resource_graph import timeout_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from huggingface_hub import JobHardwareInfo

    from skerry.infra.spec.model import Limits, Replicas

_HOUR_S: Final = 3600
_UNITS: Final = {"second": 3600, "minute": 60, "hour": 1}


def rates(hardware: Sequence[JobHardwareInfo] | str, limits: Limits, groups: Sequence[Replicas]) -> list[Rate]:
    """See Target.rates. hardware: the flavors, or why they are unknown."""
    return [_rate(hardware, limits, group) for group in groups]


def _rate(hardware: Sequence[JobHardwareInfo] | str, limits: Limits, group: Replicas) -> Rate:
    target = HfJobsTarget.of(group)
    flavors = () if isinstance(hardware, str) else hardware
    own = next((row for row in flavors if row.name == target.flavor), None)
    units = None if own is None else _UNITS.get(own.unit_label)
    if own is None or units is None:
        per_hour, source = None, hardware if isinstance(hardware, str) else f"no price of {target.flavor}"
    else:
        per_hour, source = group.count * own.unit_cost_micro_usd * units / 1e6, "Hugging Face, by the minute"
    limited = limits.max_hours is not None or target.max_runtime is not None
    return Rate(
        group=group.name,
        what=f"{target.flavor} in the namespace {target.namespace}",
        machine=target.flavor,
        count=group.count,
        per_hour=per_hour,
        source=source,
        cap_hours=timeout_s(limits.max_hours, target) / _HOUR_S if limited else None,
        each_start=True,
    )
