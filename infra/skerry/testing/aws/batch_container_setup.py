"""Provides the containers of Batch jobs as AWS would: image, environment, limits, keys of the role, log stream.

Reads moto's job and definition; `jobs` runs the job.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's jobs have no types.

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.local.docker_engine import Bind
from skerry.testing.aws.container_role_keys import role_keys, role_of_profile
from skerry.testing.docker_containers import JobContainer
from skerry.testing.job_runner import StartRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.container_environment import JobDefaults

SHARED_LOGS: Final = "/aws/batch/job"
"""The log group of jobs that name none. AWS creates it, and no run owns it."""
_ECR: Final = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(/.+)")
_MIB: Final = 1 << 20


def ecr_image(image: str, defaults: JobDefaults) -> str:
    """Return an image's reference for the engine. Raises StartRefused for one of ECR without a registry."""
    return defaults.local_image(image, _ECR, "CannotPullContainerError")


def append_line(backend: Any, group: str, stream: str, at_ms: int, text: str) -> None:
    """Add a line to a log stream of moto's; the line is lost if the group was deleted meanwhile, as on AWS."""
    if group in backend.groups and stream in backend.groups[group].streams:
        backend.put_log_events(group, stream, [{"timestamp": at_ms, "message": text}])


def endpoint_variables(defaults: JobDefaults, region: str) -> dict[str, str]:
    """Variables that make every client in a container use this sandbox."""
    return {
        **defaults.variables,
        "AWS_ENDPOINT_URL": defaults.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class BatchJobHost:
    """A `jobs.JobHost` for one job of Batch."""

    def __init__(self, job: Any, defaults: JobDefaults) -> None:
        self._job = job
        self._defaults = defaults
        self._region = str(job.backend.region_name)
        self._properties: Mapping[str, Any] = job.job_definition.container_properties

    def container_for(self, number: int) -> JobContainer:
        """Return the container of attempt `number`, from 1. Raises StartRefused."""
        job, properties = self._job, self._properties
        linux = properties.get("linuxParameters") or {}
        shared = linux.get("sharedMemorySize")
        return JobContainer(
            name=f"skerry-{self._defaults.mark}-{job.job_id.replace(':', '-')}-{number}",
            image=ecr_image(str(properties["image"]), self._defaults),
            command=job._add_parameters_to_command(job._get_container_property("command", [])),  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            environment=self._environment(number),
            memory_bytes=int(requirement(job, "MEMORY")) * _MIB,
            shm_bytes=None if shared is None else int(shared) * _MIB,
            user=properties.get("user"),
            read_only=bool(properties.get("readonlyRootFilesystem")),
            binds=self._binds(),
        )

    def open_log(self) -> str:
        """Open a new stream for each attempt, named as by ECS. Raises StartRefused if its group does not exist."""
        group, backend = self._group(), self._job._log_backend  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        may_create = group == SHARED_LOGS or self._log_options().get("awslogs-create-group") == "true"
        if group not in backend.groups and not may_create:
            raise StartRefused(f"ResourceInitializationError: the log group {group} does not exist")
        backend.ensure_log_group(group)
        prefix = self._log_options().get("awslogs-stream-prefix") or self._job.job_definition.name
        stream = f"{prefix}/default/{uuid.uuid4().hex}"
        backend.ensure_log_stream(group, stream)
        return stream

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """Add a line to the stream."""
        append_line(self._job._log_backend, self._group(), stream, at_ms, text)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def _environment(self, number: int) -> dict[str, str]:
        defaults, job = self._defaults, self._job
        own = {variable["name"]: variable["value"] for variable in job._get_container_property("environment", [])}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        array_index = job.array_properties.get("index")
        return {
            **endpoint_variables(defaults, self._region),
            **self._keys(number),
            **own,
            "AWS_BATCH_JOB_ID": job.job_id,
            "AWS_BATCH_JOB_ATTEMPT": str(number),
            "AWS_BATCH_JQ_NAME": job.job_queue.name,
            "AWS_BATCH_CE_NAME": job.job_queue.environments[0].name,
            **({} if array_index is None else {"AWS_BATCH_JOB_ARRAY_INDEX": str(array_index)}),
        }

    def _keys(self, number: int) -> dict[str, str]:
        """Keys of the job's role; without a role, of the machine's."""
        session = f"{self._job.job_id.replace(':', '-')}-{number}"
        if role := self._properties.get("jobRoleArn"):
            return role_keys(role, session, self._region)
        profile = self._job.job_queue.environments[0].compute_resources.get("instanceRole")
        role = role_of_profile(profile) if profile else None
        return {} if role is None else role_keys(role, session, self._region, service="ec2.amazonaws.com")

    def _binds(self) -> tuple[Bind, ...]:
        volumes = {volume["name"]: volume.get("host", {}) for volume in self._properties.get("volumes", [])}
        return tuple(
            Bind(
                source=volumes[mount["sourceVolume"]]["sourcePath"],
                target=mount["containerPath"],
                writable=not mount.get("readOnly", False),
            )
            for mount in self._properties.get("mountPoints", [])
        )

    def _log_options(self) -> Mapping[str, str]:
        return (self._properties.get("logConfiguration") or {}).get("options") or {}

    def _group(self) -> str:
        return self._log_options().get("awslogs-group") or SHARED_LOGS


def requirement(job: Any, kind: str) -> str:
    """Return a job's MEMORY, VCPU or GPU: from SubmitJob, else from the definition, else "0"."""
    legacy_field = {"MEMORY": "memory", "VCPU": "vcpus"}.get(kind, "")
    for properties in (job.container_overrides, job.job_definition.container_properties):
        for entry in properties.get("resourceRequirements") or ():
            if entry["type"] == kind:
                return str(entry["value"])
        if properties.get(legacy_field):
            return str(properties[legacy_field])
    return "0"
