"""Brings back the payloads and checkpoints of a run that were deleted, if its bucket keeps deleted objects.

Replicas collect garbage, so a compromised replica can delete all checkpoints and its own payloads. None can delete
what the bucket keeps (`undelete_days` of a spec).
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from skerry.infra.deploy.removal import bucket_handler, prefix_of
from skerry.infra.provision.handler import Contents
from skerry.infra.provision.plan import desired_of
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from datetime import timedelta

    from skerry.infra.deploy.prepared_deployment import Deployment

_DELETED_BY_REPLICAS = (keys.PAYLOADS, keys.CHECKPOINTS)


def undelete_tensors(deployment: Deployment, ago: timedelta) -> Contents:
    """Bring back what was deleted or replaced so long ago or later; return it. New objects stay.

    What garbage collection has deleted comes back as well, and the next collection deletes it again. Raises
    Unauthorized without the operator's rights on old versions, on Google on deleted objects.
    """
    record = desired_of(deployment.bucket(), {}, deployment.run).to_record({})
    since = datetime.fromisoformat(deployment.clock.utc_text()) - ago
    handler, prefix = bucket_handler(deployment), prefix_of(deployment.run)
    parts = [handler.undelete(record, prefix + folder, since) for folder in _DELETED_BY_REPLICAS]
    return Contents(objects=sum(part.objects for part in parts), size_bytes=sum(part.size_bytes or 0 for part in parts))
