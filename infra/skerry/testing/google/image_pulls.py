"""Artifact Registry by the registries' own protocol: manifests and what they name, as far as a pull goes.

All of it lies in the registry that stands in, under the project and the repository. Nothing can be pushed here. What
is not there is refused with Google's status; its words are not told further.
Source: OCI distribution specification, "Pulling manifests", "Pulling blobs".
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final

from skerry.infra.testing.google.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.google.principals import Principal
    from skerry.infra.testing.google.project import Project

_PLACE: Final = re.compile(r"/v2/([^/]+)/[^/]+/.+/(?:manifests|blobs)/[^/]+")
_DOWNLOAD: Final = "artifactregistry.repositories.downloadArtifacts"
_ANSWER_S: Final = 5.0


class Images:
    """What can be pulled. registry: host:port of what stands in; None holds nothing."""

    def __init__(self, project: Project, registry: str | None) -> None:
        self._project = project
        self._registry = registry

    @staticmethod
    def has(path: str) -> bool:
        """Whether this is where images are asked for. The services of Google that begin with /v2/ have no such path."""
        return _PLACE.fullmatch(path) is not None

    def get(self, path: str, media_type: str, principal: Principal) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and content. Raises Refusal.

        The region is in the registry's host and not in a path: only the project's own policy is asked.
        """
        found = _PLACE.fullmatch(path)
        if found is None or not self._project.is_mine(found[1]):
            raise Refusal(403, f"Permission {_DOWNLOAD!r} denied on resource (or it may not exist).")
        with self._project.lock:
            self._project.check(principal, _DOWNLOAD, self._project.resource)
        if self._registry is None:
            raise _absent(path)
        asked = urllib.request.Request(f"http://{self._registry}{path}", headers={"Accept": media_type})
        try:
            with urllib.request.urlopen(asked, timeout=_ANSWER_S) as answer:  # noqa: S310  loopback
                return 200, {"Content-Type": str(answer.headers.get_content_type())}, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise _absent(path) from error


def _absent(path: str) -> Refusal:
    return Refusal(404, f"Failed to fetch {path!r}: there is no such image here.")
