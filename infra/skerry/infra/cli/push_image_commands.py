"""The commands `skerry image push|ship`: push the replica image that scripts/image has built, for a spec to name it."""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003  typer evaluates annotations
from typing import Annotated, Literal

import typer

from skerry.infra import targets
from skerry.infra.cli.common import errors_as_exit_codes, open_access
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.image import push as image_push
from skerry.infra.local.docker_engine import Engine
from skerry.infra.spec import model
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid

app = typer.Typer(
    name="image",
    help="The replica image: push what `scripts/image build` has built. See images/README.md.",
    no_args_is_help=True,
)
Variant = Annotated[Literal["cpu", "gpu", "cu12"], typer.Option("--variant", help="The torch in it.")]
AllowDirty = Annotated[bool, typer.Option("--allow-dirty", help="Push changes that are not committed.")]


@app.command()
def push(
    repository: Annotated[str, typer.Argument(metavar="REPOSITORY", help="Without a tag; must exist.")],
    variant: Variant = "gpu",
    *,
    tag: Annotated[str | None, typer.Option("--tag", help="Instead of the tag of the commit.")] = None,
    allow_dirty: AllowDirty = False,
) -> None:
    """Push the image and print its digest, which a spec's `image:` pins. Logs in to ECR and Artifact Registry."""
    with errors_as_exit_codes(service="the registry"):
        access = OperatorAccess(SystemClock(), os.environ)
        pushed = image_push.push(
            Engine(), repository, variant, access, _print_progress, tag=tag, allow_dirty=allow_dirty
        )
        typer.echo(f"image: {pushed}")


@app.command()
def ship(
    path: Annotated[Path, typer.Argument(metavar="SPEC", help="The spec; its repositories must exist.")],
    variant: Variant = "gpu",
    *,
    allow_dirty: AllowDirty = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Push nothing; digests stay unknown.")] = False,
) -> None:
    """Push the image to every repository of a spec's images. Prints the `--set` values that pin them."""
    with errors_as_exit_codes(service="the registry"):
        spec = model.load(path, targets.kinds())
        if not spec.deployed:
            raise Invalid(f"{path} runs on this machine with a local image, so there is nothing to push")
        access = open_access(spec)
        engine = None if dry else Engine()
        references = {
            repository: f"{repository}@{image_push.UNKNOWN}"
            if engine is None
            else image_push.push(engine, repository, variant, access, _print_progress, allow_dirty=allow_dirty)
            for repository in image_push.repositories(spec.spec)
        }
        for line in image_push.pins(spec.spec, references):
            typer.echo(line)


def _print_progress(line: str) -> None:
    typer.echo(line, err=True)
