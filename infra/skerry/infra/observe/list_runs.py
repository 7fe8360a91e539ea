"""Lists the runs below a prefix of a store, with a few requests for each. Never writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import list_closed
from skerry.runtime.log.records import Commit
from skerry.runtime.log.run_record import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store import Store

RunState: TypeAlias = Literal["finished", "running", "stopped", "not started", "unreadable"]
# A replica at work writes a heartbeat at least every five seconds; clocks may differ by some seconds.
_ALIVE_S: Final = 60.0
_STREAMS: Final = 16


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One run. rounds: None for an endless run. last_activity: seconds since the epoch; None if the store has no clock.

    running: a heartbeat was written within the last minute.
    """

    name: str
    uri: str
    closed: int
    rounds: int | None
    state: RunState
    last_activity: float | None


def list_runs(
    uri: str, open_at: Callable[[str], Store], list_names: Callable[[str], Sequence[str]], now: float
) -> list[ListedRun]:
    """The runs directly below `uri`, the latest activity first; the run at `uri` itself, if it is one.

    One listing of folders, and for each run six requests, one for each change of its settings and one for every
    thousand rounds. open_at: opens a prefix. list_names: of the folders below one. now: seconds since the epoch. Raises
    what the store raises.
    """

    def read_named(name: str) -> ListedRun | None:
        return _read_run(open_at(f"{uri}/{name}"), name, now)

    if (run := _read_run(open_at(uri), uri.rpartition("/")[2], now)) is not None:
        return [run]
    names = list_names(uri)
    with ThreadPoolExecutor(_STREAMS, thread_name_prefix="runs") as pool:
        listed = pool.map(read_named, names)
        return sorted((run for run in listed if run is not None), key=_by_activity)


def _by_activity(run: ListedRun) -> tuple[float, str]:
    return -(run.last_activity or 0.0), run.name


def _read_run(store: Store, name: str, now: float) -> ListedRun | None:
    data = store.read(keys.RUN)
    if data is None:
        return None
    try:
        run = RunSettings(first=Run.parse(data, keys.RUN)).read_newer(store).now
        commit = _last_commit(store)
    except Corrupt:
        return ListedRun(name=name, uri=store.uri, closed=0, rounds=None, state="unreadable", last_activity=None)
    beats = [entry.modified for entry in store.list(keys.HEARTBEATS)]
    ends = [entry.modified for entry in store.list(keys.OUTCOMES)]
    closed, work = (0, 0.0) if commit is None else (commit.round + 1, commit.work)
    state: RunState = "stopped" if beats else "not started"
    if run.is_over(closed, work):
        state = "finished"
    elif max(beats, default=0.0) > max(now - _ALIVE_S, *ends, 0.0):
        state = "running"
    last = max([*beats, *ends], default=0.0)
    return ListedRun(
        name=run.name, uri=store.uri, closed=closed, rounds=run.rounds, state=state, last_activity=last or None
    )


def _last_commit(store: Store) -> Commit | None:
    listed = list_closed(store, 0)
    data = store.read(listed[-1].key) if listed else None
    return None if data is None else Commit.parse(data, listed[-1].key)
