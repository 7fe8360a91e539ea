"""Artifact Registry: the repository of a run's image, and what the registry reports of an image before a job pulls it.

Tags cannot be moved. Images are data: only an empty repository is deleted, because its deletion deletes all images.
Untagged versions expire by age; jobs name images by digest, so push them with a tag. Vertex AI pulls images as its
service agent, which may read only the repositories of its own project.
Sources: the discovery document of artifactregistry v1; Artifact Registry, "Cleanup policies"; Vertex AI, "Use a custom
service account"; OCI distribution specification.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from skerry.infra.clouds.bucket_and_image_checks import MANIFEST_TYPES, Manifest, RegistryImage, manifest_of
from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.session import delete_if_present
from skerry.infra.clouds.handler_helpers import REPOSITORY_REMEDY, Absent, check_empty, check_owner, differing, each
from skerry.infra.provision.graph import Life, Resource
from skerry.infra.provision.handler import Contents, Observed
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.graph import Json
    from skerry.infra.provision.handler import Desired, StateRecord

_HOST: Final = re.compile(r"([a-z][a-z0-9-]*)-docker\.pkg\.dev")
_RULE: Final = "skerry-untagged"
_DAY_S: Final = 86_400
_PAGE: Final = "100"
_DELETED_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class Repository(Resource):
    """A repository of container images. untagged_days: untagged versions expire after them. Outputs: name, uri."""

    KIND: ClassVar[str] = "google_repository"
    LIFE: ClassVar[Life] = Life.DATA
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})

    immutable: bool = True
    untagged_days: int = 30


@dataclass(frozen=True, kw_only=True)
class Image(RegistryImage):
    """An image in Artifact Registry. image: its name in the repository."""

    location: str
    project: str
    image: str

    @property
    def host(self) -> str:
        """The registry's host."""
        return f"{self.location}-docker.pkg.dev"


def image_in_registry(image: str) -> Image | None:
    """The parts of an image's name; None for an image in another registry."""
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
    """The service agent that pulls images for a project's jobs. number: the project's."""
    return f"service-{number}@gcp-sa-aiplatform.iam.gserviceaccount.com"


def create_request(desired: Desired) -> dict[str, Any]:
    """The body of repositories.create."""
    about = {"format": "DOCKER", "description": "skerry: images of replicas", "labels": owner_labels.labels(desired)}
    return {**about, **parts(desired)}


def parts(desired: Desired) -> dict[str, Any]:
    """The changeable parts of a repository, by field."""
    days = desired.settings["untagged_days"]
    age_s = int(days) * _DAY_S if isinstance(days, int) else 0
    rule = {"id": _RULE, "action": "DELETE", "condition": {"tagState": "UNTAGGED", "olderThan": f"{age_s}s"}}
    return {
        "dockerConfig": {"immutableTags": desired.settings["immutable"]},
        "cleanupPolicies": {_RULE: rule},
    }


class Repositories:
    """Creates repositories. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        path = f"{self._location(desired.resource.region)}/repositories"
        try:
            operation = self._call("POST", path, create_request(desired), {"repositoryId": desired.name})
            self._google.finished("artifactregistry", operation, f"the repository {desired.name} is created")
        except Conflict:
            seen = self._read(desired)
            if seen is None:
                raise
            check_owner(seen, desired, "repository", REPOSITORY_REMEDY)
            return self.update(desired, differing(desired, seen))
        return self._outputs(desired.name, desired.resource.region)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        region = desired.resource.region
        names = {"immutable": "dockerConfig", "untagged_days": "cleanupPolicies"}
        body = {names[name]: parts(desired)[names[name]] for name in sorted(changed) if name in names}
        if body:
            self._call("PATCH", self._path(desired.name, region), body, {"updateMask": ",".join(sorted(body))})
        return self._outputs(desired.name, region)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete. Raises Conflict while it holds images."""
        check_empty("repository", record.name, self.contents(record))
        path = self._path(record.name, record.region)
        delete_if_present(lambda: self._remove(path, f"the repository {record.name} is deleted"))

    def contents(self, record: StateRecord, prefix: str = "") -> Contents:
        """See DataHandler.contents. Images have no folders."""
        del prefix
        with suppress(Absent):
            path = f"{self._path(record.name, record.region)}/dockerImages"
            images = list(self._google.pages("artifactregistry", path, "dockerImages", query={"pageSize": _PAGE}))
            size = sum(int(image.get("imageSizeBytes", 0)) for image in images)
            return Contents(objects=len(images), size_bytes=size, noun="image")
        return Contents(objects=0, noun="image")

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Regions of other clouds are skipped."""
        for region in sorted(region for region in regions if is_location(region)):
            path = f"{self._location(region)}/repositories"
            try:
                repositories = list(self._google.pages("artifactregistry", path, "repositories"))
            except Absent:
                continue
            for repository in repositories:
                mark = owner_labels.of_labels(repository.get("labels", {}))
                if mark is not None and mark.owner(run) == run:
                    name = str(repository["name"]).rpartition("/")[2]
                    outputs = self._outputs(name, region)
                    yield owner_labels.owned_record(Repository, mark, name=name, region=region, outputs=outputs)

    def _read(self, desired: Desired) -> Observed | None:
        region = desired.resource.region
        try:
            repository = self._call("GET", self._path(desired.name, region))
        except Absent:
            return None
        mark = owner_labels.of_labels(repository.get("labels", {}))
        return Observed(
            outputs=self._outputs(desired.name, region),
            settings={
                "region": region,
                "immutable": bool(repository.get("dockerConfig", {}).get("immutableTags")),
                "untagged_days": _untagged_days(repository.get("cleanupPolicies", {})),
            },
            owner=None if mark is None else mark.owner(desired.run),
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
    """True for the form of Google's regions, europe-west4; those of AWS end in -1, as in eu-west-1."""
    return re.fullmatch(r"[a-z]+-[a-z]+[0-9]+|us|europe|asia", region) is not None


def read_manifest(google: Google, image: Image, fetch: Callable[[str, str], bytes] | None = None) -> Manifest:
    """The image's manifest. Raises Absent if the image or its repository does not exist.

    fetch: the content at an address of the registry, as a media type.
    """
    read = fetch or google.fetched
    # An endpoint without TLS is a test's, and has all services at one address.
    api = google.endpoint("artifactregistry")
    base = api if api.startswith("http://") else f"https://{image.host}"
    place = f"{base}/v2/{image.project}/{image.repository}/{image.image}"
    manifest = read(f"{place}/manifests/{quote(image.reference, safe=':')}", ", ".join(MANIFEST_TYPES))
    return manifest_of(manifest, image.reference, lambda digest: read(f"{place}/blobs/{digest}", "*/*"))


def _untagged_days(policies: Mapping[str, Any]) -> int:
    """0 unless this run's rule is the only one: other rules may delete what a run needs."""
    rule: Mapping[str, Any] = policies.get(_RULE, {}) if len(policies) == 1 else {}
    condition: Mapping[str, Any] = rule.get("condition", {})
    if rule.get("action") != "DELETE" or set(condition) != {"tagState", "olderThan"}:
        return 0
    return int(float(str(condition["olderThan"]).rstrip("s"))) // _DAY_S if condition["tagState"] == "UNTAGGED" else 0
