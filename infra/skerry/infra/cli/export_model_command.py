"""The command `skerry export`: the trained model of a run as a file, from its bucket alone. Needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from skerry.infra.cli.common import DEFAULT_SPEC, AsJson, Overrides, RunName, errors_as_exit_codes, to_json
from skerry.infra.cli.open_run import open_run
from skerry.infra.number_text import size_text
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.store.retrying import DEADLINE_S


def export(
    run: RunName = str(DEFAULT_SPEC),
    overrides: Overrides = None,
    *,
    path: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="It ends with .safetensors, or .pt for all state.")
    ] = Path("model.safetensors"),
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="After so many rounds. The newest checkpoint otherwise.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the trained model to a file, checked against the log. The run may continue meanwhile."""
    with errors_as_exit_codes(as_json=as_json):
        try:
            from skerry.runtime.export import check_path, write  # noqa: PLC0415  the operator's machine has no torch
        except ImportError as error:
            raise Invalid(f"export needs torch ({error}): pip install 'skerry[export]'") from error
        check_path(path, force=force)
        store = open_run(run, overrides or (), SystemClock(), DEADLINE_S).store
        with Console(stderr=True).status(f"reading a checkpoint of {store.uri}"):
            written = write(store, path, round_number, force=force)
        if as_json:
            typer.echo(to_json(written))
            return
        typer.echo(
            f"{path}: {written.run} after {written.round} rounds, {written.tensors} tensors, "
            f"{size_text(written.size_bytes)}"
        )
        if written.by_fragment:
            typer.echo("note: the script registered no model; names are those in DiLoCo's fragments", err=True)
        if written.disputed:
            typer.echo(
                f"warning: the replicas reported different states after {written.round} rounds, and no majority says "
                "which is right: their hardware rounds differently, or one was damaged. `skerry doctor` names them; "
                "--round exports another checkpoint",
                err=True,
            )
