"""moto 5.2.5 drops the computeResources of an UpdateComputeEnvironment, and a queue's jobStateTimeLimitActions.

Without this shim an update is never visible, and every later plan finds the same difference.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from moto.batch.models import BatchBackend, JobQueue
from moto.batch.responses import BatchResponse

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches

_LIMITS: Final = "jobStateTimeLimitActions"


def install(patches: Patches) -> None:
    """Install the shim: store both."""

    def update_compute_environment(
        self: Any, compute_environment_name: str, state: Any, compute_resources: Any, service_role: Any
    ) -> Any:
        response = moto_update(self, compute_environment_name, state, compute_resources, service_role)
        if compute_resources:
            environment = self.get_compute_environment(compute_environment_name)
            environment.compute_resources = {**environment.compute_resources, **compute_resources}
        return response

    def describe(self: Any) -> dict[str, Any]:
        return {**moto_describe(self), _LIMITS: getattr(self, "skerry_limits", [])}

    moto_update: Any = patches.replace(BatchBackend, "update_compute_environment", update_compute_environment)
    moto_describe: Any = patches.replace(JobQueue, "describe", describe)
    for name in ("createjobqueue", "updatejobqueue"):
        _store_limits(patches, name)


def _store_limits(patches: Patches, name: str) -> None:
    def handler(self: Any) -> str:
        response = moto_handler(self)
        limits = self._get_param(_LIMITS)
        if limits is not None:
            queue = self.batch_backend.get_job_queue(json.loads(response)["jobQueueArn"])
            queue.skerry_limits = limits
        return response

    moto_handler: Any = patches.replace(BatchResponse, name, handler)
