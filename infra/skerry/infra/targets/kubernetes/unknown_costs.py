"""The cost of replicas in a cluster: unknown, because its nodes are paid for elsewhere, and whether they run or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.provision.target_and_store_interfaces import Rate
from skerry.infra.targets.kubernetes.options import KubernetesTarget
from skerry.infra.targets.kubernetes.resource_graph import deadline_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.spec.model import Limits, Replicas

_HOUR_S: Final = 3600


def rates(limits: Limits, groups: Sequence[Replicas]) -> list[Rate]:
    """See Target.rates."""
    return [_rate(limits, group) for group in groups]


def _rate(limits: Limits, group: Replicas) -> Rate:
    target = KubernetesTarget.of(group)
    limit = deadline_s(limits.max_hours, target)
    gpus = f", {target.gpus} GPU{'' if target.gpus == 1 else 's'}" if target.gpus else ""
    return Rate(
        group=group.name,
        what=f"{target.cpu} CPU{gpus} in the namespace {target.namespace}",
        machine=f"{target.cpu} CPU{gpus}",
        count=group.count,
        per_hour=None,
        source="the nodes of a cluster have no price here",
        cap_hours=None if limit is None else limit / _HOUR_S,
        each_start=True,
    )
