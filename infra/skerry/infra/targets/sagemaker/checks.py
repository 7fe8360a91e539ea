"""Checks before an apply: machine types, quotas, the place for artifacts, and permissions. Reads only.

What cannot be checked is reported as unknown, never as good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.infra.clouds.aws.ecr import image_in_ecr, read_manifest
from skerry.infra.clouds.aws.s3 import Buckets
from skerry.infra.clouds.aws.session import Account
from skerry.infra.clouds.bucket_and_image_checks import DOCKER_MANIFEST
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.targets.sagemaker import quotas
from skerry.infra.targets.sagemaker.machine_lookup import find_machine
from skerry.infra.targets.sagemaker.options import SageMakerTarget
from skerry.infra.targets.sagemaker.resource_graph import SERVICE, name_part, runtime_s
from skerry.infra.targets.shared.aws_checks import pass_role_check
from skerry.infra.targets.shared.aws_replica_roles import replicas_by_suffix, role_name
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas


def checks(aws: Aws, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
    """See Target.checks."""
    for group in groups:
        yield _machine(aws, group)
    for region in sorted({SageMakerTarget.of(group).region for group in groups}):
        in_region = [group for group in groups if SageMakerTarget.of(group).region == region]
        yield from _quotas(aws, region, in_region, context.hours)
    for group in groups:
        yield _output(aws, context, group)
    for image in sorted({context.image_of(group) for group in groups}):
        yield from _media_type(aws, image)
    yield pass_role_check(
        aws,
        "right iam:PassRole to SageMaker",
        service=SERVICE,
        roles=lambda: [role for group in groups for role in _roles(aws, context, group)],
        ask="them",
    )


def _machine(aws: Aws, group: Replicas) -> Check:
    name, target = f"machine of {group.name}", SageMakerTarget.of(group)
    try:
        machine = find_machine(aws, target)
    except Invalid as error:
        return Check(name=name, ok=False, text=str(error), advice="change the target's options in the spec")
    except SkerryError as error:
        return Check(name=name, ok=None, text=str(error))
    disk = "disks of its own" if machine.own_disk else "an attached disk"
    return Check(name=name, ok=True, text=f"{machine.type}: {machine.gpus} GPUs, {disk}, in {target.region}")


def _quotas(aws: Aws, region: str, groups: Sequence[Replicas], hours: float | None) -> Iterator[Check]:
    """Check that the region has these machines, and the account's quotas of their number and time."""
    need: dict[str, int] = {}
    for group in groups:
        target = SageMakerTarget.of(group)
        quota = quotas.of_machines(target.instance, spot=target.spot)
        need[quota] = need.get(quota, 0) + group.count
    try:
        known = quotas.known(aws, region)
    except SkerryError as error:
        for quota, count in need.items():
            text = f"{count} are needed at once; the limit cannot be checked ({error})"
            yield Check(name=f"quota of {quota} in {region}", ok=None, text=text)
        return
    for quota, count in sorted(need.items()):
        yield _quota(region, quota, count, known.get(quota))
    if (longest := known.get(quotas.LONGEST)) is not None:
        seconds = max(runtime_s(hours, SageMakerTarget.of(group)) for group in groups)
        text = f"{seconds} s are requested, {longest['Value']:g} allowed"
        advice = quotas.too_long(longest, region, seconds)
        yield Check(name=f"longest job in {region}", ok=advice is None, text=text, advice=advice or "")


def _quota(region: str, quota: str, count: int, row: Mapping[str, Any] | None) -> Check:
    name = f"quota of {quota} in {region}"
    if row is None:
        text = f"Service Quotas has no quota of this name: SageMaker may not offer this machine in {region}"
        return Check(name=name, ok=False, text=text, advice="name another instance, or another region")
    limit = float(row["Value"])
    text = f"{count} needed at once, {limit:g} allowed"
    if limit >= count:
        return Check(name=name, ok=True, text=f"{text}; others of the account use it too")
    return Check(name=name, ok=False, text=text, advice=f"ask for more: {quotas.ask_for(row, region, count)}")


def _output(aws: Aws, context: RunContext, group: Replicas) -> Check:
    """Check the bucket for artifacts: SageMaker stores the files in /opt/ml/model only in the region of the job."""
    name, target = f"artifacts of {group.name}", SageMakerTarget.of(group)
    place = target.output or context.run_uri
    bucket = place.removeprefix("s3://").partition("/")[0]
    try:
        existing = Buckets(aws).look(bucket, target.region)
    except SkerryError as error:
        return Check(name=name, ok=None, text=f"the bucket {bucket} cannot be checked ({error})")
    if existing is None and target.output is None:
        return Check(name=name, ok=True, text=f"are stored with the run, in {bucket}")
    if existing is None:
        return Check(name=name, ok=False, text=f"there is no bucket {bucket}", advice="create it, or name another")
    if existing.region != target.region:
        text = (
            f"{bucket} is in {existing.region}, and the machines in {target.region}: a job that leaves files would fail"
        )
        advice = f"write output: s3://a-bucket-in-{target.region}/..., or leave /opt/ml/model empty"
        return Check(name=name, ok=False, text=text, advice=advice)
    return Check(name=name, ok=True, text=f"are stored in {bucket}, in the same region")


def _media_type(aws: Aws, reference: str) -> Iterator[Check]:
    """Check the format of an image's manifest; nothing if it cannot be read, which the check of the image reports.

    SageMaker refuses OCI manifests for models. Nothing is documented for training jobs, so no job is stopped for it.
    Source: aws/amazon-sagemaker-feedback, issue 180 ("Unsupported manifest media type").
    """
    image = image_in_ecr(reference)
    if image is None:
        return
    try:
        media_type = read_manifest(aws, image).media_type
    except SkerryError:
        return
    if media_type != DOCKER_MANIFEST:
        text = f"{image.repository} has a manifest of the type {media_type}; SageMaker may refuse it"
        advice = f"push it as {DOCKER_MANIFEST}: docker buildx build --provenance=false --output type=docker"
        yield Check(name="format of the image", ok=False, text=text, advice=advice)


def _roles(aws: Aws, context: RunContext, group: Replicas) -> Iterator[str]:
    """Return the ARNs of the roles of a group's jobs in their first generation. Reads the user's own role by name."""
    own = SageMakerTarget.of(group).byo.role
    if own is not None:
        yield own if own.startswith("arn:") else str(aws.call("iam", "", "get_role", RoleName=own)["Role"]["Arn"])
        return
    identity = aws.identity()
    account = Account(number=identity.account, partition=identity.partition)
    for suffix in replicas_by_suffix(context, group, one_role=SageMakerTarget.of(group).one_role):
        name = role_name(context, account, name_part(group), suffix)
        yield f"arn:{account.partition}:iam::{account.number}:role{context.spec.aws.role_path}{name}"
