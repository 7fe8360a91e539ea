"""What AWS would give to a job's container: image, environment, limits, keys of its role, and a log stream.

Reads moto's job and definition; decides nothing about the job's way.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's jobs have no types.

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.engine import Bind
from skerry.infra.testing.boxes import Box
from skerry.infra.testing.jobs import Refused
from skerry.infra.testing.roles import keys_of, role_of_profile

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARED_LOGS: Final = "/aws/batch/job"
"""Where jobs write that name no group of their own. AWS makes it, and it belongs to nobody's run."""
_ECR: Final = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(/.+)")
_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all jobs of a sandbox share. endpoint: as a container reaches it. registry: stands in for ECR.

    variables: given to every container besides its own, such as those that lead to another cloud's sandbox.
    """

    mark: str
    endpoint: str
    registry: str | None
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


def image_here(image: str, around: Surroundings) -> str:
    """An image as the engine can find it. Raises Refused for one in ECR if nothing stands in for that."""
    found = _ECR.fullmatch(image)
    if found is None:
        return image
    if around.registry is None:
        raise Refused(f"CannotPullContainerError: {image} lies in ECR, and this sandbox has no registry for it")
    return f"{around.registry}{found[1]}"


def at_home(around: Surroundings, region: str) -> dict[str, str]:
    """What makes every client in a container talk to this sandbox."""
    return {
        **around.variables,
        "AWS_ENDPOINT_URL": around.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class JobHost:
    """One job's surroundings; `jobs.Host`."""

    def __init__(self, job: Any, around: Surroundings) -> None:
        self._job = job
        self._around = around
        self._region = str(job.backend.region_name)
        self._properties: Mapping[str, Any] = job.job_definition.container_properties

    def box(self, number: int) -> Box:
        """The container of attempt `number`, from 1. Raises Refused."""
        job, properties = self._job, self._properties
        linux = properties.get("linuxParameters") or {}
        shared = linux.get("sharedMemorySize")
        return Box(
            name=f"skerry-{self._around.mark}-{job.job_id.replace(':', '-')}-{number}",
            image=image_here(str(properties["image"]), self._around),
            command=job._add_parameters_to_command(job._get_container_property("command", [])),  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            environment=self._environment(number),
            memory_bytes=int(requirement(job, "MEMORY")) * _MIB,
            shm_bytes=None if shared is None else int(shared) * _MIB,
            user=properties.get("user"),
            read_only=bool(properties.get("readonlyRootFilesystem")),
            binds=self._binds(),
        )

    def open_log(self) -> str:
        """A stream of its own for each attempt, as ECS names it. Raises Refused if its group is not there."""
        group, backend = self._group(), self._job._log_backend  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        may_make = group == SHARED_LOGS or self._log_options().get("awslogs-create-group") == "true"
        if group not in backend.groups and not may_make:
            raise Refused(f"ResourceInitializationError: the log group {group} does not exist")
        backend.ensure_log_group(group)
        prefix = self._log_options().get("awslogs-stream-prefix") or self._job.job_definition.name
        stream = f"{prefix}/default/{uuid.uuid4().hex}"
        backend.ensure_log_stream(group, stream)
        return stream

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """One line; lost if the group was deleted meanwhile, as on AWS."""
        group, backend = self._group(), self._job._log_backend  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        if group in backend.groups and stream in backend.groups[group].streams:
            backend.put_log_events(group, stream, [{"timestamp": at_ms, "message": text}])

    def _environment(self, number: int) -> dict[str, str]:
        around, job = self._around, self._job
        own = {one["name"]: one["value"] for one in job._get_container_property("environment", [])}  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        array = job.array_properties.get("index")
        return {
            **at_home(around, self._region),
            **self._keys(number),
            **own,
            "AWS_BATCH_JOB_ID": job.job_id,
            "AWS_BATCH_JOB_ATTEMPT": str(number),
            "AWS_BATCH_JQ_NAME": job.job_queue.name,
            "AWS_BATCH_CE_NAME": job.job_queue.environments[0].name,
            **({} if array is None else {"AWS_BATCH_JOB_ARRAY_INDEX": str(array)}),
        }

    def _keys(self, number: int) -> dict[str, str]:
        """Of the job's role; without one, of the machine's."""
        session = f"{self._job.job_id.replace(':', '-')}-{number}"
        if role := self._properties.get("jobRoleArn"):
            return keys_of(role, session, self._region)
        profile = self._job.job_queue.environments[0].compute_resources.get("instanceRole")
        role = role_of_profile(profile) if profile else None
        return {} if role is None else keys_of(role, session, self._region, service="ec2.amazonaws.com")

    def _binds(self) -> tuple[Bind, ...]:
        volumes = {one["name"]: one.get("host", {}) for one in self._properties.get("volumes", [])}
        return tuple(
            Bind(
                source=volumes[one["sourceVolume"]]["sourcePath"],
                target=one["containerPath"],
                writable=not one.get("readOnly", False),
            )
            for one in self._properties.get("mountPoints", [])
        )

    def _log_options(self) -> Mapping[str, str]:
        return (self._properties.get("logConfiguration") or {}).get("options") or {}

    def _group(self) -> str:
        return self._log_options().get("awslogs-group") or SHARED_LOGS


def requirement(job: Any, kind: str) -> str:
    """What a job asks for of MEMORY, VCPU or GPU: SubmitJob's word before the definition's. "0" if nobody says."""
    old = {"MEMORY": "memory", "VCPU": "vcpus"}.get(kind, "")
    for properties in (job.container_overrides, job.job_definition.container_properties):
        for one in properties.get("resourceRequirements") or ():
            if one["type"] == kind:
                return str(one["value"])
        if properties.get(old):
            return str(properties[old])
    return "0"
