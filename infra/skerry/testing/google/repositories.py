"""Artifact Registry's repositories, packages and image records; image contents are in the sandbox's registry.

Source: the REST reference of Artifact Registry.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.google.refusals import Refusal, absent, invalid
from skerry.testing.google.shared_state import masked, page_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.google.operations import Operations
    from skerry.testing.google.shared_state import Handler, Project, SandboxRequest

_REPOSITORY: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_REPOSITORIES: Final = "artifactregistry.projects.locations.repositories"


class Repositories:
    """The repositories of a project and the records of their images."""

    def __init__(self, project: Project, operations: Operations) -> None:
        self._project = project
        self._operations = operations
        self._repositories: dict[str, dict[str, Any]] = {}
        self._images: dict[str, dict[str, Any]] = {}

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by method id."""
        return {
            f"{_REPOSITORIES}.create": self._create,
            f"{_REPOSITORIES}.get": lambda request: self._existing(request.names["name"]),
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
        """Return LOCATION/ID of each."""
        return ["/".join(name.split("/")[3::2]) for name in self._repositories]

    def clear(self) -> None:
        """Delete all repositories and images."""
        self._repositories.clear()
        self._images.clear()

    def push(self, location: str, repository: str, image: str, digest: str, *, size: int = 0) -> None:
        """Record a pushed image, if its repository exists."""
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

    def _create(self, request: SandboxRequest) -> Mapping[str, Any]:
        repository_id = request.parameter("repositoryId") or ""
        if _REPOSITORY.fullmatch(repository_id) is None:
            raise invalid("a repository's id is 1 to 63 lower-case letters, digits and hyphens", "repository_id")
        if request.body.get("format", "FORMAT_UNSPECIFIED") == "FORMAT_UNSPECIFIED":
            raise invalid("a repository has a format", "repository.format")
        name = self._name(f"{request.names['parent']}/repositories/{repository_id}")
        if name in self._repositories:
            raise Refusal(409, "the repository already exists")
        now, location = self._project.text(), name.split("/")[3]
        resource = {
            **request.body,
            "name": name,
            "createTime": now,
            "updateTime": now,
            "mode": request.body.get("mode", "STANDARD_REPOSITORY"),
            "registryUri": f"{location}-docker.pkg.dev/{self._project.id}/{repository_id}",
        }

        def effect() -> dict[str, Any]:
            return self._repositories.setdefault(name, resource)

        return self._begin(name, effect, "google.devtools.artifactregistry.v1.Repository")

    def _list(self, request: SandboxRequest) -> Mapping[str, Any]:
        if request.parameter("filter") or request.parameter("orderBy"):
            raise invalid("the sandbox does not support filter and orderBy of repositories", "filter")
        parent = self._name(request.names["parent"]) + "/"
        every = [resource for name, resource in self._repositories.items() if name.startswith(parent)]
        return page_of(request, "repositories", every)

    def _patch(self, request: SandboxRequest) -> Mapping[str, Any]:
        resource = self._existing(request.names["name"])
        if not (mask := request.parameter("updateMask")):
            raise invalid("an update mask is required", "update_mask")
        changed = masked(resource, request.body, mask) | {"updateTime": self._project.text()}
        if changed.get("format") != resource.get("format"):
            raise invalid("a repository's format cannot be changed", "repository.format")
        self._repositories[str(resource["name"])] = changed
        return changed

    def _get_image(self, request: SandboxRequest) -> Mapping[str, Any]:
        image = self._images.get(self._name(request.names["name"]))
        if image is None:
            raise absent(f"Requested entity was not found. ({request.names['name']})")
        return image

    def _list_images(self, request: SandboxRequest) -> Mapping[str, Any]:
        inside = f"{self._existing(request.names['parent'])['name']}/"
        every = [resource for name, resource in sorted(self._images.items()) if name.startswith(inside)]
        return page_of(request, "dockerImages", every)

    def _list_packages(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = str(self._existing(request.names["parent"])["name"])
        packages = {self._package(image) for image in self._images if image.startswith(f"{name}/")}
        every: list[Mapping[str, Any]] = [
            {"name": package, "displayName": package.rpartition("/")[2]} for package in sorted(packages)
        ]
        return page_of(request, "packages", every)

    def _delete_package(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = self._name(request.names["name"])
        if name not in {self._package(image) for image in self._images}:
            raise absent(f"Requested entity was not found. ({request.names['name']})")

        def effect() -> dict[str, Any]:
            self._images = {full: resource for full, resource in self._images.items() if self._package(full) != name}
            return {}

        return self._begin(name, effect, "google.protobuf.Empty")

    def _package(self, image: str) -> str:
        """Return the package of an image: its name without the digest."""
        repository, _, name = image.partition("/dockerImages/")
        return f"{repository}/packages/{name.partition('@')[0]}"

    def _delete(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = str(self._existing(request.names["name"])["name"])

        def effect() -> dict[str, Any]:
            self._repositories.pop(name, None)
            self._images = {
                full: resource for full, resource in self._images.items() if not full.startswith(f"{name}/")
            }
            self._project.policies.forget(name)
            return {}

        return self._begin(name, effect, "google.protobuf.Empty")

    def _begin(self, name: str, effect: Any, kind: str) -> dict[str, Any]:
        return self._operations.begin("/".join(name.split("/")[:4]), effect, response_type=kind)

    def _get_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = str(self._existing(request.names["resource"])["name"])
        return self._project.policies.read(name, request.int_parameter("options.requestedPolicyVersion"))

    def _set_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = str(self._existing(request.names["resource"])["name"])
        self._project.policies.write(name, request.body.get("policy", {}))
        return self._project.policies.read(name, 3)

    def _existing(self, name: str) -> dict[str, Any]:
        repository = self._repositories.get(self._name(name))
        if repository is None:
            raise absent(f"Requested entity was not found. ({name})")
        return repository

    def _name(self, name: str) -> str:
        parts = name.split("/")
        if not self._project.is_mine(parts[1]):
            raise Refusal(403, f"Permission denied on resource project {parts[1]}.")
        return "/".join(("projects", self._project.id, *parts[2:]))
