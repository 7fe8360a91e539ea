"""The command `doctor`: examines the log of a run, repairs it, moves stray records away, or compares two logs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from skerry.infra import targets
from skerry.infra.cli import doctor_text, up_status_destroy_in_clouds
from skerry.infra.cli.common import (
    DEFAULT_SPEC,
    FAILED,
    AsJson,
    Overrides,
    RunName,
    absolute,
    errors_as_exit_codes,
    is_uri,
    load_spec,
    print_lines,
    run_uri,
    to_json,
)
from skerry.infra.cli.open_run import open_places, open_run
from skerry.infra.deploy.undelete_run_objects import undelete_tensors
from skerry.infra.observe.doctor.compare_logs import compare_logs
from skerry.infra.run import check_machine_and_store
from skerry.infra.run.quarantine_stray import quarantine_stray
from skerry.infra.run.repair_run import known_copies
from skerry.infra.run.repair_run import repair as repair_run
from skerry.infra.spec.units import parse_duration
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.observe.doctor.findings import Examination
    from skerry.infra.provision.handler import Contents
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

_DEADLINE_S: Final = 20.0


@dataclass(frozen=True, kw_only=True)
class Undeletion:
    """The result of `--undelete`: what came back, and the findings that are left."""

    restored: Contents
    log: Examination


def doctor(
    run: RunName = str(DEFAULT_SPEC),
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            show_default=False,
            help="Another spec or URI: only tell where the two logs part.",
        ),
    ] = None,
    overrides: Overrides = None,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read and verify payloads and checkpoints too.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Replace damaged and missing objects by copies with the right digest.")
    ] = False,
    copies: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="URI", help="With --repair: a copy of the run. Its mirrors are known."),
    ] = None,
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine", help="Move records away that stop the run; with --deep also damaged payloads' records."
        ),
    ] = False,
    undelete: Annotated[
        str | None,
        typer.Option("--undelete", metavar="TIME", help="Bring back payloads and checkpoints deleted since then: 2h."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine the run's log and report what is wrong, where, and what to do. Only three options change anything.

    In a cloud, before the first apply: check rights, quotas, machine offers and the image.
    """
    with errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()
        changes = repair + quarantine + (undelete is not None)
        if other is not None and (changes or deep):
            raise Invalid("this option is for a single run; leave out the second one, or the option")
        if changes > 1:
            raise Invalid("one change at a time: first --undelete, then --quarantine, then --repair, as far as needed")
        if copies and not repair:
            raise Invalid("--from names a copy for --repair; add --repair")
        settings = overrides or ()
        if other is not None:
            _compare(run, other, settings, clock, as_json=as_json)
        elif undelete is not None:
            _undelete(run, settings, undelete, clock, deep=deep, as_json=as_json)
        elif quarantine:
            _quarantine(run, settings, clock, deep=deep, as_json=as_json)
        elif repair:
            _repair(run, settings, copies or (), clock, deep=deep, as_json=as_json)
        else:
            _examine(run, settings, clock, deep=deep, as_json=as_json)


def _examine(run: str, overrides: Sequence[str], clock: Clock, *, deep: bool, as_json: bool) -> None:
    if not is_uri(run) and load_spec(run, overrides).deployed:
        spec = check_machine_and_store.load_deployed(Path(run), targets.kinds(), overrides)
        ok = up_status_destroy_in_clouds.doctor(spec, deep=deep, as_json=as_json)
        raise typer.Exit(0 if ok else FAILED)
    store = open_store(run_uri(run, overrides), clock=clock, deadline_s=_DEADLINE_S)
    examination = doctor_text.examine(store, clock, deep=deep)
    if as_json:
        typer.echo(to_json(examination))
    else:
        _show(examination)
    if not examination.ok:
        raise typer.Exit(FAILED)


def _show(examination: Examination) -> None:
    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        console.print(doctor_text.table(examination, console.width))
    else:
        typer.echo("\n".join(doctor_text.plain(examination)))


def _repair(
    run: str, overrides: Sequence[str], copies: Sequence[str], clock: Clock, *, deep: bool, as_json: bool
) -> None:
    places = open_places(run, overrides, clock)
    named = [absolute(uri) for uri in copies]
    others = dict.fromkeys([*named, *(mirror.uri for mirror in places.lines), *known_copies(places.run)])
    stores: list[Store] = []
    for uri in others:
        try:
            stores.append(places.open_at(uri))
        except SkerryError as error:
            typer.echo(f"{uri} cannot be opened: {error}", err=True)
    result = repair_run(
        places.run,
        stores,
        lambda: doctor_text.examine(places.run, clock, deep=deep),
    )
    if as_json:
        typer.echo(to_json(result))
    else:
        print_lines(f"mended: {item.key} from {item.uri}: it was {item.was}" for item in result.mended)
        print_lines(f"not mended: {problem}" for problem in result.problems)
        _show(result.log)
    if not result.ok:
        raise typer.Exit(FAILED)


def _quarantine(run: str, overrides: Sequence[str], clock: Clock, *, deep: bool, as_json: bool) -> None:
    store = open_places(run, overrides, clock).run
    result = quarantine_stray(store, clock, lambda: doctor_text.examine(store, clock, deep=deep))
    if as_json:
        typer.echo(to_json(result))
    else:
        print_lines(f"moved: {record.key} to {record.to}: {record.why}" for record in result.moved)
        if result.kept is not None:
            print_lines([f"not moved: {result.kept}"])
        _show(result.log)
    if not result.ok:
        raise typer.Exit(FAILED)


def _undelete(run: str, overrides: Sequence[str], since: str, clock: Clock, *, deep: bool, as_json: bool) -> None:
    opened = open_run(run, overrides, clock)
    if opened.deployment is None:
        raise Invalid("--undelete needs the spec of a run in a cloud: only its bucket can keep deleted objects")
    left, here = opened.deployment.run, opened.store.uri
    if here.rstrip("/") != left.rstrip("/"):
        raise Invalid(
            f"the run left {left} and is at {here}: --undelete looks at the former only; bring back there what you "
            "need with the tools of its cloud"
        )
    restored = undelete_tensors(opened.deployment, parse_duration(since))
    result = Undeletion(restored=restored, log=doctor_text.examine(opened.store, clock, deep=deep))
    if as_json:
        typer.echo(to_json(result))
    else:
        print_lines([f"brought back: {restored}"])
        _show(result.log)
    if not result.log.ok:
        raise typer.Exit(FAILED)


def _compare(run: str, other: str, overrides: Sequence[str], clock: Clock, *, as_json: bool) -> None:
    places = open_places(run, overrides, clock)
    second = places.open_at(absolute(other)) if is_uri(other) else open_run(other, (), clock).store
    comparison = compare_logs(places.run, second)
    if as_json:
        typer.echo(to_json(comparison))
    else:
        print_lines([comparison.text])
    if not comparison.ok:
        raise typer.Exit(FAILED)
