"""Deletes a run: its remaining processes and containers, its objects, and its folder on this machine.

Only a run's keys are deleted, and only under a prefix with a run.json or the mark of a mirror, so a spec whose store
names another folder deletes nothing there. Mirrors are deleted only on request: the run can be restored from them.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from skerry.infra.local.container_starts import remove_containers
from skerry.infra.local.docker_engine import Engine
from skerry.infra.local.up_destroy_events import Leftovers
from skerry.infra.local.workspace import Workspace, remove_empty
from skerry.infra.run.run_record import delete_run, is_mirror, list_run_objects
from skerry.infra.spec import store_uri
from skerry.runtime.errors import SkerryError
from skerry.runtime.store import open_store
from skerry.runtime.store.directory import TEMPORARY
from skerry.runtime.store.parallel import run_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.model import SpecFile
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Entry, Store

# For every store call; a person waits for the command.
_DEADLINE_S: Final = 20.0


def list_leftovers(spec: SpecFile, clock: Clock, *, data: bool = False) -> Leftovers:
    """The remains that `destroy` would delete now, and the mirrors that it would leave. data: as of `destroy`."""
    folder = spec.work_folder
    mirrors = tuple(_mirrors(spec, clock, data=data))
    return replace(
        list_objects(spec.run_uri, clock),
        processes=len(Workspace(folder).processes()),
        folder=folder if folder.exists() else None,
        mirrors=mirrors if data else (),
        left=() if data else mirrors,
    )


def list_objects(uri: str, clock: Clock) -> Leftovers:
    """The objects that `destroy_objects` would delete now."""
    return _leftovers(uri, list_run_objects(open_store(uri, clock=clock, deadline_s=_DEADLINE_S)))


def destroy(spec: SpecFile, clock: Clock, *, data: bool = False) -> Leftovers:
    """Delete the run and return what was deleted and left. data: delete its mirrors too, before its own objects.

    Raises Conflict, and deletes nothing, while it is up here.
    """
    workspace = Workspace(spec.work_folder)
    had_folder = spec.work_folder.exists()
    with workspace.locked():
        ended = workspace.kill_leftovers()
        # Containers of an `up` that was killed.
        in_docker = any(replica.target.kind == "docker" for replica in spec.replica_slots)
        containers = remove_containers(Engine(), spec.run_uri) if in_docker else []
        mirrors = tuple(_mirrors(spec, clock, data=data))
        for uri in mirrors if data else ():
            destroy_objects(uri, clock)
        objects = destroy_objects(spec.run_uri, clock)
        workspace.remove()
    processes = len(ended) + len(containers)
    return replace(
        objects,
        processes=processes,
        folder=spec.work_folder if had_folder else None,
        mirrors=mirrors if data else (),
        left=() if data else mirrors,
    )


def destroy_objects(uri: str, clock: Clock) -> Leftovers:
    """Delete the objects of the run at `uri` alone; its folder and its processes are known from its spec only."""
    entries = delete_run(open_store(uri, clock=clock, deadline_s=_DEADLINE_S))
    if entries:
        _remove_folder(uri)
    return _leftovers(uri, entries)


def clear_prefix(store: Store) -> None:
    """Delete all objects of a prefix that this command itself has made up, whether a run is there or not."""
    entries = store.list("")
    run_parallel(store, len(entries), lambda index: store.delete(entries[index].key))
    _remove_folder(store.uri)


def _mirrors(spec: SpecFile, clock: Clock, *, data: bool) -> Iterator[str]:
    """The mirrors that exist. Without `data`, one that cannot be read is passed over, as by the next `up`."""
    for uri in spec.mirrors:
        try:
            if is_mirror(open_store(uri, clock=clock, deadline_s=_DEADLINE_S), spec.run_uri):
                yield uri
        except (SkerryError, OSError):
            if data:
                raise


def _remove_folder(uri: str) -> None:
    if uri.startswith(store_uri.FILE):
        folder = Path(unquote(uri.removeprefix(store_uri.FILE)))
        shutil.rmtree(folder / TEMPORARY, ignore_errors=True)
        remove_empty(folder)


def _leftovers(uri: str, entries: Sequence[Entry]) -> Leftovers:
    size_bytes = sum(entry.size for entry in entries)
    return Leftovers(uri=uri, objects=len(entries), size_bytes=size_bytes, processes=0, folder=None)
