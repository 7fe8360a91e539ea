"""Finds out if the run of a prefix lives at another URI: in a mirror, after a restore, or in a copy made by hand.

Two writers of one run in two stores cannot see each other, so no replica may start in the wrong one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from skerry.runtime.errors import Invalid, Moved
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import Elsewhere

if TYPE_CHECKING:
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store


def read_elsewhere(store: Store) -> Elsewhere | None:
    """The mark of a mirror, or of a run that was moved; None for a prefix without one."""
    data = store.read(keys.ELSEWHERE)
    return None if data is None else Elsewhere.parse(data, keys.ELSEWHERE)


def check_lives_here(store: Store, run: Run) -> None:
    """One request. Raises Moved if the run was restored at another URI, Invalid if this is a mirror or another copy."""
    mark = read_elsewhere(store)
    if mark is not None and mark.why == "moved":
        raise Moved(f"run {run.name} goes on at {mark.uri}, from round {mark.round} on; use that URI")
    if mark is not None:
        raise Invalid(f"{store.uri} is a mirror of run {mark.uri}: make a run of it with `skerry restore {store.uri}`")
    if run.store is not None and _is_copy(run.store, store.uri):
        raise Invalid(
            f"{store.uri} is a copy of run {run.store}, made by hand: two stores must not go on with one run; make a "
            f"run of it with `skerry restore {store.uri}`"
        )


def _is_copy(original: str, uri: str) -> bool:
    """A folder may be mounted or moved to another place; then the original is the same folder, or is gone."""
    if original.rstrip("/") == uri.rstrip("/"):
        return False
    if not (original.startswith("file:") and uri.startswith("file:")):
        return True
    origin, current = (Path(unquote(urlsplit(each).path)) / keys.RUN for each in (original, uri))
    return origin.exists() and not (current.exists() and origin.samefile(current))
