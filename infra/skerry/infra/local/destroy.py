"""Takes a run away: its processes and containers that are left, its objects, its folder on this machine. Nothing else.

Only keys that a run has are deleted, and only under a prefix that holds a run.json: a spec whose store points at a
folder of something else loses nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from skerry.infra import coherence
from skerry.infra.engine import Engine
from skerry.infra.founding import objects_of, remove_run
from skerry.infra.reports import Remains
from skerry.infra.targets import docker
from skerry.infra.workspace import Workspace, remove_empty
from skerry.runtime.store import open_store
from skerry.runtime.store.directory import TEMPORARY

if TYPE_CHECKING:
    from skerry.infra.spec import SpecFile
    from skerry.runtime.clock import Clock

# Every verb of a call that somebody waits for.
_DEADLINE_S: Final = 20.0


def survey(spec: SpecFile, clock: Clock) -> Remains:
    """What `destroy` would remove now."""
    entries = objects_of(open_store(spec.run_uri, clock=clock, deadline_s=_DEADLINE_S))
    folder = spec.work_folder
    return Remains(
        uri=spec.run_uri,
        objects=len(entries),
        size_bytes=sum(entry.size for entry in entries),
        processes=len(Workspace(folder).processes()),
        folder=folder if folder.exists() else None,
    )


def destroy(spec: SpecFile, clock: Clock) -> Remains:
    """Remove the run and return what was removed. Raises Conflict, having removed nothing, while it is up here."""
    workspace = Workspace(spec.work_folder)
    had_folder = spec.work_folder.exists()
    with workspace.alone():
        ended = workspace.end_leftovers()
        # Of an `up` that was killed: they have ended, or do so now.
        in_docker = any(seat.target.kind == "docker" for seat in spec.seats)
        containers = docker.remove_containers(Engine(), spec.run_uri) if in_docker else []
        store = open_store(spec.run_uri, clock=clock, deadline_s=_DEADLINE_S)
        entries = remove_run(store)
        if spec.run_uri.startswith(coherence.FILE) and entries:
            folder = Path(unquote(spec.run_uri.removeprefix(coherence.FILE)))
            shutil.rmtree(folder / TEMPORARY, ignore_errors=True)
            remove_empty(folder)
        workspace.remove()
    return Remains(
        uri=spec.run_uri,
        objects=len(entries),
        size_bytes=sum(entry.size for entry in entries),
        processes=len(ended) + len(containers),
        folder=spec.work_folder if had_folder else None,
    )
