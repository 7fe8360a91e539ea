"""What moto lacks, each gap closed by a module of its own that says which; installed while a sandbox runs.

A test asks of each whether moto still has the gap: when it has not, the shim goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from skerry.infra.testing.hosting import Surroundings
    from skerry.infra.testing.jobs import Jobs
    from skerry.infra.testing.shims.patches import Patches


def install(
    patches: Patches,
    jobs: Jobs,
    training: Jobs,
    around: Surroundings,
    looks: Callable[[], int],
    without: Collection[str] = (),
) -> None:
    """Install all but those named in `without`. Those that build on others come after them.

    jobs: of Batch. training: of SageMaker.
    """
    from skerry.infra.testing.shims import (  # noqa: PLC0415  they import moto
        batch_deleting,
        batch_environment,
        batch_jobs,
        batch_listing,
        batch_settling,
        batch_submitting,
        batch_updating,
        caller_identity,
        denials,
        ecr_images,
        managed_policies,
        policies,
        sagemaker_jobs,
        sagemaker_requests,
        service_role,
        web_identity,
    )

    plain: dict[str, Callable[[Patches], object]] = {
        "policies": policies.install,
        "denials": denials.install,
        "managed_policies": managed_policies.install,
        "service_role": service_role.install,
        "ecr_images": lambda patches: ecr_images.install(patches, around.registry),
        "batch_environment": batch_environment.install,
        "batch_submitting": batch_submitting.install,
        "batch_listing": batch_listing.install,
        "batch_updating": batch_updating.install,
        "batch_deleting": batch_deleting.install,
        "batch_jobs": lambda patches: batch_jobs.install(patches, jobs, around),
        "batch_settling": lambda patches: batch_settling.install(patches, looks),
        "sagemaker_jobs": lambda patches: sagemaker_jobs.install(patches, training, around, looks),
        "sagemaker_requests": sagemaker_requests.install,
        "web_identity": web_identity.install,
        "caller_identity": caller_identity.install,
    }
    if unknown := set(without) - plain.keys():
        raise LookupError(f"no such shim: {', '.join(sorted(unknown))}")
    for name, one in plain.items():
        if name not in without:
            one(patches)
