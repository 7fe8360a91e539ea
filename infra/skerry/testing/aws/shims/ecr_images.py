"""moto 5.2.5 has no registry behind its ECR: it knows of images only what PutImage told it, and of layers nothing.

With a registry beside it, BatchGetImage gives the manifest that lies there, and GetDownloadUrlForLayer (which moto
lacks) an address in it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from moto.core.responses import ActionResult
from moto.ecr.models import ECRBackend, Image
from moto.ecr.responses import ECRResponse

if TYPE_CHECKING:
    from skerry.infra.testing.shims.patches import Patches

_MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json, "
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
)
_WAIT_S: Final = 5.0


def install(patches: Patches, registry: str | None) -> None:
    """Answer as AWS does, for what lies in the registry at host:port; nothing changes without one."""
    if registry is None:
        return

    def batch_get_image(self: Any, repository_name: str, registry_id: Any = None, image_ids: Any = None) -> Any:
        answer = moto_s(self, repository_name, registry_id, image_ids)
        answer["failures"] = []
        for wanted in image_ids or ():
            name = str(wanted.get("imageDigest") or wanted.get("imageTag"))
            found = _manifest(registry, repository_name, name)
            if found is None:
                why = {"failureCode": "ImageNotFound", "failureReason": "Requested image not found"}
                answer["failures"].append({"imageId": wanted, **why})
                continue
            text, kind = found
            answer["images"] = [one for one in answer["images"] if one.get_image_digest() != name]
            answer["images"].append(
                Image(self.account_id, wanted.get("imageTag"), text, repository_name, kind, wanted.get("imageDigest"))
            )
        return answer

    def get_download_url_for_layer(self: Any) -> ActionResult:
        digest, repository = self._get_param("layerDigest"), self._get_param("repositoryName")
        address = f"http://{registry}/v2/{repository}/blobs/{digest}"
        return ActionResult({"downloadUrl": address, "layerDigest": digest})

    moto_s: Any = patches.replace(ECRBackend, "batch_get_image", batch_get_image)
    patches.replace(ECRResponse, "get_download_url_for_layer", get_download_url_for_layer)


def _manifest(registry: str, repository: str, name: str) -> tuple[str, str] | None:
    address = f"http://{registry}/v2/{repository}/manifests/{name}"
    asked = urllib.request.Request(address, headers={"Accept": _MANIFESTS})
    try:
        with urllib.request.urlopen(asked, timeout=_WAIT_S) as answer:  # noqa: S310  same
            return answer.read().decode(), str(answer.headers.get_content_type())
    except urllib.error.HTTPError:
        return None
