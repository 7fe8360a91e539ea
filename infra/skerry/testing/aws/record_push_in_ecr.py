"""Records an image that was pushed to the sandbox's registry in the account's ECR."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's backends have few types.

from __future__ import annotations

import contextlib
import json
from typing import Final

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ecr.exceptions import ImageAlreadyExistsException
from moto.ecr.models import ecr_backends

_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"


def record_image(repository: str, digest: str, region: str) -> str:
    """Add the image to the ECR repository, if that exists, and return the reference by digest that specs pin."""
    ecr = ecr_backends[DEFAULT_ACCOUNT_ID][region]
    if repository in ecr.repositories:
        # moto uses the manifest only to tell images apart; the digest is enough for that.
        manifest = json.dumps({"mediaType": _MANIFEST, "digest": digest})
        with contextlib.suppress(ImageAlreadyExistsException):
            ecr.put_image(repository, manifest, "published", digest=digest)
    return f"{DEFAULT_ACCOUNT_ID}.dkr.ecr.{region}.amazonaws.com/{repository}@{digest}"
