"""The run.json of a run: made once, and found again by whoever goes on with it. What it fixes is fixed for good.

It is what makes a prefix a run: nothing is deleted where there is none, and it goes last, so that a removal that was
interrupted is found and finished.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from skerry.runtime import keys
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.records import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.document import Where
    from skerry.infra.spec import SpecFile
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Entry, Store

_FOLDERS: Final = (
    keys.HEARTBEATS,
    keys.PAYLOADS,
    keys.CHECKPOINTS,
    keys.PRIVATE,
    keys.UNFINISHED,
    keys.PINS,
    keys.RECEIPTS,
    keys.CONTRIBUTIONS,
    keys.EXCHANGES,
    keys.COMMITS,
    keys.OUTCOMES,
    keys.MEMBERS,
    keys.CODE,
    keys.PROBE,
)


def fix_run(store: Store, spec: SpecFile, clock: Clock) -> tuple[Run, bool]:
    """The run.json of this prefix, written now or before; True if before. Raises Invalid if it says something else."""
    proposed = _proposed(spec, clock)
    if store.create(keys.RUN, proposed.to_bytes()):
        return proposed, False
    found = find_run(store)
    if found is None:
        raise Corrupt(f"{keys.RUN} exists and cannot be read: {store.uri}")
    check_run(found, spec, clock)
    return found, True


def find_run(store: Store) -> Run | None:
    """The run that was started under this prefix, if one was."""
    data = store.read(keys.RUN)
    return None if data is None else Run.parse(data, keys.RUN)


def check_run(found: Run, spec: SpecFile, clock: Clock) -> None:
    """Raise Invalid, naming every difference, if the spec cannot go on with this run.

    Replicas may come and go: a slot that was not there at first joins like one that was late. How much is due in a run
    that makes up for lost work stays what it was at first.
    """
    proposed = _proposed(spec, clock)
    if any(_asked(found, name) != _asked(proposed, name) for name in _FIXED if name != "slots"):
        raise Invalid("\n".join(_differences(spec, found, proposed)))


def objects_of(store: Store) -> Sequence[Entry]:
    """Every object of the run under this prefix, but for what was noted of its deployment; none if there is no run."""
    if store.read(keys.RUN) is None:
        return ()
    return [
        entry
        for folder in (*_FOLDERS, keys.RUN)
        for entry in store.list(folder)
        if folder != keys.RUN or entry.key == keys.RUN
    ]


def remove_run(store: Store) -> Sequence[Entry]:
    """Delete them, and return them."""
    entries = objects_of(store)
    # Requests of a few milliseconds each: a run of a thousand rounds has some 10,000 objects.
    with ThreadPoolExecutor(max(1, store.profile.streams)) as pool:
        for _ in pool.map(store.delete, [entry.key for entry in entries if entry.key != keys.RUN]):
            pass
    store.delete(keys.RUN)
    return entries


def _proposed(spec: SpecFile, clock: Clock) -> Run:
    outer, faults = spec.spec.outer, spec.spec.faults
    return Run(
        nonce=clock.nonce(),
        name=spec.spec.run,
        spec=spec.digest(),
        slots=tuple(seat.slot for seat in spec.seats),
        rounds=outer.rounds,
        sync_every=outer.sync_every,
        fragments=outer.fragments,
        outer_lr=outer.lr,
        outer_momentum=outer.momentum,
        min_replicas=faults.min_replicas,
        grace_s=faults.grace.total_seconds(),
        start_window_s=faults.start_window.total_seconds(),
        checkpoint_every=faults.checkpoint_every,
        keep_checkpoints=faults.keep_checkpoints,
        keep_every=faults.keep_every,
        keep_unfinished_s=None if faults.keep_unfinished is None else faults.keep_unfinished.total_seconds(),
        codec=outer.codec,
        weighting=outer.weighting,
        max_norm=outer.max_norm,
        work=float(outer.rounds * len(spec.seats)) if faults.make_up and outer.rounds is not None else None,
        created=clock.utc_text(),
    )


_FIXED: Final[Mapping[str, Where]] = {
    "name": ("run",),
    "slots": ("replicas",),
    **{name: ("outer", name) for name in ("rounds", "sync_every", "fragments", "codec", "weighting", "max_norm")},
    "outer_lr": ("outer", "lr"),
    "outer_momentum": ("outer", "momentum"),
    "min_replicas": ("faults", "min_replicas"),
    "grace_s": ("faults", "grace"),
    "start_window_s": ("faults", "start_window"),
    "keep_unfinished_s": ("faults", "keep_unfinished"),
    "work": ("faults", "make_up"),
    **{name: ("faults", name) for name in ("checkpoint_every", "keep_checkpoints", "keep_every")},
}


def _differences(spec: SpecFile, found: Run, proposed: Run) -> Iterator[str]:
    yield (
        f"run {found.name!r} was started from another spec on {found.created}; take the changes back, change `run:` to "
        "start a new one, or `skerry destroy` to delete the old one"
    )
    for name, where in _FIXED.items():
        before, now = _shown(_asked(found, name)), _shown(_asked(proposed, name))
        if before != now:
            yield f"  {where[-1]}: {before} -> {now} ({spec.written.place(where)})"


def _asked(run: Run, name: str) -> object:
    """What a spec says of a field. How much work there is follows from other fields."""
    return run.work is not None if name == "work" else getattr(run, name)


def _shown(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return ", ".join(map(str, value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case None:
            return "null"
        case float():
            return f"{value:g}"
        case _:
            return str(value)
