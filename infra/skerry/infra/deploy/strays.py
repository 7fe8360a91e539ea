"""What carries a run's tag, whoever remembers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.infra.deploy.deployment import Deployment
    from skerry.infra.handler import Made
    from skerry.infra.state import Entry


def owned(deployment: Deployment, entries: Iterable[Entry]) -> list[Made]:
    """Everything of the run by its tag, wherever the spec wants or these entries say that something may be."""
    wanted = {str(getattr(group.target, "region", "")) for group in deployment.spec.spec.replicas}
    regions = {entry.made.region for entry in entries} | wanted | {deployment.bucket.region}
    handlers = deployment.handlers.values()
    return [made for handler in handlers for made in handler.owned(deployment.run, regions - {""})]
