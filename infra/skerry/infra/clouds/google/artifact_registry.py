"""The repository that holds a run's image, and what can be known of an image before a job pulls it.

Tags cannot be moved. Images are data: a repository goes only when it is empty, for its deletion would take all of them.
Versions that lost their tag go by age; a job names its image by digest, so push it with a tag. Whoever pulls for Vertex
AI is its service agent, which may read the repositories of its own project and no others.
Sources: the discovery document of artifactregistry v1; Artifact Registry, "Cleanup policies"; Vertex AI, "Use a custom
service account" (who pulls); OCI distribution specification.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from skerry.infra.clouds.google import marks
from skerry.infra.clouds.google.handling import gone
from skerry.infra.clouds.google.session import Absent
from skerry.infra.clouds.handling import check_owner, differing, each
from skerry.infra.graph import Life, Resource
from skerry.infra.handler import Held, Seen
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.graph import Json
    from skerry.infra.handler import Made, Wanted

_REMEDY: Final = "if it is yours, say `byo: {repository: true}`"
_HOST: Final = re.compile(r"([a-z][a-z0-9-]*)-docker\.pkg\.dev")
_RULE: Final = "skerry-untagged"
_DAY_S: Final = 86_400
_PAGE: Final = "100"
_DELETED_S: Final = 600.0
_MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.oci.image.index.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json, "
    "application/vnd.docker.distribution.manifest.list.v2+json"
)


@dataclass(frozen=True, kw_only=True)
class Repository(Resource):
    """A repository of container images. untagged_days: versions without a tag go after them. Outputs: name, uri."""

    KIND: ClassVar[str] = "google_repository"
    LIFE: ClassVar[Life] = Life.DATA
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})

    immutable: bool = True
    untagged_days: int = 30


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image in Artifact Registry. image: its name in the repository. reference: its digest, or a tag."""

    location: str
    project: str
    repository: str
    image: str
    reference: str

    @property
    def is_pinned(self) -> bool:
        """Whether it is named by its digest."""
        return self.reference.startswith("sha256:")

    @property
    def host(self) -> str:
        """Where it is pulled from."""
        return f"{self.location}-docker.pkg.dev"


def image_in_registry(image: str) -> Image | None:
    """The parts of an image's name; None if it lies in another registry."""
    host, _, path = image.partition("/")
    matched = _HOST.fullmatch(host)
    if matched is None:
        return None
    named, at, digest = path.partition("@")
    plain, _, tag = named.partition(":")
    project, _, below = plain.partition("/")
    repository, _, name = below.partition("/")
    if not name:
        raise Invalid(f"not an image of Artifact Registry: {image}; write {host}/PROJECT/REPOSITORY/IMAGE@sha256:...")
    return Image(
        location=matched[1],
        project=project,
        repository=repository,
        image=name,
        reference=digest if at else tag or "latest",
    )


def vertex_agent(number: str) -> str:
    """Whoever pulls images for the jobs of a project. number: the project's."""
    return f"service-{number}@gcp-sa-aiplatform.iam.gserviceaccount.com"


def create_request(wanted: Wanted) -> dict[str, Any]:
    """The body of repositories.create."""
    about = {"format": "DOCKER", "description": "skerry: images of replicas", "labels": marks.labels(wanted)}
    return {**about, **parts(wanted)}


def parts(wanted: Wanted) -> dict[str, Any]:
    """What a repository is told, by its parts."""
    days = wanted.settings["untagged_days"]
    older = int(days) * _DAY_S if isinstance(days, int) else 0
    rule = {"id": _RULE, "action": "DELETE", "condition": {"tagState": "UNTAGGED", "olderThan": f"{older}s"}}
    return {
        "dockerConfig": {"immutableTags": wanted.settings["immutable"]},
        "cleanupPolicies": {_RULE: rule},
    }


class Repositories:
    """Makes repositories. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create."""
        path = f"{self._location(wanted.resource.region)}/repositories"
        try:
            told = self._call("POST", path, create_request(wanted), {"repositoryId": wanted.name})
            self._google.finished("artifactregistry", told, f"the repository {wanted.name} is made")
        except Conflict:
            seen = self._read(wanted)
            if seen is None:
                raise
            check_owner(seen, wanted, "repository", _REMEDY)
            return self.update(wanted, differing(wanted, seen))
        return self._outputs(wanted.name, wanted.resource.region)

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        region = wanted.resource.region
        names = {"immutable": "dockerConfig", "untagged_days": "cleanupPolicies"}
        body = {names[name]: parts(wanted)[names[name]] for name in sorted(changed) if name in names}
        if body:
            self._call("PATCH", self._path(wanted.name, region), body, {"updateMask": ",".join(sorted(body))})
        return self._outputs(wanted.name, region)

    def delete(self, made: Made) -> None:
        """See Handler.delete. Raises Conflict while there is an image in it."""
        held = self.held(made)
        if held.objects:
            raise Conflict(
                f"the repository {made.name} holds {held}: it is left; `skerry destroy --data` deletes them and the "
                "repository"
            )
        gone(lambda: self._remove(self._path(made.name, made.region), f"the repository {made.name} is deleted"))

    def held(self, made: Made, prefix: str = "") -> Held:
        """The images in it."""
        del prefix  # images have no folders
        with suppress(Absent):
            path = f"{self._path(made.name, made.region)}/dockerImages"
            images = list(self._google.pages("artifactregistry", path, "dockerImages", query={"pageSize": _PAGE}))
            size = sum(int(image.get("imageSizeBytes", 0)) for image in images)
            return Held(objects=len(images), size_bytes=size, noun="image")
        return Held(objects=0, noun="image")

    def empty(self, made: Made, prefix: str = "") -> Held:
        """Delete all images, and say how many; gone already is success. The repository stays."""
        held = self.held(made, prefix)
        path = f"{self._path(made.name, made.region)}/packages"
        with suppress(Absent):
            for package in list(self._google.pages("artifactregistry", path, "packages", query={"pageSize": _PAGE})):
                name = f"v1/{package['name']}"
                gone(lambda name=name: self._remove(name, f"the images of {name.rpartition('/')[2]} are deleted"))
        return held

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. Regions of other clouds are none of its."""
        for region in sorted(region for region in regions if is_location(region)):
            path = f"{self._location(region)}/repositories"
            try:
                repositories = list(self._google.pages("artifactregistry", path, "repositories"))
            except Absent:
                continue
            for told in repositories:
                mark = marks.of_labels(told.get("labels", {}))
                if mark is not None and mark.owner(run) == run:
                    name = str(told["name"]).rpartition("/")[2]
                    outputs = self._outputs(name, region)
                    yield marks.found(Repository, mark, name=name, region=region, outputs=outputs)

    def _read(self, wanted: Wanted) -> Seen | None:
        region = wanted.resource.region
        try:
            told = self._call("GET", self._path(wanted.name, region))
        except Absent:
            return None
        mark = marks.of_labels(told.get("labels", {}))
        return Seen(
            outputs=self._outputs(wanted.name, region),
            settings={
                "region": region,
                "immutable": bool(told.get("dockerConfig", {}).get("immutableTags")),
                "untagged_days": _untagged_days(told.get("cleanupPolicies", {})),
            },
            owner=None if mark is None else mark.owner(wanted.run),
        )

    def _remove(self, path: str, what: str) -> None:
        self._google.finished("artifactregistry", self._call("DELETE", path), what, within_s=_DELETED_S)

    def _outputs(self, name: str, region: str) -> dict[str, str]:
        project = self._google.project
        return {"name": name, "uri": f"{region}-docker.pkg.dev/{project}/{name}"}

    def _location(self, region: str) -> str:
        return f"v1/projects/{self._google.project}/locations/{region}"

    def _path(self, name: str, region: str) -> str:
        return f"{self._location(region)}/repositories/{name}"

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Json] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        return self._google.call("artifactregistry", method, path, body=body, query=query)


def is_location(region: str) -> bool:
    """Whether it may be a region of Google's: europe-west4; those of AWS end in -1, as in eu-west-1."""
    return re.fullmatch(r"[a-z]+-[a-z]+[0-9]+|us|europe|asia", region) is not None


def architectures(google: Google, image: Image, fetch: Callable[[str, str], bytes] | None = None) -> frozenset[str]:
    """What machines the image runs on: amd64, arm64. Raises Absent if there is no such image or repository.

    fetch: what an address of the registry has, asked for as a media type.
    """
    take = fetch or google.fetched
    # What listens without TLS is no registry of Google's, but stands for all of it.
    api = google.endpoint("artifactregistry")
    base = api if api.startswith("http://") else f"https://{image.host}"
    place = f"{base}/v2/{image.project}/{image.repository}/{image.image}"
    manifest: dict[str, Any] = json.loads(take(f"{place}/manifests/{quote(image.reference, safe=':')}", _MANIFESTS))
    if "manifests" in manifest:
        platforms = [entry.get("platform", {}).get("architecture") for entry in manifest["manifests"]]
        # Attestations lie beside the images, for the platform "unknown".
        return frozenset(str(platform) for platform in platforms if platform not in {None, "unknown"})
    digest = manifest.get("config", {}).get("digest")
    if digest is None:
        raise Invalid(f"the manifest of {image.reference} names no configuration: it is no image that can be run")
    config: dict[str, Any] = json.loads(take(f"{place}/blobs/{digest}", "*/*"))
    return frozenset({str(config.get("architecture", "unknown"))})


def _untagged_days(policies: Mapping[str, Any]) -> int:
    """0 if no rule of ours is there, or not alone: other rules may delete what a run needs."""
    rule: Mapping[str, Any] = policies.get(_RULE, {}) if len(policies) == 1 else {}
    condition: Mapping[str, Any] = rule.get("condition", {})
    if rule.get("action") != "DELETE" or set(condition) != {"tagState", "olderThan"}:
        return 0
    return int(float(str(condition["olderThan"]).rstrip("s"))) // _DAY_S if condition["tagState"] == "UNTAGGED" else 0
