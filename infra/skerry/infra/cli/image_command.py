"""The commands `skerry image VERB`: build, list, push, ship and pin the replica image of a checkout."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from skerry.infra import targets
from skerry.infra.cli.common import AsJson, errors_as_exit_codes
from skerry.infra.image import building, source
from skerry.infra.image import push as image_push
from skerry.infra.image import sbom as image_sbom
from skerry.infra.local.docker_engine import Engine
from skerry.infra.spec import model
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid

app = typer.Typer(
    name="image",
    help="The replica image, from a checkout: build it, list its packages, push it. See images/README.md.",
    no_args_is_help=True,
)
Variant = Annotated[Literal["cpu", "gpu", "cu12"], typer.Option("--variant", help="The torch in it.")]


@app.command()
def build(
    variant: Variant = "gpu",
    *,
    base: Annotated[str | None, typer.Option("--base", help="The base image.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Download here, and build without a network.")] = False,
    toolchain: Annotated[Literal["", "gcc"], typer.Option("--toolchain", help="Add a compiler.")] = "",
    fresh: Annotated[bool, typer.Option("--no-cache", help="Do not use the cache of earlier builds.")] = False,
    no_bill: Annotated[bool, typer.Option("--no-bill", help="Without the bill of materials.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build skerry:cpu or skerry:gpu, and list its packages. The same commit on the same base is the same image."""
    with errors_as_exit_codes(service="the registry"):
        options = building.BuildOptions(
            variant=variant, base=base, offline=offline, toolchain=toolchain, fresh=fresh, bill=not no_bill
        )
        built = building.build(Engine(), _root(), options, SystemClock(), _print_progress)
        typer.echo(
            f"{built.reference}: {built.all_bytes / 1e6:.0f} MB, {built.own_bytes / 1e6:.1f} MB of it skerry, "
            f"{built.seconds} s, {built.id}",
            err=as_json,
        )
        if built.bill is not None:
            typer.echo(f"packages: {built.bill}", err=as_json)
        if as_json:
            typer.echo(json.dumps(asdict(built)))


@app.command()
def sbom(
    variant: Variant = "cpu",
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; stdout by default.")] = None,
) -> None:
    """List every package in the image, as CycloneDX JSON."""
    with errors_as_exit_codes(service="the registry"):
        engine = Engine()
        reference = f"{building.NAME}:{variant}"
        building.revision_of(engine, reference)
        text = image_sbom.bill_of(engine, _root(), reference, _print_progress)
        if output is None:
            typer.echo(text, nl=False)
            return
        output.write_text(text)
        typer.echo(f"{output}: {len(json.loads(text)['components'])} components")


@app.command()
def push(
    repository: Annotated[str, typer.Argument(metavar="REPOSITORY", help="Without a tag; must exist.")],
    variant: Variant = "gpu",
    *,
    tag: Annotated[str | None, typer.Option("--tag", help="Instead of the tag of the commit.")] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Push changes that are not committed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Push the image and print its digest, which a spec's `image:` pins. Logs in to ECR and Artifact Registry."""
    with errors_as_exit_codes(service="the registry"):
        pushed = image_push.push(Engine(), repository, variant, _print_progress, tag=tag, allow_dirty=allow_dirty)
        typer.echo(json.dumps(asdict(pushed)) if as_json else f"image: {pushed.reference}")


@app.command()
def ship(
    path: Annotated[Path, typer.Argument(metavar="SPEC", help="The spec; its repositories must exist.")],
    variant: Variant = "gpu",
    *,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Push changes that are not committed.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Push nothing; digests stay unknown.")] = False,
) -> None:
    """Push the image to every repository of a spec's images. Prints the `--set` values that pin them."""
    with errors_as_exit_codes(service="the registry"):
        spec = model.load(path, targets.kinds())
        if not spec.deployed:
            raise Invalid(f"{path} runs on this machine with a local image, so there is nothing to push")
        engine = None if dry else Engine()
        references = {
            repository: f"{repository}@{image_push.UNKNOWN}"
            if engine is None
            else image_push.push(engine, repository, variant, _print_progress, allow_dirty=allow_dirty).reference
            for repository in image_push.repositories(spec.spec)
        }
        for line in image_push.pins(spec.spec, references):
            typer.echo(line)


@app.command()
def pin() -> None:
    """Renew the digest of the base image in images/replica/Dockerfile."""
    with errors_as_exit_codes(service="the registry"):
        typer.echo(building.pin_base(Engine(), _root()))


def _root() -> Path:
    return source.checkout(Path.cwd())


def _print_progress(line: str) -> None:
    typer.echo(line, err=True)
