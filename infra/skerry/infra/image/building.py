"""Builds the replica image with `docker build` and tags it. Pushes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from skerry.infra.image import normalize_config, sbom, source
from skerry.infra.local.docker_engine import EngineFailed
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from skerry.infra.image.source import Variant
    from skerry.infra.local.docker_engine import Engine
    from skerry.runtime.clock import Clock

NAME: Final = "skerry"
OFFLINE_BASE: Final = "skerry-base:bookworm"
REVISION: Final = "org.opencontainers.image.revision"
DOCKERFILE: Final = source.RECIPE / "Dockerfile"
_BASE: Final = "ARG BASE_IMAGE="
# The contents of the layers above the base, in order.
_LAYERS: Final = ("compiler, if requested", "torch and its closure", "what else a replica needs", "skerry")
# Passed on from the caller's environment. Never a token: arguments stay in a stage's history.
_INDEXES: Final = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build. base: None uses the Dockerfile's own, but offline the base that `scripts/image base` made.

    offline: download the wheels on this machine and build without a network. toolchain: "gcc" adds a compiler. fresh:
    ignore the engine's cache. bill: also write the bill of materials.
    """

    variant: Variant = "gpu"
    base: str | None = None
    offline: bool = False
    toolchain: str = ""
    fresh: bool = False
    bill: bool = True


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image on the engine. own_bytes: of skerry's layer alone; all_bytes: of all layers, as the engine counts.

    bill: the file with its bill of materials; None if not requested.
    """

    reference: str
    id: str
    revision: str
    base: str
    all_bytes: int
    own_bytes: int
    bill: str | None
    seconds: float


def build(
    engine: Engine, root: Path, options: BuildOptions, clock: Clock, on_line: Callable[[str], None]
) -> BuiltImage:
    """Build the image of a checkout, tag it skerry:{variant}, and list its contents. Raises EngineFailed."""
    started = clock.now()
    commit = source.commit_of(root)
    packed, unpacked = source.sizes(root, options.variant)
    on_line(f"{NAME}:{options.variant}: {packed / 1e9:.1f} GB of wheels, {unpacked / 1e9:.1f} GB unpacked")
    base = options.base or (OFFLINE_BASE if options.offline else _pinned_base(root))
    if options.offline:
        source.fetch_wheels(root, options.variant, on_line)
    reference, unnamed = f"{NAME}:{options.variant}", f"{NAME}:{options.variant}-unnamed"
    arguments = {
        "BASE_IMAGE": base,
        "VARIANT": options.variant,
        "TOOLCHAIN": options.toolchain,
        "VERSION": _version(root),
        "REVISION": str(commit),
    } | {name: os.environ[name] for name in _INDEXES if name in os.environ and not options.offline}
    command = ["docker", "build", "--file", str(root / DOCKERFILE), "--tag", unnamed]
    command += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    # An offline build must fail if it tries to download, on any machine.
    command += ["--network", "none"] * options.offline + ["--no-cache"] * options.fresh
    _run([*command, str(root)], {"SOURCE_DATE_EPOCH": str(commit.seconds)}, on_line)
    image = engine.images.inspect(unnamed)
    document = normalize_config.configuration(image, _LAYERS, commit.seconds)
    engine.images.load(normalize_config.archive(document, reference, len(image["RootFS"]["Layers"])))
    engine.images.remove(unnamed)
    image_record = engine.images.inspect(reference)
    bill = sbom.write(engine, root, reference, on_line) if options.bill else None
    return BuiltImage(
        reference=reference,
        id=str(image_record["Id"]),
        revision=str(commit),
        base=base,
        all_bytes=int(image_record["Size"]),
        # The history of a normalized configuration has one entry for each layer.
        own_bytes=int(engine.images.history(reference)[0]["Size"]),
        bill=None if bill is None else str(bill),
        seconds=round(clock.now() - started, 1),
    )


def pin_base(engine: Engine, root: Path) -> str:
    """Renew the digest of the Dockerfile's base from its registry; return the pinned name. Raises EngineFailed."""
    path = root / DOCKERFILE
    name = _pinned_base(root).partition("@")[0]
    pinned = f"{name}@{engine.images.digest_in_registry(name)}"
    path.write_text(path.read_text().replace(f"{_BASE}{_pinned_base(root)}\n", f"{_BASE}{pinned}\n"))
    return pinned


def revision_of(engine: Engine, reference: str) -> str:
    """The commit in an image's label. Raises Invalid if it is missing, or not an image of skerry."""
    try:
        labels = cast("dict[str, str]", engine.images.inspect(reference)["Config"].get("Labels") or {})
    except EngineFailed as error:
        raise Invalid(f"no image {reference} on this engine; build it with `scripts/image build`") from error
    if REVISION not in labels:
        raise Invalid(f"{reference} is not an image of skerry: it has no label {REVISION}")
    return labels[REVISION]


def _pinned_base(root: Path) -> str:
    lines = (root / DOCKERFILE).read_text().splitlines()
    return next(line.removeprefix(_BASE) for line in lines if line.startswith(_BASE))


def _version(root: Path) -> str:
    """The version by the tag, if this machine can compute it; the build uses pyproject.toml's fallback otherwise."""
    command = [sys.executable, "-m", "hatchling", "version"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)  # noqa: S603
    return ended.stdout.strip()


def _run(command: list[str], environment: dict[str, str], on_line: Callable[[str], None]) -> None:
    """Run docker and report its lines. Raises EngineFailed with the last ones."""
    try:
        process = subprocess.Popen(  # noqa: S603
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError as error:
        raise Invalid("no docker command on this machine; install Docker's command line") from error
    lines: list[str] = []
    for line in cast("Iterable[str]", process.stdout):
        lines.append(line.rstrip())
        on_line(lines[-1])
    if process.wait():
        raise EngineFailed(f"docker build failed: {' | '.join(lines[-12:])}")
