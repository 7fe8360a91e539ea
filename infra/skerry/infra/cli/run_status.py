"""Adds to the state of a run which replicas took part in its rounds, as far as that costs few reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.cli.run_text import participation_lines
from skerry.infra.observe.read_participation import read_participation

if TYPE_CHECKING:
    from skerry.infra.observe.run_view import RunView
    from skerry.runtime.store import Store

# Each has a contribution and a receipt to read: some ten seconds from a bucket.
_MOST_ROUNDS_OF_REPLICAS: Final = 5000


def participation_so_far(store: Store, view: RunView) -> list[str]:
    """The lines of `participation_lines`; for a long run, the command that reads it. Raises what the store raises."""
    if view.closed * len(view.replicas) > _MOST_ROUNDS_OF_REPLICAS:
        return [f"`skerry doctor {view.uri}` reads which replicas took part in which of the {view.closed} rounds"]
    return participation_lines(read_participation(store), view.rounds) if view.closed else []
