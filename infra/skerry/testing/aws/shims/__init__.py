"""Patches that close gaps of moto, one module per gap, installed while a sandbox runs.

A test of each checks that moto still has the gap; when moto closes it, the shim is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from skerry.testing.aws.shims.patching import Patches
    from skerry.testing.container_environment import JobDefaults
    from skerry.testing.job_runner import Jobs


@dataclass(frozen=True, kw_only=True)
class Settings:
    """looks: how many descriptions a change takes to settle. any_image: whether ECR has every image.

    issuers: the keys of those of identity tokens, by their URLs.
    """

    looks: Callable[[], int]
    any_image: Callable[[], bool]
    issuers: Mapping[str, Mapping[str, Any]]


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
        batch_jobs,
        batch_listing,
        batch_service_linked_role,
        batch_settling,
        batch_submitting,
        batch_update_fields,
        listing_during_deletes,
        managed_policies,
        policy_actions_and_denials,
        policy_conditions,
        quick_accounts,
        registry_behind_ecr,
        sagemaker_jobs,
        sagemaker_requests,
        secret_resources,
        signed_url_posts,
        tags_at_bucket_creation,
        unshare_job_environment,
        web_identity,
    )

    installers: dict[str, Callable[[Patches], object]] = {
        "policy_conditions": policy_conditions.install,
        "policy_actions_and_denials": policy_actions_and_denials.install,
        "tags_at_bucket_creation": tags_at_bucket_creation.install,
        "listing_during_deletes": listing_during_deletes.install,
        "managed_policies": managed_policies.install,
        "quick_accounts": quick_accounts.install,
        "batch_service_linked_role": batch_service_linked_role.install,
        "registry_behind_ecr": lambda patches: registry_behind_ecr.install(patches, defaults.registry, now.any_image),
        "unshare_job_environment": unshare_job_environment.install,
        "batch_submitting": batch_submitting.install,
        "batch_listing": batch_listing.install,
        "batch_update_fields": batch_update_fields.install,
        "batch_deleting": batch_deleting.install,
        "batch_jobs": lambda patches: batch_jobs.install(patches, jobs, defaults),
        "batch_settling": lambda patches: batch_settling.install(patches, now.looks),
        "sagemaker_jobs": lambda patches: sagemaker_jobs.install(patches, training, defaults, now.looks),
        "sagemaker_requests": sagemaker_requests.install,
        "secret_resources": secret_resources.install,
        "web_identity": lambda patches: web_identity.install(patches, now.issuers),
        "signed_url_posts": signed_url_posts.install,
    }
    if unknown := set(without) - installers.keys():
        raise LookupError(f"unknown shim: {', '.join(sorted(unknown))}")
    for name, installer in installers.items():
        if name not in without:
            installer(patches)
