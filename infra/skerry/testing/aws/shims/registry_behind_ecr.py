"""moto 5.2.5 has no registry behind its ECR: it has only the image records of PutImage, and no layers.

With a registry, BatchGetImage returns the manifest stored there, and GetDownloadUrlForLayer (missing in moto) returns
a URL of the registry; without one, no repository has layers. On request, every image exists without having been pushed.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult
from moto.ecr.models import ECRBackend, Image
from moto.ecr.responses import ECRResponse

from skerry.testing.assumed_image import ASSUMED_CONFIG, ASSUMED_MANIFEST, MEDIA_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.aws.shims.patching import Patches

_MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json, "
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
)
_WAIT_S: Final = 5.0


class _LayersNotFound(ServiceException):
    code = "LayersNotFoundException"


def install(patches: Patches, registry: str | None, any_image: Callable[[], bool]) -> None:
    """Install the shim for images of the registry at host:port, if any. any_image: every image exists."""

    def batch_get_image(self: Any, repository_name: str, registry_id: Any = None, image_ids: Any = None) -> Any:
        if any_image():
            images = [_assumed(self.account_id, repository_name, image_id) for image_id in image_ids or ()]
            return {"images": images, "failures": []}
        answer = moto_get_image(self, repository_name, registry_id, image_ids)
        if registry is None:
            return answer
        answer["failures"] = []
        for image_id in image_ids or ():
            name = str(image_id.get("imageDigest") or image_id.get("imageTag"))
            manifest = _manifest(registry, repository_name, name)
            if manifest is None:
                reason = {"failureCode": "ImageNotFound", "failureReason": "Requested image not found"}
                answer["failures"].append({"imageId": image_id, **reason})
                continue
            text, kind = manifest
            answer["images"] = [image for image in answer["images"] if image.get_image_digest() != name]
            answer["images"].append(
                Image(
                    self.account_id, image_id.get("imageTag"), text, repository_name, kind, image_id.get("imageDigest")
                )
            )
        return answer

    def get_download_url_for_layer(self: Any) -> ActionResult:
        digest, repository = self._get_param("layerDigest"), self._get_param("repositoryName")
        if any_image():
            return ActionResult({"downloadUrl": f"data:,{quote(ASSUMED_CONFIG)}", "layerDigest": digest})
        if registry is None:
            self.ecr_backend.describe_repositories(repository_names=[repository])
            raise _LayersNotFound(f"The specified layers could not be found: {digest}")
        address = f"http://{registry}/v2/{repository}/blobs/{digest}"
        return ActionResult({"downloadUrl": address, "layerDigest": digest})

    moto_get_image: Any = patches.replace(ECRBackend, "batch_get_image", batch_get_image)
    patches.replace(ECRResponse, "get_download_url_for_layer", get_download_url_for_layer)


def _assumed(account: str, repository: str, image_id: Mapping[str, Any]) -> Any:
    tag, digest = image_id.get("imageTag"), image_id.get("imageDigest")
    return Image(account, tag, ASSUMED_MANIFEST, repository, MEDIA_TYPE, digest)


def _manifest(registry: str, repository: str, name: str) -> tuple[str, str] | None:
    address = f"http://{registry}/v2/{repository}/manifests/{name}"
    request = urllib.request.Request(address, headers={"Accept": _MANIFESTS})
    try:
        with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:  # noqa: S310  same
            return answer.read().decode(), str(answer.headers.get_content_type())
    except urllib.error.HTTPError:
        return None
