"""Patches that close gaps of moto, one module per gap, installed while a sandbox runs.

A test of each checks that moto still has the gap; when moto closes it, the shim is deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from skerry.testing.aws.shims.patches import Patches
    from skerry.testing.job_defaults import JobDefaults
    from skerry.testing.jobs import Jobs


def install(
    patches: Patches,
    jobs: Jobs,
    training: Jobs,
    defaults: JobDefaults,
    looks: Callable[[], int],
    without: Collection[str] = (),
) -> None:
    """Install all shims except those named in `without`, in the order of their dependencies.

    jobs: of Batch. training: of SageMaker. looks: how many descriptions a change takes to settle.
    """
    from skerry.testing.aws.shims import (  # noqa: PLC0415  they import moto
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

    installers: dict[str, Callable[[Patches], object]] = {
        "policies": policies.install,
        "denials": denials.install,
        "managed_policies": managed_policies.install,
        "service_role": service_role.install,
        "ecr_images": lambda patches: ecr_images.install(patches, defaults.registry),
        "batch_environment": batch_environment.install,
        "batch_submitting": batch_submitting.install,
        "batch_listing": batch_listing.install,
        "batch_updating": batch_updating.install,
        "batch_deleting": batch_deleting.install,
        "batch_jobs": lambda patches: batch_jobs.install(patches, jobs, defaults),
        "batch_settling": lambda patches: batch_settling.install(patches, looks),
        "sagemaker_jobs": lambda patches: sagemaker_jobs.install(patches, training, defaults, looks),
        "sagemaker_requests": sagemaker_requests.install,
        "web_identity": web_identity.install,
        "caller_identity": caller_identity.install,
    }
    if unknown := set(without) - installers.keys():
        raise LookupError(f"unknown shim: {', '.join(sorted(unknown))}")
    for name, installer in installers.items():
        if name not in without:
            installer(patches)
