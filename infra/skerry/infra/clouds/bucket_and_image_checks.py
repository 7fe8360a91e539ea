"""Checks that both clouds make before anything is created: the run's bucket, and the images of its jobs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from skerry.infra.clouds.handler_helpers import Absent, ownership
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.runtime.errors import Conflict, Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.handler_helpers import BucketLook
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.env_secrets_and_data import Inputs
    from skerry.infra.spec.model import Replicas

ImageT = TypeVar("ImageT", bound="RegistryImage")

MACHINE: Final = "amd64"
"""The architecture of the machines that jobs run on."""
OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFEST_TYPES: Final = (OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_LIST)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """An image as a registry reports it. media_type: of the manifest. architectures: that the image runs on."""

    media_type: str
    architectures: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class RegistryImage:
    """An image in a cloud's registry. reference: its digest, or a tag."""

    repository: str
    reference: str

    @property
    def is_pinned(self) -> bool:
        """True if it is named by its digest."""
        return self.reference.startswith("sha256:")


def guarded_check(
    name: str, look: Callable[[], Check], advice: str = "ask for the permission, or use other credentials"
) -> Check:
    """The check; a failed or undecided one if a call raises. advice: if that lacks a permission."""
    try:
        return look()
    except Unauthorized as error:
        return Check(name=name, ok=False, text=str(error), advice=advice)
    except (Invalid, Conflict) as error:
        return Check(name=name, ok=False, text=str(error))
    except Retryable as error:
        return Check(name=name, ok=None, text=str(error))


def bucket_check(context: RunContext, bucket: str, region: str, look: BucketLook | None) -> Check:
    """The bucket exists or can be created, is this run's or the user's own, and is where the replicas are.

    region: of the replicas; "" if unknown.
    """
    brought = context.spec.byo.bucket
    if look is None and brought:
        advice = "create it, or remove `byo: {bucket: true}`: then `skerry apply` creates it"
        return Check(name="bucket", ok=False, text=f"bucket {bucket} does not exist", advice=advice)
    if look is None:
        return Check(name="bucket", ok=True, text=f"the name {bucket} is free: it will be created in {region}")
    shared = not brought and look.owner not in (None, context.run_uri)
    if not brought and look.owner is None:
        advice = "if it is yours, set `byo: {bucket: true}`; otherwise name another bucket at `store`"
        return Check(
            name="bucket", ok=False, text=f"{bucket} exists already and {ownership(look.owner)}", advice=advice
        )
    if region and look.region != region:
        text = f"{bucket} is in {look.region}, replicas are in {region}: traffic between regions costs money"
        # The user's own bucket may be in any region; the run's is where the spec said before, and is never moved.
        advice = "" if brought or shared else f"name another bucket at `store`, or run in {look.region}"
        return Check(name="bucket", ok=brought or shared, text=text, advice=advice)
    whose = "yours" if brought else f"shared with the run {look.owner}" if shared else "of this run"
    return Check(name="bucket", ok=True, text=f"{bucket} exists, and is {whose}")


def data_checks(
    context: RunContext,
    groups: Sequence[Replicas],
    buckets_of: Callable[[Inputs], Sequence[str]],
    look: Callable[[str, str], BucketLook | None],
) -> Iterator[Check]:
    """The buckets with data of these groups exist, each checked once; the run's own may not exist yet.

    buckets_of: those in this cloud. look: at a bucket, from a region. Replicas read the data with rights of their own,
    so an operator without any is no problem.
    """
    own = context.run_uri.partition("://")[2].partition("/")[0]
    regions = {
        bucket: str(getattr(group.target, "region", ""))
        for group in groups
        for bucket in buckets_of(context.inputs(group))
        if bucket != own
    }
    for bucket, region in regions.items():
        yield _data_check(bucket, region, look)


def _data_check(bucket: str, region: str, look: Callable[[str, str], BucketLook | None]) -> Check:
    name = f"data in {bucket}"
    try:
        bucket_look = look(bucket, region)
    except Unauthorized:
        return Check(name=name, ok=None, text=f"cannot be checked: your credentials cannot read bucket {bucket}")
    except Retryable as error:
        return Check(name=name, ok=None, text=str(error))
    if bucket_look is None:
        return Check(name=name, ok=False, text=f"bucket {bucket} does not exist", advice="correct `data` in the spec")
    if not bucket_look.uniform:
        advice = f"gcloud storage buckets update gs://{bucket} --uniform-bucket-level-access"
        text = f"{bucket} has permissions by object, and cannot have permissions that are limited to prefixes"
        return Check(name=name, ok=False, text=text, advice=advice)
    if region and bucket_look.region != region:
        text = f"{bucket} is in {bucket_look.region}, replicas are in {region}: traffic between regions costs money"
        return Check(name=name, ok=True, text=text)
    return Check(name=name, ok=True, text=f"{bucket} exists")


def image_check(
    name: str, reference: str, image: ImageT | None, registry: str, read: Callable[[ImageT], Manifest]
) -> Check:
    """Jobs will find the image, and it runs on their machines. image: None if it is not in the cloud's registry.

    Without the right to read the registry, nothing is known: jobs pull the image with other rights.
    """
    if image is None:
        text = f"{reference} is not in {registry}: jobs must be able to pull it without a login"
        return Check(name=name, ok=None, text=text)
    try:
        machines = read(image).architectures
    except Absent:
        text = f"{reference} is not in {registry}"
        return Check(name=name, ok=False, text=text, advice=_push_advice(reference, image), stops_jobs=True)
    except Unauthorized as error:
        return Check(name=name, ok=None, text=str(error), advice="ask for the permission, or use other credentials")
    if MACHINE not in machines:
        text = f"it runs on {', '.join(sorted(machines))}, and the machines are {MACHINE}"
        advice = f"build it with --platform linux/{MACHINE}"
        return Check(name=name, ok=False, text=text, advice=advice, stops_jobs=True)
    if not image.is_pinned:
        text = f"{reference} is named by a tag, which may later name another image"
        return Check(name=name, ok=False, text=text, advice="name it by its digest: repository@sha256:...")
    return Check(name=name, ok=True, text=f"{image.repository} has {image.reference[:19]} for {MACHINE}")


def manifest_of(text: bytes | str, reference: str, fetch: Callable[[str], bytes]) -> Manifest:
    """The parts of a manifest that jobs depend on: amd64, arm64. fetch: the blob of a digest."""
    parsed: Mapping[str, Any] = json.loads(text)
    media_type = str(parsed.get("mediaType", OCI_INDEX if "manifests" in parsed else OCI_MANIFEST))
    if "manifests" in parsed:
        platforms = [entry.get("platform", {}).get("architecture") for entry in parsed["manifests"]]
        # Attestations are listed beside the images, for the platform "unknown".
        known = frozenset(str(platform) for platform in platforms if platform not in {None, "unknown"})
        return Manifest(media_type=media_type, architectures=known)
    digest = parsed.get("config", {}).get("digest")
    if digest is None:
        raise Invalid(f"the manifest of {reference} names no configuration: it is not a runnable image")
    config: dict[str, Any] = json.loads(fetch(str(digest)))
    return Manifest(media_type=media_type, architectures=frozenset({str(config.get("architecture", "unknown"))}))


def repository_of(image: str) -> str:
    """An image's name without tag and digest, port included. Pure."""
    start, slash, last = image.partition("@")[0].rpartition("/")
    return f"{start}{slash}{last.partition(':')[0]}"


def _push_advice(reference: str, image: RegistryImage) -> str:
    """The command that pushes an image; a digest is known only after the push."""
    command = f"skerry image push {repository_of(reference)}"
    if image.is_pinned:
        return f"push it: `{command}`, and write the digest that it prints into the spec"
    return f"push it: `{command} --tag {image.reference}`"
