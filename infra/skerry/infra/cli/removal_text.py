"""Formats what `skerry destroy` would delete, and what is left afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from skerry.infra.cli.plan_text import change_lines, outcome_line
from skerry.infra.provision.handler import Contents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.deploy.removal import Removal, Removed


def removal_lines(removal: Removal, run: str, *, data: bool) -> Iterator[Text]:
    """The deletions, and what is kept."""
    yield Text(f"destroy {run}", style="bold")
    deletions = [change for change in removal.plan.changes if change.address not in removal.data]
    yield from change_lines([replace(change, because="") for change in deletions])
    for record in removal.strays:
        yield Text(f"  - {record.kind} {record.name}: has the run's tag but is not in the state", style="red")
    for address, contents in removal.data.items():
        text = "deleted with its contents" if data else "kept: `--data` deletes it"
        yield Text(f"  {'-' if data else '='} {address} holds {contents}: {text}", style="red" if data else "dim")
    if removal.foreign_objects:
        yield Text(f"  = the bucket is kept: {removal.foreign_objects} objects in it are not of this run")
    if removal.objects:
        text = "deleted" if data else "kept: `--data` deletes them"
        contents = Contents(objects=removal.objects, size_bytes=removal.size_bytes)
        yield Text(f"  {contents} at {run}: {text}")


def removed_lines(removed: Removed) -> Iterator[Text]:
    """Describes the result of the removal, and what is left of the run."""
    yield Text(outcome_line(removed.outcome))
    for left in removed.left:
        yield Text(f"left: {left}", style="red")
