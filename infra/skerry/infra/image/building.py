"""Builds and tags the replica image on an engine. Pushes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from skerry.infra.image import normalize_config, sbom, source
from skerry.infra.local.docker_engine import BuildRequest, EngineFailed
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.image.source import Variant
    from skerry.infra.local.docker_engine import Engine
    from skerry.runtime.clock import Clock

NAME: Final = "skerry"
OFFLINE_BASE: Final = "skerry-base:bookworm"
PUBLIC_BASE: Final = "python:3.11-slim-bookworm"
REVISION: Final = "org.opencontainers.image.revision"
BASES: Final = Path("images/replica/bases.lock")
# The contents of the three layers above the base, in order.
_LAYERS: Final = ("torch and its closure", "what else a replica needs", "skerry")
# Passed on from the caller's environment to an online build. Never a token: arguments stay in a stage's history.
_INDEXES: Final = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build. base: None uses the offline base if the engine has it, else the public one.

    online: pip downloads inside the build, instead of using wheels of this machine. fresh: ignore the engine's cache.
    bill: also write the bill of materials.
    """

    variant: Variant = "gpu"
    base: str | None = None
    online: bool = False
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
    engine: Engine,
    root: Path,
    options: BuildOptions,
    environment: Mapping[str, str],
    clock: Clock,
    on_line: Callable[[str], None],
) -> BuiltImage:
    """Build the image from the files in `root`, tag it skerry:{variant}, and list its contents. Raises EngineFailed."""
    started = clock.now()
    commit = source.commit_of(root)
    base = options.base or (OFFLINE_BASE if engine.images.has(OFFLINE_BASE) else PUBLIC_BASE)
    pinned = pinned_bases(root).get(base)
    if not options.online:
        source.fetch_wheels(root, options.variant, on_line)
    wheel = source.build_wheel(root)
    if not engine.images.has(base_reference := f"{base}@{pinned}" if pinned else base):
        engine.images.pull(base_reference, None, on_line)
    reference = f"{NAME}:{options.variant}"
    unnamed = f"{NAME}:{options.variant}-unnamed"
    arguments = {
        "BASE_IMAGE": base_reference,
        "VARIANT": options.variant,
        "VERSION": wheel.name.split("-")[1],
        "REVISION": str(commit),
        "BASE_NAME": base,
        "BASE_DIGEST": pinned or str(engine.images.inspect(base_reference)["Id"]),
    }
    if options.online:
        arguments |= {"ONLINE": "1"} | {name: environment[name] for name in _INDEXES if environment.get(name)}
    with source.context(root, options.variant, environment, online=options.online) as context:
        request = BuildRequest(
            context=context,
            tag=unnamed,
            arguments=arguments,
            # An offline build must fail if it tries to download, on any machine.
            network=None if options.online else "none",
            fresh=options.fresh,
        )
        engine.images.build(request, on_line)
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
        base=base_reference,
        all_bytes=int(image_record["Size"]),
        own_bytes=_own_bytes(engine, reference),
        bill=None if bill is None else str(bill),
        seconds=round(clock.now() - started, 1),
    )


def pinned_bases(root: Path) -> dict[str, str]:
    """The digests of base images recorded by `skerry image pin`, by name."""
    path = root / BASES
    if not path.is_file():
        return {}
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: digest for name, digest in lines}  # noqa: C416  a line with more words must raise


def pin_bases(engine: Engine, root: Path, names: list[str]) -> dict[str, str]:
    """Look up the digest of each base in its registry and record it. Raises EngineFailed if a base is missing."""
    pins = pinned_bases(root) | {name: engine.images.digest_in_registry(name) for name in names}
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(pins.items()))
    (root / BASES).write_text(
        f"# Written by `scripts/image pin`: the digest of each tag when it was looked up.\n{lines}"
    )
    return pins


def revision_of(engine: Engine, reference: str) -> str:
    """The commit in an image's label. Raises Invalid if it is missing, or not an image of skerry."""
    try:
        labels = cast("dict[str, str]", engine.images.inspect(reference)["Config"].get("Labels") or {})
    except EngineFailed as error:
        raise Invalid(f"no image {reference} on this engine; build it with `scripts/image build`") from error
    if REVISION not in labels:
        raise Invalid(f"{reference} is not an image of skerry: it has no label {REVISION}")
    return labels[REVISION]


def _own_bytes(engine: Engine, reference: str) -> int:
    """The size of the newest layer; the history of a normalized configuration has one entry for each layer."""
    return int(engine.images.history(reference)[0]["Size"])
