"""The repository that holds a run's image, and what can be known of an image before a job pulls it.

Tags cannot be moved and every image is scanned as it is pushed. Images are data: a repository goes only when it is
empty. Layers that lost their tag go by age; a job names its image by digest, so push it with a tag.
Sources: ECR API reference; ECR user guide, "Lifecycle policies"; OCI image specification.
"""

from __future__ import annotations

import json
import re
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.handling import found, owner_of, tag_list, tags_in
from skerry.infra.clouds.aws.policies import Statement
from skerry.infra.clouds.handling import Absent, check_owner, differing, each, of
from skerry.infra.graph import Life, Resource
from skerry.infra.handler import Held, Seen
from skerry.runtime.errors import Conflict, Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.handler import Made, Wanted

_REMEDY: Final = "if it is yours, say `byo: {repository: true}`"
_HOST: Final = re.compile(r"(\d{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
_MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_CONFIG_BYTES: Final = 1 << 20
_FETCH_S: Final = 10
_AT_ONCE: Final = 100


@dataclass(frozen=True, kw_only=True)
class Repository(Resource):
    """A repository of images. registry: the account it is in. untagged_days: images without a tag go after them.

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
class Image:
    """An image in ECR. reference: its digest, or a tag."""

    registry: str
    region: str
    repository: str
    reference: str

    @property
    def is_pinned(self) -> bool:
        """Whether it is named by its digest."""
        return self.reference.startswith("sha256:")


def image_in_ecr(image: str) -> Image | None:
    """The parts of an image's name; None if it lies in another registry."""
    host, _, path = image.partition("/")
    matched = _HOST.fullmatch(host)
    if matched is None:
        return None
    named, at, digest = path.partition("@")
    repository, _, tag = named.partition(":")
    return Image(
        registry=matched[1], region=matched[2], repository=repository, reference=digest if at else tag or "latest"
    )


def fetching(images: Iterable[str], partition: str) -> tuple[Statement, ...]:
    """The right to fetch these images as far as they are in ECR; other registries ask for no role."""
    found = [image for image in map(image_in_ecr, images) if image is not None]
    places = sorted({f"{one.region}:{one.registry}:repository/{one.repository}" for one in found})
    if not places:
        return ()
    return (
        # ECR gives its logins for no resource in particular.
        Statement(sid="LogIn", actions=("ecr:GetAuthorizationToken",), resources=("*",)),
        Statement(
            sid="FetchImage",
            actions=("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"),
            resources=tuple(f"arn:{partition}:ecr:{place}" for place in places),
        ),
    )


def create_request(wanted: Wanted) -> dict[str, Any]:
    """Parameters of CreateRepository."""
    return {
        "repositoryName": wanted.name,
        "imageTagMutability": _mutability(wanted),
        "imageScanningConfiguration": {"scanOnPush": wanted.settings["scan"]},
        "tags": tag_list(wanted.tags),
    }


def lifecycle_request(wanted: Wanted) -> dict[str, Any]:
    """Parameters of PutLifecyclePolicy."""
    rule = {
        "rulePriority": 1,
        "description": "images without a tag",
        "selection": {
            "tagStatus": "untagged",
            "countType": "sinceImagePushed",
            "countUnit": "days",
            "countNumber": wanted.settings["untagged_days"],
        },
        "action": {"type": "expire"},
    }
    return {"repositoryName": wanted.name, "lifecyclePolicyText": json.dumps({"rules": [rule]}, sort_keys=True)}


class Repositories:
    """Makes repositories. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. Raises Conflict if the image's registry is another account's."""
        registry, account = of(Repository, wanted).registry, self._aws.identity().account
        if registry != account:
            raise Conflict(f"the image's registry is account {registry}'s, and this is account {account}; {_REMEDY}")
        changed: Collection[str] = {"untagged_days"}
        try:
            self._call(wanted.resource.region, "create_repository", **create_request(wanted))
        except Conflict:
            seen = self._read(wanted)
            if seen is None:
                raise
            check_owner(seen, wanted, "repository", _REMEDY)
            changed = differing(wanted, seen)
        return self.update(wanted, changed)

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        region, named = wanted.resource.region, {"repositoryName": wanted.name}
        if "immutable" in changed:
            self._call(region, "put_image_tag_mutability", **named, imageTagMutability=_mutability(wanted))
        if "scan" in changed:
            scanning = {"scanOnPush": wanted.settings["scan"]}
            self._call(region, "put_image_scanning_configuration", **named, imageScanningConfiguration=scanning)
        if "untagged_days" in changed:
            self._call(region, "put_lifecycle_policy", **lifecycle_request(wanted))
        return _outputs(self._call(region, "describe_repositories", repositoryNames=[wanted.name])["repositories"][0])

    def delete(self, made: Made) -> None:
        """See Handler.delete. Raises Conflict while there is an image in it."""
        try:
            if count := len(self._images(made)):
                images = f"{count} image" + ("" if count == 1 else "s")
                raise Conflict(
                    f"the repository {made.name} holds {images}: it is left; `skerry destroy --data` deletes them and "
                    "the repository"
                )
            self._call(made.region, "delete_repository", repositoryName=made.name, force=False)
        except Absent:
            return

    def held(self, made: Made, prefix: str = "") -> Held:
        """The images in it."""
        del prefix  # images have no folders
        with suppress(Absent):
            return Held(objects=len(self._images(made)), noun="image")
        return Held(objects=0, noun="image")

    def empty(self, made: Made, prefix: str = "") -> Held:
        """Delete all images, and say how many; gone already is success. The repository stays."""
        del prefix  # images have no folders
        deleted = 0
        try:
            # An image list holds its images until it is gone itself, which takes a second pass.
            while images := self._images(made):
                before = deleted
                for start in range(0, len(images), _AT_ONCE):
                    some = images[start : start + _AT_ONCE]
                    told = self._call(made.region, "batch_delete_image", repositoryName=made.name, imageIds=some)
                    deleted += len({str(image.get("imageDigest")) for image in told.get("imageIds", [])})
                if deleted == before:
                    raise Retryable(f"ECR deletes none of the {len(images)} images left in {made.name}")
        except Absent:
            pass
        return Held(objects=deleted, noun="image")

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned."""
        for region in sorted(regions):
            for repository in self._aws.pages("ecr", region, "describe_repositories", "repositories"):
                tags = self._tags(region, str(repository["repositoryArn"]))
                if owner_of(tags) == run:
                    name = str(repository["repositoryName"])
                    yield found(Repository, name=name, region=region, tags=tags, outputs=_outputs(repository))

    def _read(self, wanted: Wanted) -> Seen | None:
        resource = of(Repository, wanted)
        named = {"repositoryNames": [wanted.name], "registryId": resource.registry}
        try:
            repository = self._call(resource.region, "describe_repositories", **named)["repositories"][0]
        except Absent:
            return None
        # The owner of another account's repository need not let us see its tags and rules.
        tags = {} if resource.brought else self._tags(resource.region, str(repository["repositoryArn"]))
        return Seen(
            outputs=_outputs(repository),
            settings={
                "region": resource.region,
                "registry": str(repository["registryId"]),
                "immutable": repository.get("imageTagMutability") == "IMMUTABLE",
                "scan": bool(repository.get("imageScanningConfiguration", {}).get("scanOnPush")),
                **({} if resource.brought else {"untagged_days": self._untagged_days(resource.region, wanted.name)}),
            },
            owner=owner_of(tags),
        )

    def _untagged_days(self, region: str, name: str) -> int:
        """0 if no rule of ours is there, or not alone: other rules may delete what a run needs."""
        try:
            told = self._call(region, "get_lifecycle_policy", repositoryName=name)
        except Absent:
            return 0
        rules: list[dict[str, Any]] = json.loads(told["lifecyclePolicyText"]).get("rules", [])
        selection: dict[str, Any] = rules[0].get("selection", {}) if len(rules) == 1 else {}
        return int(selection.get("countNumber", 0)) if selection.get("tagStatus") == "untagged" else 0

    def _images(self, made: Made) -> list[dict[str, str]]:
        images = self._aws.pages("ecr", made.region, "list_images", "imageIds", repositoryName=made.name)
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
    """What lies at a signed address. Raises Retryable if it gives no answer."""
    try:
        with urllib.request.urlopen(url, timeout=_FETCH_S) as answer:  # noqa: S310  ECR gave it, over TLS
            return answer.read(_CONFIG_BYTES)
    except OSError as error:
        raise Retryable(f"cannot fetch an image's configuration: {error}") from error


def architectures(aws: Aws, image: Image, fetch: Callable[[str], bytes] = fetched) -> frozenset[str]:
    """What machines the image runs on: amd64, arm64. Raises Absent if there is no such image or repository."""
    named = {"registryId": image.registry, "repositoryName": image.repository}
    which = {"imageDigest" if image.is_pinned else "imageTag": image.reference}
    told = aws.call(
        "ecr", image.region, "batch_get_image", **named, imageIds=[which], acceptedMediaTypes=list(_MANIFESTS)
    )
    if not told.get("images"):
        raise Absent(f"no image {image.reference} in the repository {image.repository} of account {image.registry}")
    manifest: dict[str, Any] = json.loads(told["images"][0]["imageManifest"])
    if "manifests" in manifest:
        platforms = [entry.get("platform", {}).get("architecture") for entry in manifest["manifests"]]
        # Attestations lie beside the images, for the platform "unknown".
        return frozenset(str(platform) for platform in platforms if platform not in {None, "unknown"})
    digest = manifest.get("config", {}).get("digest")
    if digest is None:
        raise Invalid(f"the manifest of {image.reference} names no configuration: it is no image that can be run")
    where = aws.call("ecr", image.region, "get_download_url_for_layer", **named, layerDigest=digest)
    config: dict[str, Any] = json.loads(fetch(str(where["downloadUrl"])))
    return frozenset({str(config.get("architecture", "unknown"))})


def _mutability(wanted: Wanted) -> str:
    return "IMMUTABLE" if wanted.settings["immutable"] is True else "MUTABLE"


def _outputs(repository: Mapping[str, Any]) -> dict[str, str]:
    return {"arn": str(repository["repositoryArn"]), "uri": str(repository["repositoryUri"])}
