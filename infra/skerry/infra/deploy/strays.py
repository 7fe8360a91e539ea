"""What carries a run's tag, whoever remembers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.targets import cloud_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.handler import Made
    from skerry.infra.state import Entry


def owned(deployment: Deployment, entries: Iterable[Entry]) -> list[Made]:
    """Everything of the run by its tag, wherever the spec wants or these entries say that something may be.

    A cloud is asked for its own regions, and one that neither names is not asked: nobody may have a key to it.
    """
    regions = _regions(deployment)
    kinds = {kind for maker in (deployment.home, *deployment.targets.values()) for kind in maker.handlers()}
    for entry in entries:
        kinds.add(entry.made.kind)
        regions.setdefault(cloud_of(entry.made.kind), set()).add(entry.made.region)
    found: list[Made] = []
    for kind, handler in deployment.handlers.items():
        there = regions.get(cloud_of(kind))
        if kind in kinds and there is not None:
            found += handler.owned(deployment.run, there - {""})
    return found


def _regions(deployment: Deployment) -> dict[str, set[str]]:
    """Where something of the run may be as the spec says, by cloud."""
    regions = {deployment.home_name: {deployment.bucket.region}}
    for group in deployment.spec.spec.replicas:
        if (cloud := group.target.CLOUD) is not None:
            regions.setdefault(cloud, set()).update(deployment.ground.regions(cloud))
    return regions
