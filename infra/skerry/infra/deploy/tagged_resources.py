"""Lists every resource that carries a run's tag, whether or not the state records it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra import targets

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.state import Entry


def list_tagged(deployment: Deployment, entries: Iterable[Entry]) -> list[StateRecord]:
    """All resources of the run by its tag, in the kinds and regions that the spec or these entries name.

    Each cloud is asked for its own regions only. A cloud that neither the spec nor an entry names is not asked: there
    may be no credentials for it.
    """
    regions = spec_regions(deployment)
    places = (deployment.home, *deployment.mirror_homes.values(), *deployment.targets.values())
    kinds = {kind for place in places for kind in place.handlers()}
    for entry in entries:
        kinds.add(entry.record.kind)
        regions.setdefault(targets.cloud_of(entry.record.kind), set()).add(entry.record.region)
    tagged: list[StateRecord] = []
    for kind, handler in deployment.handlers.items():
        cloud_regions = regions.get(targets.cloud_of(kind))
        if kind in kinds and cloud_regions is not None:
            tagged += handler.list_owned(deployment.run, cloud_regions - {""})
    return tagged


def spec_regions(deployment: Deployment) -> dict[str, set[str]]:
    """The regions that the spec names, by cloud: those that are searched while there is no state."""
    regions = {deployment.home_name: {deployment.bucket().region}}
    for bucket in deployment.mirrors().values():
        regions.setdefault(targets.cloud_of(bucket.KIND), set()).add(bucket.region)
    for group in deployment.spec.spec.replicas:
        if (cloud := group.target.CLOUD) is not None:
            regions.setdefault(cloud, set()).update(deployment.context.regions(cloud))
    return regions
