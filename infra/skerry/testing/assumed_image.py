"""The image that a sandbox with `any_image` has under every name: a manifest and a configuration without layers."""

from __future__ import annotations

import hashlib
import json
from typing import Final

MEDIA_TYPE: Final = "application/vnd.docker.distribution.manifest.v2+json"
ASSUMED_CONFIG: Final = json.dumps({"architecture": "amd64", "os": "linux"})
_DIGEST: Final = f"sha256:{hashlib.sha256(ASSUMED_CONFIG.encode()).hexdigest()}"
ASSUMED_MANIFEST: Final = json.dumps(
    {"schemaVersion": 2, "mediaType": MEDIA_TYPE, "config": {"digest": _DIGEST}, "layers": []}
)
