"""moto 5.2.5 lists other jobs and definitions than AWS.

ListJobs without a status lists all jobs (AWS: the RUNNING ones). DescribeJobs takes any number of ids (AWS: 100), and
none means all. DescribeJobDefinitions does not know name:revision.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from moto.batch.exceptions import ClientException
from moto.batch.models import BatchBackend

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches

_MOST: Final = 100


def install(patches: Patches) -> None:
    """Install the shim."""

    def list_jobs(
        self: Any, job_queue_name: Any, array_job_id: Any, job_status: Any = None, filters: Any = None
    ) -> Any:
        status = job_status if job_status or filters else "RUNNING"
        return moto_list(self, job_queue_name, array_job_id, status, filters)

    def describe_jobs(self: Any, jobs: list[str] | None) -> Any:
        if not jobs:
            return []
        if len(jobs) > _MOST:
            raise ClientException(f"Error executing request, Exception : jobs is limited to {_MOST} ids")
        return moto_jobs(self, jobs)

    def get_job_definitions(self: Any, identifier: str) -> Any:
        name, _, revision = identifier.rpartition(":")
        if name and revision.isdecimal() and not identifier.startswith("arn:"):
            definition = self.get_job_definition_by_name_revision(name, revision)
            return [] if definition is None else [definition]
        return moto_definitions(self, identifier)

    moto_list: Any = patches.replace(BatchBackend, "list_jobs", list_jobs)
    moto_jobs: Any = patches.replace(BatchBackend, "describe_jobs", describe_jobs)
    moto_definitions: Any = patches.replace(BatchBackend, "get_job_definitions", get_job_definitions)
