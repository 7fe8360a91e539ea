"""Artifact Registry, as far as images and their repositories go; what they hold lies in a registry of its own.

Source: the REST reference of Artifact Registry.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.google.project import masked, paged
from skerry.infra.testing.google.refusals import Refusal, absent, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.google.operations import Operations
    from skerry.infra.testing.google.project import Asked, Handler, Project

_REPOSITORY: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_REPOSITORIES: Final = "artifactregistry.projects.locations.repositories"


class Repositories:
    """Artifact Registry, as far as an image's repository goes; the images lie in a registry of their own."""

    def __init__(self, project: Project, operations: Operations) -> None:
        self._project = project
        self._operations = operations
        self._repositories: dict[str, dict[str, Any]] = {}
        self._images: dict[str, dict[str, Any]] = {}

    def handlers(self) -> dict[str, Handler]:
        """By method."""
        return {
            f"{_REPOSITORIES}.create": self._create,
            f"{_REPOSITORIES}.get": lambda asked: self._found(asked.names["name"]),
            f"{_REPOSITORIES}.list": self._list,
            f"{_REPOSITORIES}.patch": self._patch,
            f"{_REPOSITORIES}.delete": self._delete,
            f"{_REPOSITORIES}.dockerImages.get": self._get_image,
            f"{_REPOSITORIES}.dockerImages.list": self._list_images,
            f"{_REPOSITORIES}.packages.list": self._list_packages,
            f"{_REPOSITORIES}.packages.delete": self._delete_package,
            "artifactregistry.projects.locations.operations.get": self._operations.get,
            f"{_REPOSITORIES}.getIamPolicy": self._get_policy,
            f"{_REPOSITORIES}.setIamPolicy": self._set_policy,
        }

    def names(self) -> list[str]:
        """LOCATION/ID of each."""
        return ["/".join(name.split("/")[3::2]) for name in self._repositories]

    def clear(self) -> None:
        """None at all."""
        self._repositories.clear()
        self._images.clear()

    def push(self, location: str, repository: str, image: str, digest: str, *, size: int = 0) -> None:
        """An image lies in a repository from now on; without that repository, nowhere that this service tells of."""
        name = f"projects/{self._project.id}/locations/{location}/repositories/{repository}"
        if name not in self._repositories:
            return
        now, full = self._project.text(), f"{name}/dockerImages/{image}@{digest}"
        self._images[full] = {
            "name": full,
            "uri": f"{location}-docker.pkg.dev/{self._project.id}/{repository}/{image}@{digest}",
            "imageSizeBytes": str(size),
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "uploadTime": now,
            "updateTime": now,
        }

    def _create(self, asked: Asked) -> Mapping[str, Any]:
        wanted = asked.one("repositoryId") or ""
        if _REPOSITORY.fullmatch(wanted) is None:
            raise invalid("a repository's id is 1 to 63 lower-case letters, digits and hyphens", "repository_id")
        if asked.body.get("format", "FORMAT_UNSPECIFIED") == "FORMAT_UNSPECIFIED":
            raise invalid("a repository has a format", "repository.format")
        name = self._name(f"{asked.names['parent']}/repositories/{wanted}")
        if name in self._repositories:
            raise Refusal(409, "the repository already exists")
        now, location = self._project.text(), name.split("/")[3]
        told = {
            **asked.body,
            "name": name,
            "createTime": now,
            "updateTime": now,
            "mode": asked.body.get("mode", "STANDARD_REPOSITORY"),
            "registryUri": f"{location}-docker.pkg.dev/{self._project.id}/{wanted}",
        }

        def effect() -> dict[str, Any]:
            return self._repositories.setdefault(name, told)

        return self._begin(name, effect, "google.devtools.artifactregistry.v1.Repository")

    def _list(self, asked: Asked) -> Mapping[str, Any]:
        if asked.one("filter") or asked.one("orderBy"):
            raise invalid("this sandbox lists repositories without filter and order", "filter")
        parent = self._name(asked.names["parent"]) + "/"
        every = [told for name, told in self._repositories.items() if name.startswith(parent)]
        found, token = paged(every, asked.number("pageSize"), asked.one("pageToken"))
        return {"repositories": found, **({"nextPageToken": token} if token else {})}

    def _patch(self, asked: Asked) -> Mapping[str, Any]:
        told = self._found(asked.names["name"])
        if not (mask := asked.one("updateMask")):
            raise invalid("an update mask is required", "update_mask")
        changed = masked(told, asked.body, mask) | {"updateTime": self._project.text()}
        if changed.get("format") != told.get("format"):
            raise invalid("a repository's format cannot be changed", "repository.format")
        self._repositories[str(told["name"])] = changed
        return changed

    def _get_image(self, asked: Asked) -> Mapping[str, Any]:
        found = self._images.get(self._name(asked.names["name"]))
        if found is None:
            raise absent(f"Requested entity was not found. ({asked.names['name']})")
        return found

    def _list_images(self, asked: Asked) -> Mapping[str, Any]:
        inside = f"{self._found(asked.names['parent'])['name']}/"
        every = [told for name, told in sorted(self._images.items()) if name.startswith(inside)]
        found, token = paged(every, asked.number("pageSize"), asked.one("pageToken"))
        return {"dockerImages": found, **({"nextPageToken": token} if token else {})}

    def _list_packages(self, asked: Asked) -> Mapping[str, Any]:
        name = str(self._found(asked.names["parent"])["name"])
        held = {self._package(image) for image in self._images if image.startswith(f"{name}/")}
        every: list[Mapping[str, Any]] = [{"name": one, "displayName": one.rpartition("/")[2]} for one in sorted(held)]
        found, token = paged(every, asked.number("pageSize"), asked.one("pageToken"))
        return {"packages": found, **({"nextPageToken": token} if token else {})}

    def _delete_package(self, asked: Asked) -> Mapping[str, Any]:
        name = self._name(asked.names["name"])
        if name not in {self._package(image) for image in self._images}:
            raise absent(f"Requested entity was not found. ({asked.names['name']})")

        def effect() -> dict[str, Any]:
            self._images = {full: told for full, told in self._images.items() if self._package(full) != name}
            return {}

        return self._begin(name, effect, "google.protobuf.Empty")

    def _package(self, image: str) -> str:
        """The name of an image without its digest, as packages are named."""
        repository, _, name = image.partition("/dockerImages/")
        return f"{repository}/packages/{name.partition('@')[0]}"

    def _delete(self, asked: Asked) -> Mapping[str, Any]:
        name = str(self._found(asked.names["name"])["name"])

        def effect() -> dict[str, Any]:
            self._repositories.pop(name, None)
            self._images = {full: told for full, told in self._images.items() if not full.startswith(f"{name}/")}
            self._project.policies.forget(name)
            return {}

        return self._begin(name, effect, "google.protobuf.Empty")

    def _begin(self, name: str, effect: Any, kind: str) -> dict[str, Any]:
        return self._operations.begin("/".join(name.split("/")[:4]), effect, response_type=kind)

    def _get_policy(self, asked: Asked) -> Mapping[str, Any]:
        name = str(self._found(asked.names["resource"])["name"])
        return self._project.policies.told(name, asked.number("options.requestedPolicyVersion"))

    def _set_policy(self, asked: Asked) -> Mapping[str, Any]:
        name = str(self._found(asked.names["resource"])["name"])
        self._project.policies.put(name, asked.body.get("policy", {}))
        return self._project.policies.told(name, 3)

    def _found(self, name: str) -> dict[str, Any]:
        found = self._repositories.get(self._name(name))
        if found is None:
            raise absent(f"Requested entity was not found. ({name})")
        return found

    def _name(self, name: str) -> str:
        parts = name.split("/")
        if not self._project.is_mine(parts[1]):
            raise Refusal(403, f"Permission denied on resource project {parts[1]}.")
        return "/".join(("projects", self._project.id, *parts[2:]))
