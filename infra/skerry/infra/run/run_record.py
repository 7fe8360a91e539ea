"""Creates, loads, checks and deletes run.json, the immutable record of a run.

A prefix is a run if it has a run.json: without one nothing is deleted, and it is deleted last, so that an interrupted
removal can be finished.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.run_settings import RunSettings
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.spec.model import SpecFile
    from skerry.infra.spec.yaml_document import Where
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Entry, Store

_FOLDERS: Final = (
    keys.HEARTBEATS,
    keys.PAYLOADS,
    keys.CHECKPOINTS,
    keys.PRIVATE,
    keys.UNFINISHED,
    keys.PINS,
    keys.SETTINGS,
    keys.RECEIPTS,
    keys.CONTRIBUTIONS,
    keys.EXCHANGES,
    keys.COMMITS,
    keys.OUTCOMES,
    keys.MEMBERS,
    keys.ARTIFACTS,
    keys.ROLL_UPS,
    keys.CODE,
    keys.PROBE,
)


def create_or_load_run(store: Store, spec: SpecFile, clock: Clock) -> tuple[Run, bool]:
    """The run.json of this prefix, and whether it existed before. Raises Invalid if it differs from the spec."""
    proposed = _proposed(spec, clock)
    if store.create(keys.RUN, proposed.to_bytes()):
        return proposed, False
    existing = load_settings(store)
    if existing is None:
        raise Corrupt(f"{keys.RUN} exists but is unreadable: {store.uri}")
    check_same_run(existing, spec, clock)
    return existing.now, True


def load_run(store: Store) -> Run | None:
    """The run under this prefix, with its newest settings; None if no run was started there."""
    settings = load_settings(store)
    return None if settings is None else settings.now


def load_settings(store: Store) -> RunSettings | None:
    """The run under this prefix, with every change of its settings; None if no run was started there."""
    data = store.read(keys.RUN)
    return None if data is None else RunSettings(first=Run.parse(data, keys.RUN)).read_newer(store)


def check_same_run(settings: RunSettings, spec: SpecFile, clock: Clock) -> None:
    """Raise Invalid, with every difference, if the spec cannot continue this run.

    The slots may change: a new slot joins like a late one. In a run that makes up lost work, the work due stays as it
    was at the start. What `skerry extend` has changed may be as it was or as it is.
    """
    proposed = _proposed(spec, clock)
    # A spec that was not changed after an extension continues the extended run.
    changed = {name: getattr(settings.now, name) for name in CHANGEABLE if settings.had(name, getattr(proposed, name))}
    proposed, run = proposed.model_copy(update=changed), settings.now
    if any(_comparable(run, name) != _comparable(proposed, name) for name in FIXED if name != "slots"):
        raise Invalid("\n".join(_differences(spec, run, proposed)))


def list_run_objects(store: Store) -> Sequence[Entry]:
    """All objects of the run under this prefix, the state of its deployment excepted; none without a run.json."""
    if store.read(keys.RUN) is None:
        return ()
    return [
        entry
        for folder in (*_FOLDERS, keys.RUN)
        for entry in store.list(folder)
        if folder != keys.RUN or entry.key == keys.RUN
    ]


def delete_run(store: Store) -> Sequence[Entry]:
    """Delete all objects of the run, and return them."""
    entries = list_run_objects(store)
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
        slots=tuple(replica.slot for replica in spec.replica_slots),
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
        work=float(outer.rounds * len(spec.replica_slots)) if faults.make_up and outer.rounds is not None else None,
        created=clock.utc_text(),
    )


FIXED: Final[Mapping[str, Where]] = {
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


CHANGEABLE: Final[Mapping[str, str]] = {
    "rounds": "--rounds",
    "outer_lr": "--outer-lr",
    "outer_momentum": "--outer-momentum",
}
"""The fields of a run that `skerry extend` changes, with its option for each."""


def _differences(spec: SpecFile, run: Run, proposed: Run) -> Iterator[str]:
    yield (
        f"run {run.name!r} was started from another spec on {run.created}; undo the changes, change `run:` to "
        "start a new run, or run `skerry destroy` to delete the old one"
    )
    for name, where in FIXED.items():
        before, now = _shown(_comparable(run, name)), _shown(_comparable(proposed, name))
        if before != now:
            option = None if name == "rounds" and not _is_longer(run, proposed) else CHANGEABLE.get(name)
            remedy = f"; `skerry extend {option} {now}` changes it" if option else ""
            yield f"  {where[-1]}: {before} -> {now} ({spec.written.place(where)}){remedy}"


def _is_longer(run: Run, proposed: Run) -> bool:
    return run.rounds is not None and proposed.rounds is not None and proposed.rounds > run.rounds


def _comparable(run: Run, name: str) -> object:
    """The value of a field to compare. The amount of work follows from other fields, so only its presence counts."""
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
