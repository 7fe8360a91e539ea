"""Lists everything that exists in the sandbox's account, in every region, so that a test can assert it is empty.

Left out: resources of AWS itself (service-linked roles, default networks, the shared log groups of Batch and SageMaker)
and records of ended jobs.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# moto's backends have few types.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.batch.models import batch_backends
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ecr.models import ecr_backends
from moto.iam.models import iam_backends
from moto.logs.models import logs_backends
from moto.s3.models import s3_backends
from moto.sagemaker.models import sagemaker_backends

from skerry.testing.aws.batch_container_setup import SHARED_LOGS
from skerry.testing.aws.training_container_setup import LOGS
from skerry.testing.job_runner import OVER

if TYPE_CHECKING:
    from collections.abc import Iterator


def inventory(operator: str) -> dict[str, tuple[str, ...]]:
    """Return sorted names by kind, without empty kinds. operator: a user that is not listed."""
    names_by_kind: dict[str, list[str]] = {}
    for kind, name in [*_global(operator), *_batch(), *_ec2(), *_others()]:
        names_by_kind.setdefault(kind, []).append(str(name))
    return {kind: tuple(sorted(names)) for kind, names in sorted(names_by_kind.items())}


def _regions(backends: Any) -> list[Any]:
    """Backends of the regions in use."""
    return list(backends[DEFAULT_ACCOUNT_ID].values()) if DEFAULT_ACCOUNT_ID in backends else []


def _global(operator: str) -> Iterator[tuple[str, str]]:
    iam = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
    yield from (("role", role.name) for role in iam.get_roles() if not role.path.startswith("/aws-service-role/"))
    yield from (("instance profile", profile.name) for profile in iam.get_instance_profiles())
    yield from (("policy", arn) for arn in iam.managed_policies if not arn.startswith("arn:aws:iam::aws:"))
    yield from (("user", name) for name in iam.users if name != operator)
    yield from (("identity provider", arn) for arn in iam.open_id_providers)
    yield from (("bucket", name) for name in s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets)


def _batch() -> Iterator[tuple[str, str]]:
    for region in _regions(batch_backends):
        yield from (("compute environment", place.name) for place in region._compute_environments.values())  # noqa: SLF001  moto has no other way to ask
        yield from (("job queue", queue.name) for queue in region._job_queues.values())  # noqa: SLF001  moto has no other way to ask
        yield from (
            ("job definition", f"{definition.name}:{definition.revision}")
            for definition in region._job_definitions.values()  # noqa: SLF001  same
            if definition.status == "ACTIVE"
        )
        yield from (("job", job.job_name) for job in region._jobs.values() if job.status not in OVER)  # noqa: SLF001  moto has no other way to ask


def _ec2() -> Iterator[tuple[str, str]]:
    for region in _regions(ec2_backends):
        groups = (group for of_vpc in region.groups.values() for group in of_vpc.values())
        yield from (("security group", group.name) for group in groups if group.name != "default")
        yield from (("launch template", template.name) for template in region.launch_templates.values())
        yield from (("vpc", vpc.id) for vpc in region.vpcs.values() if vpc.is_default not in {True, "true"})
        yield from (("vpc endpoint", name) for name in region.vpc_end_points)
        yield from (
            ("instance", instance.id)
            for reservation in region.reservations.values()
            for instance in reservation.instances
            if instance.state != "terminated"
        )


def _others() -> Iterator[tuple[str, str]]:
    for logs in _regions(logs_backends):
        yield from (("log group", name) for name in logs.groups if name not in {SHARED_LOGS, LOGS})
    for training in _regions(sagemaker_backends):
        live = {"InProgress", "Stopping"}
        jobs = training.training_jobs.values()
        yield from (("training job", job.training_job_name) for job in jobs if job.training_job_status in live)
    for ecr in _regions(ecr_backends):
        yield from (("repository", name) for name in ecr.repositories)
