"""Deletes a run: its remaining processes and containers, its objects, and its folder on this machine.

Only a run's keys are deleted, and only under a prefix with a run.json, so a spec whose store names another folder
deletes nothing there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from skerry.infra.local.container_starts import remove_containers
from skerry.infra.local.docker_engine import Engine
from skerry.infra.local.up_destroy_events import Leftovers
from skerry.infra.local.workspace import Workspace, remove_empty
from skerry.infra.run.run_record import delete_run, list_run_objects
from skerry.infra.spec import store_uri
from skerry.runtime.store import open_store
from skerry.runtime.store.directory import TEMPORARY

if TYPE_CHECKING:
    from skerry.infra.spec.model import SpecFile
    from skerry.runtime.clock import Clock

# For every store call; a person waits for the command.
_DEADLINE_S: Final = 20.0


def list_leftovers(spec: SpecFile, clock: Clock) -> Leftovers:
    """The remains that `destroy` would delete now."""
    entries = list_run_objects(open_store(spec.run_uri, clock=clock, deadline_s=_DEADLINE_S))
    folder = spec.work_folder
    return Leftovers(
        uri=spec.run_uri,
        objects=len(entries),
        size_bytes=sum(entry.size for entry in entries),
        processes=len(Workspace(folder).processes()),
        folder=folder if folder.exists() else None,
    )


def destroy(spec: SpecFile, clock: Clock) -> Leftovers:
    """Delete the run and return what was deleted. Raises Conflict, and deletes nothing, while it is up here."""
    workspace = Workspace(spec.work_folder)
    had_folder = spec.work_folder.exists()
    with workspace.locked():
        ended = workspace.kill_leftovers()
        # Containers of an `up` that was killed.
        in_docker = any(replica.target.kind == "docker" for replica in spec.replica_slots)
        containers = remove_containers(Engine(), spec.run_uri) if in_docker else []
        store = open_store(spec.run_uri, clock=clock, deadline_s=_DEADLINE_S)
        entries = delete_run(store)
        if spec.run_uri.startswith(store_uri.FILE) and entries:
            folder = Path(unquote(spec.run_uri.removeprefix(store_uri.FILE)))
            shutil.rmtree(folder / TEMPORARY, ignore_errors=True)
            remove_empty(folder)
        workspace.remove()
    return Leftovers(
        uri=spec.run_uri,
        objects=len(entries),
        size_bytes=sum(entry.size for entry in entries),
        processes=len(ended) + len(containers),
        folder=spec.work_folder if had_folder else None,
    )
