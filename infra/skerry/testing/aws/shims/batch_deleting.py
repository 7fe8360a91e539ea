"""moto 5.2.5 deletes queues and compute environments in any order, enabled and in use.

AWS refuses: both must be DISABLED first, and a compute environment must be in no queue. Deleting a queue ends its jobs.
Source: API reference, DeleteJobQueue and DeleteComputeEnvironment.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.batch.exceptions import ClientException
from moto.batch.models import BatchBackend

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches


def install(patches: Patches) -> None:
    """Install the shim."""

    def delete_job_queue(self: Any, queue_name: str) -> None:
        queue = self.get_job_queue(queue_name)
        if queue is not None:
            check_deletion(self, queue)
            for job in queue.jobs:
                job.terminate("Job queue deleted")
        moto_delete_queue(self, queue_name)

    def delete_compute_environment(self: Any, compute_environment_name: str) -> None:
        environment = self.get_compute_environment(compute_environment_name)
        if environment is not None:
            check_deletion(self, environment)
        moto_delete_compute(self, compute_environment_name)

    moto_delete_queue: Any = patches.replace(BatchBackend, "delete_job_queue", delete_job_queue)
    moto_delete_compute: Any = patches.replace(BatchBackend, "delete_compute_environment", delete_compute_environment)


def check_deletion(backend: Any, resource: Any) -> None:
    """Raise ClientException if AWS would refuse to delete this queue or compute environment now."""
    if resource.state != "DISABLED":
        raise ClientException(f"Cannot delete, {resource.name} must be DISABLED first")
    if any(resource in queue.environments for queue in backend._job_queues.values()):  # noqa: SLF001  moto has no other way
        raise ClientException("Cannot delete, found existing JobQueue relationship")
