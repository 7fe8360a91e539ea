"""Normalizes an image's configuration: removes dates, container ids and builder texts that differ between builds.

The layers are reproducible already; with this the image id and the manifest's digest are reproducible, too. Pure.
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

# The fields of an engine's image record that belong to the image.
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
    """The configuration of a built image. layers: a description of each. seconds: the time of its commit."""
    created = dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    digests = image["RootFS"]["Layers"]
    descriptions = [*(["base"] * (len(digests) - len(layers))), *layers]
    document = {
        "architecture": image["Architecture"],
        "os": image["Os"],
        "created": created,
        "config": {name: image["Config"][name] for name in _KEPT if image["Config"].get(name)},
        "rootfs": {"type": "layers", "diff_ids": digests},
        "history": [{"created": created, "created_by": text} for text in descriptions],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def archive(document: bytes, reference: str, n_layers: int) -> bytes:
    """A `docker save` archive of the configuration alone; the engine reuses the layers that it has."""
    name = f"{hashlib.sha256(document).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": [f"{n}/layer.tar" for n in range(n_layers)]}]
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for path, data in ((name, document), ("manifest.json", json.dumps(manifest).encode())):
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return plain.getvalue()
