"""`skerry image`: parses, prints progress, and turns errors into exit codes. Decides nothing else.

Exit codes are those of `skerry`: 0 ok, 1 failed, 2 bad usage. With --json the last line on stdout is for programs.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from skerry.infra import spec
from skerry.infra.engine import Engine
from skerry.infra.image import bill, building, shipping, source
from skerry.infra.image import smoke as trying
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Generator

app = typer.Typer(
    name="image",
    help="The replica image, from a checkout: build it, try it, list what is in it, push it. See images/README.md.",
    no_args_is_help=True,
)
Which = Annotated[Literal["cpu", "gpu"], typer.Option("--variant", help="Which torch is in it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, for programs.")]


@app.command()
def build(
    variant: Which = "gpu",
    *,
    base: Annotated[str | None, typer.Option("--base", help="The base image.")] = None,
    online: Annotated[bool, typer.Option("--online", help="Let pip fetch inside the build.")] = False,
    fresh: Annotated[bool, typer.Option("--no-cache", help="Use nothing of earlier builds.")] = False,
    no_bill: Annotated[bool, typer.Option("--no-bill", help="Without the bill of materials.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build skerry:cpu or skerry:gpu, and list what is in it. A commit on a base is one image, whoever builds it."""
    with _errors_as_exit_codes():
        order = building.Order(variant=variant, base=base, online=online, fresh=fresh, bill=not no_bill)
        built = building.build(Engine(), _root(), order, os.environ, SystemClock(), _tell)
        typer.echo(
            f"{built.reference}: {built.all_bytes / 1e6:.0f} MB, of it skerry {built.own_bytes / 1e6:.1f} MB, "
            f"{built.seconds} s, {built.id}",
            err=as_json,
        )
        if built.bill is not None:
            typer.echo(f"what is in it: {built.bill}", err=as_json)
        if as_json:
            typer.echo(json.dumps(asdict(built)))


@app.command()
def smoke(variant: Which = "cpu", *, as_json: AsJson = False) -> None:
    """Try the image: what is in it, signals, users, folders. Without a network."""
    with _errors_as_exit_codes():
        engine = Engine()
        reference = f"{building.NAME}:{variant}"
        building.revision_of(engine, reference)
        tried = trying.smoke(engine, _root(), reference, SystemClock(), lambda line: typer.echo(line, err=as_json))
        if as_json:
            typer.echo(json.dumps([asdict(one) for one in tried]))
        if any(one.problem for one in tried):
            raise typer.Exit(1)


@app.command()
def sbom(
    variant: Which = "cpu",
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; stdout unless told.")] = None,
) -> None:
    """List every package in the image, as CycloneDX JSON."""
    with _errors_as_exit_codes():
        engine = Engine()
        reference = f"{building.NAME}:{variant}"
        building.revision_of(engine, reference)
        text = bill.bill_of(engine, _root(), reference, _tell)
        if output is None:
            typer.echo(text, nl=False)
            return
        output.write_text(text)
        typer.echo(f"{output}: {len(json.loads(text)['components'])} components")


@app.command()
def push(
    repository: Annotated[str, typer.Argument(metavar="REPOSITORY", help="Without a tag; it must exist.")],
    variant: Which = "gpu",
    *,
    tag: Annotated[str | None, typer.Option("--tag", help="Instead of the commit's.")] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Push what no commit describes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Push the image and print its digest, which a spec's `image:` pins. Logs in to ECR and Artifact Registry."""
    with _errors_as_exit_codes():
        shipped = shipping.push(Engine(), repository, variant, _tell, tag=tag, allow_dirty=allow_dirty)
        typer.echo(json.dumps(asdict(shipped)) if as_json else f"image: {shipped.reference}")


@app.command()
def ship(
    path: Annotated[Path, typer.Argument(metavar="SPEC", help="Its repositories must exist.")],
    variant: Which = "gpu",
    *,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Push what no commit describes.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Push nothing, and know no digest.")] = False,
) -> None:
    """Push the image to every repository that a spec's images lie in. Prints what `--set` takes to pin them."""
    with _errors_as_exit_codes():
        found = spec.load(path)
        if not found.deployed:
            raise Invalid(f"{path} runs on this machine, with the image that is on it: there is nowhere to push")
        engine = None if dry else Engine()
        references = {
            place: f"{place}@{shipping.UNKNOWN}"
            if engine is None
            else shipping.push(engine, place, variant, _tell, allow_dirty=allow_dirty).reference
            for place in shipping.repositories(found.spec)
        }
        for line in shipping.pins(found.spec, references):
            typer.echo(line)


@app.command()
def pin(
    bases: Annotated[list[str] | None, typer.Argument(metavar="[BASE]...", help="Base images.")] = None,
) -> None:
    """Look up the digests of base images, and write them to images/replica/bases.lock; builds then use those."""
    with _errors_as_exit_codes():
        for name, digest in building.pin_bases(Engine(), _root(), bases or [building.PUBLIC_BASE]).items():
            typer.echo(f"{name} {digest}")


def _root() -> Path:
    return source.checkout(Path.cwd())


def _tell(line: str) -> None:
    typer.echo(line, err=True)


@contextlib.contextmanager
def _errors_as_exit_codes() -> Generator[None]:
    try:
        yield
    except Invalid as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (SkerryError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted", err=True)
        raise typer.Exit(1) from error
