"""Patches that close gaps of moto, one module per gap, installed while a sandbox runs.

A test of each checks that moto still has the gap; when moto closes it, the shim is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from skerry.testing.aws.shims.patching import Patches
    from skerry.testing.container_environment import JobDefaults
    from skerry.testing.jobs import Jobs


@dataclass(frozen=True, kw_only=True)
class Settings:
    """looks: how many descriptions a change takes to settle. any_image: whether ECR has every image."""

    looks: Callable[[], int]
    any_image: Callable[[], bool]


def install(
    patches: Patches,
    jobs: Jobs,
    training: Jobs,
    defaults: JobDefaults,
    now: Settings,
    without: Collection[str] = (),
) -> None:
    """Install all shims except those named in `without`, in the order of their dependencies.

    jobs: of Batch. training: of SageMaker. now: what a test may change meanwhile.
    """
    from skerry.testing.aws.shims import (  # noqa: PLC0415  they import moto
        batch_deleting,
        batch_job_variables,
        batch_jobs,
        batch_listing,
        batch_service_linked_role,
        batch_settling,
        batch_submitting,
        batch_update_fields,
        ecr_images,
        managed_policies,
        policy_conditions,
        s3_bucket_tags,
        s3_denials,
        s3_listing,
        sagemaker_jobs,
        sagemaker_requests,
        signed_url_posts,
        web_identity,
    )

    installers: dict[str, Callable[[Patches], object]] = {
        "policy_conditions": policy_conditions.install,
        "s3_denials": s3_denials.install,
        "s3_bucket_tags": s3_bucket_tags.install,
        "s3_listing": s3_listing.install,
        "managed_policies": managed_policies.install,
        "batch_service_linked_role": batch_service_linked_role.install,
        "ecr_images": lambda patches: ecr_images.install(patches, defaults.registry, now.any_image),
        "batch_job_variables": batch_job_variables.install,
        "batch_submitting": batch_submitting.install,
        "batch_listing": batch_listing.install,
        "batch_update_fields": batch_update_fields.install,
        "batch_deleting": batch_deleting.install,
        "batch_jobs": lambda patches: batch_jobs.install(patches, jobs, defaults),
        "batch_settling": lambda patches: batch_settling.install(patches, now.looks),
        "sagemaker_jobs": lambda patches: sagemaker_jobs.install(patches, training, defaults, now.looks),
        "sagemaker_requests": sagemaker_requests.install,
        "web_identity": web_identity.install,
        "signed_url_posts": signed_url_posts.install,
    }
    if unknown := set(without) - installers.keys():
        raise LookupError(f"unknown shim: {', '.join(sorted(unknown))}")
    for name, installer in installers.items():
        if name not in without:
            installer(patches)
