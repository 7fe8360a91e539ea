"""moto 5.2.5 drops the computeResources of an UpdateComputeEnvironment, and a queue's jobStateTimeLimitActions.

So an update is never seen, and a plan that follows it finds the same difference for ever.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from moto.batch.models import BatchBackend, JobQueue
from moto.batch.responses import BatchResponse

if TYPE_CHECKING:
    from skerry.infra.testing.shims.patches import Patches

_LIMITS: Final = "jobStateTimeLimitActions"


def install(patches: Patches) -> None:
    """Keep them."""

    def update_compute_environment(
        self: Any, compute_environment_name: str, state: Any, compute_resources: Any, service_role: Any
    ) -> Any:
        told = moto_s_update(self, compute_environment_name, state, compute_resources, service_role)
        if compute_resources:
            environment = self.get_compute_environment(compute_environment_name)
            environment.compute_resources = {**environment.compute_resources, **compute_resources}
        return told

    def describe(self: Any) -> dict[str, Any]:
        return {**moto_s_describe(self), _LIMITS: getattr(self, "skerry_limits", [])}

    moto_s_update: Any = patches.replace(BatchBackend, "update_compute_environment", update_compute_environment)
    moto_s_describe: Any = patches.replace(JobQueue, "describe", describe)
    for name in ("createjobqueue", "updatejobqueue"):
        _keep_limits(patches, name)


def _keep_limits(patches: Patches, name: str) -> None:
    def answer(self: Any) -> str:
        said = moto_s(self)
        limits = self._get_param(_LIMITS)
        if limits is not None:
            queue = self.batch_backend.get_job_queue(json.loads(said)["jobQueueArn"])
            queue.skerry_limits = limits
        return said

    moto_s: Any = patches.replace(BatchResponse, name, answer)
