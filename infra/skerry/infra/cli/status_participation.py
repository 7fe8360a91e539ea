"""Adds to the state of a run which replicas took part in its rounds, as far as that costs few reads."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from skerry.infra import clouds
from skerry.infra.cli.run_text import participation_lines
from skerry.infra.cost.work_lost_by_failure import Place, after_loss, loss_lines, losses
from skerry.infra.observe.read_participation import read_participation
from skerry.infra.spec.store_uri import FILE
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import Corrupt, Invalid, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import count_single_rounds, find_closed
from skerry.runtime.log.records import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.observe.run_view import RunView
    from skerry.infra.spec.model import SpecFile
    from skerry.runtime.log.records import MirrorState
    from skerry.runtime.store import Store

# Each that is in no roll-up has a contribution and a receipt to read: some ten seconds from a bucket.
_MOST_ROUNDS_OF_REPLICAS: Final = 5000

# One listing returns so many commits: a mirror that is further behind costs one for each thousand rounds.
_NEAR: Final = 1000


def mirrors_so_far(
    spec: SpecFile,
    run: Store | None,
    closed: int,
    regions: Mapping[str, str],
    open_at: Callable[[str], Store],
) -> list[str]:
    """Describe how far behind each mirror of the spec is, with the table of losses as of now; empty without mirrors.

    run: its store; None if that is gone. closed: its rounds. regions: of buckets, by URI. open_at: opens a mirror; an
    unreadable one is reported. Raises what the run's store raises.
    """
    if not spec.mirrors:
        return []
    problems = {} if run is None else _problems(run)
    lines: list[str] = []
    places: list[Place] = []
    for uri, line in spec.mirrors.items():
        try:
            store = open_at(uri)
            copied = find_closed(store, max(0, closed - _NEAR))
            if copied == closed - _NEAR:  # further behind than that
                copied = find_closed(store, 0)
            checkpoint = _newest_checkpoint(store)
        except (SkerryError, OSError) as error:
            lines.append(f"mirror {uri}: cannot be read: {in_short(error)}")
            continue
        place = Place(
            uri=uri,
            cloud=_cloud_of(uri),
            region=regions.get(uri),
            line=line,
            copied=copied,
            checkpoint=checkpoint,
            after=after_loss(spec, uri),
        )
        state = "no checkpoint yet" if checkpoint is None else f"checkpoint {checkpoint}"
        behind = f"{closed - copied} behind" if closed > copied else "not behind"
        lines.append(f"mirror {uri}: {copied} of {closed} rounds, {state}; {behind}")
        if problem := problems.get(uri):
            lines.append(f"  not all was copied: {problem}; `skerry doctor` names what is damaged in the run")
        places.append(place)
    home = Place(uri=spec.run_uri, cloud=_cloud_of(spec.run_uri), region=regions.get(spec.run_uri))
    return [*lines, *loss_lines(losses(home, places, spec.peers, spec.spec.faults, closed))]


def _problems(run: Store) -> dict[str, str]:
    """Reads why mirrors are behind, from the replica that has copied most to each: others may have tried before."""
    states: defaultdict[str, list[MirrorState]] = defaultdict(list)
    for entry in run.list(keys.HEARTBEATS):
        with suppress(Corrupt):
            for state in Heartbeat.parse(run.read(entry.key) or b"", entry.key).mirrors or ():
                states[state.uri].append(state)
    newest = {
        uri: max(reports, key=lambda state: (state.copied, state.checkpoint or 0, state.problem is None))
        for uri, reports in states.items()
    }
    return {uri: state.problem for uri, state in newest.items() if state.problem is not None}


def _cloud_of(uri: str) -> str | None:
    return clouds.home_of(uri) if clouds.is_home(uri) and not uri.startswith(FILE) else None


def _newest_checkpoint(store: Store) -> int | None:
    """The newest complete checkpoint. One listing; a mirror keeps few."""
    newest: int | None = None
    for entry in store.list(keys.CHECKPOINTS):
        if entry.key.endswith(keys.MANIFEST):
            try:
                number = keys.round_of(entry.key)
            except Invalid:  # a foreign object
                continue
            newest = number if newest is None else max(newest, number)
    return newest


def participation_so_far(store: Store, view: RunView) -> list[str]:
    """The lines of `participation_lines`; the command that reads it, for a long run without roll-ups.

    Raises what the store raises.
    """
    # A short run costs no listing.
    is_long = view.closed * len(view.replicas) > _MOST_ROUNDS_OF_REPLICAS
    if is_long and count_single_rounds(store, view.closed) * len(view.replicas) > _MOST_ROUNDS_OF_REPLICAS:
        return [f"`skerry doctor {view.uri}` reads which replicas took part in which of the {view.closed} rounds"]
    return participation_lines(read_participation(store), view.rounds) if view.closed else []
