"""Creates, loads, checks and deletes run.json, the immutable record of a run.

Nothing is deleted under a prefix with neither a run.json nor the mark of a mirror. Both are deleted last, so that an
interrupted removal can be finished.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.run.source_checkpoint import find_source
from skerry.infra.spec.model import changed_by
from skerry.runtime.errors import Corrupt, Invalid, SkerryError, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import check_lives_here, read_elsewhere
from skerry.runtime.log.run_record import FailoverSettings, MirrorSettings, PeerCopies, Run
from skerry.runtime.mirrors.ballots import read_verdict
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.run.source_checkpoint import Source
    from skerry.infra.spec.model import SpecFile
    from skerry.infra.spec.yaml_document import Where
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Entry, Store

_FOLDERS: Final = (
    keys.HEARTBEATS,
    keys.PAYLOADS,
    keys.CHECKPOINTS,
    keys.INITIAL,
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
    keys.SPENT,
    keys.FAILOVER,
)
# Deleted last, in this order.
_LAST: Final = (keys.STATE_ELSEWHERE, keys.RUN, keys.ELSEWHERE)


def create_or_load_run(
    store: Store,
    spec: SpecFile,
    clock: Clock,
    find: Callable[[SpecFile], Source | None] | None = None,
    usd_per_gb: Mapping[str, float] | None = None,
) -> tuple[Run, bool]:
    """The run.json of this prefix, and whether it existed before.

    A new run that starts from another one first gets a copy of that run's checkpoint; an existing run never asks it
    again. find: finds that checkpoint; None is `find_source_of`. usd_per_gb: the price of traffic to mirrors, by their
    URIs; 0 where there is none. Raises Invalid if run.json differs from the spec, and
    the errors of `find_source` and `check_lives_here`.
    """
    proposed = _proposed(spec, clock, usd_per_gb or {}).model_copy(update={"store": store.uri})
    find = find or find_source_of
    if spec.source is not None and load_settings(store) is None and (source := find(spec)) is not None:
        source.copy_to(store)
        proposed = proposed.model_copy(update={"init_from": source.initial})
    if store.create(keys.RUN, proposed.to_bytes()):
        return proposed, False
    existing = load_settings(store)
    if existing is None:
        raise Corrupt(f"{keys.RUN} exists but is unreadable: {store.uri}")
    check_lives_here(store, existing.first)
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


def require_settings(store: Store) -> RunSettings:
    """As `load_settings`. Raises SkerryError, with the next step, if no run was started there."""
    settings = load_settings(store)
    if settings is None:
        remedy = "start it with `skerry up`, or name a spec, or the URI of a run's own prefix"
        raise SkerryError(f"no run at {store.uri}; {remedy}")
    return settings


def check_not_lost(spec: SpecFile, open_at: Callable[[str], Store]) -> None:
    """Raise Invalid if a mirror of the spec holds the run that its store has not: a new one would begin at round 0.

    Also if the place is taken at which a run with failover would go on.
    open_at: opens a mirror. One that cannot be read is passed over: before the first apply no bucket exists.
    """
    for uri in spec.mirrors:
        try:
            store = open_at(uri)
            run, move = load_run(store), find_move(store)
        except (SkerryError, OSError):
            continue
        if move is not None:
            raise Invalid(f"run {spec.spec.run} left {spec.run_uri}: {move}")
        if run is not None and run.name == spec.spec.run:
            raise Invalid(
                f"no run at {spec.run_uri}, but its mirror {uri} has one; continue it with `skerry restore`, "
                f"delete it with `skerry destroy {uri}`, or name this run otherwise: run: "
                f"({spec.written.place(('run',))})"
            )
    if (mirror := spec.failover_mirror) is not None:
        uri = mirror + keys.GOES_ON
        try:
            run = load_run(open_at(uri))
        except (SkerryError, OSError):
            return
        if run is not None:
            raise Invalid(
                f"{uri}, where this run would go on by itself, has run {run.name} already; delete it with `skerry "
                f"destroy {uri}`, or name this run otherwise: run: ({spec.written.place(('run',))})"
            )


@dataclass(frozen=True, kw_only=True)
class Move:
    """The place where a run goes on after its store was lost, and from which round. votes: the slots that decided it,
    none if an operator did.
    """

    uri: str
    round: int
    votes: tuple[str, ...]

    def __str__(self) -> str:
        """For people, with what to write into the spec."""
        root, _, name = self.uri.rpartition("/")
        return (
            f"it goes on at {self.uri} from round {self.round}; write `store: {root}`, `run: {name}`, and no "
            "`failover:` or `replication:`"
        )


def find_move(mirror: Store) -> Move | None:
    """The place at which the run of a mirror goes on, by the votes in it; None if it is still in its store."""
    verdict = read_verdict(mirror)
    if verdict is None or verdict.uri is None:
        return None
    return Move(uri=verdict.uri, round=verdict.round, votes=verdict.votes)


def is_mirror(store: Store, run_uri: str) -> bool:
    """True if this prefix is a mirror of the run."""
    mark = read_elsewhere(store)
    return mark is not None and mark.why == "mirror" and mark.uri.rstrip("/") == run_uri.rstrip("/")


def find_source_of(spec: SpecFile, open_source: Callable[[str], Store] = open_store) -> Source | None:
    """The checkpoint that a new run of this spec starts from; None if it starts with the model of its script."""
    if spec.source is None:
        return None
    uri, number = spec.source
    if uri == spec.run_uri:
        raise Invalid(f"init_from: a run cannot start from itself: {uri} ({spec.written.place(('init_from',))})")
    try:
        return find_source(open_source(uri), uri, number)
    except (Invalid, Corrupt, Unauthorized) as error:
        raise type(error)(f"init_from: {error} ({spec.written.place(('init_from',))})") from error


def check_same_run(settings: RunSettings, spec: SpecFile, clock: Clock) -> None:
    """Raise Invalid, with every difference, if the spec cannot continue this run.

    The slots may change: a new slot joins like a late one. In a run that makes up lost work, the work due stays as it
    was at the start. What `skerry extend` has changed may be as it was or as it is.
    """
    groups = {slot.rpartition("-")[0] for slot in settings.named}
    for name, first in spec.spec.moved.items():
        if first not in groups:
            place = spec.written.place(("moved", name))
            raise Invalid(
                f"moved: the run has no group {first!r} ({place}); its groups: {', '.join(sorted(groups))}; write the "
                f"first name of {name!r}, or remove the line"
            )
    proposed = _proposed(spec, clock)
    # A spec that was not changed after an extension continues the extended run.
    changed = {name: getattr(settings.now, name) for name in CHANGEABLE if settings.had(name, getattr(proposed, name))}
    proposed, run = proposed.model_copy(update=changed), settings.now
    compared = FIXED.keys() - {"slots", "init_from"}
    before, now = _source(spec, run)
    if before != now or any(_comparable(run, name) != _comparable(proposed, name) for name in compared):
        raise Invalid("\n".join(_differences(spec, run, proposed)))


def list_run_objects(store: Store) -> Sequence[Entry]:
    """All objects of the run under this prefix, the state of its deployment excepted.

    None without a run.json and without the mark of a mirror.
    """
    if store.read(keys.RUN) is None and read_elsewhere(store) is None:
        return ()
    return [
        entry
        for folder in (*_FOLDERS, *_LAST)
        for entry in store.list(folder)
        if folder not in _LAST or entry.key == folder
    ]


def delete_run(store: Store) -> Sequence[Entry]:
    """Delete all objects of the run, and return them."""
    entries = list_run_objects(store)
    # Requests of a few milliseconds each: a run of a thousand rounds has some 10,000 objects.
    with ThreadPoolExecutor(max(1, store.profile.streams)) as pool:
        for _ in pool.map(store.delete, [entry.key for entry in entries if entry.key not in _LAST]):
            pass
    for key in _LAST:
        store.delete(key)
    return entries


def _proposed(spec: SpecFile, clock: Clock, usd_per_gb: Mapping[str, float] | None = None) -> Run:
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
        reduction=None if outer.reduction == "auto" else outer.reduction,
        reduce_in=outer.reduce_in,
        weighting=outer.weighting,
        layout=2,
        links=True,
        max_norm=outer.max_norm,
        work=float(outer.rounds * len(spec.replica_slots)) if faults.make_up and outer.rounds is not None else None,
        created=clock.utc_text(),
        peers=_peers(spec),
        mirrors=mirror_settings(spec, usd_per_gb or {}) or None,
        failover=_failover(spec),
    )


def _failover(spec: SpecFile) -> FailoverSettings | None:
    if (mirror := spec.failover_mirror) is None:
        return None
    return FailoverSettings(mirror=mirror, uri=mirror + keys.GOES_ON, after_s=spec.spec.failover_after.total_seconds())


def _peers(spec: SpecFile) -> PeerCopies | None:
    if (line := spec.peers) is None:
        return None
    return PeerCopies(
        every_s=line.time.total_seconds(),
        copies=line.copies or 2,
        apart=line.apart if isinstance(line.apart, int) else None,
        memory=line.memory is not False,
    )


def mirror_settings(spec: SpecFile, usd_per_gb: Mapping[str, float]) -> tuple[MirrorSettings, ...]:
    """The mirrors of a spec as replicas keep them. usd_per_gb: as of `create_or_load_run`."""
    return tuple(
        MirrorSettings(
            uri=uri,
            every=line.rounds,
            each_round=line.each_round,
            private=line.private is not False,
            max_usd=line.max_usd,
            usd_per_gb=usd_per_gb.get(uri, 0.0),
        )
        for uri, line in spec.mirrors.items()
    )


FIXED: Final[Mapping[str, Where]] = {
    "name": ("run",),
    "slots": ("replicas",),
    "init_from": ("init_from",),
    **{
        name: ("outer", name)
        for name in ("rounds", "sync_every", "fragments", "codec", "reduction", "reduce_in", "weighting", "max_norm")
    },
    "outer_lr": ("outer", "lr"),
    "outer_momentum": ("outer", "momentum"),
    "min_replicas": ("faults", "min_replicas"),
    "grace_s": ("faults", "grace"),
    "start_window_s": ("faults", "start_window"),
    "keep_unfinished_s": ("faults", "keep_unfinished"),
    "work": ("faults", "make_up"),
    "peers": ("replication",),
    "mirrors": ("replication",),
    "failover": ("failover",),
    **{name: ("faults", name) for name in ("checkpoint_every", "keep_checkpoints", "keep_every")},
}


CHANGEABLE: Final[Mapping[str, str]] = {
    name: command
    for name, where in FIXED.items()
    if where[0] == "outer" and (command := changed_by(str(where[-1]))) is not None
}
"""The fields of a run that a command changes, with that command."""


def _source(spec: SpecFile, run: Run) -> tuple[str, str]:
    """The model that the run starts from, and that of the spec, for people; without a round, it is the one of the run.

    Equal if the spec may continue the run.
    """
    of_run = run.init_from
    before = "null" if of_run is None else f"{of_run.uri}@{of_run.round}"
    if spec.source is None:
        return before, "null"
    uri, number = spec.source
    same = of_run is not None and uri == of_run.uri and number in (None, of_run.round)
    return before, before if same else str(spec.spec.init_from)


def _differences(spec: SpecFile, run: Run, proposed: Run) -> Iterator[str]:
    yield (
        f"run {run.name!r} was started with other values on {run.created}; undo the changes, give the run "
        "another name, or run `skerry destroy` to delete the old one"
    )
    is_fixed = False
    for name, where in FIXED.items():
        before, now = _shown(_comparable(run, name)), _shown(_comparable(proposed, name))
        if name == "init_from":
            before, now = _source(spec, run)
        if before == now:
            continue
        command = CHANGEABLE.get(name)
        if name == "slots":
            remedy = "may change at any time"
        elif name == "rounds" and not _is_longer(run, proposed):
            remedy = "a run can only become longer; stop it to end it before"
        elif command is not None:
            remedy = f"`{command} {now}` changes it"
        else:
            remedy, is_fixed = "fixed when the run starts", True
        yield f"  {where[-1]}: {before} -> {now} ({spec.written.place(where)}); {remedy}"
    if is_fixed:
        yield (
            f"what is fixed needs a new run: write e.g. `run: {run.name}-2`, and `init_from: {spec.run_uri}` to start "
            "with the model of this one"
        )


def _is_longer(run: Run, proposed: Run) -> bool:
    return run.rounds is not None and proposed.rounds is not None and proposed.rounds > run.rounds


def _comparable(run: Run, name: str) -> object:
    """The value of a field to compare. The amount of work follows from other fields, so only its presence counts.

    Prices change, and are those of the start.
    """
    match name:
        case "work":
            return run.work is not None
        case "mirrors":
            return tuple(mirror.model_copy(update={"usd_per_gb": 0.0}) for mirror in run.mirrors or ())
        case _:
            return getattr(run, name)


def _shown(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case None | ():
            return "null"
        case tuple():
            return ", ".join(map(_shown, value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case PeerCopies() | MirrorSettings() | FailoverSettings():
            fields = value.model_dump(exclude={"usd_per_gb"}, exclude_defaults=True).items()
            return "{" + ", ".join(f"{name}: {_shown(field)}" for name, field in fields) + "}"
        case float():
            return f"{value:g}"
        case _:
            return str(value)
