"""Writes a `docker load` archive of an image's configuration, without the dates and texts of the classic builder.

`docker image inspect IMAGE | SOURCE_DATE_EPOCH=... python normalize.py IMAGE | docker load`: equal layers then have an
equal id. The engine reuses the layers that it has.
Source: https://github.com/opencontainers/image-spec/blob/v1.1.0/config.md
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
import time

# The other fields of an engine's record are of the container that built the image.
KEPT = {"Cmd", "Entrypoint", "Env", "Healthcheck", "Labels", "StopSignal", "User", "Volumes", "WorkingDir"}

[image] = json.load(sys.stdin)
layers = image["RootFS"]["Layers"]
created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"])))
document = {
    **{name.lower(): image[name] for name in ("Architecture", "Os")},
    "created": created,
    "config": {name: value for name, value in image["Config"].items() if name in KEPT and value},
    "rootfs": {"type": "layers", "diff_ids": layers},
    "history": [{"created": created} for _ in layers],
}
configuration = json.dumps(document, sort_keys=True).encode()
name = f"{hashlib.sha256(configuration).hexdigest()}.json"
manifest = [{"Config": name, "RepoTags": sys.argv[1:], "Layers": [f"{n}/layer.tar" for n in range(len(layers))]}]
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
    for path, data in ((name, configuration), ("manifest.json", json.dumps(manifest).encode())):
        entry = tarfile.TarInfo(path)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
