"""Artifact Registry's pull protocol: manifests and blobs, read from the sandbox's registry.

Images are stored there under project and repository. Pushes are not supported. An absent image is refused with
Google's status, without Google's message.
Source: OCI distribution specification, "Pulling manifests", "Pulling blobs".
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Final

from skerry.testing.assumed_image import ASSUMED_CONFIG, ASSUMED_MANIFEST, MEDIA_TYPE
from skerry.testing.google.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.google.access_tokens import Principal
    from skerry.testing.google.shared_state import Project

_PATH: Final = re.compile(r"/v2/([^/]+)/[^/]+/.+/(?:manifests|blobs)/[^/]+")
_DOWNLOAD: Final = "artifactregistry.repositories.downloadArtifacts"
_TIMEOUT_S: Final = 5.0


class Images:
    """The images that can be pulled. registry: host:port; None has no images. any_image: every image exists."""

    def __init__(self, project: Project, registry: str | None, any_image: Callable[[], bool]) -> None:
        self._project = project
        self._registry = registry
        self.any_image = any_image

    @staticmethod
    def has(path: str) -> bool:
        """Return True for paths of the pull protocol; no Google service under /v2/ has such paths."""
        return _PATH.fullmatch(path) is not None

    def get(self, path: str, media_type: str, principal: Principal) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and content. Raises Refusal.

        The region is in the registry's host and not in the path, so only the project's policy is checked.
        """
        if self.any_image():
            content = ASSUMED_MANIFEST if "/manifests/" in path else ASSUMED_CONFIG
            return 200, {"Content-Type": MEDIA_TYPE}, content.encode()
        match = _PATH.fullmatch(path)
        if match is None or not self._project.is_mine(match[1]):
            raise Refusal(403, f"Permission {_DOWNLOAD!r} denied on resource (or it may not exist).")
        with self._project.lock:
            self._project.check(principal, _DOWNLOAD, self._project.resource)
        if self._registry is None:
            raise _absent(path)
        request = urllib.request.Request(f"http://{self._registry}{path}", headers={"Accept": media_type})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310  loopback
                return 200, {"Content-Type": str(response.headers.get_content_type())}, response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise _absent(path) from error


def _absent(path: str) -> Refusal:
    return Refusal(404, f"Failed to fetch {path!r}: the image does not exist.")
