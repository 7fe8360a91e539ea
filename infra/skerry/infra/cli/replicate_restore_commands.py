"""The commands `replicate` and `restore`: a mirror of a run in another store, and a run made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from skerry.infra.cli.common import (
    DEFAULT_SPEC,
    FAILED,
    Approved,
    AsJson,
    Overrides,
    RunName,
    confirm,
    errors_as_exit_codes,
    is_uri,
    print_lines,
    to_json,
)
from skerry.infra.cli.interrupts import on_signal
from skerry.infra.cli.open_run import open_places
from skerry.infra.cli.run_text import megabytes
from skerry.infra.local.destroy import clear_prefix
from skerry.infra.local.workspace import operator_name
from skerry.infra.observe.doctor.examine import examine_store
from skerry.infra.run.restore_run import (
    RESTORED,
    best_mirror,
    end_original,
    find_restored,
    finder_of_cuts,
    mirrors_of_fork,
    plan_restore,
    restore,
)
from skerry.infra.run.run_record import load_run
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Conflict, Corrupt, Diverged, Invalid, Retryable, SkerryError
from skerry.runtime.log.run_record import MirrorSettings
from skerry.runtime.mirrors.budget import Budget
from skerry.runtime.mirrors.mirror import Mirror, MirrorOptions
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.cli.open_run import RunPlaces
    from skerry.infra.run.restore_run import RestorePlan
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.mirrors.mirror import MirrorProgress
    from skerry.runtime.store import Store

_DEADLINE_S: Final = 20.0
_LOOK_S: Final = 2.0
# Counts bytes in a mirror as a slot does; no slot of a spec has this name, because those end in numbers.
_OPERATOR: Final = "operator"


@dataclass(frozen=True, kw_only=True)
class _Copied:
    """The state of a mirror, for programs."""

    uri: str
    rounds: int
    copied: int
    checkpoint: int | None
    objects: int
    bytes: int
    ok: bool = True


@dataclass(frozen=True, kw_only=True)
class _Restored:
    """A restore. uri: of the new run, None if none was made. ended: slots of the original whose replicas will end.

    not_used: what is damaged, and mirrors that were passed over, with the reason.
    """

    run: str
    round: int
    checkpoint: int
    lost: int
    original: str | None
    uri: str | None
    ended: tuple[str, ...] = ()
    not_used: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    ok: bool = True


def replicate(
    run: RunName = str(DEFAULT_SPEC),
    overrides: Overrides = None,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="STORE", help="The other store: the mirror is STORE/name-of-run. Else the spec's."
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="With --to: rounds between two copied checkpoints.")] = 1,
    payloads: Annotated[
        bool,
        typer.Option(help="With --to: copy what the rounds after the last checkpoint need, so that none is lost."),
    ] = True,
    private: Annotated[bool, typer.Option(help="With --to: copy the state that each replica alone has.")] = True,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a run to another store, from which `restore` can continue it. Repeat it, or --follow, to keep it near."""
    with errors_as_exit_codes(as_json=as_json), on_signal(_interrupt):
        clock = SystemClock()
        places = open_places(run, overrides or (), clock)
        if to is not None:
            uri = mirror_uri(to, places.run.uri)
            settings = (MirrorSettings(uri=uri, every=every, each_round=payloads, private=private),)
        else:
            settings = places.mirrors
        copies = [_Copy(places, each, clock) for each in settings]
        for copy in copies:
            copy.show(as_json=as_json and not follow)
        while follow and not all(copy.is_over for copy in copies):
            clock.pause(_LOOK_S)
            for copy in copies:
                copy.catch_up(as_json=as_json)
        for copy in copies:
            if follow and as_json:
                copy.show(as_json=True)
        for copy in copies:
            copy.check()


def restore_run(
    mirror: Annotated[
        str, typer.Argument(metavar="MIRROR", help="The URI of the mirror or of another copy, or the spec.")
    ] = str(DEFAULT_SPEC),
    overrides: Overrides = None,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URI",
            help="The new run's own prefix. MIRROR-restored otherwise, with failover where its replicas would go on.",
        ),
    ] = None,
    at: Annotated[int | None, typer.Option("--at", metavar="ROUND", min=0, help="After so many closed rounds.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be lost, and end.")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Restore to a temporary prefix, read every byte there, and delete it.")
    ] = False,
    votes_are_lost: Annotated[
        bool,
        typer.Option(
            "--votes-are-lost", help="The mirror in which replicas vote is lost for good, and all are stopped."
        ),
    ] = False,
    yes: Approved = False,
    as_json: AsJson = False,
) -> None:
    """Make a run of a mirror, which continues the lost one. The original's replicas end, where it can be reached."""
    with errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()

        places = None if is_uri(mirror) else open_places(mirror, overrides or (), clock)

        def open_at(uri: str) -> Store:
            return open_store(uri, clock=clock, deadline_s=_DEADLINE_S) if places is None else places.open_at(uri)

        passed: tuple[str, ...] = ()
        with Console(stderr=True).status("reading the mirror" if not dry_run else "looking at the mirror"):
            find = finder_of_cuts(clock, open_at, to, reads_bytes=not dry_run, may_be_done=not rehearse)
            if places is None:
                source = open_at(mirror.rstrip("/"))
            else:
                source, passed = best_mirror([each.uri for each in places.mirrors], open_at, at, find)
            plan = plan_restore(source, at, open_at, find, votes_are_lost=votes_are_lost)
        plan = replace(plan, passed=passed)
        if not as_json:
            print_lines(_plan_lines(plan))
            if dry_run:
                typer.echo("lengths and records were compared; --rehearse and a restore read every byte first")
        if dry_run:
            if as_json:
                typer.echo(to_json(_result(plan)))
        elif rehearse:
            _rehearse(
                source, plan, open_at(f"{source.uri.rstrip('/')}{RESTORED}-{clock.nonce()[:8]}"), clock, as_json=as_json
            )
        else:
            target = open_at((to or plan.target).rstrip("/"))
            if not yes and plan.closed is not None:
                confirm(f"The replicas at {plan.original} will end. Restore to {target.uri}?", flag="--auto-approve")
            if (run := find_restored(target, plan.cut.run, at)) is not None:
                plan = plan.after(run)
                typer.echo(f"restored already; rounds of the original that are not in it: {plan.lost}", err=as_json)
            else:
                lines = () if places is None else places.lines
                mirrors = mirrors_of_fork(lines, plan.cut.run, target.uri)
                run = _make_run(source, plan, target, clock, mirrors)
            _end_and_tell(plan, run, target, clock, open_at, as_json=as_json)


def mirror_uri(store: str, run: str) -> str:
    """The URI of the mirror of a run in another store. Raises Invalid if `store` is no URI."""
    if not is_uri(store):
        raise Invalid(f"--to {store} is not the URI of a store; write s3://bucket/prefix, gs://..., or file:///folder")
    return f"{store.rstrip('/')}/{run.rstrip('/').rpartition('/')[2]}"


def _interrupt() -> None:
    raise KeyboardInterrupt


class _Copy:
    """A mirror that this process brings up to date."""

    def __init__(self, places: RunPlaces, settings: MirrorSettings, clock: Clock) -> None:
        self._target = places.open_at(settings.uri)
        options = MirrorOptions(every=settings.every, payloads=settings.each_round, private=settings.private)
        charge = None
        if (run := load_run(places.run)) is not None:
            # Its limit holds for all copies together, at the prices of the start.
            limited = next((kept for kept in run.mirrors or () if kept.uri == settings.uri), settings)
            charge = Budget(self._target, limited, run.nonce, _OPERATOR).charge
        self._mirror = Mirror(places.run, self._target, clock, options, by=operator_name(), charge=charge)
        self._damage: SkerryError | None = None
        self._progress = self._copy()

    def _copy(self) -> MirrorProgress:
        try:
            progress, self._damage = self._mirror.catch_up(), None
        except (Corrupt, Conflict, Diverged) as error:  # all else is copied
            if str(error) != str(self._damage):
                typer.echo(f"{self._target.uri}: not all can be copied: {error}", err=True)
            progress, self._damage = self._mirror.progress, error
        return progress

    def check(self) -> None:
        """Raises the damage that kept the last pass from copying all."""
        if self._damage is not None:
            raise self._damage

    @property
    def is_over(self) -> bool:
        """True if the run is over, and all of it is in the mirror, or damage keeps its last checkpoint from there."""
        rounds, progress = self._mirror.run.rounds, self._progress
        is_whole = progress.checkpoint == progress.copied or self._damage is not None
        return rounds is not None and progress.copied >= rounds and is_whole

    def catch_up(self, *, as_json: bool) -> None:
        """Make one more pass; a store that does not respond is reported, and tried again."""
        try:
            progress = self._copy()
        except Retryable as error:
            typer.echo(f"{self._target.uri}: behind: {in_short(error)}; trying again", err=True)
            return
        has_more, self._progress = progress != self._progress, progress
        if has_more and not as_json:
            self.show(as_json=False)

    def show(self, *, as_json: bool) -> None:
        """Print the state of the mirror."""
        progress = self._progress
        copied = _Copied(
            uri=self._target.uri,
            rounds=progress.rounds,
            copied=progress.copied,
            checkpoint=progress.checkpoint,
            objects=progress.objects,
            bytes=progress.bytes,
        )
        if as_json:
            typer.echo(to_json(copied))
            return
        state = "no checkpoint yet" if copied.checkpoint is None else f"checkpoint {copied.checkpoint}"
        amount = f"{copied.objects} objects, {megabytes(copied.bytes)}"
        typer.echo(f"{copied.uri}: {copied.copied} of {copied.rounds} rounds, {state}; copied {amount}")


def _plan_lines(plan: RestorePlan) -> list[str]:
    cut = plan.cut
    lines = [f"run {cut.run.name} at {plan.uri}" + (f", a mirror of {plan.original}" if plan.original else "")]
    after = "" if cut.round == cut.checkpoint else f" and {cut.round - cut.checkpoint} rounds after it"
    lines.append(f"goes on from round {cut.round}: checkpoint {cut.checkpoint}{after}")
    if plan.original is not None and plan.closed is None:
        lines.append(f"the original cannot be asked: {plan.unreachable}")
    if plan.lost > 0:
        known = f"{max(cut.logged, plan.closed or 0)} rounds are known to be closed"
        lines.append(f"lost: {plan.lost} rounds; {known}, {cut.logged} of them by the copy's log")
    else:
        lines.append("lost: no round that is known to be closed")
    return [*lines, *(f"not used: {reason}" for reason in plan.not_used)]


def _make_run(
    source: Store, plan: RestorePlan, target: Store, clock: Clock, mirrors: tuple[MirrorSettings, ...]
) -> Run:
    with Console(stderr=True).status("copying") as status:
        return restore(
            source,
            plan,
            target,
            clock,
            mirrors,
            by=operator_name(),
            on_round=lambda done: status.update(f"{done} of {plan.cut.round} rounds"),
        )


def _end_and_tell(
    plan: RestorePlan, run: Run, target: Store, clock: Clock, open_at: Callable[[str], Store], *, as_json: bool
) -> None:
    """End the original of a restored run, and print the next steps."""
    ended, problems = _end_original(plan, run, clock, open_at)
    if as_json:
        typer.echo(to_json(_result(plan, target.uri, ended, problems)))
    else:
        root, _, name = target.uri.rstrip("/").rpartition("/")
        print_lines(
            [
                *([f"will end at {plan.original}: {', '.join(ended)}"] if ended else []),
                *problems,
                *_return_lines(plan),
                f"run {run.name} goes on at {target.uri} from round {plan.cut.round}",
                f"write into its spec `store: {root}` and `run: {name}`",
                *_spec_lines(run),
                "then start its replicas with `skerry up`, in a cloud with `skerry apply`",
            ]
        )
    if problems:
        raise typer.Exit(FAILED)


def _spec_lines(run: Run) -> list[str]:
    """Describes the `replication:` of a restored run, which cannot be a mirror of itself."""
    kept = [mirror.uri.rpartition("/")[0] for mirror in run.mirrors or ()]
    if kept:
        return [f"keep only these lines of its `replication:`: {', '.join(kept)}"]
    return ["remove the stores from its `replication:`; `skerry replicate --to STORE --follow` keeps a new mirror"]


def _return_lines(plan: RestorePlan) -> list[str]:
    if plan.original is None or plan.closed is not None:
        return []
    return [f"if {plan.original} comes back, repeat this command: it ends the replicas there"]


def _end_original(
    plan: RestorePlan, run: Run, clock: Clock, open_at: Callable[[str], Store]
) -> tuple[list[str], list[str]]:
    """Returns the slots whose replicas will end, and the problems."""
    if plan.original is None or plan.closed is None:
        return [], []
    try:
        return end_original(open_at(plan.original), run, clock, operator_name()), []
    except (SkerryError, OSError) as error:
        return [], [f"the replicas at {plan.original} could not be stopped: {error}; stop them, or two runs continue"]


def _rehearse(source: Store, plan: RestorePlan, target: Store, clock: Clock, *, as_json: bool) -> None:
    try:
        with Console(stderr=True).status(f"restoring to {target.uri}"):
            restore(source, plan, target, clock, (), by=None)
            examination = examine_store(target, on_progress=lambda _done, _whole: None)
    finally:
        clear_prefix(target)
    problems = tuple(item.text for item in examination.findings if item.severity == "error")
    if plan.not_used:
        problems += (f"restored without what is not used; `skerry doctor {plan.uri} --repair` mends what it can",)
    if as_json:
        typer.echo(to_json(_result(plan, problems=problems)))
    else:
        print_lines(problems or ["rehearsed: restored, every byte read, and deleted again; nothing else was changed"])
    if problems:
        raise typer.Exit(FAILED)


def _result(
    plan: RestorePlan, uri: str | None = None, ended: Sequence[str] = (), problems: Sequence[str] = ()
) -> _Restored:
    return _Restored(
        run=plan.cut.run.name,
        round=plan.cut.round,
        checkpoint=plan.cut.checkpoint,
        lost=plan.lost,
        original=plan.original,
        uri=uri,
        ended=tuple(ended),
        not_used=plan.not_used,
        problems=tuple(problems),
        ok=not problems,
    )
