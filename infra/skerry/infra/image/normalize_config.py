"""An image's configuration without what differs from build to build: dates, container ids, the builder's own words.

The layers are reproducible by themselves. With this the image id and the manifest's digest are too. Pure.
Source: https://github.com/opencontainers/image-spec/blob/v1.1.0/config.md
"""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Of an engine's record of an image, what belongs to the image.
_KEPT: Final = (
    "Cmd",
    "Entrypoint",
    "Env",
    "ExposedPorts",
    "Healthcheck",
    "Labels",
    "Shell",
    "StopSignal",
    "User",
    "Volumes",
    "WorkingDir",
)


def configuration(image: Mapping[str, Any], layers: Sequence[str], seconds: int) -> bytes:
    """The configuration of an image that was built. layers: what made each, in words. seconds: of its commit."""
    created = dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    digests = image["RootFS"]["Layers"]
    words = [*(["base"] * (len(digests) - len(layers))), *layers]
    document = {
        "architecture": image["Architecture"],
        "os": image["Os"],
        "created": created,
        "config": {name: image["Config"][name] for name in _KEPT if image["Config"].get(name)},
        "rootfs": {"type": "layers", "diff_ids": digests},
        "history": [{"created": created, "created_by": text} for text in words],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def archive(document: bytes, reference: str, n_layers: int) -> bytes:
    """A `docker save` archive of the configuration alone: an engine takes the layers that it has already."""
    name = f"{hashlib.sha256(document).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": [f"{n}/layer.tar" for n in range(n_layers)]}]
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for path, data in ((name, document), ("manifest.json", json.dumps(manifest).encode())):
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return plain.getvalue()
