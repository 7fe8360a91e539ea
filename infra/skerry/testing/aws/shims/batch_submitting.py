"""moto 5.2.5 accepts jobs for a disabled queue or of a deregistered definition; AWS refuses both.

Jobs that the sandbox cannot run (dependencies, several nodes, EKS) are refused by name.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.batch.exceptions import ClientException
from moto.batch.models import BatchBackend
from moto.batch.responses import BatchResponse

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches


def install(patches: Patches) -> None:
    """Install the shim: check each submission."""

    def submit_job(self: Any, job_name: str, job_def_id: str, job_queue: str, *rest: Any, **named: Any) -> Any:
        queue, definition = self.get_job_queue(job_queue), self.get_job_definition(job_def_id)
        if queue is not None and (queue.state != "ENABLED" or queue.status != "VALID"):
            raise ClientException(f"Job queue {queue.name} is {queue.state} and takes no jobs")
        if definition is not None and definition.status != "ACTIVE":
            raise ClientException(f"Job definition {job_def_id} is not ACTIVE")
        if named.get("depends_on"):
            raise NotImplementedError("the sandbox does not support jobs with dependencies")
        if definition is not None and definition.container_properties is None:
            raise NotImplementedError("the sandbox supports only jobs of one container")
        return moto_submit(self, job_name, job_def_id, job_queue, *rest, **named)

    def submitjob(self: Any) -> str:
        unknown = {"schedulingPriorityOverride", "shareIdentifier", "nodeOverrides"}
        if any(self._get_param(name) for name in unknown):
            raise NotImplementedError(f"the sandbox does not support {', '.join(sorted(unknown))}")
        return moto_response(self)

    moto_submit: Any = patches.replace(BatchBackend, "submit_job", submit_job)
    moto_response: Any = patches.replace(BatchResponse, "submitjob", submitjob)
