"""An image of this machine, where jobs of a sandbox look for it: its registry, and its account's ECR by name."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's backends have few types.

from __future__ import annotations

import contextlib
import json
from typing import Final

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ecr.exceptions import ImageAlreadyExistsException
from moto.ecr.models import ecr_backends

from skerry.infra.engine import Engine

_TAG: Final = "published"
_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"


def publish(image: str, repository: str, registry: str, region: str) -> tuple[str, str]:
    """Push it, tell ECR if it has the repository, and return the reference by digest: AWS's, and the engine's own."""
    engine = Engine()
    name = f"{registry}/{repository}:{_TAG}"
    engine.images.tag(image, name)
    try:
        digest = engine.images.push(name, None, lambda _: None)
    finally:
        engine.images.remove(name)
    ecr = ecr_backends[DEFAULT_ACCOUNT_ID][region]
    if repository in ecr.repositories:
        # The digest stands in for the manifest, of which moto keeps nothing but what tells two apart.
        manifest = json.dumps({"mediaType": _MANIFEST, "digest": digest})
        with contextlib.suppress(ImageAlreadyExistsException):
            ecr.put_image(repository, manifest, _TAG, digest=digest)
    path = f"{repository}@{digest}"
    return f"{DEFAULT_ACCOUNT_ID}.dkr.ecr.{region}.amazonaws.com/{path}", f"{registry}/{path}"
