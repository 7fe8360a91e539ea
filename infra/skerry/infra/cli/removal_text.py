"""Formats what `skerry destroy` would delete, and what it deleted, kept and left."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from skerry.infra.cli.plan_text import change_lines, outcome_line
from skerry.infra.provision.handler import Contents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.deploy.removal import Removal, Removed
    from skerry.infra.provision.graph import Resource


def removal_lines(removal: Removal, bucket: Resource, run: str, *, data: bool) -> Iterator[Text]:
    """The deletions, and what is kept."""
    yield Text(f"destroy {run}", style="bold")
    kept = _kept_addresses(removal, bucket)
    deletions = [change for change in removal.plan.changes if change.address not in kept]
    yield from change_lines([replace(change, because="") for change in deletions])
    yield from kept_lines(removal, bucket, run, data=data)


def kept_lines(removal: Removal, bucket: Resource, run: str, *, data: bool) -> Iterator[Text]:
    """Describes the deletions that the state does not record, and the things that are kept."""
    kept = _kept_addresses(removal, bucket)
    for record in removal.strays:
        if record.address not in kept:
            yield Text(f"  - {record.kind} {record.name}: has the run's tag but is not in the state", style="red")
    for address, contents in removal.in_use.items():
        yield Text(f"  = {address} holds {contents}: kept, because other runs may use it", style="dim")
    for mirror in removal.mirrors:
        whole = data and mirror.ours and not mirror.foreign_objects
        text = "deleted with its bucket" if whole else "deleted" if data else "kept: `--data` deletes it"
        line = f"  {'-' if data else '='} the mirror at {mirror.uri} holds {mirror.contents}: {text}"
        yield Text(line, style="red" if data else "dim")
    if removal.contents.objects:
        goes = data and not removal.foreign_objects
        text = "deleted with its contents" if goes else "kept" if data else "kept: `--data` deletes it"
        line = f"  {'-' if goes else '='} {bucket.address} holds {removal.contents} of the run: {text}"
        yield Text(line, style="red" if goes else "dim")
    if removal.foreign_objects:
        yield Text(f"  = the bucket is kept: {removal.foreign_objects} objects in it are not of this run")
    if removal.objects:
        text = "deleted" if data else "kept: `--data` deletes them"
        contents = Contents(objects=removal.objects, size_bytes=removal.size_bytes)
        yield Text(f"  {contents} at {run}: {text}")


def _kept_addresses(removal: Removal, bucket: Resource) -> set[str]:
    return {bucket.address, *(mirror.bucket.address for mirror in removal.mirrors if mirror.bucket), *removal.in_use}


def removed_lines(removed: Removed, run: str) -> Iterator[Text]:
    """Describes the result of the removal, and what is left of the run."""
    if removed.objects.objects:
        yield Text(f"deleted: {removed.objects} at {run}")
    yield Text(outcome_line(removed.outcome))
    for kept in removed.kept:
        yield Text(f"kept: {kept}")
    for left in removed.left:
        yield Text(f"left: {left}", style="red")
