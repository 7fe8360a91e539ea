"""ECR: the repository of a run's image, and what the registry reports of an image before a job pulls it.

Tags cannot be moved and every image is scanned when it is pushed. Images are data: only an empty repository is deleted.
Untagged images expire by age; jobs name images by digest, so push them with a tag.
Sources: ECR API reference; ECR user guide, "Lifecycle policies"; OCI image specification.
"""

from __future__ import annotations

import json
import re
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.policies import Statement
from skerry.infra.clouds.aws.tags import owned_record, owner_of, tag_list, tags_in
from skerry.infra.clouds.bucket_and_image_checks import MANIFEST_TYPES, Manifest, RegistryImage, manifest_of
from skerry.infra.clouds.handler_helpers import REPOSITORY_REMEDY, Absent, check_empty, check_owner, differing, each, of
from skerry.infra.provision.graph import Life, Resource
from skerry.infra.provision.handler import Contents, Observed
from skerry.runtime.errors import Conflict, Retryable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.handler import Desired, StateRecord

HOST: Final = re.compile(r"(\d{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.(?:com(?:\.cn)?|eu)")
_CONFIG_BYTES: Final = 1 << 20
_FETCH_S: Final = 10
_AT_ONCE: Final = 100


@dataclass(frozen=True, kw_only=True)
class Repository(Resource):
    """A repository of images. registry: its account. untagged_days: untagged images expire after them.

    Outputs: arn, uri.
    """

    KIND: ClassVar[str] = "aws_repository"
    LIFE: ClassVar[Life] = Life.DATA
    FIXED: ClassVar[frozenset[str]] = frozenset({"region", "registry"})

    registry: str
    immutable: bool = True
    scan: bool = True
    untagged_days: int = 30


@dataclass(frozen=True, kw_only=True)
class Image(RegistryImage):
    """An image in ECR. registry: its account."""

    registry: str
    region: str


def image_in_ecr(image: str) -> Image | None:
    """The parts of an image's name; None for an image in another registry."""
    host, _, path = image.partition("/")
    matched = HOST.fullmatch(host)
    if matched is None:
        return None
    named, at, digest = path.partition("@")
    repository, _, tag = named.partition(":")
    return Image(
        registry=matched[1], region=matched[2], repository=repository, reference=digest if at else tag or "latest"
    )


def fetching(images: Iterable[str], partition: str) -> tuple[Statement, ...]:
    """The permission to pull those of the images that are in ECR; other registries need no role."""
    in_ecr = [image for image in map(image_in_ecr, images) if image is not None]
    places = sorted({f"{image.region}:{image.registry}:repository/{image.repository}" for image in in_ecr})
    if not places:
        return ()
    return (
        # ECR issues logins for no particular resource.
        Statement(sid="LogIn", actions=("ecr:GetAuthorizationToken",), resources=("*",)),
        Statement(
            sid="FetchImage",
            actions=("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"),
            resources=tuple(f"arn:{partition}:ecr:{place}" for place in places),
        ),
    )


def create_request(desired: Desired) -> dict[str, Any]:
    """Parameters of CreateRepository."""
    return {
        "repositoryName": desired.name,
        "imageTagMutability": _mutability(desired),
        "imageScanningConfiguration": {"scanOnPush": desired.settings["scan"]},
        "tags": tag_list(desired.tags),
    }


def lifecycle_request(desired: Desired) -> dict[str, Any]:
    """Parameters of PutLifecyclePolicy."""
    rule = {
        "rulePriority": 1,
        "description": "images without a tag",
        "selection": {
            "tagStatus": "untagged",
            "countType": "sinceImagePushed",
            "countUnit": "days",
            "countNumber": desired.settings["untagged_days"],
        },
        "action": {"type": "expire"},
    }
    return {"repositoryName": desired.name, "lifecyclePolicyText": json.dumps({"rules": [rule]}, sort_keys=True)}


class Repositories:
    """Creates repositories. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Raises Conflict for a registry of another account."""
        registry, account = of(Repository, desired).registry, self._aws.identity().account
        if registry != account:
            raise Conflict(f"the image is in the registry of account {registry}, not of {account}; {REPOSITORY_REMEDY}")
        changed: Collection[str] = {"untagged_days"}
        try:
            self._call(desired.resource.region, "create_repository", **create_request(desired))
        except Conflict:
            seen = self._read(desired)
            if seen is None:
                raise
            check_owner(seen, desired, "repository", REPOSITORY_REMEDY)
            changed = differing(desired, seen)
        return self.update(desired, changed)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        region, named = desired.resource.region, {"repositoryName": desired.name}
        if "immutable" in changed:
            self._call(region, "put_image_tag_mutability", **named, imageTagMutability=_mutability(desired))
        if "scan" in changed:
            scanning = {"scanOnPush": desired.settings["scan"]}
            self._call(region, "put_image_scanning_configuration", **named, imageScanningConfiguration=scanning)
        if "untagged_days" in changed:
            self._call(region, "put_lifecycle_policy", **lifecycle_request(desired))
        return _outputs(self._call(region, "describe_repositories", repositoryNames=[desired.name])["repositories"][0])

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete. Raises Conflict while it holds images."""
        try:
            check_empty("repository", record.name, Contents(objects=len(self._images(record)), noun="image"))
            self._call(record.region, "delete_repository", repositoryName=record.name, force=False)
        except Absent:
            return

    def contents(self, record: StateRecord, prefix: str = "") -> Contents:
        """See DataHandler.contents. Images have no folders."""
        del prefix
        with suppress(Absent):
            return Contents(objects=len(self._images(record)), noun="image")
        return Contents(objects=0, noun="image")

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned."""
        for region in sorted(regions):
            for repository in self._aws.pages("ecr", region, "describe_repositories", "repositories"):
                tags = self._tags(region, str(repository["repositoryArn"]))
                if owner_of(tags) == run:
                    name = str(repository["repositoryName"])
                    yield owned_record(Repository, name=name, region=region, tags=tags, outputs=_outputs(repository))

    def _read(self, desired: Desired) -> Observed | None:
        resource = of(Repository, desired)
        named = {"repositoryNames": [desired.name], "registryId": resource.registry}
        try:
            repository = self._call(resource.region, "describe_repositories", **named)["repositories"][0]
        except Absent:
            return None
        # Another account's repository may hide its tags and rules.
        tags = {} if resource.brought else self._tags(resource.region, str(repository["repositoryArn"]))
        return Observed(
            outputs=_outputs(repository),
            settings={
                "region": resource.region,
                "registry": str(repository["registryId"]),
                "immutable": repository.get("imageTagMutability") == "IMMUTABLE",
                "scan": bool(repository.get("imageScanningConfiguration", {}).get("scanOnPush")),
                **({} if resource.brought else {"untagged_days": self._untagged_days(resource.region, desired.name)}),
            },
            owner=owner_of(tags),
        )

    def _untagged_days(self, region: str, name: str) -> int:
        """0 unless this run's rule is the only one: other rules may delete what a run needs."""
        try:
            response = self._call(region, "get_lifecycle_policy", repositoryName=name)
        except Absent:
            return 0
        rules: list[dict[str, Any]] = json.loads(response["lifecyclePolicyText"]).get("rules", [])
        selection: dict[str, Any] = rules[0].get("selection", {}) if len(rules) == 1 else {}
        return int(selection.get("countNumber", 0)) if selection.get("tagStatus") == "untagged" else 0

    def _images(self, record: StateRecord) -> list[dict[str, str]]:
        images = self._aws.pages("ecr", record.region, "list_images", "imageIds", repositoryName=record.name)
        digests = dict.fromkeys(str(image["imageDigest"]) for image in images if image.get("imageDigest"))
        return [{"imageDigest": digest} for digest in digests]

    def _tags(self, region: str, arn: str) -> dict[str, str]:
        try:
            return tags_in(self._call(region, "list_tags_for_resource", resourceArn=arn)["tags"])
        except Absent:
            return {}

    def _call(self, region: str, operation: str, **parameters: object) -> dict[str, Any]:
        return self._aws.call("ecr", region, operation, **parameters)


def fetched(url: str) -> bytes:
    """The content at a signed address. Raises Retryable without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=_FETCH_S) as answer:  # noqa: S310  ECR returned it, over TLS
            return answer.read(_CONFIG_BYTES)
    except OSError as error:
        raise Retryable(f"cannot fetch an image's configuration: {error}") from error


def read_manifest(aws: Aws, image: Image, fetch: Callable[[str], bytes] = fetched) -> Manifest:
    """The image's manifest. Raises Absent if the image or its repository does not exist."""
    named = {"registryId": image.registry, "repositoryName": image.repository}
    which = {"imageDigest" if image.is_pinned else "imageTag": image.reference}
    response = aws.call(
        "ecr", image.region, "batch_get_image", **named, imageIds=[which], acceptedMediaTypes=list(MANIFEST_TYPES)
    )
    if not response.get("images"):
        raise Absent(f"no image {image.reference} in the repository {image.repository} of account {image.registry}")

    def blob(digest: str) -> bytes:
        where = aws.call("ecr", image.region, "get_download_url_for_layer", **named, layerDigest=digest)
        return fetch(str(where["downloadUrl"]))

    return manifest_of(response["images"][0]["imageManifest"], image.reference, blob)


def _mutability(desired: Desired) -> str:
    return "IMMUTABLE" if desired.settings["immutable"] is True else "MUTABLE"


def _outputs(repository: Mapping[str, Any]) -> dict[str, str]:
    return {"arn": str(repository["repositoryArn"]), "uri": str(repository["repositoryUri"])}
