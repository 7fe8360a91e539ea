"""The command `skerry artifacts`: lists and fetches the files that a run's script saved, from its bucket alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.infra.cli.common import (
    DEFAULT_SPEC,
    AsJson,
    Overrides,
    RunName,
    errors_as_exit_codes,
    is_uri,
    load_spec,
    to_json,
)
from skerry.infra.cli.open_run import open_run
from skerry.infra.run.run_record import require_settings
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.log.files_saved_by_script import Artifact, fetch, list_artifacts
from skerry.runtime.output_file import check_output
from skerry.runtime.store.retrying import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class _Artifacts:
    """The output of --json. files: where they were written; empty for a list."""

    artifacts: tuple[Artifact, ...]
    files: tuple[str, ...] = ()


def artifacts(
    run: RunName = str(DEFAULT_SPEC),
    verb: Annotated[
        str | None, typer.Argument(metavar="list|get", help="List them, or get one by its name.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Of the file to get.", show_default=False)] = None,
    overrides: Overrides = None,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE|DIR", help="Where to write it.", show_default=True)
    ] = Path(),
    replica: Annotated[str | None, typer.Option(metavar="SLOT", help="Only of this one.")] = None,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="Saved after so many rounds. The newest otherwise.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: AsJson = False,
) -> None:
    """List or get the files that the script saved with `replica.save`. The run may continue meanwhile."""
    with errors_as_exit_codes(as_json=as_json):
        words = [word for word in (run, verb, name) if word is not None]
        if run in {"list", "get"}:
            words.insert(0, str(DEFAULT_SPEC))
        run, name = words[0], words[2] if len(words) == 3 else None
        if words[1:] not in ([], ["list"], ["get", name]):
            raise Invalid("name the file to get: skerry artifacts [RUN] get NAME; or list them: skerry artifacts [RUN]")
        store = open_run(run, overrides or (), SystemClock(), DEADLINE_S).store
        if replica is not None and not is_uri(run):
            replica = load_spec(run, overrides or ()).spec.slot(replica)
        require_settings(store)
        saved = [
            artifact
            for artifact in list_artifacts(store)
            if replica in (None, artifact.slot) and round_number in (None, artifact.round)
        ]
        if name is None:
            lines = [_line(artifact) for artifact in saved] or ["nothing was saved"]
            typer.echo(to_json(_Artifacts(artifacts=tuple(saved))) if as_json else "\n".join(lines))
            return
        newest = _newest(saved, name)
        paths = _paths(newest, output)
        for path in paths:
            check_output(path, force=force)
        for artifact, path in zip(newest, paths, strict=True):
            fetch(store, artifact, path)
            if not as_json:
                typer.echo(f"{path}: {_line(artifact)}")
        if as_json:
            typer.echo(to_json(_Artifacts(artifacts=tuple(newest), files=tuple(map(str, paths)))))


def _newest(saved: Sequence[Artifact], name: str) -> list[Artifact]:
    """The last save of `name` of each replica. Raises Invalid, listing the names, if there is none."""
    newest = {artifact.slot: artifact for artifact in saved if artifact.name == name}
    if not newest:
        names = sorted({artifact.name for artifact in saved})
        raise Invalid(f"nothing was saved as {name!r}; saved were: {', '.join(names) or 'nothing'}")
    return list(newest.values())


def _paths(newest: Sequence[Artifact], output: Path) -> list[Path]:
    """The path to write each to, in a folder of its replica if there are several. Makes these folders."""
    if len(newest) == 1:
        return [output / newest[0].name if output.is_dir() else output]
    if not output.is_dir():
        slots = ", ".join(artifact.slot for artifact in newest)
        raise Invalid(f"{slots} saved it; name one of them with --replica, or an existing folder with -o")
    for artifact in newest:
        (output / artifact.slot).mkdir(exist_ok=True)
    return [output / artifact.slot / artifact.name for artifact in newest]


def _line(artifact: Artifact) -> str:
    return f"{artifact.name} of {artifact.slot} after {artifact.round} rounds, {artifact.size_bytes:,} bytes"
